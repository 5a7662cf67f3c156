"""Gluon kernel for Hopper: one copying warp feeds one or two multiplying warpgroups.

A tile is a token, or neighbouring tokens of one sequence, with the heads of one KV head. Its
(token, head) pairs are the *columns* of the products and keys or channels the rows, so that few
queries need no padding: ``S^T = K q^T``, ``O^T = V^T P^T``. The blocks that the tokens selected are
cut into *parts*, which are shared out over the splits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....common.kernels import _key_room
from ..kernels import (
    _LN_2,
    _LOG2_E,
    _LOWEST,
    _barrier,
    _clear_unseen,
    _load_async,
    _next_slot,
    _release,
)

_LARGEST = gl.constexpr(2**31 - 1)
_BLOCK_SIZE = gl.constexpr(128)
# Shifts the rows of padding to where no key is.
_BEFORE_ALL_KEYS = gl.constexpr(-(2**30))


@constexpr_function
def _log2(n):
    return n.bit_length() - 1


@constexpr_function
def _next_power_of_2(n, minimum):
    return max(minimum, 1 << (n - 1).bit_length())


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _bound_shift(b, shift, limit, batch):
    """No row before `limit` stands past the last key that the storage has room for."""
    _, _, first_key_ptr, num_seqs, _, _, num_tokens, max_seqlen_k = batch
    room = _key_room(first_key_ptr, b, num_seqs, num_tokens, max_seqlen_k)
    return gl.minimum(gl.where(b < num_seqs, shift, _BEFORE_ALL_KEYS), room - limit)


@gluon.jit
def _find_sequence(row, batch, BLOCK_B: gl.constexpr):
    """Sequence of a row and the shift from its row to its position; one warp looks.

    First where the row is if every sequence has one.
    """
    cu_seqlens_q_ptr, seqused_k_ptr, _, num_seqs, _, row_end, _, _ = batch
    found_b = gl.minimum(row, num_seqs)
    start = gl.load(cu_seqlens_q_ptr + found_b)
    found_end = gl.load(cu_seqlens_q_ptr + found_b + 1, mask=found_b < num_seqs, other=_LARGEST)
    found_seqused = gl.load(seqused_k_ptr + found_b, mask=found_b < num_seqs, other=0)
    if (row < start) | (row >= found_end):
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        found_b = 0
        found_end = 0
        found_seqused = 0
        for first_b in range(0, num_seqs + 1, BLOCK_B):
            b = first_b + gl.arange(0, BLOCK_B, LANES)
            starts = gl.load(cu_seqlens_q_ptr + b, mask=b <= num_seqs, other=_LARGEST)
            ends = gl.load(cu_seqlens_q_ptr + b + 1, mask=b < num_seqs, other=_LARGEST)
            seqused = gl.load(seqused_k_ptr + b, mask=b < num_seqs, other=0)
            mine = (starts <= row) & (row < ends)
            # One sequence has the row. Of several, which offsets that decrease make, any will do.
            found_b = gl.maximum(found_b, gl.max(gl.where(mine, b, 0), 0))
            found_end = gl.maximum(found_end, gl.max(gl.where(mine, ends, 0), 0))
            found_seqused = gl.maximum(found_seqused, gl.max(gl.where(mine, seqused, 0), 0))
    limit = gl.minimum(found_end, row_end)
    return found_b, _bound_shift(found_b, found_seqused - found_end, limit, batch)


@gluon.jit
def _tile_rows(tile, batch, tiles_per_seq, TILE_T: gl.constexpr):
    """Sequence, first row, end row and shift from row to position, of a tile of several tokens.

    Every sequence has `tiles_per_seq` tiles, padding (sequence `num_seqs`) the others.
    """
    cu_seqlens_q_ptr, seqused_k_ptr, _, num_seqs, row_begin, row_end, _, _ = batch
    b = gl.minimum(tile // tiles_per_seq, num_seqs)
    start = gl.load(cu_seqlens_q_ptr + b)
    end = gl.load(cu_seqlens_q_ptr + b + 1, mask=b < num_seqs, other=_LARGEST)
    seqused = gl.load(seqused_k_ptr + b, mask=b < num_seqs, other=0)
    first = gl.minimum(gl.maximum(start, row_begin), row_end)
    first += (tile - b * tiles_per_seq) * TILE_T
    limit = gl.minimum(gl.minimum(gl.maximum(end, row_begin), row_end), first + TILE_T)
    return b, first, limit, _bound_shift(b, seqused - end, limit, batch)


@gluon.jit
def _load_ids(ids, rows, limit, slots, head_kv, TOPK: gl.constexpr):
    """The ids in some slots of some rows; -1 where there is no such row or slot."""
    ids_ptr, stride_i_t, stride_i_h, stride_i_k = ids
    i_ptrs = ids_ptr + head_kv.to(gl.int64) * stride_i_h
    i_ptrs += rows.to(gl.int64) * stride_i_t + slots.to(gl.int64) * stride_i_k
    return gl.load(i_ptrs, mask=(rows < limit) & (slots < TOPK), other=-1)


@gluon.jit
def _prefetch(pointers):
    """Have some lines fetched, into L2 alone, where they cannot become stale."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _guess(pointer):
    """A number that a predecessor may still write, read past L1: for prefetches alone."""
    return gl.load(pointer, cache_modifier=".cg")


