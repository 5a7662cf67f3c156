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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_LOWEST = gl.constexpr(-3.0e38)
_LARGEST = gl.constexpr(2**31 - 1)
_BLOCK_SIZE = gl.constexpr(128)
# Shifts the rows of padding to where no key is.
_BEFORE_ALL_KEYS = gl.constexpr(-(2**30))

# Triton 3.9 renamed the copy and the barrier.
_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


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
def _next_slot(slot, phase, STAGES: gl.constexpr):
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _find_sequence(row, batch, BLOCK_B: gl.constexpr):
    """Sequence of a row and the shift from its row to its position; one warp looks."""
    cu_seqlens_q_ptr, seqused_k_ptr, num_seqs, _, _ = batch
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    found_b = 0
    found_shift = 0
    for first_b in range(0, num_seqs + 1, BLOCK_B):
        b = first_b + gl.arange(0, BLOCK_B, LANES)
        start = gl.load(cu_seqlens_q_ptr + b, mask=b <= num_seqs, other=_LARGEST)
        end = gl.load(cu_seqlens_q_ptr + b + 1, mask=b < num_seqs, other=_LARGEST)
        seqused = gl.load(seqused_k_ptr + b, mask=b < num_seqs, other=0)
        mine = (start <= row) & (row < end)
        shift = gl.where(b < num_seqs, seqused - end, _BEFORE_ALL_KEYS)
        found_b += gl.sum(gl.where(mine, b, 0), 0)
        found_shift += gl.sum(gl.where(mine, shift, 0), 0)
    return found_b, found_shift


