"""The kernels of the KV-major road: Triton ones that list and join, a Gluon one that multiplies.

Tokens are cut into chunks. Per chunk and KV head, every block of every sequence has a list of the
*entries* that selected it: a token of the chunk and a slot of its ids, ``token * TOPK + slot``.
Lists are cut into tiles of `TILE_T` entries. Where an entry stands in its list depends on the order
of atomic additions, but no result does: each is computed alone, and they are joined slot by slot.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....common.kernels import block_coordinates, find_tile
from ..kernels import (
    _LN_2,
    _LOG2_E,
    _barrier,
    _clear_unseen,
    _load_async,
    _next_slot,
    _release,
)

# Triton 3.9 renamed the copy and the view.
_store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_reinterpret = getattr(
    gl.shared_memory_descriptor,
    "reinterpret",
    getattr(gl.shared_memory_descriptor, "_reinterpret", None),
)

# Of the Gluon kernel: tokens of a tile, which fill the 64 rows of one warpgroup's products; the
# warpgroups that multiply; bits of an entry that hold a key of its block of 128.
_TILE_T = gl.constexpr(4)
_WARPGROUPS = gl.constexpr(3)
_KEY_BITS = gl.constexpr(7)

_METADATA = ["cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr"]
_COUNTS = [
    "stride_table_b",
    "num_seqs",
    "num_pages",
    "num_tokens",
    "max_seqlen_k",
    "row_begin",
    "row_end",
    "chunk_rows",
    "columns",
    "num_blocks",
    "list_limit",
    "tile_limit",
]


@triton.jit
def _selected(
    ids_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    first_key_ptr,
    stride_i_t,
    stride_i_h,
    stride_i_k,
    num_seqs,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    columns,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """What the tokens of one program selected for one head, ``[BLOCK_T * BLOCK_K]``.

    Returns the entries, which of them exist and which of those are live, and of each its block
    (counted over all sequences) and the last key in it that the token sees.
    """
    b, row, row_limit, shift = find_tile(
        cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, tl.program_id(0), num_seqs, num_tokens,
        max_seqlen_k, row_begin, row_end, BLOCK_T, BLOCK_B,
    )  # fmt: skip
    e = tl.arange(0, BLOCK_T * BLOCK_K)
    rows = row + e // BLOCK_K
    slots = e % BLOCK_K
    exists = (rows < row_limit) & (slots < TOPK)
    head = tl.program_id(1)
    i_ptrs = ids_ptr + rows.to(tl.int64) * stride_i_t + head * stride_i_h + slots * stride_i_k
    ids = tl.load(i_ptrs, exists, -1)
    positions = rows + shift
    live = (ids >= 0) & (positions >= 0) & (ids <= positions // BLOCK_SIZE) & (ids < columns)
    live = live & (tl.zeros_like(e) + b < num_seqs)
    entries = (rows - row_begin) * TOPK + slots
    last_key = tl.minimum(positions - ids * BLOCK_SIZE, BLOCK_SIZE - 1)
    return entries, exists, live, b * columns + ids, last_key


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_METADATA)
def _kv_major_count_kernel(
    balance_ptr,
    ids_ptr,
    counts_ptr,
    places_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    first_key_ptr,
    stride_i_t,
    stride_i_h,
    stride_i_k,
    num_seqs,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    chunk_rows,
    columns,
    num_blocks,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the entries of every block and give each its place in the list, -1 if it is dead.

    Limit: atomic additions.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.load(balance_ptr) <= 0:
        return
    chunk = tl.program_id(2)
    begin = row_begin + chunk * chunk_rows
    entries, exists, live, blocks, _ = _selected(
        ids_ptr, cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, stride_i_t, stride_i_h, stride_i_k,
        num_seqs, num_tokens, max_seqlen_k, begin, tl.minimum(begin + chunk_rows, row_end), columns,
        TOPK, BLOCK_SIZE, BLOCK_T, BLOCK_K, BLOCK_B,
    )  # fmt: skip
    part = (chunk * HEADS + tl.program_id(1)).to(tl.int64)
    counts_ptr += part * num_blocks
    places = tl.atomic_add(
        counts_ptr + tl.where(live, blocks, 0), tl.full(blocks.shape, 1, tl.int32), live, "relaxed"
    )
    places_ptr += part * chunk_rows * TOPK
    tl.store(places_ptr + entries, tl.where(live, places, -1), exists)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_METADATA)
def _kv_major_lists_kernel(
    balance_ptr,
    counts_ptr,
    starts_ptr,
    lists_ptr,
    num_tiles_ptr,
    seqused_k_ptr,
    block_table_ptr,
    first_key_ptr,
    stride_table_b,
    num_seqs,
    num_pages,
    num_tokens,
    columns,
    num_blocks,
    list_limit,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    """Number the lists that are not empty, and the tiles, of one head in one chunk.

    Writes per block ``(first tile, list)`` and per list ``(page or sequence, first token, keys of
    the block, 0)``. Limit: the latency of a prefix sum.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.load(balance_ptr) <= 0:
        return
    part = tl.program_id(0).to(tl.int64)
    counts_ptr += part * num_blocks
    starts_ptr += part * num_blocks * 2
    lists_ptr += part * list_limit * 4
    tiles_before = 0
    lists_before = 0
    for first in range(0, num_blocks, BLOCK_L):
        blocks = first + tl.arange(0, BLOCK_L)
        counts = tl.load(counts_ptr + blocks, blocks < num_blocks, 0)
        filled = counts > 0
        tiles = (counts + TILE_T - 1) // TILE_T
        lists = filled.to(tl.int32)
        tile_starts = tiles_before + tl.cumsum(tiles) - tiles
        indices = lists_before + tl.cumsum(lists) - lists
        tl.store(starts_ptr + blocks * 2, tile_starts, filled)
        tl.store(starts_ptr + blocks * 2 + 1, indices, filled)
        b = blocks // columns
        outers, tokens = block_coordinates(
            blocks % columns, filled, b, num_seqs, block_table_ptr, first_key_ptr, stride_table_b,
            num_pages, num_tokens, LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        num_keys = tl.load(seqused_k_ptr + b, filled, 0) - blocks % columns * BLOCK_SIZE
        l_ptrs = lists_ptr + indices * 4
        tl.store(l_ptrs, outers, filled)
        tl.store(l_ptrs + 1, tokens, filled)
        tl.store(l_ptrs + 2, tl.minimum(num_keys, BLOCK_SIZE), filled)
        tiles_before += tl.sum(tiles)
        lists_before += tl.sum(lists)
    tl.store(num_tiles_ptr + part, tiles_before)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_METADATA)
