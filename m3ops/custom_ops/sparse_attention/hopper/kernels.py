"""Gluon kernel for Hopper: one copying warp feeds two multiplying warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .layouts import _blocked

_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)
_LOWEST = gl.constexpr(-3.0e38)

# Triton 3.9 renamed the copy and the barrier.
_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _next_slot(slot, phase, STAGES: gl.constexpr):
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _copy_block(desc, ring, full, empty, slot, phase, outer, head_kv, token):
    """Fill one slot of a ring once both warpgroups have left it."""
    mbarrier.wait(empty.index(slot), phase ^ 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    _load_async(desc, [outer, head_kv, token, 0], full.index(slot), ring.index(slot))


@gluon.jit
def _find_block(
    entry,
    table_ptr,
    num_pages,
    b,
    first_key,
    PAGED: gl.constexpr,
    TILE_T: gl.constexpr,
    N: gl.constexpr,
):
    """Page (or sequence) of a listed block, and the token in it where the block starts."""
    block = entry >> TILE_T
    if PAGED:
        page = gl.load(table_ptr + block)
        return gl.minimum(gl.maximum(page, 0), num_pages - 1), 0 * block
    return b, block * N + first_key


@gluon.jit
def _tile_of(work, item, HEADS_KV: gl.constexpr):
    """An item of work, which is a tile and a KV head. Past the last one there are no rows.

    Returns the sequence, the first row, the end row, the shift from row to position, the KV head,
    the list, how many of its entries are wholly visible, and all of them.
    """
    tiles_ptr, lists_ptr, counts_ptr, width, num_items, num_seqs = work
    # The longest lists first, so that the last items are short.
    tile = gl.maximum(num_items - 1 - item, 0) // HEADS_KV
    head_kv = item % HEADS_KV
    b = gl.load(tiles_ptr + tile * 4)
    first = gl.load(tiles_ptr + tile * 4 + 1)
    limit = gl.load(tiles_ptr + tile * 4 + 2)
    shift = gl.load(tiles_ptr + tile * 4 + 3)
    list_index = tile * HEADS_KV + head_kv
    whole = gl.load(counts_ptr + list_index * 2)
    total = gl.load(counts_ptr + list_index * 2 + 1)
    limit = gl.where(item < num_items, limit, 0)
    # Spare tiles, and rows of padding: nothing to attend to.
    total = gl.where((b < num_seqs) & (first < limit), total, 0)
    list_ptr = lists_ptr + list_index.to(gl.int64) * width
    return b, first, limit, shift, head_kv, list_ptr, whole, total


@gluon.jit
def _copy_blocks(
    rings,
    work,
    keys,
    HEADS_KV: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    TILE_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every listed block of every item, in order, K before V."""
    k_ring, k_full, k_empty, v_ring, v_full, v_empty = rings
    k_desc, v_desc, block_table_ptr, stride_table_b, num_pages, first_key_ptr = keys
    _, lists_ptr, _, _, num_items, _ = work
    N: gl.constexpr = k_desc.block_type.shape[2]
    slot = 0
    phase = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        b, _, _, _, head_kv, list_ptr, _, total = _tile_of(work, item, HEADS_KV)
        if total > 0:
            table_ptr = lists_ptr
            if PAGED:
                table_ptr = block_table_ptr + b.to(gl.int64) * stride_table_b
            first_key = gl.to_tensor(0)
            if first_key_ptr is not None:
                first_key = gl.load(first_key_ptr + b)
            sequence = b
            if PACKED:
                sequence = gl.to_tensor(0)
            outer, token = _find_block(
                gl.load(list_ptr), table_ptr, num_pages, sequence, first_key, PAGED, TILE_T, N
            )
            for i in range(total):
                # Looked up one block ahead: its page is known when the slot comes free.
                next_entry = gl.load(list_ptr + gl.minimum(i + 1, total - 1))
                next_outer, next_token = _find_block(
                    next_entry, table_ptr, num_pages, sequence, first_key, PAGED, TILE_T, N
                )
                _copy_block(k_desc, k_ring, k_full, k_empty, slot, phase, outer, head_kv, token)
                _copy_block(v_desc, v_ring, v_full, v_empty, slot, phase, outer, head_kv, token)
                slot, phase = _next_slot(slot, phase, STAGES)
                outer = next_outer
                token = next_token


@gluon.jit
def _release(empty, slot):
    # One thread arrives for all four warps: none of them may still wait for this phase.
    _barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _clear_unseen(v_tile, keys, PART_ROWS: gl.constexpr):
    """Zero the values from row `keys` on: no key is there yet, and 0 x NaN would spoil the sum.

    Both warpgroups do this to the same rows, so neither waits for the other.
    """
    ROWS: gl.constexpr = v_tile.shape[0]
    DIM: gl.constexpr = v_tile.shape[1]
    LAYOUT: gl.constexpr = _blocked([1, 8], [2, 16], [4, 1], [1, 0], gl.num_ctas())
    for first in gl.static_range(0, ROWS, PART_ROWS):
        if keys < first + PART_ROWS:
            part = v_tile if PART_ROWS == ROWS else v_tile.slice(first, PART_ROWS)
            n = first + gl.arange(0, PART_ROWS, gl.SliceLayout(1, LAYOUT))
            values = part.load(LAYOUT)
            seen = (n < keys)[:, None]
            part.store(gl.where(seen, values, gl.zeros([PART_ROWS, DIM], values.dtype, LAYOUT)))
    fence_async_shared()


@gluon.jit
def _multiply_keys(q_tile, k_ring, slot, LOGITS: gl.constexpr):
    """Start q K^T, ``[ROWS, BLOCK_SIZE]``."""
    ROWS: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    BLOCK_SIZE: gl.constexpr = k_ring.shape[3]
    keys = k_ring.index(slot).reshape([BLOCK_SIZE, DIM]).permute((1, 0))
    zeros = gl.zeros([ROWS, BLOCK_SIZE], gl.float32, LOGITS)
    return warpgroup_mma(q_tile, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _multiply_values(weights, v_ring, slot, acc):
    """Start adding weights V, ``[ROWS, DIM]``."""
    v_tile = v_ring.index(slot).reshape([v_ring.shape[3], v_ring.shape[4]])
    return warpgroup_mma(weights, v_tile, acc, is_async=True)


@gluon.jit
def _weigh(logits, seen, masked, member, scale, top, weight_sum):
    """One step of the running softmax; if masked, row by row only the first `seen` keys count.

    A token that did not select the block keeps its sums: weights 0, decay 1.
    """
    BLOCK_SIZE: gl.constexpr = logits.shape[1]
    if masked:
        n = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(0, logits.type.layout))
        logits = gl.where(n[None, :] < seen[:, None], logits, float("-inf"))
    new_top = gl.where(member, gl.maximum(top, gl.max(logits, 1) * scale), top)
    decay = gl.exp2(top - new_top)
    offset = gl.where(member, new_top, float("inf"))
    weights = gl.exp2(logits * scale - offset[:, None])
    return weights, decay, new_top, weight_sum * decay + gl.sum(weights, 1)