@gluon.jit
def _tile_rows(tile, batch, tiles_per_seq, TILE_T: gl.constexpr):
    """Sequence, first row, end row and shift from row to position, of a tile of several tokens.

    Every sequence has `tiles_per_seq` tiles, padding (sequence `num_seqs`) the others.
    """
    cu_seqlens_q_ptr, seqused_k_ptr, num_seqs, row_begin, row_end = batch
    b = gl.minimum(tile // tiles_per_seq, num_seqs)
    start = gl.load(cu_seqlens_q_ptr + b)
    end = gl.load(cu_seqlens_q_ptr + b + 1, mask=b < num_seqs, other=_LARGEST)
    seqused = gl.load(seqused_k_ptr + b, mask=b < num_seqs, other=0)
    first = gl.minimum(gl.maximum(start, row_begin), row_end)
    first += (tile - b * tiles_per_seq) * TILE_T
    limit = gl.minimum(gl.minimum(gl.maximum(end, row_begin), row_end), first + TILE_T)
    return b, first, limit, gl.where(b < num_seqs, seqused - end, _BEFORE_ALL_KEYS)


@gluon.jit
def _load_ids(ids, rows, limit, slots, head_kv, TOPK: gl.constexpr):
    """The ids in some slots of some rows; -1 where there is no such row or slot."""
    ids_ptr, stride_i_t, stride_i_h, stride_i_k = ids
    i_ptrs = ids_ptr + head_kv.to(gl.int64) * stride_i_h
    i_ptrs += rows.to(gl.int64) * stride_i_t + slots.to(gl.int64) * stride_i_k
    return gl.load(i_ptrs, mask=(rows < limit) & (slots < TOPK), other=-1)


@gluon.jit
def _prefetch_pages(sources, b, position):
    """Have the first 4096 entries of a sequence's page table fetched while its ids are on the way.

    Without waiting, and into L2 alone: which entries are wanted, the ids will say.
    """
    _, _, block_table_ptr, stride_table_b, _, _ = sources
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    # One entry of every 128 bytes.
    entry = gl.arange(0, 128, LANES) * 32
    last = gl.maximum(position >> _log2(_BLOCK_SIZE), 0)
    row_ptr = block_table_ptr + b.to(gl.int64) * stride_table_b
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [row_ptr + gl.minimum(entry, last)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


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
    the union, how many lanes up to it do, the block, and the bits of the tokens that selected it.
    """
    ENTRIES: gl.constexpr = _next_power_of_2(TILE_T * TOPK, 32)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile, tiles_per_seq, head_kv, _ = place
    row_begin = batch[3]
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
    if PAGED:
        if b < batch[2]:
            _prefetch_pages(sources, b, limit - 1 + shift)
    chosen = (block >= 0) & (block <= (first + t + shift) >> _log2(_BLOCK_SIZE))
    members = chosen.to(gl.int32)
    if TILE_T > 1:
        members = _find_members(block, ids, first, limit, shift, head_kv, TOPK, TILE_T)
        # The first of those who selected a block brings it.
        chosen = chosen & ((members & ((1 << t) - 1)) == 0)
    rank = gl.associative_scan(chosen.to(gl.int32), 0, _add)
    return b, first + shift, chosen, rank, block, members


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
    TOPK: gl.constexpr,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_B: gl.constexpr,
    PDL: gl.constexpr,
):
    """This split's share of the parts, then a part that nobody selected, which ends them."""
    rings, ready, sources, ids, place, num_splits, batch = copied
    k_ring, v_ring, members_ring, last_ring, k_full, v_full, empty = rings
    k_desc, v_desc, block_table_ptr, stride_table_b, num_pages, first_key_ptr = sources
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
        gdc_wait()
    num_seqs = batch[2]
    b, position, chosen, rank, block, members = _list_blocks(
        ids, sources, place, batch, TOPK, TILE_T, PAGED, BLOCK_B
    )
    if PAGED:
        page = gl.load(
            block_table_ptr + b.to(gl.int64) * stride_table_b + block, mask=chosen, other=0
        )
        page = gl.minimum(gl.maximum(page, 0), num_pages - 1)
    first_key = gl.to_tensor(0)
    if first_key_ptr is not None:
        first_key = gl.load(first_key_ptr + b, mask=b < num_seqs, other=0)
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
def _release(empty, slot):
    # One thread arrives for all four warps: none of them may still wait for this phase.
    _barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _clear_unseen(v_tile, keys, PIECE: gl.constexpr):
    """Zero the values from row `keys` on: no key is there yet, and 0 x NaN would spoil the sum."""
    ROWS: gl.constexpr = v_tile.shape[0]
    DIM: gl.constexpr = v_tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for first in gl.static_range(0, ROWS, PIECE):
        if keys < first + PIECE:
            piece = v_tile.slice(first, PIECE)
            n = first + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT))
            values = piece.load(LAYOUT)
            seen = (n < keys)[:, None]
            piece.store(gl.where(seen, values, gl.zeros([PIECE, DIM], values.dtype, LAYOUT)))


@gluon.jit
def _attend_parts(attended, WARPGROUP: gl.constexpr, GROUP: gl.constexpr, PDL: gl.constexpr):
    """One warpgroup: the queries of its tokens of the tile against the parts that they selected."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rings, q_tiles, p_tiles, inputs, outputs, place, batch = attended
    k_ring, v_ring, members_ring, last_ring, k_full, v_full, empty = rings
    q_ptr, stride_q_t, stride_q_h, softmax_scale = inputs
    out_ptr, stride_o_s, stride_o_t, stride_o_h, lse_ptr, stride_l_s, stride_l_t, stride_l_h = (
        outputs
    )
    tile, tiles_per_seq, head_kv, split = place
    row_begin = batch[3]
    q_tile = q_tiles.index(WARPGROUP)
    p_tile = p_tiles.index(WARPGROUP)
    COLUMNS: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    TOKENS: gl.constexpr = COLUMNS // GROUP
    TILE_T: gl.constexpr = q_tiles.shape[0] * TOKENS
    STAGES: gl.constexpr = k_ring.shape[0]
    PART: gl.constexpr = k_ring.shape[3]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])

    if TILE_T == 1:
        first = row_begin + tile
        limit = first + 1
    else:
        _, first, limit, _ = _tile_rows(tile, batch, tiles_per_seq, TILE_T)
    copy_column = gl.arange(0, COLUMNS, gl.SliceLayout(1, COPY))
    copy_t = (first + WARPGROUP * TOKENS + copy_column // GROUP)[:, None]
    copy_h = (head_kv * GROUP + copy_column % GROUP)[:, None]
    copy_d = gl.arange(0, DIM, gl.SliceLayout(0, COPY))[None, :]
    # [COLUMNS, DIM]
    q = gl.load(
        q_ptr + copy_t.to(gl.int64) * stride_q_t + copy_h.to(gl.int64) * stride_q_h + copy_d,
        mask=copy_t < limit,
        other=0.0,
    )
    q_tile.store(q)
    fence_async_shared()
    _barrier()

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
    divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
    lse = gl.where(weight_sum > 0, (top + gl.log2(divisor)) * _LN_2, float("-inf"))
    live = first + t < limit
    row = (first + t - row_begin).to(gl.int64)
    head = (head_kv * GROUP + column % GROUP).to(gl.int64)
    split = split.to(gl.int64)
    l_ptrs = lse_ptr + split * stride_l_s + row * stride_l_t + head * stride_l_h
    gl.store(l_ptrs, lse, mask=live)
    o_ptrs = out_ptr + split * stride_o_s + row * stride_o_t + head * stride_o_h
    d = gl.arange(0, DIM, ROW)
    out = acc * (1.0 / divisor)[None, :]
    gl.store(o_ptrs[None, :] + d[:, None], out.to(out_ptr.dtype.element_ty), mask=live[None, :])


@gluon.jit(
    do_not_specialize=[
        "stride_o_s", "stride_l_s", "stride_table_b", "num_seqs", "num_pages", "row_begin",
        "row_end", "num_splits", "tiles_per_seq",
    ],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr",
    ],
)  # fmt: skip
def _sparse_attention_decode_kernel(
    q_ptr,
    k_desc,
    v_desc,
    ids_ptr,
    out_ptr,
    lse_ptr,
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
    stride_table_b,
    num_seqs,
    num_pages,
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
    WARPGROUPS: gl.constexpr,
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
    COLUMNS: gl.constexpr = TILE_T * GROUP // WARPGROUPS
    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, DIM], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, PART], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, PART, DIM], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, COLUMNS, DIM], q_layout)
    p_tiles = gl.allocate_shared_memory(dtype, [WARPGROUPS, COLUMNS, PART], p_layout)
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
    batch = (cu_seqlens_q_ptr, seqused_k_ptr, num_seqs, row_begin, row_end)
    inputs = (q_ptr, stride_q_t, stride_q_h, softmax_scale)
    outputs = (
        out_ptr, stride_o_s, stride_o_t, stride_o_h, lse_ptr, stride_l_s, stride_l_t, stride_l_h,
    )  # fmt: skip
    ids = (ids_ptr, stride_i_t, stride_i_h, stride_i_k)
    sources = (k_desc, v_desc, block_table_ptr, stride_table_b, num_pages, first_key_ptr)
    place = (tile, tiles_per_seq, head_kv, split)
    copied = (rings, ready, sources, ids, place, num_splits, batch)
    attended = (rings, q_tiles, p_tiles, inputs, outputs, place, batch)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_parts, (attended, W0, GROUP, PDL)),
                (_copy_parts, (copied, TOPK, TILE_T, PAGED, PACKED, BLOCK_B, PDL)),
            ],
            worker_num_warps=[1],
            worker_num_regs=[88],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_parts, (attended, W0, GROUP, PDL)),
                (_attend_parts, (attended, W1, GROUP, PDL)),
                (_copy_parts, (copied, TOPK, TILE_T, PAGED, PACKED, BLOCK_B, PDL)),
            ],
            worker_num_warps=[4, 1],
            worker_num_regs=[160, 96],
        )
