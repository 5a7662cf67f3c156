"""Gluon kernel for Hopper: one copying warp feeds warpgroups that take turns at what it copies.

A program takes the few rows of one sequence and the heads of one KV head. Its (row, head) pairs
are the rows of the products, ``S = q K^T`` and ``O = P V``. The blocks that any of its rows
selected are cut into *parts*. Those with visible keys are shared out over the splits, and a split's
over the warpgroups. Each of these has sums of its own, which are joined in shared memory at the
end: while one waits for its product or its exponentials, another multiplies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....common.kernels import _key_room
from ..decode.join.kernels import _join_if_last, _place
from ..decode.kernels import (
    _BLOCK_SIZE,
    _add,
    _copy_part,
    _end_parts,
    _fetch_descriptors,
    _log2,
    _next_power_of_2,
    _prefetch_inputs,
    _read,
)
from ..kernels import (
    _LN_2,
    _LOG2_E,
    _LOWEST,
    _barrier,
    _clear_unseen,
    _multiply_keys,
    _multiply_values,
    _next_slot,
    _release,
    _weigh,
)
from ..kv_major.kernels import _reinterpret


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def _find_rows(b, batch, TOKENS: gl.constexpr):
    """First row and end row of a sequence, of which `TOKENS` count, and shift to the position."""
    cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, num_seqs, row_end, num_tokens, longest = batch
    start = gl.load(cu_seqlens_q_ptr + b)
    end = gl.load(cu_seqlens_q_ptr + b + 1)
    seqused = gl.load(seqused_k_ptr + b)
    first = gl.minimum(gl.maximum(start, 0), row_end)
    limit = gl.minimum(gl.maximum(end, 0), row_end)
    # No row stands past the last key that the storage has room for.
    room = _key_room(first_key_ptr, b, num_seqs, num_tokens, longest)
    return first, gl.minimum(limit, first + TOKENS), gl.minimum(seqused - end, room - limit)


@gluon.jit
def _load_ids(ids, row, slot, head_kv, row_end, TOPK: gl.constexpr, DENSE: gl.constexpr):
    """The ids in some slots of some rows; -1 where there is no such row or slot."""
    ids_ptr, stride_i_t, stride_i_h, stride_i_k = ids
    i_ptrs = ids_ptr + head_kv.to(gl.int64) * stride_i_h
    i_ptrs = i_ptrs + row.to(gl.int64) * stride_i_t
    if DENSE:
        # Several at once: in a partition a stride of 1 is not known to be that.
        i_ptrs = i_ptrs + slot
    else:
        i_ptrs = i_ptrs + slot.to(gl.int64) * stride_i_k
    mask = row < row_end
    if _next_power_of_2(TOPK, 1) > TOPK:
        mask = mask & (slot < TOPK)
    return gl.load(i_ptrs, mask=mask, other=-1)


@gluon.jit
def _list_union(
    ids,
    sources,
    place,
    batch,
    queries_per_seq,
    PART: gl.constexpr,
    TOPK: gl.constexpr,
    TOKENS: gl.constexpr,
    DENSE: gl.constexpr,
    PAGED: gl.constexpr,
):
    """The parts with visible keys of the blocks that any row selected, over one warp's lanes.

    Returns the position of the first row and per lane: how many such parts its block has, how many
    the lanes up to it have, the block, its page (or 0), and a bit for each row that selected it.
    """
    COLUMNS: gl.constexpr = _next_power_of_2(TOPK, 1)
    PARTS: gl.constexpr = _BLOCK_SIZE // PART
    # Entries lie over the lanes, and each lane compares its own with all ids.
    CUBE: gl.constexpr = gl.BlockedLayout([1, TOKENS, COLUMNS], [32, 1, 1], [1, 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.SliceLayout(2, CUBE)
    ENTRY: gl.constexpr = gl.SliceLayout(1, PAIRS)
    IDS: gl.constexpr = gl.SliceLayout(0, CUBE)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _, _, block_table_ptr, stride_table_b, num_pages = sources
    b, _, head_kv, _ = place
    row_end = batch[4]
    e = gl.arange(0, _next_power_of_2(TOKENS * COLUMNS, 32), ENTRY)
    t = e // COLUMNS
    all_t = gl.arange(0, TOKENS, gl.SliceLayout(1, IDS))[:, None]
    all_slots = gl.arange(0, COLUMNS, gl.SliceLayout(0, IDS))[None, :]
    # Asked for beside the sequence's place, which every sequence with all its rows has.
    guess = gl.minimum(b * queries_per_seq, row_end)
    block = _load_ids(ids, guess + t, e % COLUMNS, head_kv, row_end, TOPK, DENSE)
    all_ids = _load_ids(ids, guess + all_t, all_slots, head_kv, row_end, TOPK, DENSE)
    first, limit, shift = _find_rows(b, batch, TOKENS)
    if first != guess:
        block = _load_ids(ids, first + t, e % COLUMNS, head_kv, row_end, TOPK, DENSE)
        all_ids = _load_ids(ids, first + all_t, all_slots, head_kv, row_end, TOPK, DENSE)
    # The last block that a row sees.
    own = gl.where(first + t < limit, (first + t + shift) >> _log2(_BLOCK_SIZE), -1)
    chosen = (t < TOKENS) & (block >= 0) & (block <= own)
    page = 0 * block
    if PAGED:
        # Asked for before the union is made, which does not wait for them.
        page = gl.load(
            block_table_ptr + b.to(gl.int64) * stride_table_b + block, mask=chosen, other=0
        )
        page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    # [ENTRIES, TOKENS]
    equal = gl.reduce(block[:, None][:, :, None] == all_ids[None, :, :], 2, _or)
    row_t = gl.arange(0, TOKENS, gl.SliceLayout(0, PAIRS))
    owns = gl.where(first + row_t < limit, (first + row_t + shift) >> _log2(_BLOCK_SIZE), -1)
    selected = equal & (block[:, None] <= owns[None, :])
    members = gl.sum(selected.to(gl.int32) << row_t[None, :], 1)
    # The first of the rows that selected a block brings it.
    chosen = chosen & ((members & ((1 << t) - 1)) == 0)
    visible = ((limit - 1 + shift - block * _BLOCK_SIZE) >> _log2(PART)) + 1
    count = gl.where(chosen, gl.minimum(visible, PARTS), 0)
    count = gl.convert_layout(count, LANES)
    end = gl.associative_scan(count, 0, _add)
    block = gl.convert_layout(block, LANES)
    page = gl.convert_layout(page, LANES)
    return first + shift, count, end, block, page, gl.convert_layout(members, LANES)


@gluon.jit
def _clear_padding(outputs, joined, place, batch, GROUP: gl.constexpr, DIM: gl.constexpr):
    """This program's share of the rows that no sequence has, which attend to nothing."""
    cu_seqlens_q_ptr, _, _, num_seqs, row_end, _, _ = batch
    b, _, head_kv, split = place
    out, lse = outputs
    if joined[0] is not None:
        out, lse = joined[3], joined[4]
    if split == 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        zeros = gl.zeros([GROUP, DIM], out[0].dtype.element_ty, LAYOUT)
        nothing = gl.full([GROUP], float("-inf"), gl.float32, LANES)
        head = head_kv * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, LAYOUT))
        d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
        l_head = head_kv * GROUP + gl.arange(0, GROUP, LANES)
        before = gl.minimum(gl.maximum(gl.load(cu_seqlens_q_ptr), 0), row_end)
        used = gl.minimum(gl.maximum(gl.load(cu_seqlens_q_ptr + num_seqs), before), row_end)
        for i in range(b, before + row_end - used, num_seqs):
            row = gl.where(i < before, i, row_end - 1 - (i - before))
            gl.store(_place(out, split, row, head)[:, None] + d[None, :], zeros)
            gl.store(_place(lse, split, row, l_head), nothing)


