"""Triton kernels of ``topk_select``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_COUNTS = ["stride_s_t", "stride_s_h", "stride_v_t", "stride_i_t", "stride_i_h", "num_columns"]

_LOWEST = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["visible_ptr"])
def _topk_select_kernel(
    scores_ptr,
    visible_ptr,
    ids_ptr,
    stride_s_t,
    stride_s_h,
    stride_s_j,
    stride_v_t,
    stride_i_t,
    stride_i_h,
    stride_i_k,
    num_columns,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: its scores stay in registers, a search over their bits finds the least one kept.

    The kept blocks come out in ascending order by a running count, without a sort, and ties fall to
    the lower id. Limit: arithmetic on the visible scores, about 12 passes over registers.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    row = (pid // HEADS).to(tl.int64)
    head = pid % HEADS
    visible = tl.load(visible_ptr + row * stride_v_t)
    visible = tl.minimum(tl.maximum(visible, 0), num_columns)
    wanted = tl.minimum(visible, TOPK)
    j = tl.arange(0, BLOCK_J)
    s_ptrs = scores_ptr + row * stride_s_t + head * stride_s_h + j.to(tl.int64) * stride_s_j
    is_visible = j < visible
    forced = is_visible & ((j < INIT) | (j >= visible - LOCAL))
    # [BLOCK_J]
    keys = _order(tl.load(s_ptrs, mask=is_visible, other=0.0))
    keys = tl.where(forced, _LARGEST, tl.where(is_visible, keys, _LOWEST))

    # The largest threshold that `wanted` keys reach lies in low .. high.
    low = tl.min(tl.where(is_visible, keys, _LARGEST))
    high = tl.max(keys)
    reach = visible
    while (reach != wanted) & (low < high):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        count = tl.sum((keys >= middle).to(tl.int32))
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        reach = tl.where(enough, count, reach)
        high = tl.where(enough, high, middle - 1)

    above = is_visible & (keys > low)
    ties = is_visible & (keys == low)
    room = wanted - tl.sum(above.to(tl.int32))
    kept = above | (ties & (tl.cumsum(ties.to(tl.int32)) <= room))
    slot = tl.cumsum(kept.to(tl.int32)) - 1
    i_ptr = ids_ptr + row * stride_i_t + head * stride_i_h
    tl.store(i_ptr + slot * stride_i_k, j, kept)
    k = tl.arange(0, BLOCK_K)
    tl.store(i_ptr + k * stride_i_k, tl.full([BLOCK_K], -1, tl.int32), (k >= wanted) & (k < TOPK))


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["visible_ptr"])
def _topk_select_wide_kernel(
    scores_ptr,
    visible_ptr,
    ids_ptr,
    stride_s_t,
    stride_s_h,
    stride_s_j,
    stride_v_t,
    stride_i_t,
    stride_i_h,
    stride_i_k,
    num_columns,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row too wide for registers: the same search, reading the scores anew in every pass.

    Limit: the latency of about 30 passes over the row through L2.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    row = (pid // HEADS).to(tl.int64)
    head = pid % HEADS
    visible = tl.load(visible_ptr + row * stride_v_t)
    visible = tl.minimum(tl.maximum(visible, 0), num_columns)
    wanted = tl.minimum(visible, TOPK)
    s_ptr = scores_ptr + row * stride_s_t + head * stride_s_h
    low = tl.full([], _LOWEST, tl.int32)
    high = tl.full([], _LARGEST, tl.int32)
    reach = visible
    while (reach != wanted) & (low < high):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        count = 0
        for first in range(0, visible, BLOCK_J):
            keys = _load_keys(s_ptr, first, visible, stride_s_j, INIT, LOCAL, BLOCK_J)
            count += tl.sum((keys >= middle).to(tl.int32))
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        reach = tl.where(enough, count, reach)
        high = tl.where(enough, high, middle - 1)

    num_above = 0
    for first in range(0, visible, BLOCK_J):
        keys = _load_keys(s_ptr, first, visible, stride_s_j, INIT, LOCAL, BLOCK_J)
        num_above += tl.sum((keys > low).to(tl.int32))
    room = wanted - num_above
    written = 0
    i_ptr = ids_ptr + row * stride_i_t + head * stride_i_h
    for first in range(0, visible, BLOCK_J):
        keys = _load_keys(s_ptr, first, visible, stride_s_j, INIT, LOCAL, BLOCK_J)
        j = first + tl.arange(0, BLOCK_J)
        ties = (j < visible) & (keys == low)
        kept = (keys > low) | (ties & (tl.cumsum(ties.to(tl.int32)) <= room))
        slot = written + tl.cumsum(kept.to(tl.int32)) - 1
        tl.store(i_ptr + slot * stride_i_k, j, kept)
        room -= tl.sum(ties.to(tl.int32))
        written += tl.sum(kept.to(tl.int32))
    k = tl.arange(0, BLOCK_K)
    tl.store(i_ptr + k * stride_i_k, tl.full([BLOCK_K], -1, tl.int32), (k >= wanted) & (k < TOPK))


@triton.jit
def _load_keys(
    s_ptr,
    first,
    visible,
    stride_s_j,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Ordered keys of one chunk of a row; the lowest number past `visible`."""
    j = first + tl.arange(0, BLOCK_J)
    is_visible = j < visible
    keys = _order(tl.load(s_ptr + j.to(tl.int64) * stride_s_j, mask=is_visible, other=0.0))
    forced = (j < INIT) | (j >= visible - LOCAL)
    return tl.where(is_visible, tl.where(forced, _LARGEST, keys), _LOWEST)


@triton.jit
def _order(scores):
    """int32 keys that compare as the scores do: -0 equals +0, and NaN ranks with -inf."""
    scores = tl.where(scores == scores, scores + 0.0, float("-inf"))
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
