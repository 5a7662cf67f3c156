"""Launching the Triton kernel of ``index_score``."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...backends import interpreting
from ...batch import PAGED, Batch
from ..common.launch import (
    check_sizes,
    decode_rows,
    device_kind,
    fetchable,
    key_strides,
    launch,
    layout_args,
    next_power_of_2,
    num_multiprocessors,
    num_tiles,
    per_kind,
    supports_hopper,
)
from .kernels import _index_score_kernel


@dataclass(frozen=True)
class Config:
    """Rows per tile, keys per product, and how the program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


# Rows grow to a token's heads, keys shrink to a block. A block is large above 128 x 128 elements,
# huge above twice that: every stage buffers a whole block.
_SMALL = {
    "large decode": Config(16, 64, 4, 1, 3),
    "large prefill": Config(64, 64, 4, 1, 2),
}
_CONFIGS = per_kind(
    {
        "float32": Config(16, 16, 8, 1, 4),
        "decode": Config(16, 128, 4, 3, 3),
        "large decode": Config(16, 128, 4, 2, 3),
        "huge decode": Config(16, 64, 4, 1, 3),
        "prefill": Config(128, 128, 8, 3, 2),
        "large prefill": Config(128, 128, 8, 2, 2),
        "huge prefill": Config(64, 32, 8, 1, 2),
    },
    {
        "sm_80": {"large prefill": Config(64, 128, 8, 2, 2)},
        "sm_86": _SMALL,
        "sm_120": _SMALL,
        "gfx942": _SMALL,
    },
)


@functools.cache
def _config(
    decode: bool, dtype: torch.dtype, heads: int, block_size: int, block_d: int, kind: str
) -> Config:
    case = "decode" if decode else "prefill"
    if block_size * block_d > 128 * 128:
        case = f"{'large' if block_size * block_d <= 2 * 128 * 128 else 'huge'} {case}"
    config = _CONFIGS[kind]["float32" if dtype == torch.float32 else case]
    return replace(
        config,
        block_m=max(config.block_m, next_power_of_2(heads)),
        block_n=min(config.block_n, block_size),
    )


def launch_index_score(
    index_q: Tensor, index_k: Tensor, batch: Batch, num_splits: int, out: Tensor
) -> None:
    """Score all rows: the named decode rows as such, the rest by what it is."""
    check_sizes("index_score", index_q.dtype, batch.block_size, **{"index dim": index_q.shape[2]})
    launch_index_score_rows(index_q, index_k, batch, num_splits, out, None, 0, index_q.shape[0])


def launch_index_score_rows(
    index_q: Tensor,
    index_k: Tensor,
    batch: Batch,
    num_splits: int,
    scores: Tensor,
    visible: Tensor | None,
    begin: int,
    end: int,
) -> None:
    """Score rows ``begin .. end`` of the batch into the first rows of `scores`.

    With `visible`, int32 ``[end - begin]``, each row's number of visible blocks goes there.
    """
    decode_end = min(max(decode_rows(batch, end), begin), end)
    for decode, first, last in ((True, begin, decode_end), (False, decode_end, end)):
        if first < last:
            part = scores[first - begin :]
            part_visible = None if visible is None else visible[first - begin :]
            _launch(index_q, index_k, batch, num_splits, part, part_visible, first, last, decode)


def _launch(
    index_q: Tensor,
    index_k: Tensor,
    batch: Batch,
    num_splits: int,
    scores: Tensor,
    visible: Tensor | None,
    begin: int,
    end: int,
    decode: bool,
) -> None:
    columns = scores.shape[2]
    if batch.block_table is not None:
        columns = min(columns, batch.block_table.shape[1])
    if decode:
        launch_hopper = None
        # A fixed number of splits asks for bits, and so for a kernel, whatever the batch.
        if num_splits == 0:
            launch_hopper = _hopper_decode(index_q, index_k, batch, end - begin, columns)
    else:
        launch_hopper = _hopper(index_q, index_k, batch)
    if launch_hopper is not None:
        launch_hopper(index_q, index_k, batch, scores, visible, begin, end, columns)
        return
    _, heads, dim = index_q.shape
    block_d = next_power_of_2(dim)
    kind = device_kind(index_q.device)
    config = _config(decode, index_q.dtype, heads, batch.block_size, block_d, kind)
    tile_t = config.block_m // heads
    one_tile = decode and batch.max_seqlen_q <= tile_t
    # Where only scores are written, a sequence a tile leaves out nothing but padding.
    scores_only = one_tile and visible is None
    tiles = batch.num_seqs if scores_only else num_tiles(end - begin, tile_t, batch)
    stride_outer, stride_token = key_strides(batch, index_k)
    if num_splits == 0:
        busy = triton.cdiv(end - begin, tile_t)
        slots = config.programs_per_multiprocessor * num_multiprocessors(index_q.device)
        num_splits = max(1, slots // busy)
    num_splits = min(num_splits, max(1, columns))
    keys = _descriptor(index_k, batch, config.block_n, block_d)
    # A tile whose sequence needs no search may ask for its first block early, line by line.
    whole_lines = dim == block_d and dim * index_k.element_size() % 128 == 0
    launch(
        _index_score_kernel,
        (tiles, num_splits),
        index_q.device,
        q_ptr=index_q,
        k=index_k if keys is None else keys,
        k_ptr=index_k,
        scores_ptr=scores,
        visible_ptr=visible,
        stride_q_t=index_q.stride(0),
        stride_q_h=index_q.stride(1),
        stride_k_outer=stride_outer,
        stride_k_token=stride_token,
        stride_s_t=scores.stride(0),
        stride_s_h=scores.stride(1),
        stride_s_j=scores.stride(2),
        row_begin=begin,
        row_end=end,
        num_tiles=tiles,
        num_columns=columns,
        HEADS=heads,
        DIM=dim,
        TILE_T=tile_t,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        KEYS_FIRST=config.block_m < 64,
        ONE_TILE=one_tile,
        TMA=keys is not None,
        PREFETCH=one_tile and batch.layout == PAGED and whole_lines,
        UPCAST=interpreting() and index_q.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        # With a block a share none is fetched ahead, and more programs fit on a multiprocessor.
        num_stages=1 if decode and num_splits >= columns else config.num_stages,
        **layout_args(batch, index_k),
    )


def _hopper(index_q: Tensor, index_k: Tensor, batch: Batch) -> Any:
    """The launcher of the kernel for Hopper, where it takes these inputs."""
    if not supports_hopper(index_q.device):
        return None
    from .hopper.launch import launch_hopper_score, supports

    return launch_hopper_score if supports(index_q, index_k, batch) else None


def _hopper_decode(index_q: Tensor, index_k: Tensor, batch: Batch, rows: int, columns: int) -> Any:
    """The launcher of the kernel for decode rows on Hopper, where it is the faster one."""
    if not supports_hopper(index_q.device):
        return None
    from .hopper.decode.launch import launch_hopper_decode_score, supports_decode

    if supports_decode(index_q, index_k, batch, rows, columns):
        return launch_hopper_decode_score
    return None


def _descriptor(
    index_k: Tensor, batch: Batch, block_n: int, block_d: int
) -> TensorDescriptor | None:
    """Keys as ``[pages or sequences, tokens, Di]`` for the copy engine, where it can fetch them."""
    keys = index_k if index_k.ndim == 3 else index_k[None]
    if not supports_hopper(index_k.device) or not fetchable(keys):
        return None
    return TensorDescriptor(keys, list(keys.shape), [*keys.stride()[:2], 1], [1, block_n, block_d])
