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

# Keys of blocks that are not visible, of scores of -inf, and of blocks that are forced.
_UNSEEN = tl.constexpr(-(2**31))
_LOWEST = tl.constexpr(-(2**31) + 2**23 - 1)
_FORCED = tl.constexpr(2**31 - 1)

# The least score of all but -inf.
_LEAST = tl.constexpr(-3.4028234663852886e38)

# Triton lays the lanes of a warp along an axis that it finds contiguous, and else, from 3.7 on,
# along the last one, before along the first.
_LANES_LAST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))

# How soon L2 drops what was loaded.
_NORMAL = tl.constexpr("")
_FIRST = tl.constexpr("evict_first")

# Column 0 with a score of -inf.
_NO_ENTRY = tl.constexpr(-(0x800000 << 32))

# Candidates among a share's columns of a row; more make the program rank all blocks of its rows.
_CANDIDATES = tl.constexpr(64)

# So many scores more than wanted are dropped one by one rather than by halving their range.
_FEW = tl.constexpr(4)

# Most groups of columns of a wide row whose scores are looked at again.
_MOST_GROUPS = tl.constexpr(16)


@triton.constexpr_function
def list_depth(batch):
    """Entries of a share's list: how many there are, and what a batch may add to a full list."""
    return 1 + _CANDIDATES.value + batch


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["visible_ptr"])
def _topk_select_columns_kernel(
    scores_ptr,
    visible_ptr,
    ids_ptr,
    lists_ptr,
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
    BATCH: tl.constexpr,
    SAMPLE: tl.constexpr,
    SORTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread per row and share of its columns, for many rows side by side in memory.

    Forced blocks have their places; of the others K' are wanted. If it `SORTS`, the first pass
    keeps the best of every share sorted, and the second writes what reaches the K'-th best of the
    row: 28 instructions a score. Else the first pass bounds the K'-th best score from below by one
    column in `SAMPLE`, the second lists what reaches that bound, for a `SAMPLE` of 2 about 33
    candidates a row, and only those are ranked: 12 instructions a score, and for each share as much
    as for 120 of them. The second pass should find the sample in L2. Limit: the latency of loads,
    with arithmetic close behind.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if not SORTS:
        # int64 [SHARES, depth, BLOCK_R] of this program
        lists_ptr += tl.program_id(0).to(tl.int64) * (SHARES * list_depth(BATCH) * BLOCK_R)
    tiles = tl.cdiv(num_rows, BLOCK_R)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # The last rows of a prompt see the most: they go first.
        r = (tiles - 1 - tile) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        row = (r // HEADS).to(tl.int64)
        head = (r % HEADS).to(tl.int64)
        visible = tl.load(visible_ptr + row * stride_v_t, mask=r < num_rows, other=0)
        visible = tl.minimum(tl.maximum(visible, 0), num_columns)
        # [BLOCK_R, 1]
        s_ptrs = scores_ptr + row * stride_s_t + head * stride_s_h
        i_ptrs = ids_ptr + row * stride_i_t + head * stride_i_h
        free = tl.maximum(visible - (INIT + LOCAL), 0)
        if TOPK > INIT + LOCAL:
            if SORTS:
                _select_sorted(
                    s_ptrs + INIT * stride_s_j.to(tl.int64), i_ptrs + INIT * stride_i_k, free,
                    stride_s_j.to(tl.int64), stride_i_k, INIT, TOPK - INIT - LOCAL, BLOCK_K,
                    BLOCK_R, SHARES,
                )  # fmt: skip
            else:
                _select_listed(
                    s_ptrs + INIT * stride_s_j.to(tl.int64), i_ptrs + INIT * stride_i_k, lists_ptr,
                    free, stride_s_j.to(tl.int64), stride_i_k, INIT, TOPK - INIT - LOCAL, BLOCK_K,
                    BLOCK_R, SHARES, BATCH, SAMPLE,
                )  # fmt: skip
        # The forced blocks come before and after; slots past them stay unused.
        part = tl.arange(0, SHARES)[None, :]
        for forced in tl.static_range(INIT):
            tl.store(i_ptrs + forced * stride_i_k, forced, forced < visible)
        kept = tl.minimum(visible, TOPK)
        last = tl.minimum(visible, INIT) + tl.minimum(free, TOPK - INIT - LOCAL)
        for first in range(tl.min(last), TOPK, SHARES):
            k = first + part
            ids = tl.where(k < kept, visible - kept + k, -1)
            tl.store(i_ptrs + k * stride_i_k, ids, (k >= last) & (k < TOPK) & (r < num_rows))


@triton.jit
def _select_sorted(
    s_ptrs,
    i_ptrs,
    free,
    stride_s_j,
    stride_i_k,
    INIT: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Write the ids of the best `WANTED` of `free` blocks, the first of which is block `INIT`."""
    share, least, begin, size = _cut(free, SHARES)
    s_ptrs += begin * stride_s_j
    best = (tl.full([BLOCK_R, SHARES], float("-inf"), tl.float32),) * BLOCK_K
    full = tl.maximum(least, 0) // BLOCK_K * BLOCK_K
    ptrs = s_ptrs
    scores = _load_batch(ptrs, stride_s_j, full, BLOCK_K)
    for step in range(0, full, BLOCK_K):
        ptrs += BLOCK_K * stride_s_j
        # On their way while these are sorted.
        coming = _load_batch(ptrs, stride_s_j, full - BLOCK_K - step, BLOCK_K)
        best = _merge(best, _sort(_rank_all(_split(scores)), BLOCK_K), BLOCK_K)
        scores = coming
    for step in range(full, share, BLOCK_K):
        scores = _load_tile(ptrs, stride_s_j, size - step, float("-inf"), BLOCK_K)
        best = _merge(best, _sort(_rank_all(_split(scores)), BLOCK_K), BLOCK_K)
        ptrs += BLOCK_K * stride_s_j

    threshold = _merge_shares(best)[WANTED - 1][:, None]
    reach = tl.zeros_like(size)
    for i in tl.static_range(BLOCK_K):
        reach += ((best[i] >= threshold) & (best[i] > float("-inf"))).to(tl.int32)
    # No ties, nothing that is not there, and no NaN that has to be kept.
    plain = tl.sum(reach, 1)[:, None] == tl.minimum(free, WANTED)
    # A share's list may not tell how many reach a score that all of it reaches.
    if (WANTED < BLOCK_K) & (tl.min(plain.to(tl.int32)) == 1):
        # In bytes: a count of what reaches the threshold would be made of packed bits.
        ends = i_ptrs + (tl.cumsum(reach, 1) - reach) * stride_i_k
        ends = ends.to(tl.pointer_type(tl.int8))
        column = INIT + begin + tl.zeros_like(size)
        for step in range(0, full, BLOCK_K):
            scores = _load_tile(s_ptrs, stride_s_j, None, float("nan"), BLOCK_K)
            ends = _write_reaching(ends, stride_i_k, _split(scores), column + step, threshold)
            s_ptrs += BLOCK_K * stride_s_j
        for step in range(full, share, BLOCK_K):
            scores = _load_tile(s_ptrs, stride_s_j, size - step, float("nan"), BLOCK_K)
            ends = _write_reaching(ends, stride_i_k, _split(scores), column + step, threshold)
            s_ptrs += BLOCK_K * stride_s_j
    else:
        _write_divided(s_ptrs, i_ptrs, best, begin, size, share, stride_s_j, stride_i_k, INIT,
                       WANTED, BLOCK_K)  # fmt: skip


@triton.jit
def _cut(free, SHARES: tl.constexpr):
    """Columns of a share; how many of them every share of every row has; and of each share its
    first column and how many it has.
    """
    most, least = tl.max(free), tl.min(free)
    share = tl.cdiv(most, SHARES)
    least -= (SHARES - 1) * share
    # [1, SHARES]
    begin = (tl.arange(0, SHARES) * share)[None, :]
    # [BLOCK_R, SHARES]
    size = tl.minimum(tl.maximum(free - begin, 0), share)
    return share, least, begin, size


@triton.jit
def _write_reaching(ends, stride_i_k, scores, column, threshold):
    """Write the columns, of those from `column` on, whose scores reach the threshold."""
    for u in tl.static_range(len(scores)):
        reaches = scores[u] >= threshold
        _store(ends.to(tl.pointer_type(tl.int32)), column + u, reaches)
        ends += tl.where(reaches, 4 * stride_i_k, 0)
    return ends


@triton.jit
def _write_divided(
    s_ptrs,
    i_ptrs,
    best,
    begin,
    size,
    share,
    stride_s_j,
    stride_i_k,
    INIT: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the best `WANTED` blocks of every row, ties and NaN among them, from all scores and the
    `best` of each share.
    """
    threshold, room, slot = _divide(best, size, WANTED)
    j = INIT + begin[:, :, None] + tl.arange(0, BLOCK_K)[None, None, :]
    for step in range(0, share, BLOCK_K):
        scores = _load_tile(s_ptrs, stride_s_j, size - step, float("-inf"), BLOCK_K)
        # As they rank.
        scores = tl.maximum(scores, float("-inf"))
        above, tie = _against(threshold, scores, size - step)
        room, slot = _emit(i_ptrs, stride_i_k, j + step, above, tie, room, slot)
        s_ptrs += BLOCK_K * stride_s_j


@triton.jit
def _select_listed(
    s_ptrs,
    i_ptrs,
    lists_ptr,
    free,
    stride_s_j,
    stride_i_k,
    INIT: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr,
    BATCH: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """The same from few candidates."""
    bound = _bound(
        s_ptrs, SAMPLE * stride_s_j, tl.cdiv(free, SAMPLE), WANTED, BLOCK_K, BLOCK_R, SHARES, BATCH
    )
    share, least, begin, size = _cut(free, SHARES)
    s_ptrs += begin * stride_s_j
    list_ptrs = lists_ptr + tl.arange(0, BLOCK_R)[:, None]
    _list_candidates(
        s_ptrs, list_ptrs, bound, begin, size, share, least, stride_s_j, BATCH, BLOCK_R, SHARES
    )
    # Each thread wrote what its share holds, and reads its part of all candidates of the row.
    tl.debug_barrier()
    starts, total, longest = (), tl.zeros([BLOCK_R, 1], tl.int32), 0
    for s in tl.static_range(SHARES):
        length = tl.load(list_ptrs + s * list_depth(BATCH) * BLOCK_R).to(tl.int32)
        starts = starts + (total,)
        total += length
        longest = tl.maximum(longest, length)
    # NaN is not listed, but ranks with -inf, and so may have to be kept.
    listed = (total == free) | ((bound > float("-inf")) & (total >= WANTED))
    listed &= longest <= _CANDIDATES
    if tl.min(listed.to(tl.int32)) == 1:
        _write_best(
            i_ptrs, list_ptrs, starts, total, stride_i_k, INIT, WANTED, BLOCK_K, BATCH, BLOCK_R,
            SHARES,
        )  # fmt: skip
    else:
        best = (tl.full([BLOCK_R, SHARES], float("-inf"), tl.float32),) * BLOCK_K
        ptrs = s_ptrs
        for step in range(0, share, BLOCK_K):
            scores = _load_tile(ptrs, stride_s_j, size - step, float("-inf"), BLOCK_K)
            best = _merge(best, _sort(_rank_all(_split(scores)), BLOCK_K), BLOCK_K)
            ptrs += BLOCK_K * stride_s_j
        _write_divided(s_ptrs, i_ptrs, best, begin, size, share, stride_s_j, stride_i_k, INIT,
                       WANTED, BLOCK_K)  # fmt: skip
    # Before the lists are written anew.
    tl.debug_barrier()


@triton.jit
def _write_best(
    i_ptrs,
    list_ptrs,
    starts,
    total,
    stride_i_k,
    INIT: tl.constexpr,
    WANTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Write the best `WANTED` of all candidates: few rows have more than fit in registers."""
    step: tl.constexpr = SHARES * BLOCK_K
    begin = (tl.arange(0, SHARES) * BLOCK_K)[None, :]
    most = tl.max(total)
    ids, scores = _load_candidates(list_ptrs, starts, total, begin, BLOCK_K, BATCH, BLOCK_R, SHARES)
    ids, scores = _split(ids), _split(scores)
    best = _sort(scores, BLOCK_K)
    for first in range(step, most, step):
        _, next_scores = _load_candidates(
            list_ptrs, starts, total, first + begin, BLOCK_K, BATCH, BLOCK_R, SHARES
        )
        best = _merge(best, _sort(_split(next_scores), BLOCK_K), BLOCK_K)
    threshold = _merge_shares(best)[WANTED - 1][:, None]

    # No ties, and nothing of -inf that has to be kept.
    least = tl.maximum(threshold, _LEAST)
    reach = tl.zeros_like(total + begin)
    for i in tl.static_range(BLOCK_K):
        reach += (scores[i] >= least).to(tl.int32)
    plain = (tl.sum(reach, 1)[:, None] == tl.minimum(total, WANTED)) & (total <= step)
    if tl.min(plain.to(tl.int32)) == 1:
        ends = i_ptrs + (tl.cumsum(reach, 1) - reach) * stride_i_k
        for i in tl.static_range(BLOCK_K):
            reaches = scores[i] >= least
            _store(ends, INIT + ids[i], reaches)
            ends += tl.where(reaches, stride_i_k, 0)
    else:
        num_above = tl.zeros_like(reach)
        for i in tl.static_range(BLOCK_K):
            num_above += (best[i] > threshold).to(tl.int32)
        room = WANTED - tl.sum(num_above, 1)[:, None]
        slot = tl.zeros_like(room)
        for first in range(0, most, step):
            j, more = _load_candidates(
                list_ptrs, starts, total, first + begin, BLOCK_K, BATCH, BLOCK_R, SHARES
            )
            above, tie = _against(threshold, more, total - first - begin)
            room, slot = _emit_all(i_ptrs, stride_i_k, INIT + j, above, tie, room, slot)


@triton.jit
def _bound(
    s_ptrs,
    stride_s_j,
    free,
    WANTED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr,
    BATCH: tl.constexpr,
):
    """A score that at least `WANTED` of every row reach, or -inf: the `WANTED`-th largest of the
    maxima of residue classes of columns, over which neighbours, often alike, are spread.
    """
    groups: tl.constexpr = min(BLOCK_K, BATCH, 64 // SHARES)
    # [BLOCK_R, SHARES, groups]
    best = tl.full([BLOCK_R, SHARES, groups], float("-inf"), tl.float32)
    most, least = tl.max(free), tl.min(free)
    begin = (tl.arange(0, SHARES) * BATCH)[None, :]
    s_ptrs += begin * stride_s_j
    batch: tl.constexpr = SHARES * BATCH
    full = least // batch * batch
    ptrs = s_ptrs
    for _ in range(0, full, batch):
        best = _raise(best, ptrs, stride_s_j, None, BATCH)
        ptrs += batch * stride_s_j
    ptrs = s_ptrs + full * stride_s_j
    for step in range(full, most, batch):
        best = _raise(best, ptrs, stride_s_j, free - begin - step, BATCH)
        ptrs += batch * stride_s_j
    lowest = tl.full([BLOCK_R, SHARES], float("-inf"), tl.float32)
    best = _sort(_split(best), groups) + (lowest,) * (BLOCK_K - groups)
    return _merge_shares(best)[WANTED - 1][:, None]


@triton.jit
def _raise(best, s_ptrs, stride_s_j, left, BATCH: tl.constexpr):
    """The maxima of all groups with the next `BATCH` scores, of which all are on their way at once.
    Of NaN and a number the number is the larger.
    """
    groups: tl.constexpr = best.shape[2]
    tiles = ()
    for u in tl.static_range(0, BATCH, groups):
        left_of_tile = None if left is None else left - u
        tile = _load_tile(s_ptrs + u * stride_s_j, stride_s_j, left_of_tile, float("-inf"), groups)
        tiles = tiles + (tile,)
    for i in tl.static_range(len(tiles)):
        best = tl.maximum(best, tiles[i])
    return best


@triton.jit
def _list_candidates(
    s_ptrs,
    list_ptrs,
    bound,
    begin,
    size,
    share,
    least,
    stride_s_j,
    BATCH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr,
):
    """List scores and columns of what reaches the bound, each share on its own, ascending."""
    # A list begins with its length.
    list_ptrs += (tl.arange(0, SHARES) * (list_depth(BATCH) * BLOCK_R))[None, :]
    begins = list_ptrs + BLOCK_R + tl.zeros_like(size)
    full = tl.maximum(least, 0) // BATCH * BATCH
    ptrs, ends = s_ptrs, begins
    for step in range(0, full, BATCH):
        # Their room in L2 is for samples that are still to be read again.
        scores = _load_tile(ptrs, stride_s_j, None, float("nan"), BATCH, _FIRST)
        ends = _append(ends, begins, scores, begin + step, bound, BLOCK_R)
        ptrs += BATCH * stride_s_j
    ptrs = s_ptrs + full * stride_s_j
    for step in range(full, share, BATCH):
        scores = _load_tile(ptrs, stride_s_j, size - step, float("nan"), BATCH)
        ends = _append(ends, begins, scores, begin + step, bound, BLOCK_R)
        ptrs += BATCH * stride_s_j
    tl.store(list_ptrs, _length(ends, begins, BLOCK_R).to(tl.int64))


@triton.jit
def _length(ends, begins, BLOCK_R: tl.constexpr):
    """Entries of the lists."""
    return (ends.to(tl.int64) - begins.to(tl.int64)).to(tl.int32) // (8 * BLOCK_R)


@triton.jit
def _append(ends, begins, scores, column, bound, BLOCK_R: tl.constexpr):
    """Append what reaches the bound of the scores from `column` on; the lists' ends after it."""
    column = column[:, :, None] + tl.arange(0, scores.shape[2])[None, None, :]
    low = column.to(tl.uint32).to(tl.int64)
    entries = _split((scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low)
    scores = _split(scores)
    for u in tl.static_range(len(scores)):
        # Nothing reaches NaN: once there are too many the rest does not matter. Asking often keeps
        # the compiler from comparing all scores first, and packing what comes out.
        if u % 8 == 0:
            bound = tl.where(_length(ends, begins, BLOCK_R) <= _CANDIDATES, bound, float("nan"))
        reaches = scores[u] >= bound
        _store(ends, entries[u], reaches)
        ends += tl.where(reaches, BLOCK_R, 0)
    return ends


@triton.jit
def _load_candidates(
    list_ptrs,
    starts,
    total,
    begin,
    NUM: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Columns and scores of the next `NUM` candidates of a row from `begin` on, ascending."""
    # [BLOCK_R, SHARES, NUM]
    place = begin[:, :, None] + tl.arange(0, NUM)[None, None, :]
    # Past the lengths and the unused ends of the lists before.
    source = 1 + place + tl.zeros_like(total)[:, :, None]
    for s in tl.static_range(1, SHARES):
        skipped = list_depth(BATCH) - (starts[s] - starts[s - 1])
        source += tl.where(place >= starts[s][:, :, None], skipped[:, :, None], 0)
    ptrs = list_ptrs[:, :, None] + source * BLOCK_R
    entry = _load(ptrs, place < total[:, :, None], _NO_ENTRY)
    return entry.to(tl.int32), (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load_tile(
    s_ptrs, stride_s_j, left, other, NUM: tl.constexpr, EVICTION: tl.constexpr = _NORMAL
):
    """The scores of the next `NUM` columns, ``[BLOCK_R, SHARES, NUM]``; `other` past the last of
    the `left` ones. Every thread has those of its row and share.

    From every load and store the compiler visits all operations that have to do with it, and those
    of each of these: a kernel that loads columns one by one compiles for a minute.
    """
    u = tl.arange(0, NUM)[None, None, :]
    ptrs = s_ptrs[:, :, None] + u * stride_s_j
    mask = None if left is None else u < left[:, :, None]
    return _load(ptrs, mask, other, EVICTION)


@triton.jit
def _load(ptrs, mask, other, EVICTION: tl.constexpr = _NORMAL):
    """Each lane loads for a row of its own: rows are the first axis, and lie side by side."""
    if mask is None:
        return _turn(tl.load(_turn(ptrs), eviction_policy=EVICTION))
    else:
        return _turn(tl.load(_turn(ptrs), _turn(mask), other, eviction_policy=EVICTION))


@triton.jit
def _store(ptrs, values, mask):
    """Each lane stores for a row of its own."""
    tl.store(_turn(ptrs), _turn(values), _turn(mask))


@triton.jit
def _turn(tile):
    """Rows as the axis that lanes are laid along; and back."""
    if not _LANES_LAST:
        return tile
    elif len(tile.shape) == 2:
        return tl.permute(tile, (1, 0))
    else:
        return tl.permute(tile, (2, 1, 0))


@triton.constexpr_function
def _halves(shape):
    """A shape whose last axis is cut in halves, these in halves, and so on."""
    return [*shape[:-1], *[2] * _log2(shape[-1])]


@triton.jit
def _split(tile):
    """The tuple of what stands along the last axis of a tile."""
    parts = (tl.reshape(tile, _halves(tile.shape)),)
    for _ in tl.static_range(_log2(tile.shape[-1])):
        even, odd = (), ()
        for i in tl.static_range(len(parts)):
            one, other = tl.split(parts[i])
            even, odd = even + (one,), odd + (other,)
        parts = even + odd
    return parts


@triton.jit
def _load_batch(s_ptrs, stride_s_j, left, NUM: tl.constexpr):
    """The scores of the next `NUM` columns, if any are left."""
    u = tl.arange(0, NUM)[None, None, :]
    ptrs = s_ptrs[:, :, None] + u * stride_s_j
    return _load(ptrs, tl.full(ptrs.shape, 0, tl.int32) < left, 0.0)


@triton.jit
def _rank_all(scores):
    """Scores as they rank: NaN with -inf."""
    ranked = ()
    for u in tl.static_range(len(scores)):
        ranked = ranked + (tl.maximum(scores[u], float("-inf")),)
    return ranked


@triton.jit
def _divide(best, size, WANTED: tl.constexpr):
    """From the best of the `size` scores of every share: the least score kept of each row, how many
    that just reach it a share may keep, and the slot of the first that it keeps.
    """
    # [BLOCK_R, 1]
    threshold = _merge_shares(best)[WANTED - 1][:, None]
    above, ties = tl.zeros_like(size), tl.zeros_like(size)
    for i in tl.static_range(len(best)):
        above += (best[i] > threshold).to(tl.int32)
        ties += (best[i] == threshold).to(tl.int32)
    # What is not there ties with -inf.
    ties = tl.minimum(ties, tl.maximum(size - above, 0))
    room, slot = _share_out(above, ties, WANTED - tl.sum(above, 1)[:, None])
    return threshold, room, slot


@triton.jit
def _share_out(above, ties, room):
    """How many of a row's ties, for `room` of which there is room, each share keeps, and its slot
    of the first block that it keeps. Ties go to the lower ids, and so to the first shares.
    """
    room = room - (tl.cumsum(ties, 1) - ties)
    room = tl.minimum(tl.maximum(room, 0), ties)
    return room, tl.cumsum(above + room, 1) - (above + room)


@triton.jit
def _against(threshold, scores, size):
    """Which of the `size` scores of a tile are above the threshold, and which tie, as 0 or 1."""
    # [BLOCK_R, SHARES, NUM]
    threshold = threshold[:, :, None]
    # What is not there ties with -inf.
    there = tl.arange(0, scores.shape[2])[None, None, :] < size[:, :, None]
    return (scores > threshold).to(tl.int32), ((scores == threshold) & there).to(tl.int32)


@triton.jit
def _emit_all(i_ptrs, stride_i_k, j, above, tie, room, slot):
    """Write what is kept of the next blocks `j` of a row; its room and slot for those after."""
    num_above = tl.sum(above, 2)
    part_room, part_slot = _share_out(num_above, tl.sum(tie, 2), room)
    kept_ties = tl.sum(part_room, 1)[:, None]
    _emit(i_ptrs, stride_i_k, j, above, tie, part_room, part_slot + slot)
    return room - kept_ties, slot + tl.sum(num_above, 1)[:, None] + kept_ties


@triton.jit
def _emit(i_ptrs, stride_i_k, j, above, tie, room, slot):
    """Write what is kept of the next blocks `j` of a share; its room and slot for those after."""
    kept_tie = tl.where(tl.cumsum(tie, 2) <= room[:, :, None], tie, 0)
    kept = above | kept_tie
    slots = slot[:, :, None] + tl.cumsum(kept, 2) - kept
    _store(i_ptrs[:, :, None] + slots * stride_i_k, j, kept > 0)
    return room - tl.sum(kept_tie, 2), slot + tl.sum(kept, 2)


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
def _merge_shares(lists):
    """``[BLOCK_R, SHARES]`` descending lists of 16 merged to ``[BLOCK_R]``."""
    return tl.reduce(lists, 1, _merge_two)


# A combining function takes its tuples one by one.
@triton.jit
def _merge_two(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15,
):  # fmt: skip
    return _merge(
        (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15),
        (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15),
        16,
    )  # fmt: skip


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
    CONTIGUOUS: tl.constexpr,
    NARROW_J: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row, for few rows, whose scores stay in registers.

    The maxima of groups of columns bound the least score that is kept from below, and a search
    finds it, if `GATHER` only in the groups whose maxima reach the bound. Forced blocks have their
    places, the other kept ones come out in ascending order by a running count, without a sort, and
    ties fall to the lower id. Limit: the latency of a dozen reductions, one after the other.
    """
    if PDL:
        # The successor finds its place while the scores are still being made. Where rows are wide,
        # a step of selections is slower so.
        if not GATHER:
            gdc_launch_dependents()
        gdc_wait()
        if GATHER:
            gdc_launch_dependents()
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    visible = tl.load(visible_ptr + row * stride_v_t)
    visible = tl.minimum(tl.maximum(visible, 0), num_columns)
    if CONTIGUOUS:
        stride_s_j = 1
    s_ptr = scores_ptr + row * stride_s_t + head * stride_s_h
    i_ptr = ids_ptr + row * stride_i_t + head * stride_i_h

    # The loads of a narrow row do not wait for `visible`; what lies past it is not used.
    j = tl.arange(0, NARROW_J)
    scores = tl.load(s_ptr + j.to(tl.int64) * stride_s_j, j < num_columns, 0.0)
    first = tl.minimum(visible, INIT)
    num_kept = tl.minimum(visible, TOPK)
    wanted = num_kept - tl.minimum(visible, INIT + LOCAL)
    k = tl.arange(0, BLOCK_K)
    ids = tl.where(k < first, k, tl.where(k < num_kept, visible - num_kept + k, -1))
    forced = (k < first) | ((k >= first + wanted) & (k < TOPK))
    tl.store(i_ptr + k * stride_i_k, ids, forced)
    i_ptr += first * stride_i_k
    # A buffer wider than what a row sees, as a captured graph has it, should cost nothing.
    if visible <= NARROW_J:
        _select_of_row(
            s_ptr, i_ptr, scores, visible, wanted, stride_s_j, stride_i_k, TOPK - INIT - LOCAL,
            INIT, LOCAL, NARROW_J, GROUPS, False,
        )  # fmt: skip
    elif NARROW_J < BLOCK_J:
        wide_j = tl.arange(0, BLOCK_J)
        wide = tl.load(s_ptr + wide_j.to(tl.int64) * stride_s_j, wide_j < visible, 0.0)
        _select_of_row(
            s_ptr, i_ptr, wide, visible, wanted, stride_s_j, stride_i_k, TOPK - INIT - LOCAL,
            INIT, LOCAL, BLOCK_J, GROUPS, GATHER,
        )  # fmt: skip


@triton.jit
def _select_of_row(
    s_ptr,
    i_ptr,
    scores,
    visible,
    wanted,
    stride_s_j,
    stride_i_k,
    WANTED: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_J: tl.constexpr,
    GROUPS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Write the best `wanted` of the free blocks of a row, at most `WANTED`.

    The residue classes of columns, over which neighbours, often alike, are spread, are groups:
    `WANTED` scores reach the `WANTED`-th largest of their maxima, and few more do.
    """
    j = tl.arange(0, BLOCK_J)
    low = tl.full([], _LOWEST, tl.int32)
    gathered = False
    if WANTED * 2 <= GROUPS:
        free = (j >= INIT) & (j < visible - LOCAL)
        # Of NaN and a number the number is the larger.
        maxima = tl.reshape(tl.where(free, scores, float("-inf")), [BLOCK_J // GROUPS, GROUPS])
        maxima = _order(tl.max(maxima, 0))
        higher = tl.sum((maxima[:, None] > maxima[None, :]).to(tl.int32), 0)
        low = tl.min(tl.where(higher < WANTED, maxima, _FORCED))
        if GATHER and WANTED <= _MOST_GROUPS:
            count = tl.cumsum((maxima >= low).to(tl.int32), 0)
            gathered = (tl.max(count) <= _MOST_GROUPS) & (low > _LOWEST)
            if gathered:
                _select_of_groups(
                    s_ptr, i_ptr, count, low, visible, wanted, stride_s_j, stride_i_k, WANTED, INIT,
                    LOCAL, BLOCK_J, GROUPS,
                )  # fmt: skip
    # If more groups tie than may be gathered, all columns are searched.
    if gathered == 0:
        keys = _free_keys(scores, j, visible, INIT, LOCAL)
        _select_from(i_ptr, keys, j, wanted, low, stride_i_k, WANTED)


@triton.jit
def _select_of_groups(
    s_ptr,
    i_ptr,
    count,
    low,
    visible,
    wanted,
    stride_s_j,
    stride_i_k,
    WANTED: tl.constexpr,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    BLOCK_J: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Select from those groups at which the running `count` rises; no other score reaches `low`."""
    place = tl.arange(0, _MOST_GROUPS)
    # Past the last there is no such group.
    group = tl.sum((count[:, None] <= place[None, :]).to(tl.int32), 0)
    begin = tl.arange(0, BLOCK_J // GROUPS) * GROUPS
    j = begin[:, None] + tl.where(group < GROUPS, group, BLOCK_J)[None, :]
    j = tl.reshape(j, [BLOCK_J // GROUPS * _MOST_GROUPS])
    # They were just read, and come from L1.
    scores = tl.load(s_ptr + j.to(tl.int64) * stride_s_j, j < visible, 0.0)
    keys = _free_keys(scores, j, visible, INIT, LOCAL)
    _select_from(i_ptr, keys, j, wanted, low, stride_i_k, WANTED)


@triton.jit
def _free_keys(scores, j, visible, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """Ordered keys of free blocks; the lowest number for others."""
    return tl.where((j >= INIT) & (j < visible - LOCAL), _order(scores), _UNSEEN)


@triton.jit
def _select_from(i_ptr, keys, j, wanted, low, stride_i_k, WANTED: tl.constexpr):
    """Write the best `wanted` of those blocks, as many or more, whose keys are at least `low`."""
    reach = tl.sum((keys >= low).to(tl.int32))
    # Fewer than `wanted` keys are at least `high`, or the search is over.
    high = tl.full([], _FORCED, tl.int32)
    if reach > wanted + _FEW:
        high = tl.max(keys)
        top = tl.sum((keys >= high).to(tl.int32))
        if top >= wanted:
            low = high
            reach = top
    step = 0
    while (reach > wanted) & (low < high):
        few = reach <= wanted + _FEW
        if few:
            middle = tl.min(tl.where(keys > low, keys, _FORCED))
        else:
            # Scores lie close together on their own scale, but only halving bits ends for certain.
            middle = _order(0.5 * _score(low) + 0.5 * _score(high))
            if (step >= 24) | (middle <= low) | (middle >= high):
                middle = (low >> 1) + (high >> 1) + (low & high & 1)
                # Nothing lies between two neighbours.
                high = tl.where(middle > low, high, low)
        count = tl.sum((keys >= middle).to(tl.int32))
        enough = count >= wanted
        high = tl.where(enough, high, tl.where(few, low, middle))
        low = tl.where(enough, middle, low)
        reach = tl.where(enough, count, reach)
        step += 1

    kept = keys >= low
    if reach > wanted:
        # The search ended on one score, and more blocks have it than there is room for.
        above = keys > low
        room = wanted - tl.sum(above.to(tl.int32))
        ties = (keys == low).to(tl.int32)
        kept = above | ((keys == low) & (tl.cumsum(ties) <= room))
    tl.store(i_ptr + _slots(kept, WANTED) * stride_i_k, j, kept)


@triton.jit
def _slots(kept, WANTED: tl.constexpr):
    """How many of at most `WANTED` kept blocks come before each."""
    columns: tl.constexpr = kept.shape[0]
    if WANTED > 255:
        return tl.cumsum(kept.to(tl.int32)) - 1
    # Eight stretches of the row are counted at once, each in a byte.
    parts: tl.constexpr = min(8, columns // 32)
    shift = (tl.arange(0, parts) * 8).to(tl.int64)[:, None]
    ones = tl.reshape(kept, [parts, columns // parts]).to(tl.int64) << shift
    counts = tl.sum(ones, 0)
    # This product's bytes are the counts up to the end of each stretch.
    before = (tl.sum(counts) * 0x0101010101010101) << 8
    counts = tl.cumsum(counts) - counts + before
    slots = ((counts[None, :] >> shift) & 255).to(tl.int32)
    return tl.reshape(slots, [columns])


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


@triton.jit
def _score(key):
    """The score with a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
