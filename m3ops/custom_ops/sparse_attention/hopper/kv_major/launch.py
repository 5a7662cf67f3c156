"""Launching the KV-major road of ``sparse_attention`` on Hopper.

Where neighbouring tokens select different blocks, a tile that walks their union multiplies mostly
for nothing. This road turns the loop around: each block meets the tokens that selected it, 64 query
rows at a time, and every token's results are joined at the end. It costs the same whatever is
selected, because the parts go through memory; so the device decides, by the overlap it finds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .....batch import Batch
from ....common.launch import (
    fetchable,
    launch,
    layout_args,
    next_power_of_2,
    num_multiprocessors,
    num_tiles,
)
from ..descriptors import descriptor, key_descriptor
from .kernels import (
    _kv_major_count_kernel,
    _kv_major_lists_kernel,
    _kv_major_merge_kernel,
    _kv_major_place_kernel,
    _sparse_attention_kv_major_kernel,
)

TILE_T = 4
"""Tokens of a tile: 64 query rows, which a warpgroup multiplies at once."""

CHUNK_ROWS, MIN_CHUNK_ROWS = 2048, 1024
"""Tokens whose partial results lie in scratch at a time: most, and fewest worth the road."""

MIN_ROWS = 2048
"""Fewer tokens leave the lists too short."""

MIN_SPREAD = 6
"""Contexts of no more than so many times K blocks stay with the unions, which hold few of them."""

MAX_TOPK = 32
"""Slots that one program joins."""

MAX_BLOCKS = 2**14
"""Blocks of all sequences, which a prefix sum of one program runs over."""

KV_STAGES, Q_STAGES = 2, 2
"""Blocks in flight, and tiles in flight for each warpgroup: at least two of these."""

BLOCK_T = 16
"""Tokens of a program that lists."""

MERGE_PROGRAMS, MERGE_WARPS = 4, 8
"""Programs on a multiprocessor that join, and their warps."""


class Lists(NamedTuple):
    """Scratch of one call, in chunks of `chunk_rows` tokens: ``C`` chunks, ``NB`` blocks in all.

    Attributes:
        chunk_rows: tokens of a chunk.
        columns: blocks of one sequence.
        balance: int32 ``[1]``: above 0 this road is the faster one.
        counts: int32 ``[C, Hkv, NB]``: entries of each block.
        places: int32 ``[C, Hkv, chunk_rows * K]``: of each entry in its list, -1 if it is dead.
        starts: int32 ``[C, Hkv, NB, 2]``: first tile and list of each block.
        lists: int32 ``[C, Hkv, L, 4]``: page or sequence, first token and keys of each list.
        num_tiles: int32 ``[C, Hkv]``.
        entries: int32 ``[C, Hkv, tiles, TILE_T]``: ``(token * K + slot) * N + last key``, or -1.
        tile_lists: int32 ``[C, Hkv, tiles]``: the list of each tile.
        partial_out: ``[Hkv, chunk_rows * K, G, D]`` of the dtype of `q`.
        partial_lse: float32 ``[Hkv, chunk_rows * K, G]``, to base 2.
    """

    chunk_rows: int
    columns: int
    balance: Tensor
    counts: Tensor
    places: Tensor
    starts: Tensor
    lists: Tensor
    num_tiles: Tensor
    entries: Tensor
    tile_lists: Tensor
    partial_out: Tensor
    partial_lse: Tensor


def allocate_lists(
    q: Tensor, block_ids: Tensor, batch: Batch, rows: int, max_scratch_bytes: int
) -> Lists | None:
    """Scratch for the road, or None where it could not pay or does not fit.

    It must be there before the device has decided whether to use it.
    """
    topk = block_ids.shape[2]
    num_blocks = batch.num_seqs * batch.num_block_columns
    dense = MIN_SPREAD * topk * batch.block_size >= batch.max_seqlen_k
    if rows < MIN_ROWS or dense or topk > MAX_TOPK or num_blocks > MAX_BLOCKS or not fetchable(q):
        return None
    chunk_rows = min(CHUNK_ROWS, rows)
    while _scratch_bytes(q, block_ids, rows, chunk_rows, num_blocks) > max_scratch_bytes:
        chunk_rows -= 64
        if chunk_rows < MIN_CHUNK_ROWS:
            return None
    # Chunks of one length.
    chunks = triton.cdiv(rows, chunk_rows)
    return allocate(q, block_ids, batch, chunks, triton.cdiv(rows, chunks), num_blocks)


def _sizes(rows: int, topk: int, num_blocks: int) -> tuple[int, int]:
    """The most lists and tiles that a chunk of `rows` tokens may have for one head."""
    entries = rows * topk
    lists = min(entries, num_blocks)
    return lists, triton.cdiv(entries + (TILE_T - 1) * lists, TILE_T)


def _scratch_bytes(
    q: Tensor, block_ids: Tensor, rows: int, chunk_rows: int, num_blocks: int
) -> int:
    heads_kv, topk = block_ids.shape[1:]
    lists, tiles = _sizes(chunk_rows, topk, num_blocks)
    listed = 3 * num_blocks + 4 * lists + 1 + (TILE_T + 1) * tiles + chunk_rows * topk
    partial = chunk_rows * topk * q.shape[1] * (q.shape[2] * q.element_size() + 4)
    return 16 + triton.cdiv(rows, chunk_rows) * heads_kv * 4 * listed + partial


def allocate(
    q: Tensor, block_ids: Tensor, batch: Batch, chunks: int, chunk_rows: int, num_blocks: int
) -> Lists:
    heads_kv, topk = block_ids.shape[1:]
    heads_q, dim = q.shape[1:]
    group, slots = heads_q // heads_kv, chunk_rows * topk
    lists, tiles = _sizes(chunk_rows, topk, num_blocks)
    parts = (chunks, heads_kv)

    def empty(*sizes: int) -> Tensor:
        return q.new_empty((*parts, *sizes), dtype=torch.int32)

    # Four for the balance, so that the counts are aligned.
    zeros = q.new_zeros(4 + chunks * heads_kv * num_blocks, dtype=torch.int32)
    return Lists(
        chunk_rows=chunk_rows,
        columns=batch.num_block_columns,
        balance=zeros[:1],
        counts=zeros[4:].view(*parts, num_blocks),
        places=empty(slots),
        starts=empty(num_blocks, 2),
        lists=empty(lists, 4),
        num_tiles=empty(),
        entries=empty(tiles, TILE_T),
        tile_lists=empty(tiles),
        partial_out=q.new_empty((heads_kv, slots, group, dim)),
        partial_lse=q.new_empty((heads_kv, slots, group), dtype=torch.float32),
    )


def launch_kv_major(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    lists: Lists,
    begin: int,
    end: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend from the rows ``begin .. end``, if the balance is above 0.

    Args:
        q, k, v, block_ids, batch, softmax_scale: as the op has them.
        lists: scratch for these rows.
        out: ``[T, Hq, D]``, written for these rows.
        lse: float32 ``[T, Hq]``, likewise.
    """
    build_lists(k, block_ids, batch, lists, begin, end)
    size = batch.block_size
    keys = key_descriptor(k, batch, size), key_descriptor(v, batch, size)
    for chunk in range(lists.num_tiles.shape[0]):
        first = begin + chunk * lists.chunk_rows
        _launch_tiles(q, keys, softmax_scale, lists, chunk, first)
        merge(lists, chunk, first, min(first + lists.chunk_rows, end), out, lse)


