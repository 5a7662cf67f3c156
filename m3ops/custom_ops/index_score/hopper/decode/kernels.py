"""Gluon kernel for Hopper's decode rows: one copying warp feeds one multiplying warpgroup.

A tile is a few neighbouring tokens of one sequence. Its (token, head) pairs are the *columns* of
the products and the keys of a block the rows, ``S^T = K q^T``, so that few queries need no padding.
All blocks that all tiles see lie in one row, tile after tile, which is cut evenly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..kernels import (
    _add,
    _barrier,
    _load_async,
    _next_slot,
    _sequence_rows,
    _store_visible,
    _tiles_between,
    _visible_blocks,
)

# Entries of a page table that a warp fetches at once.
_PAGES = gl.constexpr(64)
# What a slot of the ring says about its block.
_ROW = gl.constexpr(0)
_POSITION = gl.constexpr(1)
_BLOCK = gl.constexpr(2)
_TILE = gl.constexpr(3)
_FIELDS = gl.constexpr(4)


@gluon.jit
def _tile_blocks(first, limit, shift, num_columns, BLOCK_SIZE: gl.constexpr):
    """Blocks that every tile of a sequence is scored against: those that its last row sees."""
    visible = gl.minimum(_visible_blocks(limit - 1 + shift, BLOCK_SIZE), num_columns)
    return gl.where(first < limit, visible, 0)


@gluon.jit
def _sequence_blocks(
    b, batch, num_columns, TILE_T: gl.constexpr, BLOCK_SIZE: gl.constexpr, EARLY: gl.constexpr
):
    """Blocks of all tiles of a sequence, and of one of them."""
    first, limit, shift = _sequence_rows(b, batch, EARLY)
    blocks = _tile_blocks(first, limit, shift, num_columns, BLOCK_SIZE)
    return _tiles_between(first, limit, TILE_T) * blocks, blocks


@gluon.jit
def _find_in(b, all_blocks, tile_blocks, before, begin):
    """Sums over the sequences `b`: which has block `begin`, how far in, and its tiles' blocks."""
    upto = before + gl.associative_scan(all_blocks, 0, _add)
    mine = (upto - all_blocks <= begin) & (begin < upto)
    found_b = gl.sum(gl.where(mine, b, 0), 0)
    found_block = gl.sum(gl.where(mine, begin - (upto - all_blocks), 0), 0)
    return found_b, found_block, gl.sum(gl.where(mine, tile_blocks, 0), 0)


@gluon.jit
def _find_share(
    batch,
    num_columns,
    TILE_T: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_B: gl.constexpr,
    EARLY: gl.constexpr,
):
    """How many blocks this program scores, and the first: sequence, tile in it, block, and how many
    of that tile's blocks are in the share.
    """
    LANES: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [1], [0])
    num_seqs = batch[2]
    lanes = gl.arange(0, BLOCK_B, LANES)
    all_blocks, tile_blocks = _sequence_blocks(lanes, batch, num_columns, TILE_T, BLOCK_SIZE, EARLY)
    some = gl.sum(all_blocks, 0)
    total = some
    for first_b in range(BLOCK_B, num_seqs, BLOCK_B):
        more_blocks, _ = _sequence_blocks(
            first_b + lanes, batch, num_columns, TILE_T, BLOCK_SIZE, EARLY
        )
        total += gl.sum(more_blocks, 0)
    share = total // gl.num_programs(0)
    longer_shares = total - share * gl.num_programs(0)
    begin = share * gl.program_id(0) + gl.minimum(gl.program_id(0), longer_shares)
    share += gl.where(gl.program_id(0) < longer_shares, 1, 0)

    b, block, blocks = _find_in(lanes, all_blocks, tile_blocks, 0, begin)
    before = some
    for first_b in range(BLOCK_B, num_seqs, BLOCK_B):
        more_b = first_b + lanes
        more_blocks, more_tile_blocks = _sequence_blocks(
            more_b, batch, num_columns, TILE_T, BLOCK_SIZE, EARLY
        )
        found = _find_in(more_b, more_blocks, more_tile_blocks, before, begin)
        b += found[0]
        block += found[1]
        blocks += found[2]
        before += gl.sum(more_blocks, 0)
    # Offsets that decrease may have found several.
    b = gl.minimum(b, num_seqs)
    blocks = gl.minimum(blocks, num_columns)
    tile = block // gl.maximum(blocks, 1)
    block -= tile * blocks
    return share, b, tile, block, gl.minimum(share, blocks - block)


