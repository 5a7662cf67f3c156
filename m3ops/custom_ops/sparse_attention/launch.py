"""Launching the Triton kernels of ``sparse_attention``."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...backends import interpreting
from ...batch import PACKED, PAGED, Batch
from ..common.launch import (
    MAX_DECODE_QUERIES,
    check_sizes,
    decode_rows,
    device_kind,
    fetchable,
    head_stride,
    key_strides,
    launch,
    layout_args,
    next_power_of_2,
    num_multiprocessors,
    num_tiles,
    per_kind,
    supports_hopper,
)
from .kernels import (
    _sparse_attention_kernel,
    _sparse_attention_tile_kernel,
    _sparse_attention_union_kernel,
)
from .merge import allocate_parts, launch_merge
from .reference import sparse_attention_backward_reference as launch_sparse_attention_backward

__all__ = ["launch_sparse_attention", "launch_sparse_attention_backward"]


KV_MAJOR_COST = 15
"""Time of the KV-major road for a block and half a tile's tokens, in eighths of a union's step."""

MAX_LONE_QUERIES = 4
"""Rows of a sequence that do not go in tiles on Hopper, which has faster kernels for so few.

Three or four of each of many sequences share blocks in a kernel of their own. Others go one by one,
and L2 serves the blocks that they share.
"""


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    block_ids: Tensor
    batch: Batch
    softmax_scale: float

    @property
    def heads_kv(self) -> int:
        return self.block_ids.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.heads_kv


@dataclass(frozen=True)
class RowConfig:
    """Heads and keys of a product of the row kernel, and how the program runs."""

    block_g: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TileConfig:
    """Rows and keys of a product of the tile kernel, and how the program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Heads shrink to those of a group, keys to a block. A dim is wide from 129 on; a program is alone
# if it has a multiprocessor, and so its shared memory, to itself.
_SMALL_ROWS = {"wide": RowConfig(32, 32, 4, 2), "alone": RowConfig(64, 128, 4, 2)}
_ROW_CONFIGS = per_kind(
    {
        "float32": RowConfig(16, 16, 8, 1),
        "wide": RowConfig(32, 64, 4, 2),
        "alone": RowConfig(64, 128, 4, 3),
        "shared": RowConfig(64, 128, 4, 2),
    },
    {
        "sm_86": _SMALL_ROWS,
        "sm_120": _SMALL_ROWS,
        "gfx942": {
            "wide": RowConfig(32, 32, 4, 2),
            "alone": RowConfig(64, 64, 4, 2),
            "shared": RowConfig(64, 64, 4, 2),
        },
    },
)

_TILE_CONFIGS = per_kind(
    {
        "float32": TileConfig(32, 16, 8, 1),
        "wide": TileConfig(64, 64, 4, 2),
        "narrow": TileConfig(64, 64, 4, 3),
    },
    {},
)


@functools.cache
def _row_config(
    dtype: torch.dtype, group: int, block_size: int, block_d: int, alone: bool, kind: str
) -> RowConfig:
    case = "wide" if block_d > 128 else "alone" if alone else "shared"
    config = _ROW_CONFIGS[kind]["float32" if dtype == torch.float32 else case]
    return replace(
        config,
        block_g=min(config.block_g, next_power_of_2(group)),
        block_n=min(config.block_n, block_size),
    )


@functools.cache
def _tile_config(dtype: torch.dtype, block_size: int, block_d: int, kind: str) -> TileConfig:
    case = "wide" if block_d > 128 else "narrow"
    config = _TILE_CONFIGS[kind]["float32" if dtype == torch.float32 else case]
    return replace(config, block_n=min(config.block_n, block_size))