def build_lists(
    k: Tensor, block_ids: Tensor, batch: Batch, lists: Lists, begin: int, end: int
) -> None:
    """Fill `lists` for the rows ``begin .. end``, all chunks at once."""
    chunks, heads_kv, num_blocks = lists.counts.shape
    topk, device = block_ids.shape[2], block_ids.device
    layout = layout_args(batch, k)
    selected = {
        "ids_ptr": block_ids,
        "stride_i_t": block_ids.stride(0),
        "stride_i_h": block_ids.stride(1),
        "stride_i_k": block_ids.stride(2),
        "row_begin": begin,
        "row_end": end,
        "chunk_rows": lists.chunk_rows,
        "HEADS": heads_kv,
        "TOPK": topk,
        "BLOCK_T": BLOCK_T,
        "BLOCK_K": next_power_of_2(topk, 1),
    }
    shared = {
        "balance_ptr": lists.balance,
        "counts_ptr": lists.counts,
        "columns": lists.columns,
        "num_blocks": num_blocks,
        "BLOCK_SIZE": batch.block_size,
    }
    rows = (
        "cu_seqlens_q_ptr",
        "seqused_k_ptr",
        "first_key_ptr",
        "num_seqs",
        "num_tokens",
        "max_seqlen_k",
        "BLOCK_B",
    )
    selected |= {name: layout[name] for name in rows}
    grid = (num_tiles(lists.chunk_rows, BLOCK_T, batch), heads_kv, chunks)
    launch(
        _kv_major_count_kernel,
        grid,
        device,
        places_ptr=lists.places,
        num_warps=4,
        **selected,
        **shared,
    )
    blocks = (
        "seqused_k_ptr",
        "block_table_ptr",
        "first_key_ptr",
        "stride_table_b",
        "num_seqs",
        "num_pages",
        "num_tokens",
        "LAYOUT",
    )
    launch(
        _kv_major_lists_kernel,
        (chunks * heads_kv,),
        device,
        starts_ptr=lists.starts,
        lists_ptr=lists.lists,
        num_tiles_ptr=lists.num_tiles,
        list_limit=lists.lists.shape[2],
        TILE_T=TILE_T,
        BLOCK_L=1024,
        num_warps=8,
        **shared,
        **{name: layout[name] for name in blocks},
    )
    launch(
        _kv_major_place_kernel,
        grid,
        device,
        places_ptr=lists.places,
        starts_ptr=lists.starts,
        entries_ptr=lists.entries,
        tile_lists_ptr=lists.tile_lists,
        tile_limit=lists.tile_lists.shape[2],
        TILE_T=TILE_T,
        num_warps=4,
        **selected,
        **shared,
    )


