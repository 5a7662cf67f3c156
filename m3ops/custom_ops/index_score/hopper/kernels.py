"""Gluon kernel for Hopper: one copying warp feeds two multiplying warpgroups."""

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

_LARGEST = gl.constexpr(2**31 - 1)
# Shifts the rows of padding to where no key is.
_BEFORE_ALL_KEYS = gl.constexpr(-(2**30))

# Triton 3.9 renamed the copy and the barrier.
_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@constexpr_function
def _log2(n):
    return n.bit_length() - 1


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sequence_rows(b, batch, EARLY: gl.constexpr = False):
    """First row, end row and shift from row to position of the rows of `b` that are scored.

    Padding is sequence `num_seqs`. With `EARLY` nothing stays in L1: it may be written yet.
    """
    cu_seqlens_q_ptr, seqused_k_ptr, num_seqs, max_keys, row_begin, row_end = batch
    CACHE: gl.constexpr = ".cg" if EARLY else ""
    starts = cu_seqlens_q_ptr + b
    start = gl.load(starts, mask=b <= num_seqs, other=_LARGEST, cache_modifier=CACHE)
    end = gl.load(starts + 1, mask=b < num_seqs, other=_LARGEST, cache_modifier=CACHE)
    seqused = gl.load(seqused_k_ptr + b, mask=b < num_seqs, other=0, cache_modifier=CACHE)
    first = gl.minimum(gl.maximum(start, row_begin), row_end)
    limit = gl.minimum(gl.maximum(end, row_begin), row_end)
    # Whatever the metadata hold, no row stands past the last key that the storage has room for.
    shift = gl.minimum(seqused - end, max_keys - limit)
    return first, limit, gl.where(b < num_seqs, shift, _BEFORE_ALL_KEYS)


@gluon.jit
def _tiles_between(first, limit, TILE_T: gl.constexpr):
    return gl.maximum(limit - first + TILE_T - 1, 0) >> _log2(TILE_T)


@gluon.jit
def _visible_blocks(position, BLOCK_SIZE: gl.constexpr):
    return gl.maximum((position >> _log2(BLOCK_SIZE)) + 1, 0)


@gluon.jit
def _sum_of_quotients(n, DIVISOR: gl.constexpr):
    """The sum of ``max(i // DIVISOR, 0)`` over all ``i < n``."""
    n = gl.maximum(n, 0)
    quotient = n >> _log2(DIVISOR)
    return quotient * n - (quotient * (quotient + 1) >> 1) * DIVISOR


