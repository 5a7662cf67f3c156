"""Device functions shared by kernels: which rows a program has, and where a block's keys lie."""

import triton
import triton.language as tl

_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def find_row(
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    first_key_ptr,
    row,
    num_seqs,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    BLOCK_B: tl.constexpr,
):
    """Sequence and position of one row of the packed batch; padding rows stand at -1."""
    b, _, _, shift = find_tile(
        cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, row - row_begin, num_seqs, num_tokens,
        max_seqlen_k, row_begin, row_end, 0, BLOCK_B,
    )  # fmt: skip
    padding = b == num_seqs
    return tl.where(padding, 0, b), tl.where(padding, -1, row + shift)


@triton.jit
def find_tile(
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    first_key_ptr,
    tile,
    num_seqs,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    TILE_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sequence, first row, end row and position shift of one tile of at most `TILE_T` rows.

    Rows ``row_begin .. row_end`` are cut into tiles that never cross a sequence. Sequence `b`
    has tiles from ``rows before it // TILE_T + b`` on, which leaves every sequence room enough and
    needs no prefix sum; padding is sequence `num_seqs`. Spare tiles come back empty (first >= end).
    With `TILE_T` 0, `tile` is a row, counted from `row_begin`.
    Adding the shift takes a row to its position: the last row stands at the last key.

    Whatever the metadata hold, the rows are among ``row_begin .. row_end`` and no row stands past
    the last key that the storage has room for.
    """
    found_b, found_row, found_end, found_shift = 0, 0, 0, 0
    for first in range(0, num_seqs + 1, BLOCK_B):
        # All of them at once: a search would wait for one load after the other.
        b = first + tl.arange(0, BLOCK_B)
        start = tl.load(cu_seqlens_q_ptr + b, mask=b <= num_seqs, other=_LARGEST)
        end = tl.load(cu_seqlens_q_ptr + b + 1, mask=b < num_seqs, other=_LARGEST)
        seqused = tl.load(seqused_k_ptr + b, mask=b < num_seqs, other=0)
        row = tl.minimum(tl.maximum(start, row_begin), row_end)
        limit = tl.minimum(tl.maximum(end, row_begin), row_end)
        if TILE_T == 0:
            mine = (row - row_begin <= tile) & (tile < limit - row_begin)
        else:
            first_tile = (row - row_begin) // TILE_T + b
            next_tile = (limit - row_begin) // TILE_T + b + 1
            mine = (b <= num_seqs) & (first_tile <= tile) & (tile < next_tile)
            row += (tile - first_tile) * TILE_T
            limit = tl.minimum(limit, row + TILE_T)
        # One sequence has the tile. Of several, which offsets that decrease make, any will do.
        found_b = tl.maximum(found_b, tl.max(tl.where(mine, b, 0)))
        found_row = tl.maximum(found_row, tl.max(tl.where(mine, row, 0)))
        found_end = tl.maximum(found_end, tl.max(tl.where(mine, limit, 0)))
        found_shift += tl.sum(tl.where(mine & (b < num_seqs), seqused - end, 0))
    if TILE_T == 0:
        # A row that no sequence has counts as one of the first, within its room.
        found_end = tl.where(tile < found_end - row_begin, found_end, row_end)
    room = _key_room(first_key_ptr, found_b, num_seqs, num_tokens, max_seqlen_k)
    return found_b, found_row, found_end, tl.minimum(found_shift, room - found_end)


@triton.jit
def sequence_tile(
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    first_key_ptr,
    tile,
    num_seqs,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    TILE_T: tl.constexpr,
):
    """What `find_tile` returns if no sequence is longer than a tile: tile `b` is sequence `b`."""
    b = tl.minimum(tile, num_seqs)
    start = tl.load(cu_seqlens_q_ptr + b)
    end = tl.load(cu_seqlens_q_ptr + b + 1, mask=b < num_seqs, other=_LARGEST)
    seqused = tl.load(seqused_k_ptr + b, mask=b < num_seqs, other=0)
    row = tl.minimum(tl.maximum(start, row_begin), row_end) + (tile - b) * TILE_T
    limit = tl.minimum(tl.minimum(tl.maximum(end, row_begin), row_end), row + TILE_T)
    room = _key_room(first_key_ptr, b, num_seqs, num_tokens, max_seqlen_k)
    return b, row, limit, tl.minimum(seqused - end, room - limit)


@triton.jit
def _first_key(first_key_ptr, b, num_seqs, num_tokens):
    """Where the keys of a sequence start, inside the storage whatever the metadata say."""
    first = tl.load(first_key_ptr + b, b < num_seqs, 0)
    return tl.minimum(tl.maximum(first, 0), num_tokens)


@triton.jit
def _key_room(first_key_ptr, b, num_seqs, num_tokens, max_seqlen_k):
    """Keys that the storage has for a sequence at most."""
    room = num_tokens
    if first_key_ptr is not None:
        room -= _first_key(first_key_ptr, b, num_seqs, num_tokens)
    return tl.minimum(room, max_seqlen_k)


@triton.jit
def block_coordinates(
    block,
    mask,
    b,
    num_seqs,
    block_table_ptr,
    first_key_ptr,
    stride_table_b,
    num_pages,
    num_tokens,
    LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Page (or sequence) and token in it of the first key of each logical block.

    Nothing is read where `mask` is false or `b` is padding; elsewhere a row of `b` sees the block.
    A page id out of range is bounded: it gives wrong numbers, never an access outside the cache.
    """
    if LAYOUT == "paged":
        page = tl.load(block_table_ptr + tl.cast(b, tl.int64) * stride_table_b + block, mask, 0)
        return tl.minimum(tl.maximum(page, 0), num_pages - 1), block * 0
    first = block * BLOCK_SIZE
    if first_key_ptr is not None:
        first += _first_key(first_key_ptr, b, num_seqs, num_tokens)
    if LAYOUT == "packed":
        return block * 0, first
    return block * 0 + b, first


@triton.jit
def element_offset(outer, token, stride_outer, stride_token):
    """Elements (int64) from the start of a key tensor to one of its tokens."""
    return tl.cast(outer, tl.int64) * stride_outer + tl.cast(token, tl.int64) * stride_token