@gluon.jit
def _copy_union(
    copied,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    TOKENS: gl.constexpr,
    DENSE: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    PDL: gl.constexpr,
):
    """This split's share of the parts, then for each warpgroup one that ends them.

    A part's note has the bits of the rows that selected its block, and above them the last key of
    it that the first row sees, which may lie before the part or behind it.
    """
    rings, ready, queries, sources, ids, outputs, joined, place, batch, queries_per_seq = copied
    b, _, head_kv, split = place
    _, _, first_key_ptr, _, _, _, _ = batch
    num_splits = joined[2]
    STAGES: gl.constexpr = rings[0].shape[0]
    PART: gl.constexpr = rings[0].shape[3]
    DIM: gl.constexpr = rings[0].shape[4]
    PARTS: gl.constexpr = _BLOCK_SIZE // PART
    _fetch_descriptors(rings, ready, sources)
    if PDL:
        row = b * queries_per_seq
        _prefetch_inputs(b, row, queries, ids, sources, place, batch, TOKENS, GROUP, TOPK, PAGED)
        gdc_wait()
    position, count, end, block, page, members = _list_union(
        ids, sources, place, batch, queries_per_seq, PART, TOPK, TOKENS, DENSE, PAGED
    )
    first_key = gl.to_tensor(0)
    if first_key_ptr is not None:
        first_key = gl.load(first_key_ptr + b)
    total = gl.sum(count, 0)
    # From a part's place in the list to its place in the sequence, and whose it is.
    entry = (block * PARTS - (end - count)) << TOKENS | members
    mbarrier.wait(ready, 0)
    slot = 0
    phase = 0
    for i in range(split, total, num_splits):
        here = (end - count <= i) & (i < end)
        part_entry = gl.sum(gl.where(here, entry, 0), 0)
        part = i + (part_entry >> TOKENS)
        last = gl.minimum(position - part * PART, PART)
        note = last << TOKENS | part_entry & ((1 << TOKENS) - 1)
        _copy_part(
            rings, sources, slot, phase, here, page, b, head_kv, first_key, part, note, PAGED,
            PACKED,
        )  # fmt: skip
        slot, phase = _next_slot(slot, phase, STAGES)
    for _i in gl.static_range(WARPGROUPS):
        _end_parts(rings, slot, phase, 0)
        slot, phase = _next_slot(slot, phase, STAGES)
    _clear_padding(outputs, joined, place, batch, GROUP, DIM)


