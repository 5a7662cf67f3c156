"""Triton kernels of ``topk_select``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_COUNTS = [
    "stride_s_t",
    "stride_s_h",
    "stride_s_j",
    "stride_v_t",
    "stride_i_t",
    "stride_i_h",
    "num_rows",
    "num_columns",
]

_LOWEST = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["visible_ptr"])
def _topk_select_columns_kernel(
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
    num_rows,
    num_columns,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread per row, for many rows that lie side by side in memory.

    The first pass over the columns keeps each row's best scores sorted in registers, which yields
    the least score kept and how many blocks with just that score have room. The second pass writes
    the ids in ascending order. Limit: arithmetic, about 2 K instructions a score.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    NUM_FORCED: tl.constexpr = INIT + LOCAL
    NUM_BEST: tl.constexpr = TOPK - NUM_FORCED
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = (r // HEADS).to(tl.int64)
    head = (r % HEADS).to(tl.int64)
    visible = tl.load(visible_ptr + row * stride_v_t, mask=r < num_rows, other=0)
    # [BLOCK_R]
    visible = tl.minimum(tl.maximum(visible, 0), num_columns)
    most = tl.max(visible)
    s_ptrs = scores_ptr + row * stride_s_t + head * stride_s_h
    full = visible > TOPK
    threshold = tl.where(full & (NUM_BEST == 0), float("inf"), float("-inf"))
    room = tl.where(full, 0, visible)
    if NUM_BEST > 0:
        best = (threshold,) * NUM_BEST
        ahead = _load_columns(s_ptrs, 0, visible, stride_s_j, INIT, LOCAL, UNROLL)
        for first in range(0, most, UNROLL):
            scores = ahead
            ahead = _load_columns(s_ptrs, first + UNROLL, visible, stride_s_j, INIT, LOCAL, UNROLL)
            for u in tl.static_range(UNROLL):
                best = _insert(best, scores[u], NUM_BEST)
        threshold = tl.where(full, best[NUM_BEST - 1], threshold)
        above = tl.zeros([BLOCK_R], tl.int32)
        for i in tl.static_range(NUM_BEST):
            above += (best[i] > threshold).to(tl.int32)
        room = tl.where(full, NUM_BEST - above, room)

    i_ptrs = ids_ptr + row * stride_i_t + head * stride_i_h
    slot = tl.zeros([BLOCK_R], tl.int32)
    ahead = _load_columns(s_ptrs, 0, visible, stride_s_j, INIT, LOCAL, UNROLL)
    for first in range(0, most, UNROLL):
        scores = ahead
        ahead = _load_columns(s_ptrs, first + UNROLL, visible, stride_s_j, INIT, LOCAL, UNROLL)
        for u in tl.static_range(UNROLL):
            j = tl.full([BLOCK_R], 0, tl.int32) + first + u
            free = (j >= INIT) & (j < visible - LOCAL)
            tie = free & (scores[u] == threshold) & (room > 0)
            kept = ((j < visible) & (free == 0)) | (free & (scores[u] > threshold)) | tie
            tl.store(i_ptrs + slot * stride_i_k, j, kept)
            slot += kept.to(tl.int32)
            room -= tie.to(tl.int32)
    k = tl.arange(0, BLOCK_K)[None, :]
    unused = (k >= slot[:, None]) & (k < TOPK) & (r < num_rows)[:, None]
    tl.store(i_ptrs[:, None] + k * stride_i_k, tl.full([BLOCK_R, BLOCK_K], -1, tl.int32), unused)


@triton.jit
def _load_columns(
    s_ptrs,
    first,
    visible,
    stride_s_j,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The next scores of every row, -inf for blocks that are forced or not visible."""
    columns = ()
    for u in tl.static_range(UNROLL):
        j = tl.full(visible.shape, 0, tl.int32) + first + u
        free = (j >= INIT) & (j < visible - LOCAL)
        score = tl.load(s_ptrs + j.to(tl.int64) * stride_s_j, free, float("-inf"))
        columns = columns + (_rank(score),)
    return columns


@triton.jit
def _insert(best, score, LENGTH: tl.constexpr):
    """The `LENGTH` highest of a descending tuple and one more score, descending."""
    longer = (tl.maximum(best[0], score),)
    for i in tl.static_range(1, LENGTH):
        longer = longer + (tl.maximum(best[i], tl.minimum(best[i - 1], score)),)
    return longer


@triton.jit
def _rank(scores):
    """Scores that compare as they rank: NaN with -inf."""
    return tl.where(scores == scores, scores, float("-inf"))


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["visible_ptr"])
def _topk_select_rows_kernel(
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
    num_rows,
    num_columns,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    NARROW_J: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row, for few rows: the scores stay in registers while a search finds the least
    one kept.

    The kept blocks come out in ascending order by a running count, without a sort, and ties fall to
    the lower id. Limit: the latency of about ten steps of the search.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    visible = tl.load(visible_ptr + row * stride_v_t)
    visible = tl.minimum(tl.maximum(visible, 0), num_columns)
    s_offset = row * stride_s_t + head * stride_s_h
    if ALIGNED:
        stride_s_j = 1
        s_offset = tl.multiple_of(s_offset, 4)
    i_ptr = ids_ptr + row * stride_i_t + head * stride_i_h
    # A buffer wider than what a row sees, as a captured graph has it, should cost nothing.
    if visible <= NARROW_J:
        _select_row(
            scores_ptr + s_offset, i_ptr, visible, num_columns, stride_s_j, stride_i_k, TOPK, INIT,
            LOCAL, NARROW_J, BLOCK_K,
        )  # fmt: skip
    elif NARROW_J < BLOCK_J:
        _select_row(
            scores_ptr + s_offset, i_ptr, visible, num_columns, stride_s_j, stride_i_k, TOPK, INIT,
            LOCAL, BLOCK_J, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _select_row(
    s_ptr,
    i_ptr,
    visible,
    num_columns,
    stride_s_j,
    stride_i_k,
    TOPK: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    j = tl.arange(0, BLOCK_J)
    # The loads do not wait for `visible`; what lies past it is not used.
    # [BLOCK_J]
    scores = _rank(tl.load(s_ptr + j.to(tl.int64) * stride_s_j, j < num_columns, 0.0))
    free = (j >= INIT) & (j < visible - LOCAL)
    num_forced = tl.minimum(INIT + LOCAL, visible)
    wanted = tl.minimum(visible, TOPK) - num_forced
    scores = tl.where(free, scores, float("-inf"))

    # `reach` scores are at least `low`, and fewer than `wanted` are at least `high`.
    low = tl.min(tl.where(free, scores, float("inf")))
    high = tl.max(scores)
    reach = visible - num_forced
    top = tl.sum((free & (scores >= high)).to(tl.int32))
    if (reach != wanted) & (top >= wanted):
        low = high
        reach = top
    step = 0
    while (reach != wanted) & (low < high) & (step < 64):
        # Scores lie close together on their own scale, but only halving bits ends for certain.
        middle = 0.5 * low + 0.5 * high
        if (step >= 24) | ((middle > low) & (middle < high) == 0):
            middle = _middle_bits(low, high)
            high = tl.where(middle > low, high, low)
        count = tl.sum((scores >= middle).to(tl.int32))
        enough = count >= wanted
        low = tl.where(enough, middle, low)
        reach = tl.where(enough, count, reach)
        high = tl.where(enough, high, middle)
        step += 1

    kept = free & (scores >= low)
    if reach != wanted:
        # The search ended on one score, and more blocks have it than there is room for.
        above = free & (scores > low)
        room = wanted - tl.sum(above.to(tl.int32))
        ties = (kept & (above == 0)).to(tl.int32)
        kept = above | (kept & (above == 0) & (tl.cumsum(ties) <= room))
    kept = kept | ((free == 0) & (j < visible))
    slot = tl.cumsum(kept.to(tl.int32)) - 1
    tl.store(i_ptr + slot * stride_i_k, j, kept)
    k = tl.arange(0, BLOCK_K)
    unused = (k >= wanted + num_forced) & (k < TOPK)
    tl.store(i_ptr + k * stride_i_k, tl.full([BLOCK_K], -1, tl.int32), unused)


@triton.jit
def _middle_bits(low, high):
    """A score halfway between two in the order of their bits; `low` if there is none between."""
    low_key, high_key = _order(low), _order(high)
    key = (low_key >> 1) + (high_key >> 1) + (low_key & high_key & 1)
    middle = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    # -0 has bits of its own, but is not below +0.
    return tl.where((middle > low) & (middle < high), middle, low)


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
    num_rows,
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
    head = (pid % HEADS).to(tl.int64)
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
    scores = _rank(scores) + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