def launch_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    max_scratch_bytes: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Decode rows one by one in splits, others in tiles of neighbours that share their blocks.

    A fixed number of splits asks for bits that do not depend on the batch: all rows go one by one.
    """
    check_sizes("sparse_attention", q.dtype, batch.block_size, **{"head dim": q.shape[2]})
    inputs = _Inputs(q, k, v, block_ids, batch, softmax_scale)
    rows, hopper = q.shape[0], _hopper(inputs)
    block_d, kind = next_power_of_2(q.shape[2]), device_kind(q.device)
    config = _tile_config(q.dtype, batch.block_size, block_d, kind)
    # A tile of fewer than two tokens is not worth its list.
    tile_t = min(16, config.block_m // next_power_of_2(inputs.group, 1))
    if hopper is not None:
        tile_t = hopper.TILE_T
    # Entries of a union hold a block and a bit per token of the tile.
    entries_fit = batch.num_block_columns <= 2 ** (31 - tile_t)
    alone = tile_t < 2 or num_splits > 0 or softmax_scale <= 0 or not entries_fit
    if hopper is not None and not alone and hopper.drafts_fill(q, block_ids, batch):
        hopper.attend_drafts(*inputs, max_scratch_bytes, out, lse)
        return
    if alone:
        one_by_one = rows
    elif hopper is not None and _tiles_fill(inputs):
        one_by_one = 0
    else:
        one_by_one = decode_rows(batch, rows)
    if one_by_one > 0:
        attend = functools.partial(_attend_rows, inputs)
        if hopper is not None:
            attend = functools.partial(hopper.attend_decode_rows, *inputs)
        attend(num_splits, max_scratch_bytes, one_by_one, out, lse)
    if one_by_one < rows:
        _attend_tiles(inputs, config, hopper, tile_t, max_scratch_bytes, one_by_one, out, lse)


def _attend_rows(
    inputs: _Inputs, num_splits: int, max_scratch_bytes: int, rows: int, out: Tensor, lse: Tensor
) -> None:
    """The first `rows` rows, in one pass or in splits that a second kernel joins."""
    q, topk = inputs.q, inputs.block_ids.shape[2]
    if num_splits == 0:
        num_splits = _choose_splits(rows * inputs.heads_kv, topk, q.device)
    num_splits = min(num_splits, topk)
    if num_splits == 1:
        _launch_rows(inputs, 1, 0, rows, out[None, :rows], lse[None, :rows])
        return
    partial_out, partial_lse = allocate_parts(q, num_splits, rows, max_scratch_bytes)
    chunk = partial_lse.shape[1]
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        parts = partial_out[:, : end - begin], partial_lse[:, : end - begin]
        _launch_rows(inputs, num_splits, begin, end, *parts)
        launch_merge(topk, *parts, out[begin:end], lse[begin:end])


def _attend_tiles(
    inputs: _Inputs,
    config: TileConfig,
    hopper: Any,
    tile_t: int,
    max_scratch_bytes: int,
    begin: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The rows from `begin` on: first list what each tile selected, then walk the lists."""
    q, topk, heads_kv = inputs.q, inputs.block_ids.shape[2], inputs.heads_kv
    rows = q.shape[0]
    tile_bytes = 4 * (heads_kv * (tile_t * topk + 2) + 4)
    chunk = max(1, max_scratch_bytes // tile_bytes) * tile_t
    tiles = num_tiles(min(chunk, rows - begin), tile_t, inputs.batch)
    tile_rows = q.new_empty((tiles, 4), dtype=torch.int32)
    lists = q.new_empty((tiles, heads_kv, tile_t * topk), dtype=torch.int32)
    counts = q.new_empty((tiles, heads_kv, 2), dtype=torch.int32)
    for first in range(begin, rows, chunk):
        last = min(first + chunk, rows)
        tiles = num_tiles(last - first, tile_t, inputs.batch)
        listed = (tile_rows[:tiles], lists[:tiles], counts[:tiles])
        kv_lists = None
        if hopper is not None:
            # Scratch of both roads at once: which one is taken is known on the device alone.
            left = max_scratch_bytes - tiles * tile_bytes
            kv_lists = hopper.allocate_lists(q, inputs.block_ids, inputs.batch, last - first, left)
        balance = None if kv_lists is None else kv_lists.balance
        _launch_union(inputs, tile_t, first, last, balance, *listed)
        if hopper is None:
            _launch_tiles(inputs, config, tile_t, *listed, out, lse)
            continue
        tensors = (q, inputs.k, inputs.v)
        hopper.launch_hopper_attention(
            *tensors, *listed, inputs.batch, inputs.softmax_scale, balance, out, lse
        )
        if kv_lists is not None:
            hopper.launch_kv_major(
                *tensors, inputs.block_ids, inputs.batch, inputs.softmax_scale, kv_lists, first,
                last, out, lse,
            )  # fmt: skip


def _tiles_fill(inputs: _Inputs) -> bool:
    """Whether speculative rows are worth a tile per sequence, which reads shared blocks once."""
    queries = inputs.batch.max_seqlen_q
    if not MAX_LONE_QUERIES < queries <= MAX_DECODE_QUERIES:
        return False
    tiles = inputs.q.shape[0] // queries * inputs.heads_kv
    return 3 * tiles >= num_multiprocessors(inputs.q.device)


def _hopper(inputs: _Inputs) -> Any:
    """The launcher of the Hopper kernel, where that takes the inputs."""
    if not supports_hopper(inputs.q.device):
        return None
    from .hopper import launch as hopper

    q, k, v, _, batch, _ = inputs
    return hopper if hopper.supports(q, k, v, batch, inputs.group) else None


def _choose_splits(programs: int, topk: int, device: torch.device) -> int:
    """A program per multiprocessor, as near as that goes, and no more splits than block ids."""
    return max(1, min(topk, num_multiprocessors(device) // programs))


def _launch_rows(
    inputs: _Inputs, num_splits: int, begin: int, end: int, out: Tensor, lse: Tensor
) -> None:
    """Rows ``begin .. end`` into `out` ``[S, rows, Hq, D]`` and `lse` ``[S, rows, Hq]``."""
    q, batch, group = inputs.q, inputs.batch, inputs.group
    block_d = next_power_of_2(q.shape[2])
    programs = (end - begin) * inputs.heads_kv * num_splits
    alone = programs <= num_multiprocessors(q.device)
    kind = device_kind(q.device)
    config = _row_config(q.dtype, group, batch.block_size, block_d, alone, kind)
    launch(
        _sparse_attention_kernel,
        (end - begin, inputs.heads_kv * triton.cdiv(group, config.block_g), num_splits),
        q.device,
        q_ptr=q,
        k_ptr=inputs.k,
        v_ptr=inputs.v,
        out_ptr=out,
        lse_ptr=lse,
        softmax_scale=inputs.softmax_scale,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_o_s=out.stride(0),
        stride_o_t=out.stride(1),
        stride_o_h=out.stride(2),
        stride_l_s=lse.stride(0),
        stride_l_t=lse.stride(1),
        stride_l_h=lse.stride(2),
        row_begin=begin,
        row_end=end,
        GROUP=group,
        DIM=q.shape[2],
        num_splits=num_splits,
        BLOCK_G=config.block_g,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        BLOCK_K=next_power_of_2(inputs.block_ids.shape[2]),
        UPCAST=interpreting() and q.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_id_args(inputs.block_ids),
        **_stride_args(inputs),
        **layout_args(batch, inputs.k),
    )


def _launch_union(
    inputs: _Inputs,
    tile_t: int,
    begin: int,
    end: int,
    balance: Tensor | None,
    tile_rows: Tensor,
    lists: Tensor,
    counts: Tensor,
) -> None:
    block_e = next_power_of_2(lists.shape[2])
    layout = layout_args(inputs.batch, inputs.k)
    shared = (
        "cu_seqlens_q_ptr",
        "seqused_k_ptr",
        "first_key_ptr",
        "num_seqs",
        "num_tokens",
        "max_seqlen_k",
        "BLOCK_SIZE",
        "BLOCK_B",
    )
    launch(
        _sparse_attention_union_kernel,
        (tile_rows.shape[0], inputs.heads_kv),
        inputs.q.device,
        tiles_ptr=tile_rows,
        lists_ptr=lists,
        counts_ptr=counts,
        balance_ptr=balance,
        row_begin=begin,
        row_end=end,
        HEADS=inputs.heads_kv,
        TILE_T=tile_t,
        BLOCK_E=block_e,
        KV_MAJOR_COST=KV_MAJOR_COST,
        # So many that what each thread sorts stays in its registers.
        num_warps=min(8, max(1, block_e // 512)),
        **_id_args(inputs.block_ids),
        **{name: layout[name] for name in shared},
    )


def _launch_tiles(
    inputs: _Inputs,
    config: TileConfig,
    tile_t: int,
    tile_rows: Tensor,
    lists: Tensor,
    counts: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    q, batch = inputs.q, inputs.batch
    block_d = next_power_of_2(q.shape[2])
    layout = layout_args(batch, inputs.k)
    shared = (
        "block_table_ptr",
        "first_key_ptr",
        "stride_table_b",
        "num_pages",
        "num_seqs",
        "num_tokens",
        "LAYOUT",
        "BLOCK_SIZE",
    )
    keys = _descriptor(inputs.k, batch, config.block_n, block_d)
    values = _descriptor(inputs.v, batch, config.block_n, block_d)
    tma = keys is not None and values is not None
    launch(
        _sparse_attention_tile_kernel,
        (tile_rows.shape[0] * inputs.heads_kv,),
        q.device,
        q_ptr=q,
        k=keys if tma else inputs.k,
        v=values if tma else inputs.v,
        out_ptr=out,
        lse_ptr=lse,
        tiles_ptr=tile_rows,
        lists_ptr=lists,
        counts_ptr=counts,
        softmax_scale=inputs.softmax_scale,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_o_t=out.stride(0),
        stride_o_h=out.stride(1),
        stride_l_t=lse.stride(0),
        stride_l_h=lse.stride(1),
        num_tiles=tile_rows.shape[0],
        HEADS=inputs.heads_kv,
        GROUP=inputs.group,
        DIM=q.shape[2],
        TOPK=inputs.block_ids.shape[2],
        TILE_T=tile_t,
        BLOCK_G=next_power_of_2(inputs.group, 1),
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        TMA=tma,
        UPCAST=interpreting() and q.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **_stride_args(inputs),
        **{name: layout[name] for name in shared},
    )


def _id_args(block_ids: Tensor) -> dict[str, Any]:
    return {
        "ids_ptr": block_ids,
        "stride_i_t": block_ids.stride(0),
        "stride_i_h": block_ids.stride(1),
        "stride_i_k": block_ids.stride(2),
        "TOPK": block_ids.shape[2],
    }


def _stride_args(inputs: _Inputs) -> dict[str, int]:
    strides = {}
    for name, tensor in (("k", inputs.k), ("v", inputs.v)):
        outer, token = key_strides(inputs.batch, tensor)
        strides[f"stride_{name}_outer"] = outer
        strides[f"stride_{name}_token"] = token
        strides[f"stride_{name}_h"] = head_stride(inputs.batch, tensor)
    return strides


def _descriptor(
    tensor: Tensor, batch: Batch, block_n: int, block_d: int
) -> TensorDescriptor | None:
    """``[pages or sequences, Hkv, tokens, D]`` for the copy engine, if it can fetch them."""
    if batch.layout == PACKED:
        tensor = tensor[None]
    view = tensor if batch.layout == PAGED else tensor.transpose(1, 2)
    if not supports_hopper(tensor.device) or not fetchable(view):
        return None
    return TensorDescriptor(
        view, list(view.shape), [*view.stride()[:3], 1], [1, 1, block_n, block_d]
    )