@gluon.jit
def _cost(tiles, position, TILE_T: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Cost of the first `tiles` tiles of a sequence whose first row stands at `position`.

    A block costs 2 and a tile's queries 1. Tiles count as full.
    """
    tiles = tiles.to(gl.int64)
    # Tile i sees (first + i) // (BLOCK_SIZE // TILE_T) blocks.
    first = (position.to(gl.int64) + BLOCK_SIZE - 1 + TILE_T) >> _log2(TILE_T)
    blocks = _sum_of_quotients(first + tiles, BLOCK_SIZE // TILE_T)
    blocks -= _sum_of_quotients(first, BLOCK_SIZE // TILE_T)
    # A score buffer that fits in memory keeps this small.
    return (tiles + 2 * blocks).to(gl.int32)


@gluon.jit
def _sequence_costs(b, batch, TILE_T: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    first, limit, shift = _sequence_rows(b, batch)
    return _cost(_tiles_between(first, limit, TILE_T), first + shift, TILE_T, BLOCK_SIZE)


@gluon.jit
def _find_share(batch, TILE_T: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_B: gl.constexpr):
    """This program's part of the cost of all tiles, and the tile in which it ends.

    Returns its begin and end, the sequence and the tile in it, and the cost up to the tile's end.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    num_seqs = batch[2]
    total = 0
    for first_b in range(0, num_seqs + 1, BLOCK_B):
        b = first_b + gl.arange(0, BLOCK_B, LANES)
        total += gl.sum(_sequence_costs(b, batch, TILE_T, BLOCK_SIZE), 0)
    part = total // gl.num_programs(0)
    longer_parts = total % gl.num_programs(0)
    begin = part * gl.program_id(0) + gl.minimum(gl.program_id(0), longer_parts)
    end = begin + part + gl.where(gl.program_id(0) < longer_parts, 1, 0)

    found_b = 0
    found_before = 0
    before = 0
    for first_b in range(0, num_seqs + 1, BLOCK_B):
        b = first_b + gl.arange(0, BLOCK_B, LANES)
        costs = _sequence_costs(b, batch, TILE_T, BLOCK_SIZE)
        upto = before + gl.associative_scan(costs, 0, _add)
        mine = (upto - costs < end) & (end <= upto)
        found_b += gl.sum(gl.where(mine, b, 0), 0)
        found_before += gl.sum(gl.where(mine, upto - costs, 0), 0)
        before += gl.sum(costs, 0)
    first, limit, shift = _sequence_rows(found_b, batch)
    # Ends in this tile, before the other.
    tile = gl.to_tensor(0)
    other = _tiles_between(first, limit, TILE_T)
    while other - tile > 1:
        middle = (tile + other) >> 1
        if found_before + _cost(middle, first + shift, TILE_T, BLOCK_SIZE) < end:
            tile = middle
        else:
            other = middle
    upto = found_before + _cost(tile + 1, first + shift, TILE_T, BLOCK_SIZE)
    return begin, end, found_b, tile, gl.where(begin < end, upto, begin)


@gluon.jit
def _tile_work(
    share, tile, upto, rows, num_columns, TILE_T: gl.constexpr, BLOCK_SIZE: gl.constexpr
):
    """First and end row of a tile, the cost before it, and its blocks that lie in the share.

    Of these blocks the first, the end, and the first that a row of the tile does not see wholly.
    """
    begin, end = share
    first, limit, shift = rows
    row = first + tile * TILE_T
    row_limit = gl.minimum(row + TILE_T, limit)
    before = upto - 1 - 2 * _visible_blocks(row + TILE_T - 1 + shift, BLOCK_SIZE)
    most = gl.minimum(_visible_blocks(row_limit - 1 + shift, BLOCK_SIZE), num_columns)
    # A block belongs to the share that has the first unit of its cost.
    block_begin = gl.maximum(begin - before, 0) >> 1
    block_end = gl.minimum((end - before) >> 1, most)
    whole = gl.maximum(row + shift + 1, 0) >> _log2(BLOCK_SIZE)
    return row, row_limit, before, block_begin, block_end, whole


@gluon.jit
def _previous_tile(b, tile, more, rows, batch, TILE_T: gl.constexpr):
    """Sequence, tile in it and rows of the sequence; if there is no `more`, of no matter which."""
    first, limit, shift = rows
    if tile == 0:
        while (tile == 0) & more:
            b -= 1
            first, limit, shift = _sequence_rows(b, batch)
            tile = _tiles_between(first, limit, TILE_T)
    return b, tile - 1, (first, limit, shift)


@gluon.jit
def _next_slot(slot, phase, STAGES: gl.constexpr):
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _find_block(
    block,
    table_ptr,
    num_pages,
    outer,
    first_key,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """Page (or sequence) of a block, and the token in it where the block starts."""
    if PAGED:
        page = gl.load(table_ptr + block)
        return gl.minimum(gl.maximum(page, 0), num_pages - 1), 0 * block
    return outer, block * BLOCK_SIZE + first_key


@gluon.jit
def _load_queries(q_desc, row, q_tiles, q_full, HALF: gl.constexpr):
    """Fetch the two pieces of a warpgroup's half of the tile whose first row is `row`."""
    mbarrier.expect(q_full.index(HALF), 2 * q_desc.block_type.nbytes)
    for piece in gl.static_range(2 * HALF, 2 * HALF + 2):
        first = row + piece * q_tiles.shape[1]
        _load_async(q_desc, [first, 0, 0], q_full.index(HALF), q_tiles.index(piece))


@gluon.jit
def _copy_tiles(
    rings,
    share,
    place,
    batch,
    keys,
    num_columns,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """For every tile its queries and its blocks of keys, in the order in which they are used."""
    k_ring, k_full, k_empty, q_tiles, q_full, q_empty = rings
    q_desc, k_desc, block_table_ptr, stride_table_b, num_pages, first_key_ptr = keys
    BLOCK_SIZE: gl.constexpr = k_desc.block_type.shape[1]
    begin = share[0]
    b, tile, upto = place
    num_seqs = batch[2]
    rows = _sequence_rows(b, batch)
    slot = 0
    phase = 0
    q_phase = 0
    while upto > begin:
        row, _, upto, block, block_end, _ = _tile_work(
            share, tile, upto, rows, num_columns, TILE_T, BLOCK_SIZE
        )
        if block < block_end:
            table_ptr = block_table_ptr
            if PAGED:
                table_ptr = block_table_ptr + b.to(gl.int64) * stride_table_b
            first_key = gl.to_tensor(0)
            if first_key_ptr is not None:
                first_key = gl.load(first_key_ptr + b, mask=b < num_seqs, other=0)
            sequence = b
            if PACKED:
                sequence = gl.to_tensor(0)
            outer, token = _find_block(
                block, table_ptr, num_pages, sequence, first_key, PAGED, BLOCK_SIZE
            )
            mbarrier.wait(q_empty.index(0), q_phase ^ 1)
            q_phase ^= 1
            _load_queries(q_desc, row, q_tiles, q_full, 0)
            first_block = block
            while block < block_end:
                # Looked up one block ahead: its page is known when the slot comes free.
                next_outer, next_token = _find_block(
                    gl.minimum(block + 1, block_end - 1),
                    table_ptr,
                    num_pages,
                    sequence,
                    first_key,
                    PAGED,
                    BLOCK_SIZE,
                )
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                _load_async(k_desc, [outer, token, 0], k_full.index(slot), k_ring.index(slot))
                if block == first_block:
                    _load_queries(q_desc, row, q_tiles, q_full, 1)
                slot, phase = _next_slot(slot, phase, STAGES)
                outer = next_outer
                token = next_token
                block += 1
        b, tile, rows = _previous_tile(b, tile, upto > begin, rows, batch, TILE_T)


@gluon.jit
def _release(empty, slot):
    # One thread arrives for all four warps: none of them may still wait for this phase.
    _barrier()
    mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _multiply(queries, k_ring, slot, acc):
    """Start queries K^T over the accumulator `acc`, ``[64, BLOCK_SIZE]``."""
    keys = k_ring.index(slot).reshape([k_ring.shape[2], k_ring.shape[3]]).permute((1, 0))
    return warpgroup_mma(queries, keys, acc, use_acc=False, is_async=True)


@gluon.jit
def _masked_max(dots, positions, block):
    """The largest dot product of each row with the keys of `block` that it sees."""
    BLOCK_SIZE: gl.constexpr = dots.shape[1]
    n = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(0, dots.type.layout))[None, :]
    last = (positions - block * BLOCK_SIZE)[:, None]
    # Bits 1 and 2 of a column are the thread's: what is compared are constants, not registers.
    seen = (n & ~6) <= last - (n & 6)
    return gl.max(gl.where(seen, dots, float("-inf")), 1)


@gluon.jit
def _score_blocks(
    k_ring,
    k_full,
    k_empty,
    slot,
    phase,
    queries,
    low_ptrs,
    to_high,
    masks,
    positions,
    blocks,
    stride_s_j,
    STAGES: gl.constexpr,
):
    """Two times 64 rows against some blocks: one half is multiplied while the other is reduced.

    Scores of the upper half lie `to_high` elements after those of the lower. In every product's
    time the other half is reduced: the assembler gives up overlap where more than one is running
    and either is read.
    """
    low_q, high_q = queries
    low_mask, high_mask = masks
    low_positions, high_positions = positions
    block, block_end, whole = blocks
    BLOCK_SIZE: gl.constexpr = k_ring.shape[2]
    ACC: gl.constexpr = low_q.type.layout.parent
    acc = gl.zeros([low_q.shape[0], BLOCK_SIZE], gl.float32, ACC)
    mbarrier.wait(k_full.index(slot), phase)
    low = warpgroup_mma_wait(0, deps=[_multiply(low_q, k_ring, slot, acc)])
    high = acc
    while block < block_end - 1:
        offset = block.to(gl.int64) * stride_s_j
        masked = block >= whole
        running = _multiply(high_q, k_ring, slot, high)
        if masked:
            best = _masked_max(low, low_positions, block)
        else:
            best = gl.max(low, 1)
        gl.store(low_ptrs + offset, best, low_mask)
        next_slot, next_phase = _next_slot(slot, phase, STAGES)
        mbarrier.wait(k_full.index(next_slot), next_phase)
        high = warpgroup_mma_wait(0, deps=[running])
        running = _multiply(low_q, k_ring, next_slot, low)
        _release(k_empty, slot)
        # Else the compiler puts this barrier before the next product, when none is running.
        _barrier()
        if masked:
            best = _masked_max(high, high_positions, block)
        else:
            best = gl.max(high, 1)
        gl.store(low_ptrs + (offset + to_high), best, high_mask)
        low = warpgroup_mma_wait(0, deps=[running])
        slot = next_slot
        phase = next_phase
        block += 1
    # A tile's last block is masked; where the share ends before, the mask leaves out nothing.
    offset = block.to(gl.int64) * stride_s_j
    running = _multiply(high_q, k_ring, slot, high)
    gl.store(low_ptrs + offset, _masked_max(low, low_positions, block), low_mask)
    high = warpgroup_mma_wait(0, deps=[running])
    _release(k_empty, slot)
    gl.store(low_ptrs + (offset + to_high), _masked_max(high, high_positions, block), high_mask)
    return _next_slot(slot, phase, STAGES)


@gluon.jit
def _store_visible(visible_ptr, rows, row_begin, shift, mask, BLOCK_SIZE: gl.constexpr):
    gl.store(visible_ptr + (rows - row_begin), _visible_blocks(rows + shift, BLOCK_SIZE), mask)


@gluon.jit
def _score_tiles(
    rings,
    share,
    place,
    batch,
    outputs,
    num_columns,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    TILE_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup: its half of every tile's rows."""
    k_ring, k_full, k_empty, q_tiles, q_full, q_empty = rings
    scores_ptr, stride_s_t, stride_s_h, stride_s_j, visible_ptr = outputs
    begin = share[0]
    b, tile, upto = place
    row_begin = batch[4]
    BLOCK_SIZE: gl.constexpr = k_ring.shape[2]
    DIM: gl.constexpr = k_ring.shape[3]
    ROWS: gl.constexpr = HEADS * q_tiles.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_SIZE, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)

    m = gl.arange(0, ROWS, ROW)
    low_t = (2 * HALF * ROWS + m) // HEADS
    high_t = low_t + ROWS // HEADS
    heads = m % HEADS
    rows = _sequence_rows(b, batch)
    slot = 0
    phase = 0
    q_phase = 0
    while upto > begin:
        row, row_limit, upto, block, block_end, whole = _tile_work(
            share, tile, upto, rows, num_columns, TILE_T, BLOCK_SIZE
        )
        low_rows = row + low_t
        high_rows = row + high_t
        low_live = low_rows < row_limit
        high_live = high_rows < row_limit
        shift = rows[2]
        if visible_ptr is not None:
            # Whoever has a tile's first unit of cost.
            if begin <= upto:
                first_head = heads == 0
                _store_visible(
                    visible_ptr, low_rows, row_begin, shift, low_live & first_head, BLOCK_SIZE
                )
                _store_visible(
                    visible_ptr, high_rows, row_begin, shift, high_live & first_head, BLOCK_SIZE
                )
        if block < block_end:
            mbarrier.wait(q_full.index(HALF), q_phase)
            low_q = q_tiles.index(2 * HALF).reshape([ROWS, DIM]).load(OPERAND)
            high_q = q_tiles.index(2 * HALF + 1).reshape([ROWS, DIM]).load(OPERAND)
            # The registers are read from now on.
            fence_async_shared()
            _release(q_empty, 0)
            q_phase ^= 1
            head_ptrs = scores_ptr + heads.to(gl.int64) * stride_s_h
            slot, phase = _score_blocks(
                k_ring,
                k_full,
                k_empty,
                slot,
                phase,
                (low_q, high_q),
                head_ptrs + (low_rows - row_begin).to(gl.int64) * stride_s_t,
                # Added where it is used: pointers of its own would not fit into the registers.
                stride_s_t.to(gl.int64) * (ROWS // HEADS),
                (low_live, high_live),
                (low_rows + shift, high_rows + shift),
                (block, block_end, whole),
                stride_s_j,
                STAGES,
            )
        b, tile, rows = _previous_tile(b, tile, upto > begin, rows, batch, TILE_T)


@gluon.jit(
    do_not_specialize=[
        "stride_table_b", "stride_s_t", "stride_s_h", "stride_s_j", "num_seqs", "num_pages",
        "num_tokens", "max_seqlen_k", "row_begin", "row_end", "num_columns",
    ],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr", "visible_ptr",
    ],
)  # fmt: skip
def _index_score_hopper_kernel(
    q_desc,
    k_desc,
    scores_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_table_ptr,
    first_key_ptr,
    visible_ptr,
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
    num_columns,
    HEADS: gl.constexpr,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_B: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """An equal share of all (tile, block) pairs per program, the tile's rows in registers.

    A tile's rows are the (token, head) pairs of `TILE_T` tokens. Nothing is summed over blocks, so
    the shares change no bit. Limit: tensor cores, and for few blocks the latency of the first.
    """
    BLOCK_SIZE: gl.constexpr = k_desc.block_type.shape[1]
    DIM: gl.constexpr = k_desc.block_type.shape[2]
    PIECES: gl.constexpr = 4
    max_keys = gl.minimum(num_tokens, max_seqlen_k)
    batch = (cu_seqlens_q_ptr, seqused_k_ptr, num_seqs, max_keys, row_begin, row_end)

    q_tiles = gl.allocate_shared_memory(
        q_desc.dtype, [PIECES, TILE_T // PIECES, HEADS, DIM], q_desc.layout
    )
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_SIZE, DIM], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(q_empty.index(0), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    fence_async_shared()
    # Copies of what lies before the first key and query, which are zeros and need no memory: the
    # descriptors are on the chip when the share is known.
    mbarrier.expect(ready, k_desc.block_type.nbytes + q_desc.block_type.nbytes)
    _load_async(k_desc, [0, -BLOCK_SIZE, 0], ready, k_ring.index(STAGES - 1))
    _load_async(q_desc, [-TILE_T, 0, 0], ready, q_tiles.index(PIECES - 1))

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    begin, end, b, tile, upto = _find_share(batch, TILE_T, BLOCK_SIZE, BLOCK_B)
    mbarrier.wait(ready, 0)

    rings = (k_ring, k_full, k_empty, q_tiles, q_full, q_empty)
    share = (begin, end)
    place = (b, tile, upto)
    outputs = (scores_ptr, stride_s_t, stride_s_h, stride_s_j, visible_ptr)
    keys = (q_desc, k_desc, block_table_ptr, stride_table_b, num_pages, first_key_ptr)
    LOWER: gl.constexpr = 0
    UPPER: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _score_tiles,
                (rings, share, place, batch, outputs, num_columns, LOWER, HEADS, TILE_T, STAGES),
            ),
            (
                _score_tiles,
                (rings, share, place, batch, outputs, num_columns, UPPER, HEADS, TILE_T, STAGES),
            ),
            (
                _copy_tiles,
                (rings, share, place, batch, keys, num_columns, TILE_T, PAGED, PACKED, STAGES),
            ),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )
