"""Gluon kernel for Hopper: one copying warp feeds one multiplying warpgroup.

A program takes one row and the heads of one KV head. These heads are the *columns* of the products
and keys or channels the rows, so that few queries need no padding: ``S^T = K q^T``,
``O^T = V^T P^T``. The blocks that the row selected are cut into *parts*. Those with visible keys
are shared out over the splits.
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
from ..layouts import _barriers, _blocked, _operand, _plain, _products
from .cluster.kernels import _arrive, _await, _join_in_cluster, _prepare, _rank, _stand_by
from .join.kernels import _join_if_last, _place

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
def _find_sequence(row, batch, BLOCK_B: gl.constexpr):
    """Sequence of a row and the shift from its row to its position; one warp looks.

    First where the row is if every sequence has one.
    """
    cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, num_seqs, row_end, num_tokens, longest = batch
    found_b = gl.minimum(row, num_seqs)
    start = gl.load(cu_seqlens_q_ptr + found_b)
    found_end = gl.load(cu_seqlens_q_ptr + found_b + 1, mask=found_b < num_seqs, other=_LARGEST)
    found_seqused = gl.load(seqused_k_ptr + found_b, mask=found_b < num_seqs, other=0)
    if (row < start) | (row >= found_end):
        LANES: gl.constexpr = _blocked([1], [32], [1], [0], gl.num_ctas())
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
        # A row that no sequence has stands before all keys.
        found_end = gl.where(row < found_end, found_end, row_end)
    shift = gl.where(found_b < num_seqs, found_seqused - found_end, _BEFORE_ALL_KEYS)
    # No row stands past the last key that the storage has room for.
    room = _key_room(first_key_ptr, found_b, num_seqs, num_tokens, longest)
    return found_b, gl.minimum(shift, room - gl.minimum(found_end, row_end))


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
    b,
    row,
    queries,
    ids,
    sources,
    place,
    batch,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    PAGED: gl.constexpr,
):
    """What `ROWS` rows of a sequence need before their first key, as far as the place is known.

    It may be another sequence's, which costs a little time: no result depends on it.
    """
    q_ptr, stride_q_t, stride_q_h = queries
    ids_ptr, stride_i_t, stride_i_h, stride_i_k = ids
    _, _, block_table_ptr, stride_table_b, _ = sources
    _, _, head_kv, _ = place
    cu_seqlens_q_ptr, seqused_k_ptr, _, num_seqs, row_end, num_tokens, longest = batch
    LANES: gl.constexpr = _blocked([1], [32], [1], [0], gl.num_ctas())
    b = gl.minimum(b, num_seqs - 1)
    if b >= 0:
        lane = gl.arange(0, 32, LANES)
        _prefetch(cu_seqlens_q_ptr + b + lane % 2)
        _prefetch(seqused_k_ptr + b + 0 * lane)
        i = gl.arange(0, ROWS * 32, LANES)
        rows = gl.minimum(row + i // 32, row_end - 1).to(gl.int64)
        i_ptrs = ids_ptr + rows * stride_i_t + head_kv.to(gl.int64) * stride_i_h
        _prefetch(i_ptrs + gl.minimum(i % 32, TOPK - 1).to(gl.int64) * stride_i_k)
        # Two lines of 128 bytes for each head.
        line = gl.arange(0, ROWS * GROUP * 2, LANES)
        rows = gl.minimum(row + line // (GROUP * 2), row_end - 1).to(gl.int64)
        head = (head_kv * GROUP + line // 2 % GROUP).to(gl.int64)
        _prefetch(q_ptr + rows * stride_q_t + head * stride_q_h + line % 2 * 64)
        if PAGED:
            # The first 4096 entries: one of every 128 bytes.
            entry = gl.arange(0, 128, LANES) * 32
            keys = gl.minimum(_guess(seqused_k_ptr + b), gl.minimum(num_tokens, longest))
            if keys > 0:
                entry = gl.minimum(entry, (keys - 1) >> _log2(_BLOCK_SIZE))
                _prefetch(block_table_ptr + b.to(gl.int64) * stride_table_b + entry)


@gluon.jit
def _list_parts(
    ids,
    sources,
    place,
    batch,
    PART: gl.constexpr,
    TOPK: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_B: gl.constexpr,
):
    """The parts with visible keys of the blocks that a row selected, over the lanes of one warp.

    Returns the sequence, the row's position, and per lane: how many such parts its block has, how
    many the lanes up to it have, the block, and its page (or 0).
    """
    LANES: gl.constexpr = _blocked([1], [32], [1], [0], gl.num_ctas())
    PARTS: gl.constexpr = _BLOCK_SIZE // PART
    ids_ptr, stride_i_t, stride_i_h, stride_i_k = ids
    _, _, block_table_ptr, stride_table_b, num_pages = sources
    row, _, head_kv, _ = place
    slot = gl.arange(0, _next_power_of_2(TOPK, 32), LANES)
    i_ptr = ids_ptr + row.to(gl.int64) * stride_i_t + head_kv.to(gl.int64) * stride_i_h
    # Asked for before the search, which does not wait for them.
    block = gl.load(i_ptr + slot.to(gl.int64) * stride_i_k, mask=slot < TOPK, other=-1)
    b, shift = _find_sequence(row, batch, BLOCK_B)
    position = row + shift
    chosen = (block >= 0) & (block <= position >> _log2(_BLOCK_SIZE))
    page = 0 * block
    if PAGED:
        # Asked for before the parts are counted, which does not wait for them.
        page = gl.load(
            block_table_ptr + b.to(gl.int64) * stride_table_b + block, mask=chosen, other=0
        )
        page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    visible = ((position - block * _BLOCK_SIZE) >> _log2(PART)) + 1
    count = gl.where(chosen, gl.minimum(visible, PARTS), 0)
    return b, position, count, gl.associative_scan(count, 0, _add), block, page


@gluon.jit
def _write(ring, slot, value):
    LAYOUT: gl.constexpr = _blocked([1], [32], [1], [0], gl.num_ctas())
    ring.index(slot).store(gl.full([1], value, gl.int32, LAYOUT))


@gluon.jit
def _read(ring, slot):
    LAYOUT: gl.constexpr = _blocked([1], [32], [4], [0], gl.num_ctas())
    return gl.max(ring.index(slot).load(LAYOUT), 0)


@gluon.jit
def _fetch_descriptors(rings, ready, sources):
    """Start copies of keys before the first one, which are zeros and come from nowhere.

    So the copy engine has its descriptors when ids and pages are there. The slot is the last one
    to be filled, for which `ready` is to be awaited.
    """
    k_ring, v_ring, _, _, _, _ = rings
    k_desc, v_desc, _, _, _ = sources
    STAGES: gl.constexpr = k_ring.shape[0]
    PART: gl.constexpr = k_ring.shape[3]
    mbarrier.expect(ready, 2 * k_desc.block_type.nbytes)
    _load_async(k_desc, [0, 0, -PART, 0], ready, k_ring.index(STAGES - 1))
    _load_async(v_desc, [0, 0, -PART, 0], ready, v_ring.index(STAGES - 1))


@gluon.jit
def _copy_part(
    rings,
    sources,
    slot,
    phase,
    here,
    page,
    b,
    head_kv,
    first_key,
    part,
    note,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Fill a slot, once it is free, with a part of the block in lane `here` and with a note."""
    k_ring, v_ring, note_ring, k_full, v_full, empty = rings
    k_desc, v_desc, _, _, _ = sources
    PART: gl.constexpr = k_ring.shape[3]
    PARTS: gl.constexpr = _BLOCK_SIZE // PART
    if PAGED:
        outer = gl.sum(gl.where(here, page, 0), 0)
        token = part % PARTS * PART
    else:
        outer = b
        if PACKED:
            outer = gl.to_tensor(0)
        token = first_key + part * PART
    mbarrier.wait(empty.index(slot), phase ^ 1)
    # Seen by whoever sees the barrier's phase complete.
    _write(note_ring, slot, note)
    _barrier()
    mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
    _load_async(k_desc, [outer, head_kv, token, 0], k_full.index(slot), k_ring.index(slot))
    mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
    _load_async(v_desc, [outer, head_kv, token, 0], v_full.index(slot), v_ring.index(slot))