@gluon.jit
def _load_queries(q_tile, queries, first, limit, head_kv, GROUP: gl.constexpr):
    """Fill ``[(row, head), D]``; every warpgroup does so, and none waits for another."""
    q_ptr, stride_q_t, stride_q_h = queries
    ROWS: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    pair = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    row = first + pair // GROUP
    head = head_kv * GROUP + pair % GROUP
    d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    q_ptrs = q_ptr + row.to(gl.int64) * stride_q_t + head.to(gl.int64) * stride_q_h
    q = gl.load(q_ptrs[:, None] + d[None, :], mask=(row < limit)[:, None], other=0.0)
    q_tile.store(q)
    fence_async_shared()
    _barrier()


@gluon.jit
def _own_next_slot(slot, phase, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr):
    for _i in gl.static_range(WARPGROUPS):
        slot, phase = _next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _meet(barrier):
    """Wait until every warpgroup came here."""
    _barrier()
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)


@gluon.jit
def _attend_union(
    attended,
    WARPGROUP: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    MAX_JOINED_SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """One warpgroup: all rows against every `WARPGROUPS`-th part that comes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rings, q_tile, sums, meetings, queries, outputs, joined, place, batch, softmax_scale = attended
    k_ring, v_ring, note_ring, k_full, v_full, empty = rings
    b, _, head_kv, split = place
    ROWS: gl.constexpr = q_tile.shape[0]
    STAGES: gl.constexpr = k_ring.shape[0]
    PART: gl.constexpr = k_ring.shape[3]
    DIM: gl.constexpr = k_ring.shape[4]
    TOKENS: gl.constexpr = ROWS // GROUP
    SHARE: gl.constexpr = ROWS // WARPGROUPS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)

    first, limit, _ = _find_rows(b, batch, TOKENS)
    _load_queries(q_tile, queries, first, limit, head_kv, GROUP)
    t = gl.arange(0, ROWS, ROW) // GROUP
    scale = softmax_scale * _LOG2_E
    # Finite, so that a row without keys so far needs no case of its own.
    top = gl.full([ROWS], _LOWEST, gl.float32, ROW)
    weight_sum = gl.zeros([ROWS], gl.float32, ROW)
    # [ROWS, DIM]
    acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
    slot = gl.to_tensor(WARPGROUP)
    phase = 0
    mbarrier.wait(k_full.index(slot), phase)
    note = _read(note_ring, slot)
    while note != 0:
        logits = _multiply_keys(q_tile, k_ring, slot, LOGITS)
        last = note >> TOKENS
        member = ((note >> t) & 1) != 0
        logits = warpgroup_mma_wait(0, deps=[logits])
        # [ROWS, PART]
        weights, decay, top, weight_sum = _weigh(
            logits, last + t + 1, last + 1 < PART, member, scale, top, weight_sum
        )
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, ACC))[:, None]
        weights = gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS)
        mbarrier.wait(v_full.index(slot), phase)
        if last + (limit - first) < PART:
            v_tile = v_ring.index(slot).reshape([PART, DIM])
            _clear_unseen(v_tile, last + (limit - first), 32)
            _barrier()
        acc = _multiply_values(weights, v_ring, slot, acc)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(empty, slot)
        slot, phase = _own_next_slot(slot, phase, WARPGROUPS, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        note = _read(note_ring, slot)

    # No slot is used any more when all have come here: there is room for what they summed.
    _meet(meetings.index(0))
    acc_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], gl.float32)
    ROOM: gl.constexpr = STAGES * PART // (2 * ROWS)
    accs = _reinterpret(k_ring, gl.float32, [ROOM, ROWS, DIM], acc_layout)
    accs.index(WARPGROUP).store(acc)
    sums.index(2 * WARPGROUP).store(top)
    sums.index(2 * WARPGROUP + 1).store(weight_sum)
    _meet(meetings.index(1))

    # Each joins its share of the rows.
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    OUT_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    begin: gl.constexpr = WARPGROUP * SHARE
    top = gl.full([SHARE], _LOWEST, gl.float32, OUT_ROW)
    for w in gl.static_range(WARPGROUPS):
        top = gl.maximum(top, sums.index(2 * w).slice(begin, SHARE).load(OUT_ROW))
    weight_sum = gl.zeros([SHARE], gl.float32, OUT_ROW)
    out = gl.zeros([SHARE, DIM], gl.float32, OUT)
    for w in gl.static_range(WARPGROUPS):
        decay = gl.exp2(sums.index(2 * w).slice(begin, SHARE).load(OUT_ROW) - top)
        weight_sum += decay * sums.index(2 * w + 1).slice(begin, SHARE).load(OUT_ROW)
        out += accs.index(w).slice(begin, SHARE).load(OUT) * decay[:, None]
    divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
    lse = gl.where(weight_sum > 0, (top + gl.log2(divisor)) * _LN_2, float("-inf"))
    out = out * (1.0 / divisor)[:, None]
    pair = begin + gl.arange(0, SHARE, OUT_ROW)
    row = first + pair // GROUP
    head = head_kv * GROUP + pair % GROUP
    gl.store(_place(outputs[1], split, row, head), lse, mask=row < limit)
    o_ptrs = _place(outputs[0], split, row, head)[:, None]
    gl.store(
        o_ptrs + gl.arange(0, DIM, gl.SliceLayout(0, OUT))[None, :],
        out.to(outputs[0][0].dtype.element_ty),
        mask=(row < limit)[:, None],
    )
    if joined[0] is not None:
        counters_ptr, counter, num_splits, final_out, final_lse = joined
        joined = (
            counters_ptr, counter * WARPGROUPS + WARPGROUP, num_splits, final_out, final_lse
        )  # fmt: skip
        share_t: gl.constexpr = WARPGROUP * TOKENS // WARPGROUPS
        place = (b, first + share_t, head_kv, split)
        _join_if_last(outputs, joined, place, limit, SHARE // GROUP, GROUP, DIM, MAX_JOINED_SPLITS)


@gluon.jit(
    do_not_specialize=[
        "stride_o_s", "stride_l_s", "stride_table_b", "num_seqs", "num_pages", "num_tokens",
        "max_seqlen_k", "row_end", "num_splits", "queries_per_seq",
    ],
    do_not_specialize_on_alignment=[
        "counters_ptr", "cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr",
    ],
)  # fmt: skip
def _sparse_attention_drafts_kernel(
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
    row_end,
    num_splits,
    queries_per_seq,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    TOKENS: gl.constexpr,
    DENSE: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    MAX_JOINED_SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A sequence's rows and one KV head against one split's share of all blocks they selected.

    Every block is read once for all rows. Limit: memory bandwidth.
    """
    programs_per_seq = HEADS_KV * num_splits
    b = gl.program_id(0) // programs_per_seq
    head_kv = gl.program_id(0) % programs_per_seq % HEADS_KV
    split = gl.program_id(0) % programs_per_seq // HEADS_KV
    ROWS: gl.constexpr = TOKENS * GROUP
    PART: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    gl.static_assert(STAGES % WARPGROUPS == 0, "a slot must belong to one warpgroup")
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], v_desc.layout)
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, DIM], q_layout)
    note_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    sums = gl.allocate_shared_memory(gl.float32, [2 * WARPGROUPS, ROWS], plain)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    meetings = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(2):
        mbarrier.init(meetings.index(i), count=WARPGROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    rings = (k_ring, v_ring, note_ring, k_full, v_full, empty)
    batch = (
        cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, num_seqs, row_end, num_tokens, max_seqlen_k,
    )  # fmt: skip
    queries = (q_ptr, stride_q_t, stride_q_h)
    ids = (ids_ptr, stride_i_t, stride_i_h, stride_i_k)
    sources = (k_desc, v_desc, block_table_ptr, stride_table_b, num_pages)
    # Splits lie whole heads apart, which 16 bytes divide.
    outputs = (
        (out_ptr, stride_o_s // DIM * DIM, stride_o_t, stride_o_h),
        (lse_ptr, stride_l_s, stride_l_t, stride_l_h),
    )
    joined = (
        counters_ptr,
        b * HEADS_KV + head_kv,
        num_splits,
        (final_out_ptr, 0, stride_fo_t, stride_fo_h),
        (final_lse_ptr, 0, stride_fl_t, stride_fl_h),
    )
    place = (b, b, head_kv, split)
    copied = (rings, ready, queries, sources, ids, outputs, joined, place, batch, queries_per_seq)
    attended = (
        rings, q_tile, sums, meetings, queries, outputs, joined, place, batch, softmax_scale
    )  # fmt: skip
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_union, (attended, W0, WARPGROUPS, GROUP, MAX_JOINED_SPLITS, PDL)),
                (_copy_union, (copied, GROUP, TOPK, TOKENS, DENSE, WARPGROUPS, PAGED, PACKED, PDL)),
            ],
            worker_num_warps=[1],
            worker_num_regs=[128],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_union, (attended, W0, WARPGROUPS, GROUP, MAX_JOINED_SPLITS, PDL)),
                (_attend_union, (attended, W1, WARPGROUPS, GROUP, MAX_JOINED_SPLITS, PDL)),
                (_copy_union, (copied, GROUP, TOPK, TOKENS, DENSE, WARPGROUPS, PAGED, PACKED, PDL)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[192, 112],
        )