def _launch_tiles(
    q: Tensor,
    keys: tuple[TensorDescriptor, TensorDescriptor],
    softmax_scale: float,
    lists: Lists,
    chunk: int,
    row_begin: int,
) -> None:
    heads_kv, slots, group, dim = lists.partial_out.shape
    k_desc, v_desc = keys
    arguments = dict(
        q_desc=descriptor(q, [1, group, dim // 2]),
        k_desc=k_desc,
        v_desc=v_desc,
        partial_desc=descriptor(lists.partial_out, [1, 1, group, dim // 2]),
        partial_lse_ptr=lists.partial_lse,
        balance_ptr=lists.balance,
        num_tiles_ptr=lists.num_tiles[chunk],
        entries_ptr=lists.entries[chunk],
        tile_lists_ptr=lists.tile_lists[chunk],
        lists_ptr=lists.lists[chunk],
        softmax_scale=softmax_scale,
        row_begin=row_begin,
        tile_limit=lists.tile_lists.shape[2],
        list_limit=lists.lists.shape[2],
        num_slots=slots,
        HEADS_KV=heads_kv,
        TOPK=slots // lists.chunk_rows,
        KV_STAGES=KV_STAGES,
        Q_STAGES=Q_STAGES,
        num_warps=4,
    )
    grid = (num_multiprocessors(q.device),)
    launch(_sparse_attention_kv_major_kernel, grid, q.device, **arguments)


def merge(lists: Lists, chunk: int, begin: int, end: int, out: Tensor, lse: Tensor) -> None:
    """Join the parts of the rows ``begin .. end``, those of one chunk."""
    heads_kv, slots, group, dim = lists.partial_out.shape
    topk = slots // lists.chunk_rows
    programs = min((end - begin) * heads_kv, MERGE_PROGRAMS * num_multiprocessors(out.device))
    launch(
        _kv_major_merge_kernel,
        (programs,),
        out.device,
        balance_ptr=lists.balance,
        partial_out_ptr=lists.partial_out,
        partial_lse_ptr=lists.partial_lse,
        places_ptr=lists.places[chunk],
        out_ptr=out,
        lse_ptr=lse,
        stride_o_t=out.stride(0),
        stride_o_h=out.stride(1),
        stride_l_t=lse.stride(0),
        stride_l_h=lse.stride(1),
        row_begin=begin,
        num_rows=end - begin,
        chunk_rows=lists.chunk_rows,
        HEADS=heads_kv,
        BLOCK_G=group,
        DIM=dim,
        TOPK=topk,
        num_warps=MERGE_WARPS,
    )