def _kv_major_place_kernel(
    balance_ptr,
    ids_ptr,
    counts_ptr,
    places_ptr,
    starts_ptr,
    entries_ptr,
    tile_lists_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    first_key_ptr,
    stride_i_t,
    stride_i_h,
    stride_i_k,
    num_seqs,
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    chunk_rows,
    columns,
    num_blocks,
    tile_limit,
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write every entry into its tile, as ``entry * BLOCK_SIZE + last key that it sees``.

    The spare places of a list's last tile get -1. Limit: scattered writes.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.load(balance_ptr) <= 0:
        return
    chunk = tl.program_id(2)
    begin = row_begin + chunk * chunk_rows
    entries, _, live, blocks, last_key = _selected(
        ids_ptr, cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, stride_i_t, stride_i_h, stride_i_k,
        num_seqs, num_tokens, max_seqlen_k, begin, tl.minimum(begin + chunk_rows, row_end), columns,
        TOPK, BLOCK_SIZE, BLOCK_T, BLOCK_K, BLOCK_B,
    )  # fmt: skip
    part = (chunk * HEADS + tl.program_id(1)).to(tl.int64)
    places = tl.load(places_ptr + part * chunk_rows * TOPK + entries, live, 0)
    counts = tl.load(counts_ptr + part * num_blocks + blocks, live, 0)
    starts_ptr += part * num_blocks * 2
    tiles = tl.load(starts_ptr + blocks * 2, live, 0) + places // TILE_T
    lists = tl.load(starts_ptr + blocks * 2 + 1, live, 0)
    tl.store(tile_lists_ptr + part * tile_limit + tiles, lists, live & (places % TILE_T == 0))
    e_ptrs = entries_ptr + (part * tile_limit + tiles) * TILE_T + places % TILE_T
    tl.store(e_ptrs, entries * BLOCK_SIZE + last_key, live)
    last = live & (places == counts - 1)
    for i in tl.static_range(1, TILE_T):
        tl.store(
            e_ptrs + i, tl.full(entries.shape, -1, tl.int32), last & (places % TILE_T + i < TILE_T)
        )


@gluon.jit
def _share(num_tiles_ptr, head):
    """First and end tile of one head that this program takes: tiles are shared out evenly."""
    num_tiles = gl.load(num_tiles_ptr + head)
    program = gl.program_id(0)
    first = program * num_tiles // gl.num_programs(0)
    return first, (program + 1) * num_tiles // gl.num_programs(0)


@gluon.jit
def _load_entries(entries_ptr, tile):
    """The four entries of a tile."""
    e_ptr = entries_ptr + tile * 4
    return gl.load(e_ptr), gl.load(e_ptr + 1), gl.load(e_ptr + 2), gl.load(e_ptr + 3)


@gluon.jit
def _load_place(lists_ptr, index):
    """Page (or sequence) of a listed block, and the token in it where the block starts."""
    p_ptr = lists_ptr + index * 4
    return gl.load(p_ptr), gl.load(p_ptr + 1)


@gluon.jit
def _copy_token(desc, boxes, full, box, entry, row_begin, head_kv, TOPK: gl.constexpr):
    """The query heads of one group of one token, in two halves of the channels.

    A spare entry, -1, fetches a row that nobody looks at.
    """
    GROUP: gl.constexpr = desc.block_type.shape[1]
    HALF_D: gl.constexpr = desc.block_type.shape[2]
    token = row_begin + (entry >> _KEY_BITS) // TOPK
    _load_async(desc, [token, head_kv * GROUP, 0], full, boxes.index(box))
    _load_async(desc, [token, head_kv * GROUP, HALF_D], full, boxes.index(box + _TILE_T))


@gluon.jit
def _copy_tiles(keys, queries, lists, HEADS_KV: gl.constexpr, TOPK: gl.constexpr):
    """The queries of every tile of this program, and K and V wherever a new block begins."""
    k_desc, v_desc, k_ring, v_ring, kv_full, kv_empty = keys
    q_desc, q_boxes, q_full, q_empty, row_begin = queries
    KV_STAGES: gl.constexpr = k_ring.shape[0]
    Q_STAGES: gl.constexpr = q_boxes.shape[0] // (2 * _TILE_T * _WARPGROUPS)
    num_tiles_ptr, entries_ptr, tile_lists_ptr, lists_ptr, tile_limit, list_limit = lists
    kv_slot = 0
    kv_phase = 0
    warpgroup = 0
    q_slot = 0
    q_phase = 0
    for head in range(HEADS_KV):
        first, end = _share(num_tiles_ptr, head)
        if first < end:
            index_ptr = tile_lists_ptr + head * tile_limit
            entry_ptr = entries_ptr + head * tile_limit * 4
            list_ptr = lists_ptr + head * list_limit * 4
            # Looked up one tile, and one block, ahead.
            next_index = gl.load(index_ptr + first)
            outer, token = _load_place(list_ptr, next_index)
            next_0, next_1, next_2, next_3 = _load_entries(entry_ptr, first)
            index = next_index - 1
            for tile in range(first, end):
                entry_0 = next_0
                entry_1 = next_1
                entry_2 = next_2
                entry_3 = next_3
                new = next_index != index
                index = next_index
                ahead = gl.minimum(tile + 1, end - 1)
                next_index = gl.load(index_ptr + ahead)
                next_0, next_1, next_2, next_3 = _load_entries(entry_ptr, ahead)
                if new:
                    full = kv_full.index(kv_slot)
                    mbarrier.wait(kv_empty.index(kv_slot), kv_phase ^ 1)
                    mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
                    _load_async(k_desc, [outer, head, token, 0], full, k_ring.index(kv_slot))
                    _load_async(v_desc, [outer, head, token, 0], full, v_ring.index(kv_slot))
                    kv_slot, kv_phase = _next_slot(kv_slot, kv_phase, KV_STAGES)
                    outer, token = _load_place(list_ptr, gl.minimum(index + 1, list_limit - 1))
                slot = warpgroup * Q_STAGES + q_slot
                full = q_full.index(slot)
                box = slot * 8
                mbarrier.wait(q_empty.index(slot), q_phase ^ 1)
                mbarrier.expect(full, 8 * q_desc.block_type.nbytes)
                _copy_token(q_desc, q_boxes, full, box, entry_0, row_begin, head, TOPK)
                _copy_token(q_desc, q_boxes, full, box + 1, entry_1, row_begin, head, TOPK)
                _copy_token(q_desc, q_boxes, full, box + 2, entry_2, row_begin, head, TOPK)
                _copy_token(q_desc, q_boxes, full, box + 3, entry_3, row_begin, head, TOPK)
                warpgroup += 1
                if warpgroup == _WARPGROUPS:
                    warpgroup = 0
                    q_slot, q_phase = _next_slot(q_slot, q_phase, Q_STAGES)


@gluon.jit
def _of_warp(warp, value_0, value_1, value_2, value_3):
    """What each row's token has: the rows of a token are those of a warp."""
    upper = gl.where(warp == 2, value_2, value_3)
    return gl.where(warp < 2, gl.where(warp == 0, value_0, value_1), upper)


@gluon.jit
def _store_token(desc, boxes, box, entry, head_kv):
    """The result of one entry, if it is not a spare one: the copy engine takes no store at -1."""
    HALF_D: gl.constexpr = desc.block_type.shape[3]
    if entry >= 0:
        _store_async(desc, [head_kv, entry >> _KEY_BITS, 0, 0], boxes.index(box))
        _store_async(desc, [head_kv, entry >> _KEY_BITS, 0, HALF_D], boxes.index(box + _TILE_T))


@gluon.jit
def _leave_blocks(full, empty, slot, phase, count, STAGES: gl.constexpr):
    """Let the block held go, and those up to the next one wanted, which had no tile for this
    warpgroup: these not before they are there, since until then the barrier counts others.
    """
    for _ in range(count):
        mbarrier.wait(full.index(slot), phase)
        _release(empty, slot)
        slot, phase = _next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def _attend_tiles(
    keys,
    queries,
    lists,
    outputs,
    softmax_scale,
    WARPGROUP: gl.constexpr,
    HEADS_KV: gl.constexpr,
):
    """One warpgroup: every third tile of this program, each a softmax over one block."""
    k_ring, v_ring, kv_full, kv_empty = keys
    q_tiles, o_boxes, q_full, q_empty = queries
    num_tiles_ptr, entries_ptr, tile_lists_ptr, lists_ptr, tile_limit, list_limit = lists
    partial_desc, partial_lse_ptr, num_slots = outputs
    ROWS: gl.constexpr = q_tiles.shape[1]
    DIM: gl.constexpr = q_tiles.shape[2]
    GROUP: gl.constexpr = ROWS // _TILE_T
    BLOCK_SIZE: gl.constexpr = k_ring.shape[3]
    KV_STAGES: gl.constexpr = k_ring.shape[0]
    Q_STAGES: gl.constexpr = q_tiles.shape[0] // _WARPGROUPS
    KEYS: gl.constexpr = (1 << _KEY_BITS) - 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_SIZE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)

    row = gl.arange(0, ROWS, ROW)
    warp = row // GROUP
    scale = softmax_scale * _LOG2_E
    q_slot = 0
    q_phase = 0
    # The slot whose result is still being copied out, or -1.
    stored_slot = -1
    # Blocks of this program: the one held, and those before this head's.
    held = 0
    kv_slot = 0
    kv_phase = 0
    blocks_before = 0
    tiles_before = 0
    for head in range(HEADS_KV):
        first, end = _share(num_tiles_ptr, head)
        index_ptr = tile_lists_ptr + head * tile_limit
        entry_ptr = entries_ptr + head * tile_limit * 4
        list_ptr = lists_ptr + head * list_limit * 4
        lse_ptr = partial_lse_ptr + head.to(gl.int64) * num_slots * GROUP
        start = first + (WARPGROUP + _WARPGROUPS - tiles_before % _WARPGROUPS) % _WARPGROUPS
        if first < end:
            first_index = gl.load(index_ptr + first)
            last_index = gl.load(index_ptr + end - 1)
            if start < end:
                next_index = gl.load(index_ptr + start)
                next_0, next_1, next_2, next_3 = _load_entries(entry_ptr, start)
                for tile in range(start, end, _WARPGROUPS):
                    index = next_index
                    entry_0 = next_0
                    entry_1 = next_1
                    entry_2 = next_2
                    entry_3 = next_3
                    ahead = gl.minimum(tile + _WARPGROUPS, end - 1)
                    next_index = gl.load(index_ptr + ahead)
                    next_0, next_1, next_2, next_3 = _load_entries(entry_ptr, ahead)

                    wanted = blocks_before + index - first_index
                    kv_slot, kv_phase = _leave_blocks(
                        kv_full, kv_empty, kv_slot, kv_phase, wanted - held, KV_STAGES
                    )
                    held = wanted
                    mbarrier.wait(kv_full.index(kv_slot), kv_phase)

                    slot = WARPGROUP * Q_STAGES + q_slot
                    q_tile = q_tiles.index(slot)
                    mbarrier.wait(q_full.index(slot), q_phase)
                    k_tile = k_ring.index(kv_slot).reshape([BLOCK_SIZE, DIM])
                    v_tile = v_ring.index(kv_slot).reshape([BLOCK_SIZE, DIM])
                    zeros = gl.zeros([ROWS, BLOCK_SIZE], gl.float32, LOGITS)
                    # [ROWS, BLOCK_SIZE]
                    logits = warpgroup_mma(
                        q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True
                    )
                    if stored_slot >= 0:
                        tma.store_wait(0)
                        _release(q_empty, stored_slot)
                    logits = warpgroup_mma_wait(0, deps=[logits])

                    entry = _of_warp(warp, entry_0, entry_1, entry_2, entry_3)
                    fewest = gl.minimum(
                        gl.minimum(entry_0 & KEYS, entry_1 & KEYS),
                        gl.minimum(entry_2 & KEYS, entry_3 & KEYS),
                    )
                    if fewest < BLOCK_SIZE - 1:
                        n = gl.arange(0, BLOCK_SIZE, gl.SliceLayout(0, LOGITS))
                        seen = n[None, :] <= (entry & KEYS)[:, None]
                        logits = gl.where(seen, logits, float("-inf"))
                        _clear_unseen(v_tile, gl.load(list_ptr + index * 4 + 2), 32)
                    top = gl.max(logits, 1) * scale
                    weights = gl.exp2(logits * scale - top[:, None])
                    weight_sum = gl.sum(weights, 1)
                    zeros = gl.zeros([ROWS, DIM], gl.float32, ACC)
                    # [ROWS, DIM]
                    acc = warpgroup_mma(
                        gl.convert_layout(weights.to(v_ring.dtype), WEIGHTS),
                        v_tile,
                        zeros,
                        use_acc=False,
                        is_async=True,
                    )
                    gl.store(
                        lse_ptr + (entry >> _KEY_BITS) * GROUP + row % GROUP,
                        top + gl.log2(weight_sum),
                        mask=entry >= 0,
                    )
                    acc = warpgroup_mma_wait(0, deps=[acc])

                    # The result takes the place of the queries.
                    share = gl.convert_layout(1.0 / weight_sum, gl.SliceLayout(1, ACC))
                    q_tile.store((acc * share[:, None]).to(q_tile.dtype))
                    fence_async_shared()
                    _barrier()
                    box = slot * 8
                    _store_token(partial_desc, o_boxes, box, entry_0, head)
                    _store_token(partial_desc, o_boxes, box + 1, entry_1, head)
                    _store_token(partial_desc, o_boxes, box + 2, entry_2, head)
                    _store_token(partial_desc, o_boxes, box + 3, entry_3, head)
                    stored_slot = slot
                    q_slot, q_phase = _next_slot(q_slot, q_phase, Q_STAGES)
            blocks_before += last_index - first_index + 1
            tiles_before += end - first
    # Others may have tiles of further blocks, which wait for the places of these.
    _leave_blocks(kv_full, kv_empty, kv_slot, kv_phase, blocks_before - held, KV_STAGES)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["row_begin", "tile_limit", "list_limit", "num_slots"],
    do_not_specialize_on_alignment=["num_tiles_ptr", "entries_ptr", "tile_lists_ptr", "lists_ptr"],
)
def _sparse_attention_kv_major_kernel(
    q_desc,
    k_desc,
    v_desc,
    partial_desc,
    partial_lse_ptr,
    balance_ptr,
    num_tiles_ptr,
    entries_ptr,
    tile_lists_ptr,
    lists_ptr,
    softmax_scale,
    row_begin,
    tile_limit,
    list_limit,
    num_slots,
    HEADS_KV: gl.constexpr,
    TOPK: gl.constexpr,
    KV_STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of four tokens against the block that they selected, for every KV head in turn.

    Each program has an even share of a head's tiles, so a block that many selected is shared out,
    and K and V stay in shared memory for all tiles of a block. Limit: tensor cores.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if gl.load(balance_ptr) <= 0:
        return
    GROUP: gl.constexpr = q_desc.block_type.shape[1]
    ROWS: gl.constexpr = _TILE_T * GROUP
    BLOCK_SIZE: gl.constexpr = k_desc.block_type.shape[2]
    DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    Q_SLOTS: gl.constexpr = _WARPGROUPS * Q_STAGES
    k_ring = gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, BLOCK_SIZE, DIM], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [KV_STAGES, 1, 1, BLOCK_SIZE, DIM], v_desc.layout)
    # A tile is copied token by token and multiplied as a whole: two views of one memory, in which
    # the first 64 channels of all rows lie before the others.
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [Q_SLOTS, ROWS, DIM], q_layout)
    q_boxes = _reinterpret(
        q_tiles, dtype, [Q_SLOTS * 2 * _TILE_T, 1, GROUP, DIM // 2], q_desc.layout
    )
    o_boxes = _reinterpret(
        q_tiles, dtype, [Q_SLOTS * 2 * _TILE_T, 1, 1, GROUP, DIM // 2], partial_desc.layout
    )
    kv_full = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=_WARPGROUPS)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    fence_async_shared()

    keys = (k_ring, v_ring, kv_full, kv_empty)
    queries = (q_tiles, o_boxes, q_full, q_empty)
    lists = (num_tiles_ptr, entries_ptr, tile_lists_ptr, lists_ptr, tile_limit, list_limit)
    outputs = (partial_desc, partial_lse_ptr, num_slots)
    copied_keys = (k_desc, v_desc, k_ring, v_ring, kv_full, kv_empty)
    copied_queries = (q_desc, q_boxes, q_full, q_empty, row_begin)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    W2: gl.constexpr = 2
    gl.warp_specialize(
        [
            (_attend_tiles, (keys, queries, lists, outputs, softmax_scale, W0, HEADS_KV)),
            (_attend_tiles, (keys, queries, lists, outputs, softmax_scale, W1, HEADS_KV)),
            (_attend_tiles, (keys, queries, lists, outputs, softmax_scale, W2, HEADS_KV)),
            (_copy_tiles, (copied_keys, copied_queries, lists, HEADS_KV, TOPK)),
        ],
        worker_num_warps=[4, 4, 1],
        worker_num_regs=[160, 160, 32],
    )


@triton.jit(
    do_not_specialize=["row_begin", "num_rows", "chunk_rows"],
    do_not_specialize_on_alignment=["places_ptr"],
)
def _kv_major_merge_kernel(
    balance_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    places_ptr,
    out_ptr,
    lse_ptr,
    stride_o_t,
    stride_o_h,
    stride_l_t,
    stride_l_h,
    row_begin,
    num_rows,
    chunk_rows,
    HEADS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DIM: tl.constexpr,
    TOPK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the results of a token's live slots by their lse, which is to base 2 here.

    Limit: memory bandwidth.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.load(balance_ptr) <= 0:
        return
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, DIM)
    for item in range(tl.program_id(0), num_rows * HEADS, tl.num_programs(0)):
        head = item % HEADS
        token = item // HEADS
        first = (tl.cast(head, tl.int64) * chunk_rows + token) * TOPK
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        for slot in tl.static_range(TOPK):
            live = tl.load(places_ptr + first + slot) + tl.zeros_like(g) >= 0
            l_ptrs = partial_lse_ptr + (first + slot) * BLOCK_G + g
            top = tl.maximum(top, tl.load(l_ptrs, live, float("-inf")))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, DIM], tl.float32)
        for slot in tl.static_range(TOPK):
            live = tl.load(places_ptr + first + slot) + tl.zeros_like(g) >= 0
            l_ptrs = partial_lse_ptr + (first + slot) * BLOCK_G + g
            weights = tl.exp2(tl.load(l_ptrs, live, float("-inf")) - base)
            # [BLOCK_G, DIM]
            p_ptrs = partial_out_ptr + ((first + slot) * BLOCK_G + g[:, None]) * DIM + d[None, :]
            part = tl.load(p_ptrs, live[:, None], 0.0, eviction_policy="evict_first").to(tl.float32)
            total += weights
            acc += part * weights[:, None]
        divisor = tl.where(total > 0, total, 1.0)
        row = tl.cast(row_begin + token, tl.int64)
        heads = head * BLOCK_G + g
        o_ptrs = out_ptr + row * stride_o_t + heads[:, None] * stride_o_h + d[None, :]
        tl.store(o_ptrs, (acc / divisor[:, None]).to(out_ptr.dtype.element_ty))
        lse = tl.where(total > 0, (top + tl.log2(divisor)) * _LN_2, float("-inf"))
        tl.store(lse_ptr + row * stride_l_t + heads * stride_l_h, lse)
