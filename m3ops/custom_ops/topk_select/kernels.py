"""Triton kernels of ``topk_select``: for many rows, for few, and for rows of any width."""

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

# Keys of blocks that are not visible, and of those that are forced.
_UNSEEN = tl.constexpr(-(2**31))
_FORCED = tl.constexpr(2**31 - 1)


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
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread per row and share of its columns, for many rows side by side in memory.

    The first pass sorts `BLOCK_K` keys at a time into the best of the share by a comparator
    network; the shares' lists, merged, yield the least key kept, and each list how many of its
    share are. With that the second pass emits the ids in ascending order. Limit: the latency of
    reading the scores twice, then arithmetic, about 13 minima and maxima a score.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = (r // HEADS).to(tl.int64)
    head = (r % HEADS).to(tl.int64)
    visible = tl.load(visible_ptr + row * stride_v_t, mask=r < num_rows, other=0)
    visible = tl.minimum(tl.maximum(visible, 0), num_columns)
    most = tl.max(visible)
    # [1, BLOCK_R]
    s_ptrs = (scores_ptr + row * stride_s_t + head * stride_s_h)[None, :]
    i_ptrs = (ids_ptr + row * stride_i_t + head * stride_i_h)[None, :]
    visible = visible[None, :]
    share = tl.cdiv(tl.cdiv(most, SHARES), BLOCK_K) * BLOCK_K
    # [SHARES, 1]
    begin = (tl.arange(0, SHARES) * share)[:, None]
    # [SHARES, BLOCK_R]
    end = tl.minimum(begin + share, visible)

    best = (tl.full([SHARES, BLOCK_R], _UNSEEN, tl.int32),) * BLOCK_K
    ahead = _load_columns(s_ptrs, stride_s_j, begin, end, BLOCK_K)
    for step in range(0, share, BLOCK_K):
        scores = ahead
        # The next scores are on their way while these are sorted.
        ahead = _load_columns(s_ptrs, stride_s_j, begin + step + BLOCK_K, end, BLOCK_K)
        keys = ()
        for u in tl.static_range(BLOCK_K):
            keys = keys + (_key(scores[u], begin + step + u, visible, INIT, LOCAL),)
        best = _merge(best, _sort(keys, BLOCK_K), BLOCK_K)
    threshold, room, slot = _divide(best, TOPK, SHARES, BLOCK_R, BLOCK_K)
    ahead = _load_columns(s_ptrs, stride_s_j, begin, end, BLOCK_K)
    for step in range(0, share, BLOCK_K):
        scores = ahead
        ahead = _load_columns(s_ptrs, stride_s_j, begin + step + BLOCK_K, end, BLOCK_K)
        for u in tl.static_range(BLOCK_K):
            j = begin + step + u + tl.zeros_like(slot)
            key = _key(scores[u], j, visible, INIT, LOCAL)
            tie = (key == threshold) & (room > 0)
            kept = (key > threshold) | tie
            tl.store(i_ptrs + slot * stride_i_k, j, kept)
            slot += kept.to(tl.int32)
            room -= tie.to(tl.int32)
    k = tl.arange(0, BLOCK_K)[:, None]
    unused = (k >= visible) & (k < TOPK) & (r < num_rows)[None, :]
    tl.store(i_ptrs + k * stride_i_k, tl.full([BLOCK_K, BLOCK_R], -1, tl.int32), unused)


@triton.jit
def _load_columns(s_ptrs, stride_s_j, first, end, NUM: tl.constexpr):
    """The scores of `NUM` columns of every row and share, a tuple."""
    columns = ()
    for u in tl.static_range(NUM):
        j = first + u
        columns = columns + (tl.load(s_ptrs + j.to(tl.int64) * stride_s_j, j < end, 0.0),)
    return columns


@triton.jit
def _divide(
    best,
    TOPK: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """From the best of every share: the least key kept of each row, how many that just reach it a
    share may keep, and the slot of the first that it keeps.
    """
    merged = best
    for level in tl.static_range(_log2(SHARES)):
        merged = _merge_pairs(merged, SHARES >> (level + 1), BLOCK_R, BLOCK_K)
    # [1, BLOCK_R]
    threshold = merged[TOPK - 1].reshape([1, BLOCK_R])
    # With fewer candidates than K the least key kept is that of none.
    crowded = threshold > _UNSEEN
    above = tl.zeros([SHARES, BLOCK_R], tl.int32)
    ties = tl.zeros([SHARES, BLOCK_R], tl.int32)
    for i in tl.static_range(BLOCK_K):
        above += (best[i] > threshold).to(tl.int32)
        ties += ((best[i] == threshold) & crowded).to(tl.int32)
    # Ties go to the lower ids, and so to the first shares.
    room = TOPK - tl.sum(above, 0)[None, :] - (tl.cumsum(ties, 0) - ties)
    room = tl.minimum(tl.maximum(room, 0), ties)
    return threshold, room, tl.cumsum(above + room, 0) - (above + room)


@triton.jit
def _key(score, j, visible, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """What block `j` with this score ranks by."""
    key = _order(score)
    if INIT > 0:
        key = tl.where(j < INIT, _FORCED, key)
    if LOCAL > 0:
        key = tl.where(j >= visible - LOCAL, _FORCED, key)
    return tl.where(j < visible, key, _UNSEEN)


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def _partner(i, reach, distance, length):
    """Which of `length` keys one layer of Batcher's odd-even merge sort compares with key `i`."""
    place = i - distance % reach
    if place < 0:
        return i
    other = i + distance if place % (2 * distance) < distance else i - distance
    same_block = min(i, other) // (2 * reach) == max(i, other) // (2 * reach)
    return other if other < length and same_block else i


@triton.jit
def _compare(keys, REACH: tl.constexpr, DISTANCE: tl.constexpr, LENGTH: tl.constexpr):
    """One layer of comparators, the larger of each pair first."""
    ordered = ()
    for i in tl.static_range(LENGTH):
        if _partner(i, REACH, DISTANCE, LENGTH) > i:
            key = tl.maximum(keys[i], keys[_partner(i, REACH, DISTANCE, LENGTH)])
        elif _partner(i, REACH, DISTANCE, LENGTH) < i:
            key = tl.minimum(keys[i], keys[_partner(i, REACH, DISTANCE, LENGTH)])
        else:
            key = keys[i]
        ordered = ordered + (key,)
    return ordered


@triton.jit
def _sort(keys, LENGTH: tl.constexpr):
    """A tuple of keys, descending."""
    for e in tl.static_range(_log2(LENGTH)):
        for f in tl.static_range(e + 1):
            keys = _compare(keys, 1 << e, 1 << (e - f), LENGTH)
    return keys


@triton.jit
def _merge(one, other, LENGTH: tl.constexpr):
    """The `LENGTH` largest of two descending tuples, descending."""
    keys = ()
    for i in tl.static_range(LENGTH):
        keys = keys + (tl.maximum(one[i], other[LENGTH - 1 - i]),)
    # What is left is bitonic.
    for f in tl.static_range(_log2(LENGTH)):
        keys = _compare(keys, LENGTH >> (f + 1), LENGTH >> (f + 1), LENGTH)
    return keys


@triton.jit
def _merge_pairs(lists, PAIRS: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """``[2 PAIRS, ROWS]`` descending lists merged to ``[PAIRS, ROWS]``."""
    one, other = (), ()
    for i in tl.static_range(LENGTH):
        left, right = tl.split(lists[i].reshape([PAIRS, 2, ROWS]).permute([0, 2, 1]))
        one = one + (left,)
        other = other + (right,)
    return _merge(one, other, LENGTH)


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
    low = tl.full([], _UNSEEN, tl.int32)
    high = tl.full([], _FORCED, tl.int32)
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
    scores = tl.load(s_ptr + j.to(tl.int64) * stride_s_j, mask=j < visible, other=0.0)
    return _key(scores, j, visible, INIT, LOCAL)


@triton.jit
def _order(scores):
    """int32 keys that compare as the scores do: -0 equals +0, and NaN ranks with -inf."""
    scores = _rank(scores) + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