@gluon.jit
def _end_parts(rings, slot, phase, note):
    """A slot with a note alone."""
    _, _, note_ring, k_full, _, empty = rings
    mbarrier.wait(empty.index(slot), phase ^ 1)
    _write(note_ring, slot, note)
    _barrier()
    mbarrier.arrive(k_full.index(slot), count=1)


@gluon.jit
def _copy_parts(
    copied,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_B: gl.constexpr,
    PDL: gl.constexpr,
):
    """This split's share of the parts, then a part without visible keys, which ends them."""
    rings, ready, queries, sources, ids, place, num_splits, batch = copied
    row, _, head_kv, split = place
    _, _, first_key_ptr, num_seqs, _, _, _ = batch
    STAGES: gl.constexpr = rings[0].shape[0]
    PART: gl.constexpr = rings[0].shape[3]
    PARTS: gl.constexpr = _BLOCK_SIZE // PART
    if gl.num_ctas() > 1:
        _arrive()
    _fetch_descriptors(rings, ready, sources)
    if PDL:
        _prefetch_inputs(row, row, queries, ids, sources, place, batch, 1, GROUP, TOPK, PAGED)
        gdc_wait()
    b, position, count, end, block, page = _list_parts(
        ids, sources, place, batch, PART, TOPK, PAGED, BLOCK_B
    )
    first_key = gl.to_tensor(0)
    if first_key_ptr is not None:
        first_key = gl.load(first_key_ptr + b, mask=b < num_seqs, other=0)
    total = gl.sum(count, 0)
    # From a part's place in the list to its place in the sequence.
    offset = block * PARTS - (end - count)
    mbarrier.wait(ready, 0)
    slot = 0
    phase = 0
    for i in range(total * split // num_splits, total * (split + 1) // num_splits):
        here = (end - count <= i) & (i < end)
        part = i + gl.sum(gl.where(here, offset, 0), 0)
        _copy_part(
            rings, sources, slot, phase, here, page, b, head_kv, first_key, part,
            position - part * PART, PAGED, PACKED,
        )  # fmt: skip
        slot, phase = _next_slot(slot, phase, STAGES)
    _end_parts(rings, slot, phase, -1)
    if gl.num_ctas() > 1:
        _await()


@gluon.jit
def _load_queries(q_tile, queries, place):
    """Fill ``[GROUP, D]``."""
    q_ptr, stride_q_t, stride_q_h = queries
    row, _, head_kv, _ = place
    GROUP: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    LAYOUT: gl.constexpr = _blocked([1, 8], [2, 16], [4, 1], [1, 0], gl.num_ctas())
    head = head_kv * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    q_ptrs = q_ptr + row.to(gl.int64) * stride_q_t + head.to(gl.int64)[:, None] * stride_q_h
    q_tile.store(gl.load(q_ptrs + d[None, :]))
    fence_async_shared()
    _barrier()


@gluon.jit
def _attend_parts(
    attended, GROUP: gl.constexpr, MAX_JOINED_SPLITS: gl.constexpr, PDL: gl.constexpr
):
    """One warpgroup: the row's heads, as columns, against the parts that come."""
    if gl.num_ctas() > 1:
        _arrive()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rings, q_tile, p_tile, queries, outputs, joined, place, softmax_scale = attended
    k_ring, v_ring, last_ring, k_full, v_full, empty = rings
    _, out_row, head_kv, split = place
    STAGES: gl.constexpr = k_ring.shape[0]
    PART: gl.constexpr = k_ring.shape[3]
    DIM: gl.constexpr = k_ring.shape[4]
    ACC: gl.constexpr = _products(4, GROUP, gl.num_ctas())
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)

    _load_queries(q_tile, queries, place)
    n = gl.arange(0, PART, ROW)
    scale = softmax_scale * _LOG2_E
    # Finite, so that a row without keys needs no case of its own.
    top = gl.full([GROUP], _LOWEST, gl.float32, COLUMN)
    # Summed over the keys only at the end.
    weight_sums = gl.zeros([PART, GROUP], gl.float32, ACC)
    # [DIM, GROUP]
    acc = gl.zeros([DIM, GROUP], gl.float32, ACC)
    slot = 0
    phase = 0
    mbarrier.wait(k_full.index(slot), phase)
    # The last key of the part that the row sees.
    last = _read(last_ring, slot)
    while last >= 0:
        k_tile = k_ring.index(slot).reshape([PART, DIM])
        zeros = gl.zeros([PART, GROUP], gl.float32, ACC)
        # [PART, GROUP]
        logits = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = gl.where((n <= last)[:, None], logits * scale, float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, 0))
        decay = gl.exp2(top - new_top)
        weights = gl.exp2(logits - new_top[None, :])
        weight_sums = weight_sums * decay[None, :] + weights
        top = new_top
        p_tile.permute((1, 0)).store(weights.to(p_tile.dtype))
        acc = acc * decay[None, :]
        mbarrier.wait(v_full.index(slot), phase)
        v_tile = v_ring.index(slot).reshape([PART, DIM])
        if last + 1 < PART:
            # Of a cluster's shared memory there are no slices.
            _clear_unseen(v_tile, last + 1, 32 if gl.num_ctas() == 1 else PART)
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(v_tile.permute((1, 0)), p_tile.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(empty, slot)
        slot, phase = _next_slot(slot, phase, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        last = _read(last_ring, slot)

    # [GROUP]
    weight_sum = gl.sum(weight_sums, 0)
    if gl.num_ctas() > 1:
        _join_in_cluster(acc, top, weight_sum, joined, outputs, place)
    else:
        divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
        lse = gl.where(weight_sum > 0, (top + gl.log2(divisor)) * _LN_2, float("-inf"))
        head = head_kv * GROUP + gl.arange(0, GROUP, COLUMN)
        gl.store(_place(outputs[1], split, out_row, head), lse)
        out = acc * (1.0 / divisor)[None, :]
        o_ptrs = _place(outputs[0], split, out_row, head)[None, :]
        o_ptrs += gl.arange(0, DIM, ROW)[:, None]
        gl.store(o_ptrs, out.to(outputs[0][0].dtype.element_ty))
        if joined[0] is not None:
            _join_if_last(outputs, joined, place, out_row + 1, 1, GROUP, DIM, MAX_JOINED_SPLITS)


@gluon.jit(
    do_not_specialize=[
        "stride_o_s", "stride_l_s", "stride_table_b", "num_seqs", "num_pages", "num_tokens",
        "max_seqlen_k", "row_begin", "row_end", "num_splits",
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
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    TOPK: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    MAX_JOINED_SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A row and one KV head against one split's share of the blocks that the row selected.

    If the program is a cluster, each of its multiprocessors has a split of its own.

    Limit: memory bandwidth; for few rows the latency of ids, then pages, then keys.
    """
    CLUSTER: gl.constexpr = gl.num_ctas()
    # Rows of padding come last, so that they keep no other from starting.
    if CLUSTER > 1:
        out_row = gl.program_id(0) // HEADS_KV
        head_kv = gl.program_id(0) % HEADS_KV
        split = _rank()
    else:
        programs_per_row = HEADS_KV * num_splits
        out_row = gl.program_id(0) // programs_per_row
        head_kv = gl.program_id(0) % programs_per_row % HEADS_KV
        split = gl.program_id(0) % programs_per_row // HEADS_KV
    PART: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = _operand([GROUP, DIM], dtype, CLUSTER)
    p_layout: gl.constexpr = _operand([GROUP, PART], dtype, CLUSTER)
    plain: gl.constexpr = _plain(CLUSTER)
    barriers: gl.constexpr = _barriers(CLUSTER)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], v_desc.layout)
    q_tile = gl.allocate_shared_memory(dtype, [GROUP, DIM], q_layout)
    p_tile = gl.allocate_shared_memory(dtype, [GROUP, PART], p_layout)
    last_ring = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    ready = gl.allocate_shared_memory(gl.int64, [1], barriers)
    mbarrier.init(ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    rings = (k_ring, v_ring, last_ring, k_full, v_full, empty)
    batch = (
        cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, num_seqs, row_end, num_tokens, max_seqlen_k,
    )  # fmt: skip
    queries = (q_ptr, stride_q_t, stride_q_h)
    ids = (ids_ptr, stride_i_t, stride_i_h, stride_i_k)
    sources = (k_desc, v_desc, block_table_ptr, stride_table_b, num_pages)
    outputs = (
        (out_ptr, stride_o_s, stride_o_t, stride_o_h),
        (lse_ptr, stride_l_s, stride_l_t, stride_l_h),
    )
    joined = (
        counters_ptr,
        out_row * HEADS_KV + head_kv,
        num_splits,
        (final_out_ptr, 0, stride_fo_t, stride_fo_h),
        (final_lse_ptr, 0, stride_fl_t, stride_fl_h),
    )
    if CLUSTER > 1:
        joined = _prepare()
    place = (row_begin + out_row, out_row, head_kv, split)
    copied = (rings, ready, queries, sources, ids, place, num_splits, batch)
    attended = (rings, q_tile, p_tile, queries, outputs, joined, place, softmax_scale)
    if CLUSTER > 1:
        gl.warp_specialize(
            [
                (_attend_parts, (attended, GROUP, MAX_JOINED_SPLITS, PDL)),
                (_copy_parts, (copied, GROUP, TOPK, PAGED, PACKED, BLOCK_B, PDL)),
                (_stand_by, ()),
                (_stand_by, ()),
            ],
            worker_num_warps=[1, 1, 2],
            worker_num_regs=[88, 88, 88],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_parts, (attended, GROUP, MAX_JOINED_SPLITS, PDL)),
                (_copy_parts, (copied, GROUP, TOPK, PAGED, PACKED, BLOCK_B, PDL)),
            ],
            worker_num_warps=[1],
            worker_num_regs=[88],
        )
