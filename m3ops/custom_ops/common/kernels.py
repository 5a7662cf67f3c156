"""Device functions shared by kernels: which rows a program has, and where a block's keys lie."""

import triton
import triton.language as tl


@triton.jit
def find_sequence(cu_seqlens_q_ptr, row, num_seqs, BLOCK_B: tl.constexpr):
    """The sequence that `row` of the packed batch belongs to; `num_seqs` for padding rows."""
    started = 0
    for first in range(0, num_seqs + 1, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        start = tl.load(cu_seqlens_q_ptr + b, mask=b <= num_seqs, other=2147483647)
        started += tl.sum((start <= row).to(tl.int32))
    return started - 1


@triton.jit
def find_tile(
    cu_seqlens_q_ptr,
    tile,
    num_seqs,
    row_begin,
    row_end,
    TILE_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sequence, first row and end row of one tile of at most `TILE_T` rows of one sequence.

    Rows ``row_begin .. row_end`` are cut into tiles that never cross a sequence. Sequence `b`
    has tiles from ``rows before it // TILE_T + b`` on, which leaves every sequence room enough and
    needs no prefix sum; padding is one more sequence. Spare tiles come back empty (first >= end).
    """
    started = 0
    for first in range(0, num_seqs + 1, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        start = tl.load(cu_seqlens_q_ptr + b, mask=b <= num_seqs, other=0)
        before = tl.minimum(tl.maximum(start, row_begin), row_end) - row_begin
        started += tl.sum(((b <= num_seqs) & (before // TILE_T + b <= tile)).to(tl.int32))
    b = started - 1
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_q_ptr + b), row_begin), row_end)
    end = tl.load(cu_seqlens_q_ptr + b + 1, mask=b < num_seqs, other=2147483647)
    end = tl.minimum(tl.maximum(end, row_begin), row_end)
    row = start + (tile - (start - row_begin) // TILE_T - b) * TILE_T
    return b, row, tl.minimum(row + TILE_T, end)


@triton.jit
def position_shift(cu_seqlens_q_ptr, seqused_k_ptr, b):
    """What takes a row of sequence `b` to its position: the last row stands at the last key."""
    return tl.load(seqused_k_ptr + b) - tl.load(cu_seqlens_q_ptr + b + 1)


@triton.jit
def block_offset(
    block,
    b,
    block_table_ptr,
    first_key_ptr,
    stride_table_b,
    stride_outer,
    stride_token,
    num_pages,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Elements (int64) from the start of a key tensor to the first key of one logical block."""
    if PAGED:
        page = tl.load(block_table_ptr + b.to(tl.int64) * stride_table_b + block)
        return bounded_page(page, num_pages).to(tl.int64) * stride_outer
    offset = sequence_offset(b, first_key_ptr, stride_outer, stride_token)
    return offset + tl.cast(block, tl.int64) * BLOCK_SIZE * stride_token


@triton.jit
def sequence_offset(b, first_key_ptr, stride_outer, stride_token):
    """Elements (int64) from the start of packed or batched keys to a sequence's first key."""
    offset = b.to(tl.int64) * stride_outer
    if first_key_ptr is not None:
        offset += tl.load(first_key_ptr + b).to(tl.int64) * stride_token
    return offset


@triton.jit
def bounded_page(page, num_pages):
    """A page id out of range gives wrong numbers, never an access outside the cache."""
    return tl.minimum(tl.maximum(page, 0), num_pages - 1)