@gluon.jit
def _load_queries(
    work,
    item,
    queries,
    q_tile,
    HALF: gl.constexpr,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Half of an item's rows, (token, head) pairs: ``[ROWS, DIM]``."""
    ptr, stride_t, stride_h = queries
    _, first, limit, _, head_kv, _, _, _ = _tile_of(work, item, HEADS_KV)
    HALF_T: gl.constexpr = q_tile.shape[0] // GROUP
    t, h, d = _places(first + HALF * HALF_T, head_kv, q_tile, GROUP)
    return gl.load(ptr + t.to(gl.int64) * stride_t + h.to(gl.int64) * stride_h + d, t < limit, 0.0)


@gluon.jit
def _places(first, head_kv, q_tile, GROUP: gl.constexpr):
    """Tokens, heads and channels of half a tile, in a layout that reads and writes whole lines."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, q_tile.shape[0], gl.SliceLayout(1, COPY))[:, None]
    d = gl.arange(0, q_tile.shape[1], gl.SliceLayout(0, COPY))[None, :]
    return first + row // GROUP, head_kv * GROUP + row % GROUP, d


@gluon.jit
def _attend(
    attended,
    HALF: gl.constexpr,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One warpgroup: its half of every tile's tokens against the blocks that any of them selected.

    An item's queries are on their way before the item before it has been written.
    """
    rings, work, queries, q_tiles, outputs, softmax_scale = attended
    q_tile = q_tiles.index(HALF)
    HALF_T: gl.constexpr = q_tile.shape[0] // GROUP
    num_items = work[4]
    slot = 0
    phase = 0
    q = _load_queries(work, gl.program_id(0), queries, q_tile, HALF, HEADS_KV, GROUP)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        # The copying warp has read these before, and so they are in L1.
        _, first, limit, shift, head_kv, list_ptr, whole, total = _tile_of(work, item, HEADS_KV)
        first += HALF * HALF_T
        q_tile.store(q)
        fence_async_shared()
        inputs = (q_tile, list_ptr, whole, total, softmax_scale)
        out, lse, slot, phase = _attend_tile(
            rings, inputs, (first, limit, shift), slot, phase, HALF, GROUP, STAGES, OVERLAP
        )
        next_item = item + gl.num_programs(0)
        q = _load_queries(work, next_item, queries, q_tile, HALF, HEADS_KV, GROUP)
        _write_tile(out, lse, q_tile, outputs, (first, limit, head_kv), GROUP)


@gluon.jit
def _write_tile(out, lse, q_tile, outputs, rows, GROUP: gl.constexpr):
    out_ptr, stride_o_t, stride_o_h, lse_ptr, stride_l_t, stride_l_h = outputs
    first, limit, head_kv = rows
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, q_tile.shape[0], lse.type.layout)
    t = first + row // GROUP
    h = head_kv * GROUP + row % GROUP
    gl.store(
        lse_ptr + t.to(gl.int64) * stride_l_t + h.to(gl.int64) * stride_l_h, lse, mask=t < limit
    )
    # Through shared memory, for whole lines.
    q_tile.store(out.to(q_tile.dtype))
    t, h, d = _places(first, head_kv, q_tile, GROUP)
    gl.store(
        out_ptr + t.to(gl.int64) * stride_o_t + h.to(gl.int64) * stride_o_h + d,
        q_tile.load(COPY),
        mask=t < limit,
    )