@gluon.jit
def _prefetch_inputs(
    queries,
    ids,
    sources,
    place,
    batch,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
):
    """What the tile will read before its first key, as far as that can be told beforehand.

    It may be another sequence's, which costs a little time: no result depends on it.
    """
    q_ptr, stride_q_t, stride_q_h = queries
    ids_ptr, stride_i_t, stride_i_h, _ = ids
    _, _, block_table_ptr, stride_table_b, _ = sources
    tile, tiles_per_seq, head_kv, _ = place
    cu_seqlens_q_ptr, seqused_k_ptr, _, num_seqs, row_begin, row_end, num_tokens, longest = batch
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = row_begin + tile
    b = gl.minimum(row, num_seqs - 1)
    if TILE_T > 1:
        b = gl.minimum(tile // tiles_per_seq, num_seqs - 1)
        row = _guess(cu_seqlens_q_ptr + b) + (tile - b * tiles_per_seq) * TILE_T
    if b >= 0:
        lane = gl.arange(0, 32, LANES)
        _prefetch(cu_seqlens_q_ptr + b + lane % 2)
        _prefetch(seqused_k_ptr + b + 0 * lane)
        t = gl.arange(0, _next_power_of_2(TILE_T * GROUP * 2, 32), LANES)
        rows = gl.minimum(gl.maximum(row + t // (GROUP * 2), row_begin), row_end - 1).to(gl.int64)
        head = (head_kv * GROUP + t // 2 % GROUP).to(gl.int64)
        _prefetch(ids_ptr + rows * stride_i_t + head_kv.to(gl.int64) * stride_i_h)
        _prefetch(q_ptr + rows * stride_q_t + head * stride_q_h + t % 2 * 64)
        if PAGED:
            # The first 4096 entries: one of every 128 bytes.
            entry = gl.arange(0, 128, LANES) * 32
            keys = gl.minimum(_guess(seqused_k_ptr + b), gl.minimum(num_tokens, longest))
            if keys > 0:
                entry = gl.minimum(entry, (keys - 1) >> _log2(_BLOCK_SIZE))
                _prefetch(block_table_ptr + b.to(gl.int64) * stride_table_b + entry)


@gluon.jit
def _find_members(
    block, ids, first, limit, shift, head_kv, TOPK: gl.constexpr, TILE_T: gl.constexpr
):
    """Bits of the tokens of a tile that selected each of some blocks, and see them."""
    COLUMNS: gl.constexpr = _next_power_of_2(TOPK, 1)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [1, 1], [1, 0])
    slots = gl.arange(0, COLUMNS, gl.SliceLayout(0, PAIRS))
    wanted = gl.convert_layout(block, gl.SliceLayout(1, PAIRS))
    members = gl.zeros_like(wanted)
    for t in gl.static_range(TILE_T):
        row = first + t
        others = _load_ids(ids, row + gl.zeros_like(slots), limit, slots, head_kv, TOPK)
        equal = (wanted[:, None] == others[None, :]).to(gl.int32)
        visible = wanted <= (row + shift) >> _log2(_BLOCK_SIZE)
        members |= gl.where(visible, gl.max(equal, 1), 0) << t
    return gl.convert_layout(members, block.type.layout)


@gluon.jit
def _list_blocks(
    ids,
    sources,
    place,
    batch,
    TOPK: gl.constexpr,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_B: gl.constexpr,
):
    """The union of the blocks that the tokens of a tile selected, over the lanes of one warp.

    Returns the sequence, the position of the first token, and per lane: whether it holds a block of
    the union, how many lanes up to it do, the block, its page (or 0), and the bits of the tokens
    that selected it.
    """
    ENTRIES: gl.constexpr = _next_power_of_2(TILE_T * TOPK, 32)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _, _, block_table_ptr, stride_table_b, num_pages = sources
    tile, tiles_per_seq, head_kv, _ = place
    row_begin = batch[4]
    e = gl.arange(0, ENTRIES, LANES)
    t = e // TOPK
    if TILE_T == 1:
        first = row_begin + tile
        limit = first + 1
        # Asked for before the search, which does not wait for them.
        block = _load_ids(ids, first + t, limit, e % TOPK, head_kv, TOPK)
        b, shift = _find_sequence(first, batch, BLOCK_B)
    else:
        b, first, limit, shift = _tile_rows(tile, batch, tiles_per_seq, TILE_T)
        block = _load_ids(ids, first + t, limit, e % TOPK, head_kv, TOPK)
    position = first + t + shift
    chosen = (block >= 0) & (block <= position >> _log2(_BLOCK_SIZE))
    page = 0 * block
    if PAGED:
        # Asked for before the list is made, which does not wait for them.
        page = gl.load(
            block_table_ptr + b.to(gl.int64) * stride_table_b + block, mask=chosen, other=0
        )
        page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    members = chosen.to(gl.int32)
    if TILE_T > 1:
        members = _find_members(block, ids, first, limit, shift, head_kv, TOPK, TILE_T)
        # The first of those who selected a block brings it.
        chosen = chosen & ((members & ((1 << t) - 1)) == 0)
    rank = gl.associative_scan(chosen.to(gl.int32), 0, _add)
    return b, first + shift, chosen, rank, block, page, members


@gluon.jit
def _write(ring, slot, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.index(slot).store(gl.full([1], value, gl.int32, LAYOUT))


@gluon.jit
def _read(ring, slot):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(ring.index(slot).load(LAYOUT), 0)


@gluon.jit
def _copy_parts(
    copied,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_B: gl.constexpr,
    PREFETCH: gl.constexpr,
    PDL: gl.constexpr,
):
    """This split's share of the parts, then a part that nobody selected, which ends them."""
    rings, ready, queries, sources, ids, place, num_splits, batch = copied
    k_ring, v_ring, members_ring, last_ring, k_full, v_full, empty = rings
    k_desc, v_desc, _, _, _ = sources
    STAGES: gl.constexpr = k_ring.shape[0]
    PART: gl.constexpr = k_ring.shape[3]
    PARTS: gl.constexpr = _BLOCK_SIZE // PART
    _, _, head_kv, split = place
    # Copies of keys before the first one, which are zeros and come from nowhere: the copy engine
    # has its descriptors when ids and pages are there. The slot is the last one to be filled.
    mbarrier.expect(ready, 2 * k_desc.block_type.nbytes)
    _load_async(k_desc, [0, 0, -PART, 0], ready, k_ring.index(STAGES - 1))
    _load_async(v_desc, [0, 0, -PART, 0], ready, v_ring.index(STAGES - 1))
    if PDL:
        if PREFETCH:
            _prefetch_inputs(queries, ids, sources, place, batch, GROUP, TOPK, TILE_T, PAGED)
        gdc_wait()
    first_key_ptr = batch[2]
    b, position, chosen, rank, block, page, members = _list_blocks(
        ids, sources, place, batch, TOPK, TILE_T, PAGED, BLOCK_B
    )
    first_key = gl.to_tensor(0)
    if first_key_ptr is not None:
        first_key = gl.load(first_key_ptr + b, mask=b < batch[3], other=0)
    parts = gl.sum(chosen.to(gl.int32), 0) * PARTS
    entry = block << TILE_T | members
    mbarrier.wait(ready, 0)
    slot = 0
    phase = 0
    for i in range(parts * split // num_splits, parts * (split + 1) // num_splits):
        here = chosen & (rank == i // PARTS + 1)
        part_entry = gl.sum(gl.where(here, entry, 0), 0)
        key = (part_entry >> TILE_T) * _BLOCK_SIZE + i % PARTS * PART
        if PAGED:
            outer = gl.sum(gl.where(here, page, 0), 0)
            token = i % PARTS * PART
        else:
            outer = b
            if PACKED:
                outer = gl.to_tensor(0)
            token = first_key + key
        mbarrier.wait(empty.index(slot), phase ^ 1)
        # Seen by whoever sees the barrier's phase complete.
        _write(members_ring, slot, part_entry & ((1 << TILE_T) - 1))
        _write(last_ring, slot, position - key)
        _barrier()
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        _load_async(k_desc, [outer, head_kv, token, 0], k_full.index(slot), k_ring.index(slot))
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        _load_async(v_desc, [outer, head_kv, token, 0], v_full.index(slot), v_ring.index(slot))
        slot, phase = _next_slot(slot, phase, STAGES)
    mbarrier.wait(empty.index(slot), phase ^ 1)
    _write(members_ring, slot, 0)
    _barrier()
    mbarrier.arrive(k_full.index(slot), count=1)


@gluon.jit
def _load_queries(
    q_tile,
    queries,
    place,
    batch,
    FIRST_T: gl.constexpr,
    TILE_T: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Fill ``[(token, head), D]``; returns the tile's first and end row."""
    q_ptr, stride_q_t, stride_q_h = queries
    tile, tiles_per_seq, head_kv, _ = place
    PAIRS: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if TILE_T == 1:
        first = batch[4] + tile
        limit = first + 1
    else:
        _, first, limit, _ = _tile_rows(tile, batch, tiles_per_seq, TILE_T)
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, LAYOUT))
    t = (first + FIRST_T + pair // GROUP)[:, None]
    head = (head_kv * GROUP + pair % GROUP)[:, None]
    d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))[None, :]
    q_ptrs = q_ptr + t.to(gl.int64) * stride_q_t + head.to(gl.int64) * stride_q_h + d
    q_tile.store(gl.load(q_ptrs, mask=t < limit, other=0.0))
    fence_async_shared()
    _barrier()
    return first, limit


@gluon.jit
def _attend_columns(
    attended,
    WARPGROUP: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
):
    """One warpgroup: its share of the tile's queries, as columns, against the tile's parts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rings, q_tiles, p_tiles, queries, outputs, joined, place, softmax_scale, batch = attended
    k_ring, v_ring, members_ring, last_ring, k_full, v_full, empty = rings
    q_tile = q_tiles.index(WARPGROUP)
    p_tile = p_tiles.index(WARPGROUP)
    COLUMNS: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    TOKENS: gl.constexpr = COLUMNS // GROUP
    STAGES: gl.constexpr = k_ring.shape[0]
    PART: gl.constexpr = k_ring.shape[3]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)

    first, limit = _load_queries(
        q_tile, queries, place, batch, WARPGROUP * TOKENS, WARPGROUPS * TOKENS, GROUP
    )
    column = gl.arange(0, COLUMNS, COLUMN)
    t = WARPGROUP * TOKENS + column // GROUP
    n = gl.arange(0, PART, ROW)
    scale = softmax_scale * _LOG2_E
    # Finite, so that a column without keys so far needs no case of its own.
    top = gl.full([COLUMNS], _LOWEST, gl.float32, COLUMN)
    # Summed over the keys only at the end.
    weight_sums = gl.zeros([PART, COLUMNS], gl.float32, ACC)
    # [DIM, COLUMNS]
    acc = gl.zeros([DIM, COLUMNS], gl.float32, ACC)
    slot = 0
    phase = 0
    mbarrier.wait(k_full.index(slot), phase)
    members = _read(members_ring, slot)
    while members != 0:
        if (members >> WARPGROUP * TOKENS) & ((1 << TOKENS) - 1) != 0:
            last = _read(last_ring, slot)
            k_tile = k_ring.index(slot).reshape([PART, DIM])
            zeros = gl.zeros([PART, COLUMNS], gl.float32, ACC)
            # [PART, COLUMNS]
            logits = warpgroup_mma(
                k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            logits = warpgroup_mma_wait(0, deps=[logits])
            # The last key that each column sees.
            lasts = gl.where(((members >> t) & 1) != 0, last + t, -1)
            logits = gl.where(n[:, None] <= lasts[None, :], logits * scale, float("-inf"))
            new_top = gl.maximum(top, gl.max(logits, 0))
            decay = gl.exp2(top - new_top)
            weights = gl.exp2(logits - new_top[None, :])
            weight_sums = weight_sums * decay[None, :] + weights
            top = new_top
            p_tile.permute((1, 0)).store(weights.to(p_tile.dtype))
            acc = acc * decay[None, :]
            mbarrier.wait(v_full.index(slot), phase)
            v_tile = v_ring.index(slot).reshape([PART, DIM])
            if last + (limit - first) < PART:
                _clear_unseen(v_tile, last + (limit - first), 32)
            fence_async_shared()
            _barrier()
            acc = warpgroup_mma(v_tile.permute((1, 0)), p_tile.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        _release(empty, slot)
        slot, phase = _next_slot(slot, phase, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        members = _read(members_ring, slot)

    # [COLUMNS]
    weight_sum = gl.sum(weight_sums, 0)
    o_ptrs, l_ptrs = _places(outputs, first + t, column % GROUP, place, batch, GROUP)
    live = first + t < limit
    divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
    lse = gl.where(weight_sum > 0, (top + gl.log2(divisor)) * _LN_2, float("-inf"))
    gl.store(l_ptrs, lse, mask=live)
    o_ptrs = o_ptrs[None, :] + gl.arange(0, DIM, ROW)[:, None]
    out = acc * (1.0 / divisor)[None, :]
    gl.store(o_ptrs, out.to(outputs[0].dtype.element_ty), mask=live[None, :])
    if joined[0] is not None:
        _join_if_last(
            outputs, joined, place, batch, first + WARPGROUP * TOKENS, limit, WARPGROUP, WARPGROUPS,
            GROUP, DIM, TOKENS,
        )  # fmt: skip


@gluon.jit
def _attend_rows(attended, WARPGROUP: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr):
    """One warpgroup: the 64 queries of a tile of four tokens, as rows, against the tile's parts."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rings, q_tiles, _, queries, outputs, joined, place, softmax_scale, batch = attended
    k_ring, v_ring, members_ring, last_ring, k_full, v_full, empty = rings
    q_tile = q_tiles.index(WARPGROUP)
    ROWS: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    TOKENS: gl.constexpr = ROWS // GROUP
    STAGES: gl.constexpr = k_ring.shape[0]
    PART: gl.constexpr = k_ring.shape[3]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)

    first, limit = _load_queries(q_tile, queries, place, batch, 0, TOKENS, GROUP)
    row = gl.arange(0, ROWS, ROW)
    t = row // GROUP
    n = gl.arange(0, PART, gl.SliceLayout(0, LOGITS))
    scale = softmax_scale * _LOG2_E
    # Finite, so that a row without keys so far needs no case of its own.
    top = gl.full([ROWS], _LOWEST, gl.float32, ROW)
    weight_sum = gl.zeros([ROWS], gl.float32, ROW)
    # [ROWS, DIM]
    acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
    slot = 0
    phase = 0
    mbarrier.wait(k_full.index(slot), phase)
    members = _read(members_ring, slot)
    while members != 0:
        last = _read(last_ring, slot)
        k_tile = k_ring.index(slot).reshape([PART, DIM])
        zeros = gl.zeros([ROWS, PART], gl.float32, LOGITS)
        # [ROWS, PART]
        logits = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        # The last key that each row sees.
        lasts = gl.where(((members >> t) & 1) != 0, last + t, -1)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = gl.where(n[None, :] <= lasts[:, None], logits * scale, float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, 1))
        decay = gl.exp2(top - new_top)
        weights = gl.exp2(logits - new_top[:, None])
        weight_sum = weight_sum * decay + gl.sum(weights, 1)
        top = new_top
        acc = acc * gl.convert_layout(decay, ACC_ROW)[:, None]
        weights = gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS)
        mbarrier.wait(v_full.index(slot), phase)
        v_tile = v_ring.index(slot).reshape([PART, DIM])
        if last + (limit - first) < PART:
            _clear_unseen(v_tile, last + (limit - first), 32)
            fence_async_shared()
            _barrier()
        acc = warpgroup_mma(weights, v_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(empty, slot)
        slot, phase = _next_slot(slot, phase, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        members = _read(members_ring, slot)

    o_ptrs, l_ptrs = _places(outputs, first + t, row % GROUP, place, batch, GROUP)
    live = first + t < limit
    divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
    lse = gl.where(weight_sum > 0, (top + gl.log2(divisor)) * _LN_2, float("-inf"))
    gl.store(l_ptrs, lse, mask=live)
    share = gl.convert_layout(1.0 / divisor, ACC_ROW)
    acc_row = gl.arange(0, ROWS, ACC_ROW)
    acc_t = first + acc_row // GROUP
    o_ptrs, _ = _places(outputs, acc_t, acc_row % GROUP, place, batch, GROUP)
    o_ptrs = o_ptrs[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, ACC))[None, :]
    out = acc * share[:, None]
    gl.store(o_ptrs, out.to(outputs[0].dtype.element_ty), mask=(acc_t < limit)[:, None])
    if joined[0] is not None:
        _join_if_last(outputs, joined, place, batch, first, limit, 0, 1, GROUP, DIM, TOKENS)


@gluon.jit
def _places(outputs, token, group_head, place, batch, GROUP: gl.constexpr):
    """Where this split's results of some tokens and heads of the group go: outputs, and lse."""
    out_ptr, stride_o_s, stride_o_t, stride_o_h, lse_ptr, stride_l_s, stride_l_t, stride_l_h = (
        outputs
    )
    _, _, head_kv, split = place
    row = (token - batch[4]).to(gl.int64)
    head = (head_kv * GROUP + group_head).to(gl.int64)
    split = split.to(gl.int64)
    o_ptrs = out_ptr + split * stride_o_s + row * stride_o_t + head * stride_o_h
    return o_ptrs, lse_ptr + split * stride_l_s + row * stride_l_t + head * stride_l_h


@gluon.jit
def _join_if_last(
    outputs,
    joined,
    place,
    batch,
    first,
    limit,
    WARPGROUP: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Join all splits' results of a warpgroup's queries if this one's came last, in fixed order.

    Tickets say who is the last: it leaves 0 behind, as it found it.
    """
    counters_ptr, num_splits, HEADS_KV, final = joined
    tile, _, head_kv, _ = place
    out_ptr, stride_o_t, stride_o_h, lse_ptr, stride_l_t, stride_l_h = final
    counter_ptr = counters_ptr + (tile * HEADS_KV + head_kv) * WARPGROUPS + WARPGROUP
    # All threads have stored, then one of them publishes that for all.
    _barrier()
    ticket = gl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if ticket == num_splits - 1:
        gl.store(counter_ptr, 0)
        PAIRS: gl.constexpr = TOKENS * GROUP
        # Loads in flight, of 16 bytes each.
        AT_ONCE: gl.constexpr = max(1, 64 // PAIRS)
        LAYOUT: gl.constexpr = gl.BlockedLayout([AT_ONCE, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0])
        SPLIT_PAIR: gl.constexpr = gl.SliceLayout(2, LAYOUT)
        PAIR: gl.constexpr = gl.SliceLayout(0, SPLIT_PAIR)
        s = gl.arange(0, AT_ONCE, gl.SliceLayout(1, SPLIT_PAIR))
        pair = gl.arange(0, PAIRS, PAIR)
        d = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        token = first + pair // GROUP
        head = (head_kv * GROUP + pair % GROUP).to(gl.int64)
        live = token < limit
        part_out_ptr, stride_po_s, stride_po_t, stride_po_h = (
            outputs[0], outputs[1], outputs[2], outputs[3],
        )  # fmt: skip
        part_lse_ptr, stride_pl_s, stride_pl_t, stride_pl_h = (
            outputs[4], outputs[5], outputs[6], outputs[7],
        )  # fmt: skip
        row = (token - batch[4]).to(gl.int64)
        # [PAIRS]
        po_ptrs = part_out_ptr + row * stride_po_t + head * stride_po_h
        pl_ptrs = part_lse_ptr + row * stride_pl_t + head * stride_pl_h
        top = gl.full([PAIRS], _LOWEST, gl.float32, PAIR)
        total = gl.zeros([PAIRS], gl.float32, PAIR)
        acc = gl.zeros([PAIRS, DIM], gl.float32, gl.SliceLayout(0, LAYOUT))
        for first_split in range(0, num_splits, AT_ONCE):
            splits = first_split + s
            mask = (splits < num_splits)[:, None] & live[None, :]
            offsets = splits.to(gl.int64)[:, None]
            # [AT_ONCE, PAIRS]
            lses = gl.load(
                pl_ptrs[None, :] + offsets * stride_pl_s,
                mask=mask,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            o_ptrs = po_ptrs[None, :] + offsets * stride_po_s
            # [AT_ONCE, PAIRS, DIM]
            outs = gl.load(
                o_ptrs[:, :, None] + d[None, None, :],
                mask=mask[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = gl.maximum(top, gl.max(lses, 0))
            decay = gl.exp2((top - new_top) * _LOG2_E)
            shares = gl.exp2((lses - new_top[None, :]) * _LOG2_E)
            total = total * decay + gl.sum(shares, 0)
            decay = gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))
            acc = acc * decay[:, None] + gl.sum(outs * shares[:, :, None], 0)
            top = new_top
        divisor = gl.where(total > 0, total, 1.0)
        lse = gl.where(total > 0, top + gl.log2(divisor) * _LN_2, float("-inf"))
        gl.store(lse_ptr + row * stride_l_t + head * stride_l_h, lse, mask=live)
        OUT_PAIR: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT))
        share = gl.convert_layout(1.0 / divisor, OUT_PAIR)
        o_ptrs = gl.convert_layout(out_ptr + row * stride_o_t + head * stride_o_h, OUT_PAIR)
        out = acc * share[:, None]
        d = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
        gl.store(
            o_ptrs[:, None] + d[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=gl.convert_layout(live, OUT_PAIR)[:, None],
        )


@gluon.jit(
    do_not_specialize=[
        "stride_o_s", "stride_l_s", "stride_table_b", "num_seqs", "num_pages", "num_tokens",
        "max_seqlen_k", "row_begin", "row_end", "num_splits", "tiles_per_seq",
    ],
    do_not_specialize_on_alignment=[
        "counters_ptr", "cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr",
    ],
)  # fmt: skip
def _sparse_attention_decode_kernel(
    q_ptr,
    k_desc,
    v_desc,
    ids_ptr,
    out_ptr,
    lse_ptr,
    counters_ptr,
    final_out_ptr,
    final_lse_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_table_ptr,
    first_key_ptr,
    softmax_scale,
    stride_q_t,
    stride_q_h,
    stride_i_t,
    stride_i_h,
    stride_i_k,
    stride_o_s,
    stride_o_t,
    stride_o_h,
    stride_l_s,
    stride_l_t,
    stride_l_h,
    stride_fo_t,
    stride_fo_h,
    stride_fl_t,
    stride_fl_h,
    stride_table_b,
    num_seqs,
    num_pages,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    num_splits,
    tiles_per_seq,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    AS_ROWS: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    PREFETCH: gl.constexpr,
    PDL: gl.constexpr,
):
    """A tile and one KV head against one split's share of the blocks that the tile selected.

    Every block is read once for the tile. Limit: memory bandwidth, and for few rows the latency of
    ids, pages and keys, which wait for one another.
    """
    # Spare tiles are the last ones, so that they keep no other from starting.
    programs_per_tile = HEADS_KV * num_splits
    tile = gl.program_id(0) // programs_per_tile
    head_kv = gl.program_id(0) % programs_per_tile % HEADS_KV
    split = gl.program_id(0) % programs_per_tile // HEADS_KV
    PART: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    PAIRS: gl.constexpr = TILE_T * GROUP // WARPGROUPS
    # Weights as rows stay in registers.
    P_PAIRS: gl.constexpr = 16 if AS_ROWS else PAIRS
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PAIRS, DIM], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P_PAIRS, PART], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, PAIRS, DIM], q_layout)
    p_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, P_PAIRS, PART], p_layout)
    members_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    last_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    rings = (k_ring, v_ring, members_ring, last_ring, k_full, v_full, empty)
    batch = (
        cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, num_seqs, row_begin, row_end, num_tokens,
        max_seqlen_k,
    )  # fmt: skip
    queries = (q_ptr, stride_q_t, stride_q_h)
    outputs = (
        out_ptr, stride_o_s, stride_o_t, stride_o_h, lse_ptr, stride_l_s, stride_l_t, stride_l_h,
    )  # fmt: skip
    final = (final_out_ptr, stride_fo_t, stride_fo_h, final_lse_ptr, stride_fl_t, stride_fl_h)
    joined = (counters_ptr, num_splits, HEADS_KV, final)
    ids = (ids_ptr, stride_i_t, stride_i_h, stride_i_k)
    sources = (k_desc, v_desc, block_table_ptr, stride_table_b, num_pages)
    place = (tile, tiles_per_seq, head_kv, split)
    copied = (rings, ready, queries, sources, ids, place, num_splits, batch)
    attended = (
        rings, q_tiles, p_tiles, queries, outputs, joined, place, softmax_scale, batch
    )  # fmt: skip
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    if AS_ROWS:
        gl.warp_specialize(
            [
                (_attend_rows, (attended, W0, GROUP, PDL)),
                (_copy_parts, (copied, GROUP, TOPK, TILE_T, PAGED, PACKED, BLOCK_B, PREFETCH, PDL)),
            ],
            worker_num_warps=[1],
            worker_num_regs=[96],
        )
    elif WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_columns, (attended, W0, WARPGROUPS, GROUP, PDL)),
                (_copy_parts, (copied, GROUP, TOPK, TILE_T, PAGED, PACKED, BLOCK_B, PREFETCH, PDL)),
            ],
            worker_num_warps=[1],
            worker_num_regs=[88],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_columns, (attended, W0, WARPGROUPS, GROUP, PDL)),
                (_attend_columns, (attended, W1, WARPGROUPS, GROUP, PDL)),
                (_copy_parts, (copied, GROUP, TOPK, TILE_T, PAGED, PACKED, BLOCK_B, PREFETCH, PDL)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[160, 96],
        )
