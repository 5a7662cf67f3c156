"""Launching the Gluon kernel of ``sparse_attention`` for Hopper's speculative rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .....batch import Batch
from ....common.launch import launch, next_power_of_2, num_multiprocessors
from ...merge import allocate_parts
from ..decode.join.counters import take_counters
from ..decode.launch import MAX_JOINED_SPLITS, Joined, decode_args
from .kernels import _sparse_attention_drafts_kernel

TOKENS = 4
"""Rows of a sequence: with the heads of a group they are the 64 rows of a product."""

MAX_TOPK = 16
"""Ids of a row: one warp compares each of a sequence with all of it."""

PART, STAGES, WARPGROUPS, MAX_REGISTERS = 64, 6, 2, 168
"""Keys that are fetched as one, such parts in flight, warpgroups, and registers of a thread.

Every slot belongs to one warpgroup, which waits for all that comes there: their number must be a
multiple of the warpgroups.
"""

MIN_TILES = 0.2
"""Tiles for each multiprocessor from which on sharing pays."""

START = 2
"""What a program does before its first block and after its last, in blocks' time."""


def full_tiles(rows: int, heads_kv: int, batch: Batch) -> int:
    """Tiles that `rows` rows make if every sequence has as many as the longest.

    The number of sequences is not asked for: a captured step of the same rows may pad it.
    """
    return rows // batch.max_seqlen_q * heads_kv


def drafts_fill(q: Tensor, block_ids: Tensor, batch: Batch) -> bool:
    """Whether there are enough sequences of so many rows that sharing what is read pays.

    Fewer are faster row by row, although blocks that rows share are then read by each. Where there
    are none, no program would write the rows of padding.
    """
    heads_kv, topk = block_ids.shape[1:]
    return (
        3 <= batch.max_seqlen_q <= TOKENS
        and batch.num_seqs > 0
        and topk <= MAX_TOPK
        and full_tiles(q.shape[0], heads_kv, batch) >= MIN_TILES * num_multiprocessors(q.device)
    )


def choose_drafts_splits(tiles: int, topk: int, device: torch.device) -> int:
    """The number of splits that ends first, if a multiprocessor runs one program at a time."""

    def blocks(splits: int) -> float:
        turns = -(-tiles * splits // num_multiprocessors(device))
        return turns * (topk / splits + START)

    return min(range(1, MAX_JOINED_SPLITS + 1), key=blocks)


def attend_drafts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    max_scratch_bytes: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """All rows, in one pass or in splits that the last program joins.

    Scratch for fewer than all rows is not used.
    """
    heads_kv, topk = block_ids.shape[1:]
    rows = q.shape[0]
    num_splits = choose_drafts_splits(full_tiles(rows, heads_kv, batch), topk, q.device)
    if num_splits > 1:
        parts = allocate_parts(q, num_splits, rows, max_scratch_bytes)
        if parts[1].shape[1] < rows:
            num_splits = 1
    inputs = (q, k, v, block_ids, batch, softmax_scale, num_splits)
    if num_splits == 1:
        launch_hopper_drafts(*inputs, out[None], lse[None])
    else:
        counters = take_counters(batch.num_seqs * heads_kv * WARPGROUPS, q.device)
        launch_hopper_drafts(*inputs, *parts, Joined(counters, out, lse))


def launch_hopper_drafts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    out: Tensor,
    lse: Tensor,
    joined: Joined | None = None,
) -> None:
    """All rows into `out` ``[S, T, Hq, D]`` and `lse` float32 ``[S, T, Hq]``.

    Args:
        q, k, v, block_ids, batch, softmax_scale: as the op has them, with at most `TOKENS` rows in
            a sequence; `softmax_scale` must be positive.
        joined: where the program that comes last joins the splits, if one does; it has `WARPGROUPS`
            counters for each sequence and KV head.
    """
    heads_kv = block_ids.shape[1]
    arguments = decode_args(q, k, v, block_ids, batch, softmax_scale, out, lse, joined, PART)
    launch(
        _sparse_attention_drafts_kernel,
        (batch.num_seqs * heads_kv * num_splits,),
        q.device,
        row_end=q.shape[0],
        num_splits=num_splits,
        queries_per_seq=batch.max_seqlen_q,
        TOKENS=TOKENS,
        DENSE=block_ids.stride(2) == 1,
        STAGES=STAGES,
        WARPGROUPS=WARPGROUPS,
        MAX_JOINED_SPLITS=next_power_of_2(num_splits, 2),
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        **arguments,
    )