@gluon.jit
def _load_pages(keys, b, block, num_blocks, EARLY: gl.constexpr):
    """Pages of `num_blocks` blocks from `block` on, of at most `_PAGES`, over a warp's lanes."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    _, block_table_ptr, stride_table_b, num_pages, _, _, _, _ = keys
    i = gl.arange(0, _PAGES, LANES)
    entry_ptrs = block_table_ptr + b.to(gl.int64) * stride_table_b + block + i
    pages = gl.load(entry_ptrs, mask=i < num_blocks, other=0, cache_modifier=".cg" if EARLY else "")
    return gl.minimum(gl.maximum(pages, 0), num_pages - 1)


@gluon.jit
def _load_first_key(keys, b, num_seqs, EARLY: gl.constexpr):
    first_key_ptr = keys[4]
    first_key = gl.to_tensor(0)
    if first_key_ptr is not None:
        first_key = gl.load(
            first_key_ptr + b, mask=b < num_seqs, other=0, cache_modifier=".cg" if EARLY else ""
        )
    return first_key


@gluon.jit
def _prefetch_blocks(
    keys,
    b,
    block,
    num_blocks,
    pages,
    first_key,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """Have L2 fetch the first `PREFETCH` blocks from `block` on, a lane each."""
    _, _, _, _, _, k_ptr, stride_k_outer, num_tokens = keys
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = gl.arange(0, _PAGES, LANES)
    if PAGED:
        offset = pages.to(gl.int64) * stride_k_outer
    else:
        token = first_key + (block + i) * BLOCK_SIZE
        token = gl.minimum(gl.maximum(token, 0), num_tokens - BLOCK_SIZE)
        offset = token.to(gl.int64) * DIM
        if not PACKED:
            offset += b.to(gl.int64) * stride_k_outer
    wanted = (i < PREFETCH) & (i < num_blocks)
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred wanted;
            setp.ne.b32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [k_ptr + offset, wanted.to(gl.int32), i * 0 + BLOCK_SIZE * DIM * 2],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _write(info, slot, FIELD: gl.constexpr, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    info.index(slot * _FIELDS + FIELD).store(gl.full([1], value, gl.int32, LAYOUT))


@gluon.jit
def _read(info, slot, FIELD: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(info.index(slot * _FIELDS + FIELD).load(LAYOUT), 0)


@gluon.jit
def _copy_blocks(
    copied,
    TILE_T: gl.constexpr,
    PAGED: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_B: gl.constexpr,
    PREFETCH: gl.constexpr,
    PDL: gl.constexpr,
):
    """This program's blocks, each tile's queries with the first of its blocks, and an end mark.

    Before its predecessor has ended, it guesses its share from what lengths and pages are then, and
    has L2 fetch the first blocks of it. All is read again afterwards, past L1: the guess only says
    which addresses to ask for first.
    """
    rings, ready, q_desc, keys, batch, num_columns = copied
    k_ring, q_ring, info, k_full, k_empty, q_empty = rings
    k_desc = keys[0]
    BLOCK_SIZE: gl.constexpr = k_desc.block_type.shape[1]
    DIM: gl.constexpr = k_desc.block_type.shape[2]
    STAGES: gl.constexpr = k_ring.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes
    Q_BYTES: gl.constexpr = q_desc.block_type.nbytes
    num_seqs = batch[2]
    i = gl.arange(0, _PAGES, LANES)

    # Copies of what lies before the first key and query, which is zeros that come from nowhere: the
    # copy engine has its descriptors when the first block is known.
    mbarrier.expect(ready, K_BYTES + Q_BYTES)
    _load_async(k_desc, [0, -BLOCK_SIZE, 0], ready, k_ring.index(STAGES - 1))
    _load_async(q_desc, [-TILE_T, 0, 0], ready, q_ring.index(1))
    pages = gl.zeros([_PAGES], gl.int32, LANES)
    remaining = 0
    b = 0
    tile = 0
    block = 0
    num = 0
    first = 0
    limit = 0
    shift = 0
    first_key = 0
    # The same code twice, whose second run finds its instructions where the first has had them
    # brought.
    for attempt in range(0 if PREFETCH > 0 else 1, 2):
        if PDL:
            if attempt == 1:
                gdc_wait()
                gdc_launch_dependents()
        # On their way while the lengths are.
        if PAGED:
            pages = _load_pages(keys, b, block, num, True)
        first, limit, shift = _sequence_rows(b, batch, True)
        first_key = _load_first_key(keys, b, num_seqs, True)
        remaining, share_b, tile, share_block, share_num = _find_share(
            batch, num_columns, TILE_T, BLOCK_SIZE, BLOCK_B, True
        )
        if (share_b != b) | (share_block != block) | (share_num != num):
            b = share_b
            block = share_block
            num = share_num
            if PAGED:
                pages = _load_pages(keys, b, block, num, True)
            first, limit, shift = _sequence_rows(b, batch, True)
            first_key = _load_first_key(keys, b, num_seqs, True)
        if attempt == 0:
            _prefetch_blocks(
                keys, b, block, num, pages, first_key, PAGED, PACKED, BLOCK_SIZE, DIM, PREFETCH
            )
    mbarrier.wait(ready, 0)
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    while (remaining > 0) & (b < num_seqs):
        row = first + tile * TILE_T
        blocks = _tile_blocks(first, limit, shift, num_columns, BLOCK_SIZE)
        num = gl.minimum(blocks - block, remaining)
        if num > 0:
            live = gl.minimum(limit - row, TILE_T)
            outer = b
            if PACKED:
                outer = gl.to_tensor(0)
            mbarrier.wait(q_empty.index(q_slot), q_phase ^ 1)
            for n in range(0, num):
                if PAGED:
                    outer = gl.sum(gl.where(i == n % _PAGES, pages, 0), 0)
                    token = gl.to_tensor(0)
                else:
                    token = first_key + (block + n) * BLOCK_SIZE
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                # Seen by whoever sees the barrier's phase complete.
                _write(info, slot, _ROW, row)
                _write(info, slot, _POSITION, row + shift)
                _write(info, slot, _BLOCK, block + n)
                ends_tile = gl.where(n == num - 1, 2, 0)
                _write(info, slot, _TILE, live * 4 + ends_tile + q_slot)
                _barrier()
                full = k_full.index(slot)
                if n == 0:
                    mbarrier.expect(full, K_BYTES + Q_BYTES)
                    _load_async(k_desc, [outer, token, 0], full, k_ring.index(slot))
                    _load_async(q_desc, [row, 0, 0], full, q_ring.index(q_slot))
                else:
                    mbarrier.expect(full, K_BYTES)
                    _load_async(k_desc, [outer, token, 0], full, k_ring.index(slot))
                if PAGED:
                    if (n + 1) % _PAGES == 0:
                        pages = _load_pages(keys, b, block + n + 1, num - (n + 1), False)
                slot, phase = _next_slot(slot, phase, STAGES)
            q_slot, q_phase = _next_slot(q_slot, q_phase, 2)
            remaining -= num
        if remaining > 0:
            tile += 1
            block = 0 * block
            if (blocks == 0) | (first + tile * TILE_T >= limit):
                tile = 0 * tile
                b += 1
                first, limit, shift = _sequence_rows(b, batch)
                first_key = _load_first_key(keys, b, num_seqs, False)
            if PAGED:
                next_num = _tile_blocks(first, limit, shift, num_columns, BLOCK_SIZE)
                pages = _load_pages(keys, b, block, gl.minimum(next_num, remaining), False)
    mbarrier.wait(k_empty.index(slot), phase ^ 1)
    _write(info, slot, _BLOCK, -1)
    _barrier()
    mbarrier.arrive(k_full.index(slot), count=1)


@gluon.jit
def _score_blocks(scored, HEADS: gl.constexpr, PDL: gl.constexpr):
    """The warpgroup: block after block against the queries of its tile."""
    if PDL:
        gdc_wait()
    rings, outputs, batch = scored
    k_ring, q_ring, info, k_full, k_empty, q_empty = rings
    scores_ptr, stride_s_t, stride_s_h, stride_s_j, visible_ptr = outputs
    num_seqs = batch[2]
    row_begin = batch[4]
    STAGES: gl.constexpr = k_ring.shape[0]
    BLOCK_SIZE: gl.constexpr = k_ring.shape[2]
    DIM: gl.constexpr = k_ring.shape[3]
    COLUMNS: gl.constexpr = q_ring.shape[1] * HEADS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

    if visible_ptr is not None:
        for b in range(gl.program_id(0), num_seqs + 1, gl.num_programs(0)):
            first, limit, shift = _sequence_rows(b, batch)
            for row in range(first, limit, 128):
                rows = row + gl.arange(0, 128, THREADS)
                _store_visible(visible_ptr, rows, row_begin, shift, rows < limit, BLOCK_SIZE)

    column = gl.arange(0, COLUMNS, COLUMN)
    t = column // HEADS
    n = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, ACC))
    s_ptrs = scores_ptr + (column % HEADS).to(gl.int64) * stride_s_h
    zeros = gl.zeros([BLOCK_SIZE, COLUMNS], gl.float32, ACC)
    slot = 0
    phase = 0
    mbarrier.wait(k_full.index(slot), phase)
    block = _read(info, slot, _BLOCK)
    while block >= 0:
        row = _read(info, slot, _ROW)
        position = _read(info, slot, _POSITION)
        tile = _read(info, slot, _TILE)
        q_slot = tile & 1
        k_tile = k_ring.index(slot).reshape([BLOCK_SIZE, DIM])
        q_tile = q_ring.index(q_slot).reshape([COLUMNS, DIM])
        # [BLOCK_SIZE, COLUMNS]
        dots = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dots = warpgroup_mma_wait(0, deps=[dots])
        # One thread arrives for all four warps: none of them may still read the slot.
        _barrier()
        mbarrier.arrive(k_empty.index(slot), count=1)
        if tile & 2 != 0:
            mbarrier.arrive(q_empty.index(q_slot), count=1)
        last = position + t - block * BLOCK_SIZE
        best = gl.max(gl.where(n[:, None] <= last[None, :], dots, float("-inf")), 0)
        offset = (row - row_begin + t).to(gl.int64) * stride_s_t + block.to(gl.int64) * stride_s_j
        gl.store(s_ptrs + offset, best, mask=t < tile >> 2)
        slot, phase = _next_slot(slot, phase, STAGES)
        mbarrier.wait(k_full.index(slot), phase)
        block = _read(info, slot, _BLOCK)


@gluon.jit(
    do_not_specialize=[
        "stride_table_b", "stride_s_t", "stride_s_h", "stride_s_j", "num_seqs", "num_pages",
        "num_tokens", "max_seqlen_k", "row_begin", "row_end", "num_columns",
    ],
    do_not_specialize_on_alignment=[
        "cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr", "visible_ptr",
    ],
)  # fmt: skip
def _index_score_decode_kernel(
    q_desc,
    k_desc,
    k_ptr,
    scores_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_table_ptr,
    first_key_ptr,
    visible_ptr,
    stride_k_outer,
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
    PREFETCH: gl.constexpr,
    PDL: gl.constexpr,
):
    """An equal share of all blocks of all tiles per program, `STAGES` blocks in flight.

    Programs own whole columns, so the shares change no bit. Limit: memory bandwidth, and for few
    blocks the latency of lengths, pages and keys, which wait for one another.
    """
    BLOCK_SIZE: gl.constexpr = k_desc.block_type.shape[1]
    DIM: gl.constexpr = k_desc.block_type.shape[2]
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_SIZE, DIM], k_desc.layout)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [2, TILE_T, HEADS, DIM], q_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    info = gl.allocate_shared_memory(gl.int32, [STAGES * _FIELDS, 1], plain)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=1)
    fence_async_shared()
    max_keys = gl.minimum(num_tokens, max_seqlen_k)
    batch = (cu_seqlens_q_ptr, seqused_k_ptr, num_seqs, max_keys, row_begin, row_end)
    rings = (k_ring, q_ring, info, k_full, k_empty, q_empty)
    outputs = (scores_ptr, stride_s_t, stride_s_h, stride_s_j, visible_ptr)
    keys = (
        k_desc, block_table_ptr, stride_table_b, num_pages, first_key_ptr, k_ptr, stride_k_outer,
        num_tokens,
    )  # fmt: skip
    copied = (rings, ready, q_desc, keys, batch, num_columns)
    gl.warp_specialize(
        [
            (_score_blocks, ((rings, outputs, batch), HEADS, PDL)),
            (_copy_blocks, (copied, TILE_T, PAGED, PACKED, BLOCK_B, PREFETCH, PDL)),
        ],
        worker_num_warps=[1],
        worker_num_regs=[88],
    )
