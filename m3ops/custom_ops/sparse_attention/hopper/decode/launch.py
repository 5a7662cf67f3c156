"""Launching the Gluon kernel of ``sparse_attention`` for Hopper's decode rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....batch import PACKED, PAGED, Batch
from ....common.launch import MAX_DECODE_QUERIES, launch, layout_args, num_multiprocessors
from ...merge import allocate_parts, launch_merge
from ..descriptors import key_descriptor
from .counters import take_counters
from .kernels import _sparse_attention_decode_kernel

GROUP, BLOCK_SIZE = 16, 128
"""The one geometry: heads times tokens are the columns of a product, keys of a part its rows."""

BLOCK_B = 128
"""Sequences that one step of the search for a row's sequence looks at."""

MAX_DECODE_TILE_T = 4
"""Tokens of a tile at most."""

PREFETCH = True
"""Whether a program has its first inputs fetched while it waits for its predecessor."""

MAX_JOINED_SPLITS = 8
"""Splits that the program that comes last joins; for more, a kernel has more programs to do it."""

MAX_PART_SPLITS = 32
"""Splits of which each may have less than a block."""


@dataclass(frozen=True)
class DecodeConfig:
    """Keys that are fetched as one, how many such parts are in flight, and what a program needs.

    `num_programs` are wanted on each multiprocessor where there is work enough to choose.
    """

    part: int
    stages: int
    max_registers: int
    # Whether queries are the rows of the products, which takes 64 of them, and not the columns.
    as_rows: bool = False
    warpgroups: int = 1
    num_programs: int = 1


class Joined(NamedTuple):
    """Where splits are joined by the program that comes last.

    Attributes:
        counters: int32, 0 before and after, one for each tile, KV head and warpgroup.
        out: ``[rows, Hq, D]``.
        lse: float32 ``[rows, Hq]``.
    """

    counters: Tensor
    out: Tensor
    lse: Tensor


CONFIGS = {
    # Two programs share a multiprocessor, where there are so many: one starts while one ends.
    1: DecodeConfig(64, 3, 128),
    2: DecodeConfig(64, 3, 128),
    4: DecodeConfig(64, 5, 168, as_rows=True),
}
"""By tokens of a tile."""


def decode_tile_tokens(batch: Batch, rows: int) -> int:
    """Tokens of a tile: one, unless all sequences have few of them, which share blocks."""
    # A bound as large as the batch says nothing about its sequences.
    unknown = batch.max_seqlen_q >= rows and batch.num_seqs > 1
    if unknown or batch.max_seqlen_q > MAX_DECODE_QUERIES:
        return 1
    return min(MAX_DECODE_TILE_T, 1 << max(0, batch.max_seqlen_q - 1).bit_length())