@gluon.jit
def _attend_tile(
    rings,
    inputs,
    rows,
    slot,
    phase,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Output and logsumexp of half a tile, and the slot and phase of the ring after it."""
    k_ring, k_full, k_empty, v_ring, v_full, v_empty = rings
    q_tile, list_ptr, whole, total, softmax_scale = inputs
    first, limit, shift = rows
    ROWS: gl.constexpr = q_tile.shape[0]
    DIM: gl.constexpr = q_tile.shape[1]
    BLOCK_SIZE: gl.constexpr = k_ring.shape[3]
    HALF_T: gl.constexpr = ROWS // GROUP
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_SIZE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)

    row = gl.arange(0, ROWS, ROW)
    token = first + row // GROUP
    scale = softmax_scale * _LOG2_E
    # Finite, so that a row without keys so far needs no case of its own.
    top = gl.full([ROWS], _LOWEST, gl.float32, ROW)
    weight_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
    # With OVERLAP, a block's product with V is held back and runs beside the next block's softmax:
    # its weights, its slot (or -1) and its place in the list.
    weights = gl.zeros([ROWS, BLOCK_SIZE], v_ring.dtype, WEIGHTS)
    held_slot = -1
    held_i = 0
    next_entry = gl.load(list_ptr)
    for i in range(total):
        entry = next_entry
        next_entry = gl.load(list_ptr + gl.minimum(i + 1, total - 1))
        members = (entry >> (HALF * HALF_T)) & ((1 << HALF_T) - 1)
        mbarrier.wait(k_full.index(slot), phase)
        if members == 0:
            _release(k_empty, slot)
            # Held any longer, V would keep the copies from the block that this waits for.
            if (held_slot >= 0) & (i - held_i >= STAGES - 1):
                acc = _multiply_values(weights, v_ring, held_slot, acc)
                acc = warpgroup_mma_wait(0, deps=[acc])
                _release(v_empty, held_slot)
                held_slot = -1
            mbarrier.wait(v_full.index(slot), phase)
            _release(v_empty, slot)
        else:
            first_key = (entry >> (2 * HALF_T)) * BLOCK_SIZE
            seen = token + (shift + 1 - first_key)
            masked = i >= whole
            member = ((members >> (row // GROUP)) & 1) != 0
            if held_slot >= 0:
                logits = _multiply_keys(q_tile, k_ring, slot, LOGITS)
                running = _multiply_values(weights, v_ring, held_slot, acc)
                logits = warpgroup_mma_wait(1, deps=[logits])
                _release(k_empty, slot)
                parts, decay, top, weight_sum = _weigh(
                    logits, seen, masked, member, scale, top, weight_sum
                )
                # The wait for V keeps the assembler from moving the other wait up.
                mbarrier.wait(v_full.index(slot), phase)
                acc, parts, decay = warpgroup_mma_wait(0, deps=[running, parts, decay])
                _release(v_empty, held_slot)
            else:
                logits = _multiply_keys(q_tile, k_ring, slot, LOGITS)
                logits = warpgroup_mma_wait(0, deps=[logits])
                _release(k_empty, slot)
                parts, decay, top, weight_sum = _weigh(
                    logits, seen, masked, member, scale, top, weight_sum
                )
                mbarrier.wait(v_full.index(slot), phase)
            acc = acc * decay[:, None]
            weights = gl.convert_layout(parts.to(v_ring.dtype), WEIGHTS)
            if masked:
                v_tile = v_ring.index(slot).reshape([BLOCK_SIZE, DIM])
                _clear_unseen(v_tile, limit + shift - first_key, 32)
            if OVERLAP:
                held_slot = slot
                held_i = i
            else:
                acc = _multiply_values(weights, v_ring, slot, acc)
                acc = warpgroup_mma_wait(0, deps=[acc])
                _release(v_empty, slot)
        slot, phase = _next_slot(slot, phase, STAGES)
    if held_slot >= 0:
        acc = _multiply_values(weights, v_ring, held_slot, acc)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _release(v_empty, held_slot)

    divisor = gl.where(weight_sum > 0, weight_sum, 1.0)
    lse = gl.where(weight_sum > 0, (top + gl.log2(divisor)) * _LN_2, float("-inf"))
    return acc * (1.0 / divisor)[:, None], lse, slot, phase


@gluon.jit(
    do_not_specialize=["stride_table_b", "num_seqs", "num_pages", "width", "num_items"],
    do_not_specialize_on_alignment=["block_table_ptr", "first_key_ptr"],
)
def _sparse_attention_hopper_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    lists_ptr,
    counts_ptr,
    balance_ptr,
    block_table_ptr,
    first_key_ptr,
    softmax_scale,
    stride_q_t,
    stride_q_h,
    stride_o_t,
    stride_o_h,
    stride_l_t,
    stride_l_h,
    stride_table_b,
    num_seqs,
    num_pages,
    width,
    num_items,
    HEADS_KV: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Tiles of tokens, and a KV head each, against the unions of the blocks that they selected.

    K and V pass through shared memory once for a tile; each half of it is multiplied with the
    blocks of its own tokens only. Programs take items in turns, and while one is written, K and V
    of the next arrive. Limit: tensor cores.
    """
    # The KV-major road is faster here.
    if balance_ptr is not None:
        if gl.load(balance_ptr) > 0:
            return
    BLOCK_SIZE: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    HALF_ROWS: gl.constexpr = TILE_T // 2 * GROUP

    dtype: gl.constexpr = k_desc.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_ROWS, DIM], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [2, HALF_ROWS, DIM], q_layout)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_SIZE, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_SIZE, DIM], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    rings = (k_ring, k_full, k_empty, v_ring, v_full, v_empty)
    work = (tiles_ptr, lists_ptr, counts_ptr, width, num_items, num_seqs)
    queries = (q_ptr, stride_q_t, stride_q_h)
    outputs = (out_ptr, stride_o_t, stride_o_h, lse_ptr, stride_l_t, stride_l_h)
    keys = (k_desc, v_desc, block_table_ptr, stride_table_b, num_pages, first_key_ptr)
    attended = (rings, work, queries, q_tiles, outputs, softmax_scale)
    LOWER: gl.constexpr = 0
    UPPER: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_attend, (attended, LOWER, HEADS_KV, GROUP, STAGES, OVERLAP)),
            (_attend, (attended, UPPER, HEADS_KV, GROUP, STAGES, OVERLAP)),
            (_copy_blocks, (rings, work, keys, HEADS_KV, PAGED, PACKED, TILE_T, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
