"""Triton kernel of ``index_score``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.kernels import block_coordinates, element_offset, find_tile, sequence_tile

_METADATA = ["cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr", "visible_ptr"]
_COUNTS = [
    "stride_table_b", "stride_s_t", "stride_s_h", "stride_s_j", "num_seqs", "num_pages",
    "num_tokens", "max_seqlen_k", "row_begin", "row_end", "num_tiles", "num_columns",
]  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_METADATA)
def _index_score_kernel(
    q_ptr,
    k,
    k_ptr,
    scores_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_table_ptr,
    first_key_ptr,
    visible_ptr,
    stride_q_t,
    stride_q_h,
    stride_k_outer,
    stride_k_token,
    stride_table_b,
    stride_s_t,
    stride_s_h,
    stride_s_j,
    num_seqs,
    num_pages,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    num_tiles,
    num_columns,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    ONE_TILE: tl.constexpr,
    TMA: tl.constexpr,
    PREFETCH: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of rows of one sequence against one share of the blocks it sees.

    A tile's rows are the (token, head) pairs of `TILE_T` tokens: all heads share every key tile.
    Programs own whole columns, so the number of splits changes no bit. `k` is a pointer, or with
    `TMA` a tensor descriptor. Limit: memory bandwidth for few rows, the matrix units for many.
    """
    # The last tiles of a sequence see most blocks: start with them.
    tile = num_tiles - 1 - tl.program_id(0)
    split = tl.program_id(1)
    if PDL:
        if PREFETCH:
            _prefetch_first_block(
                k_ptr, seqused_k_ptr, block_table_ptr, stride_k_outer, stride_k_token,
                stride_table_b, tile, split, num_seqs, num_pages, num_columns, BLOCK_SIZE, DIM,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    if ONE_TILE:
        b, row, row_limit, shift = sequence_tile(
            cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, tile, num_seqs, num_tokens,
            max_seqlen_k, row_begin, row_end, TILE_T,
        )  # fmt: skip
    else:
        b, row, row_limit, shift = find_tile(
            cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, tile, num_seqs, num_tokens,
            max_seqlen_k, row_begin, row_end, TILE_T, BLOCK_B,
        )  # fmt: skip
    if row >= row_limit:
        return
    m = tl.arange(0, BLOCK_M)
    rows = row + m // HEADS
    heads = (m % HEADS).to(tl.int64)
    live = (m < TILE_T * HEADS) & (rows < row_limit)
    # Only live rows say how far the keys go: behind the last of them the tensor may end.
    # [BLOCK_M]
    positions = tl.where(live, rows + shift, -1)
    visible = tl.where(positions < 0, 0, positions // BLOCK_SIZE + 1)
    if b == num_seqs:
        visible = tl.zeros_like(visible)
    if visible_ptr is not None:
        if split == 0:
            tl.store(visible_ptr + rows - row_begin, visible, live)
    most = tl.minimum(tl.max(tl.where(live, visible, 0)), num_columns)
    # Blocks before this one hold no key that a row of the tile must not see.
    whole = tl.minimum(tl.maximum(row + shift + 1, 0) // BLOCK_SIZE, most)
    # Shares interleave: the first block of one does not depend on how many there are.
    step = tl.num_programs(1)
    masked = split + tl.cdiv(tl.maximum(whole - split, 0), step) * step

    d = tl.arange(0, BLOCK_D)
    q_offset = rows.to(tl.int64) * stride_q_t + heads * stride_q_h
    # [BLOCK_M, BLOCK_D]
    q = tl.load(
        q_ptr + q_offset[:, None] + d[None, :],
        mask=live[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    s_offset = (rows - row_begin).to(tl.int64) * stride_s_t + heads * stride_s_h
    # With one block a share, its page is looked up while the lengths are still on their way.
    if KEYS_FIRST:
        outer, token = block_coordinates(
            split, (split < num_columns) & (b < num_seqs), b, num_seqs, block_table_ptr,
            first_key_ptr, stride_table_b, num_pages, num_tokens, LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        if most <= step:
            if split < most:
                best = _block_max(
                    q, k, outer, token, split, positions, stride_k_outer, stride_k_token,
                    BLOCK_SIZE, DIM, BLOCK_N, BLOCK_D, True, KEYS_FIRST, TMA, UPCAST,
                )  # fmt: skip
                tl.store(scores_ptr + s_offset + split * stride_s_j, best, live)
            return
    for block in range(split, whole, step):
        outer, token = block_coordinates(
            block, True, b, num_seqs, block_table_ptr, first_key_ptr, stride_table_b,
            num_pages, num_tokens, LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        best = _block_max(
            q, k, outer, token, block, positions, stride_k_outer, stride_k_token, BLOCK_SIZE,
            DIM, BLOCK_N, BLOCK_D, False, KEYS_FIRST, TMA, UPCAST,
        )  # fmt: skip
        tl.store(scores_ptr + s_offset + block * stride_s_j, best, live)
    for block in range(masked, most, step):
        outer, token = block_coordinates(
            block, True, b, num_seqs, block_table_ptr, first_key_ptr, stride_table_b,
            num_pages, num_tokens, LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        best = _block_max(
            q, k, outer, token, block, positions, stride_k_outer, stride_k_token, BLOCK_SIZE,
            DIM, BLOCK_N, BLOCK_D, True, KEYS_FIRST, TMA, UPCAST,
        )  # fmt: skip
        tl.store(scores_ptr + s_offset + block * stride_s_j, best, live)


@triton.jit
def _prefetch_first_block(
    k_ptr,
    seqused_k_ptr,
    block_table_ptr,
    stride_k_outer,
    stride_k_token,
    stride_table_b,
    b,
    block,
    num_seqs,
    num_pages,
    num_columns,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Have L2 fetch a share's first block while the predecessor still runs.

    It may still write lengths and pages: they are read past L1, and again afterwards, and say here
    no more than which addresses to ask for.
    """
    mask = (b < num_seqs) & (block < num_columns)
    keys = tl.load(seqused_k_ptr + b, mask, 0, cache_modifier=".cg")
    entry_ptr = block_table_ptr + b.to(tl.int64) * stride_table_b + block
    page = tl.load(entry_ptr, mask, 0, cache_modifier=".cg")
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
    if block < tl.cdiv(keys, BLOCK_SIZE):
        n = tl.arange(0, BLOCK_SIZE)[:, None]
        # Of a line of 128 bytes.
        elements: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
        d = tl.arange(0, DIM // elements)[None, :] * elements
        k_ptrs = k_ptr + element_offset(page, n, stride_k_outer, stride_k_token) + d
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [k_ptrs],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _block_max(
    q,
    k,
    outer,
    token,
    block,
    positions,
    stride_k_outer,
    stride_k_token,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    TMA: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``[BLOCK_M]``: each row's largest dot product with the keys of one block that it sees."""
    best = tl.full(positions.shape, float("-inf"), tl.float32)
    d = tl.arange(0, BLOCK_D)
    for first in tl.static_range(0, BLOCK_SIZE, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        key_positions = block * BLOCK_SIZE + n
        # [BLOCK_N, BLOCK_D]
        if TMA:
            keys = k.load([outer, token + first, 0]).reshape([BLOCK_N, BLOCK_D])
        else:
            k_ptrs = (
                k
                + element_offset(outer, token, stride_k_outer, stride_k_token)
                + n[:, None] * stride_k_token
                + d[None, :]
            )
            if MASKED:
                mask = (key_positions <= tl.max(positions))[:, None] & (d < DIM)[None, :]
                keys = tl.load(k_ptrs, mask=mask, other=0.0)
            elif DIM < BLOCK_D:
                keys = tl.load(k_ptrs, mask=(d < DIM)[None, :], other=0.0)
            else:
                keys = tl.load(k_ptrs)
        if UPCAST:
            keys = keys.to(tl.float32)
        # With few rows the keys take the long side of the product, so that none is padding.
        if KEYS_FIRST:
            dots = tl.dot(keys, tl.trans(q), input_precision="ieee")
            if MASKED:
                seen = key_positions[:, None] <= positions[None, :]
                dots = tl.where(seen, dots, float("-inf"))
            best = tl.maximum(best, tl.max(dots, 0))
        else:
            dots = tl.dot(q, tl.trans(keys), input_precision="ieee")
            if MASKED:
                seen = key_positions[None, :] <= positions[:, None]
                dots = tl.where(seen, dots, float("-inf"))
            best = tl.maximum(best, tl.max(dots, 1))
    return best