def _tiles_per_sequence(batch: Batch, tile_t: int) -> int:
    return max(1, -(-batch.max_seqlen_q // tile_t))


def num_decode_tiles(batch: Batch, tile_t: int, rows: int) -> int:
    """Tiles of some rows; with several tokens, those after the sequences' take the padding."""
    if tile_t == 1:
        return rows
    return batch.num_seqs * _tiles_per_sequence(batch, tile_t) + -(-rows // tile_t)


def most_decode_splits(topk: int) -> int:
    """A split per part, unless those are more than a program can well join."""
    return max(topk, min(topk * BLOCK_SIZE // CONFIGS[1].part, MAX_PART_SPLITS))


def choose_decode_splits(
    rows: int, heads_kv: int, topk: int, batch: Batch, tile_t: int, device: torch.device
) -> int:
    """As many programs as the device runs at once, as near as that goes."""
    tiles = rows if tile_t == 1 else batch.num_seqs * _tiles_per_sequence(batch, tile_t)
    slots = CONFIGS[tile_t].num_programs * num_multiprocessors(device)
    return max(1, min(most_decode_splits(topk), slots // max(1, tiles * heads_kv)))


def attend_decode_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    max_scratch_bytes: int,
    rows: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The first `rows` rows, alone or with their neighbours, in one pass or in splits.

    A fixed number of splits asks for bits that do not depend on the batch: every row goes alone.
    """
    heads_kv, topk = block_ids.shape[1:]
    tile_t = 1 if num_splits > 0 else decode_tile_tokens(batch, rows)
    if num_splits == 0:
        num_splits = choose_decode_splits(rows, heads_kv, topk, batch, tile_t, q.device)
    num_splits = min(num_splits, most_decode_splits(topk))
    attend = functools.partial(
        launch_hopper_decode, q, k, v, block_ids, batch, softmax_scale, tile_t, num_splits
    )
    if num_splits == 1:
        attend(0, rows, out[None, :rows], lse[None, :rows])
        return
    partial_out, partial_lse = allocate_parts(q, num_splits, rows, max_scratch_bytes)
    chunk = partial_lse.shape[1]
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        parts = partial_out[:, : end - begin], partial_lse[:, : end - begin]
        results = out[begin:end], lse[begin:end]
        if num_splits <= MAX_JOINED_SPLITS:
            tiles = num_decode_tiles(batch, tile_t, end - begin)
            counters = take_counters(tiles * heads_kv * CONFIGS[tile_t].warpgroups, q.device)
            attend(begin, end, *parts, Joined(counters, *results))
        else:
            attend(begin, end, *parts)
            launch_merge(most_decode_splits(topk), *parts, *results)


def launch_hopper_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    tile_t: int,
    num_splits: int,
    begin: int,
    end: int,
    out: Tensor,
    lse: Tensor,
    joined: Joined | None = None,
) -> None:
    """Rows ``begin .. end`` into `out` ``[S, rows, Hq, D]`` and `lse` float32 ``[S, rows, Hq]``.

    Args:
        q, k, v, block_ids, batch, softmax_scale: as the op has them.
        tile_t: tokens that share the blocks they read, 1, 2 or 4; above 1, no sequence may have
            more than ``max_seqlen_q`` rows.
        joined: where the splits are joined by whichever program comes last, if they are.
    """
    config = CONFIGS[tile_t]
    heads_kv, topk = block_ids.shape[1:]
    tiles = num_decode_tiles(batch, tile_t, end - begin)
    counters, final_out, final_lse = joined or (None, None, None)
    arguments: dict[str, Any] = layout_args(batch, k)
    layout = arguments.pop("LAYOUT")
    del arguments["BLOCK_SIZE"]
    arguments["BLOCK_B"] = BLOCK_B
    launch(
        _sparse_attention_decode_kernel,
        (tiles * heads_kv * num_splits,),
        q.device,
        q_ptr=q,
        k_desc=key_descriptor(k, batch, config.part),
        v_desc=key_descriptor(v, batch, config.part),
        ids_ptr=block_ids,
        out_ptr=out,
        lse_ptr=lse,
        counters_ptr=counters,
        final_out_ptr=final_out,
        final_lse_ptr=final_lse,
        softmax_scale=softmax_scale,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_i_t=block_ids.stride(0),
        stride_i_h=block_ids.stride(1),
        stride_i_k=block_ids.stride(2),
        stride_o_s=out.stride(0),
        stride_o_t=out.stride(1),
        stride_o_h=out.stride(2),
        stride_l_s=lse.stride(0),
        stride_l_t=lse.stride(1),
        stride_l_h=lse.stride(2),
        stride_fo_t=0 if final_out is None else final_out.stride(0),
        stride_fo_h=0 if final_out is None else final_out.stride(1),
        stride_fl_t=0 if final_lse is None else final_lse.stride(0),
        stride_fl_h=0 if final_lse is None else final_lse.stride(1),
        row_begin=begin,
        row_end=end,
        num_splits=num_splits,
        tiles_per_seq=_tiles_per_sequence(batch, tile_t),
        HEADS_KV=heads_kv,
        GROUP=GROUP,
        TOPK=topk,
        TILE_T=tile_t,
        PAGED=layout == PAGED,
        PACKED=layout == PACKED,
        STAGES=config.stages,
        AS_ROWS=config.as_rows,
        WARPGROUPS=config.warpgroups,
        PREFETCH=PREFETCH,
        num_warps=4,
        maxnreg=config.max_registers,
        **arguments,
    )
