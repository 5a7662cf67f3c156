"""Triton kernels of ``sparse_attention``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.kernels import block_coordinates, element_offset, find_row, find_tile

_METADATA = ["cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr"]
_COUNTS = [
    "stride_table_b",
    "num_seqs",
    "num_pages",
    "num_tokens",
    "max_seqlen_k",
    "row_begin",
    "row_end",
    "stride_o_s",
    "stride_l_s",
    "num_splits",
]

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LARGEST = tl.constexpr(2**31 - 1)
# Every so many tiles enter the balance between two roads.
_BALANCE_STRIDE = tl.constexpr(8)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_METADATA)
def _sparse_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
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
    stride_k_outer,
    stride_k_token,
    stride_k_h,
    stride_v_outer,
    stride_v_token,
    stride_v_h,
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
    num_tokens,
    max_seqlen_k,
    row_begin,
    row_end,
    num_splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The heads of one group of one row against one share of the row's block ids.

    Limit: memory bandwidth for few rows; for many, L2 and the padding of a 16-row product.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    local_row = tl.program_id(0).to(tl.int64)
    row = row_begin + local_row
    GROUP_TILES: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    head_kv = (tl.program_id(1) // GROUP_TILES).to(tl.int64)
    group_head = tl.program_id(1) % GROUP_TILES * BLOCK_G + tl.arange(0, BLOCK_G)
    split = tl.program_id(2)
    heads = head_kv * GROUP + group_head
    in_group = group_head < GROUP
    d = tl.arange(0, BLOCK_D)
    b, position = find_row(
        cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, row.to(tl.int32), num_seqs, num_tokens,
        max_seqlen_k, row_begin, row_end, BLOCK_B,
    )  # fmt: skip
    own_block = tl.where(position < 0, -1, position // BLOCK_SIZE)

    # The ids and pages of this share are fetched at once: inside the loop, a load that waits for a
    # load that waits for a load would leave nothing to run ahead.
    share = (TOPK + num_splits - 1) // num_splits
    slots = tl.arange(0, BLOCK_K)
    in_share = (slots >= split * share) & (slots < (split + 1) * share) & (slots < TOPK)
    ids = tl.load(
        ids_ptr + row * stride_i_t + head_kv * stride_i_h + slots * stride_i_k, in_share, -1
    )
    live = (ids >= 0) & (ids <= own_block)
    ids = tl.where(live, ids, -1)
    last_slot = tl.max(tl.where(live, slots, -1))
    outers, tokens = block_coordinates(
        tl.where(live, ids, 0), live, b, num_seqs, block_table_ptr, first_key_ptr, stride_table_b,
        num_pages, num_tokens, LAYOUT, BLOCK_SIZE,
    )  # fmt: skip
    k_ptr += head_kv * stride_k_h
    v_ptr += head_kv * stride_v_h

    # [BLOCK_G, BLOCK_D]
    q_mask = in_group[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + row * stride_q_t + heads[:, None] * stride_q_h + d[None, :], q_mask, 0.0)
    if UPCAST:
        q = q.to(tl.float32)
    scale = tl.cast(softmax_scale, tl.float32) * _LOG2_E
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    PARTS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    for step in range(split * share * PARTS, (last_slot + 1) * PARTS):
        block = tl.sum(tl.where(slots == step // PARTS, ids, 0))
        n = step % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
        # [BLOCK_N]
        seen = n <= tl.where(block < 0, -1, position - block * BLOCK_SIZE)
        mask = seen[:, None] & (d < DIM)[None, :]
        outer = tl.sum(tl.where(slots == step // PARTS, outers, 0))
        token = tl.sum(tl.where(slots == step // PARTS, tokens, 0))
        k_block_ptr = k_ptr + element_offset(outer, token, stride_k_outer, stride_k_token)
        v_block_ptr = v_ptr + element_offset(outer, token, stride_v_outer, stride_v_token)
        # [BLOCK_N, BLOCK_D]
        k = tl.load(k_block_ptr + n[:, None] * stride_k_token + d[None, :], mask, 0.0)
        v = tl.load(v_block_ptr + n[:, None] * stride_v_token + d[None, :], mask, 0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        # [BLOCK_G, BLOCK_N]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        logits = tl.where(seen[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top

    divisor = tl.where(total > 0, total, 1.0)
    acc = acc / divisor[:, None]
    lse = tl.where(total > 0, (top + tl.log2(divisor)) * _LN_2, float("-inf"))
    o_ptr = out_ptr + split * stride_o_s + local_row * stride_o_t
    tl.store(
        o_ptr + heads[:, None] * stride_o_h + d[None, :], acc.to(out_ptr.dtype.element_ty), q_mask
    )
    l_ptr = lse_ptr + split * stride_l_s + local_row * stride_l_t
    tl.store(l_ptr + heads * stride_l_h, lse, in_group)


@triton.jit(do_not_specialize=["stride_po_s", "stride_pl_s", "num_splits"])
def _sparse_attention_merge_kernel(
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    stride_po_s,
    stride_po_t,
    stride_po_h,
    stride_pl_s,
    stride_pl_t,
    stride_pl_h,
    stride_o_t,
    stride_o_h,
    stride_l_t,
    stride_l_h,
    num_splits,
    DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the splits of one head of one row by their lse. Limit: memory bandwidth."""
    if PDL:
        # Its predecessor, which wrote the splits, has waited for all before it.
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    # [BLOCK_S]
    lses = tl.load(
        partial_lse_ptr + s * stride_pl_s + row * stride_pl_t + head * stride_pl_h,
        mask=s < num_splits,
        other=float("-inf"),
    )
    top = tl.max(lses)
    weights = tl.exp(lses - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights)
    # [BLOCK_S, BLOCK_D]
    outs = tl.load(
        partial_out_ptr
        + s[:, None] * stride_po_s
        + row * stride_po_t
        + head * stride_po_h
        + d[None, :],
        mask=(s < num_splits)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    divisor = tl.where(total > 0, total, 1.0)
    out = tl.sum(outs * weights[:, None], 0) / divisor
    o_ptrs = out_ptr + row * stride_o_t + head * stride_o_h + d
    tl.store(o_ptrs, out.to(out_ptr.dtype.element_ty), d < DIM)
    lse = tl.where(total > 0, top + tl.log(divisor), float("-inf"))
    tl.store(lse_ptr + row * stride_l_t + head * stride_l_h, lse)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_METADATA)
def _sparse_attention_union_kernel(
    ids_ptr,
    tiles_ptr,
    lists_ptr,
    counts_ptr,
    balance_ptr,
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
    HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    KV_MAJOR_COST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The union of the blocks that the tokens of one tile selected, for one KV head.

    Writes ``tiles[tile] = (sequence, first row, end row, position shift)``, and per head ascending
    entries ``block << TILE_T | tokens that selected it`` and their counts: those wholly visible to
    every token of the tile, and all. Adds to `balance_ptr`, if given, what walking the unions
    costs more than `KV_MAJOR_COST` per token and block. Limit: the latency of a small sort.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b, row, row_limit, shift = find_tile(
        cu_seqlens_q_ptr, seqused_k_ptr, first_key_ptr, tile, num_seqs, num_tokens, max_seqlen_k,
        row_begin, row_end, TILE_T, BLOCK_B,
    )  # fmt: skip
    if head == 0:
        tl.store(tiles_ptr + tile * 4, b)
        tl.store(tiles_ptr + tile * 4 + 1, row)
        tl.store(tiles_ptr + tile * 4 + 2, row_limit)
        tl.store(tiles_ptr + tile * 4 + 3, shift)
    e = tl.arange(0, BLOCK_E)
    tokens = e // TOPK
    rows = row + tokens
    inside = (tokens < TILE_T) & (rows < row_limit)
    i_ptrs = ids_ptr + rows.to(tl.int64) * stride_i_t + head * stride_i_h + e % TOPK * stride_i_k
    ids = tl.load(i_ptrs, inside, -1)
    positions = rows + shift
    live = (ids >= 0) & (positions >= 0) & (ids <= positions // BLOCK_SIZE)
    live = live & (tl.zeros_like(e) + b < num_seqs)
    # Equal ids come to stand side by side, and dead ones last.
    keys = tl.sort(tl.where(live, ids << TILE_T | tokens, _LARGEST))
    ids = keys >> TILE_T
    live = keys < _LARGEST
    bits = tl.where(live, 1 << (keys & ((1 << TILE_T) - 1)), 0)
    # What a run of equal ids holds before an element and after it makes the whole run's tokens.
    _, before = tl.associative_scan((ids, bits), 0, _or_within_run)
    _, after = tl.associative_scan((ids, bits), 0, _or_within_run, reverse=True)
    _, _, rank = tl.associative_scan((ids, ids, tl.full([BLOCK_E], 1, tl.int32)), 0, _count_runs)
    program = (tile * HEADS + head).to(tl.int64)
    l_ptr = lists_ptr + program * TILE_T * TOPK
    tl.store(l_ptr + rank - 1, ids << TILE_T | before | after, live)
    whole = tl.maximum(row + shift + 1, 0) // BLOCK_SIZE
    tl.store(counts_ptr + program * 2, tl.max(tl.where(live & (ids < whole), rank, 0)))
    tl.store(counts_ptr + program * 2 + 1, tl.max(tl.where(live, rank, 0)))
    if balance_ptr is not None:
        if tile % _BALANCE_STRIDE == 0:
            # A half of a tile takes a block as one step, which has room for half of the tokens.
            once = live & (before == bits)
            members = tl.where(once, after, 0)
            lower = (members & ((1 << TILE_T // 2) - 1)) != 0
            steps = tl.sum(lower.to(tl.int32) + (members >> TILE_T // 2 != 0).to(tl.int32))
            spent = steps * (TILE_T // 2) * 8 - tl.sum(live.to(tl.int32)) * KV_MAJOR_COST
            tl.atomic_add(balance_ptr, spent, sem="relaxed")


@triton.jit
def _or_within_run(left_id, left_bits, right_id, right_bits):
    """Scan: bits of the elements so far that have the id of the latest."""
    return right_id, tl.where(left_id == right_id, left_bits | right_bits, right_bits)


@triton.jit
def _count_runs(left_first, left_last, left_count, right_first, right_last, right_count):
    """Scan: runs of equal ids among the elements so far."""
    joined = (left_last == right_first).to(tl.int32)
    return left_first, right_last, left_count + right_count - joined


@triton.jit(
    do_not_specialize=["stride_table_b", "num_tiles", "num_seqs", "num_pages", "num_tokens"],
    do_not_specialize_on_alignment=_METADATA,
)
def _sparse_attention_tile_kernel(
    q_ptr,
    k,
    v,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    lists_ptr,
    counts_ptr,
    block_table_ptr,
    first_key_ptr,
    softmax_scale,
    stride_q_t,
    stride_q_h,
    stride_k_outer,
    stride_k_token,
    stride_k_h,
    stride_v_outer,
    stride_v_token,
    stride_v_h,
    stride_o_t,
    stride_o_h,
    stride_l_t,
    stride_l_h,
    stride_table_b,
    num_tiles,
    num_seqs,
    num_pages,
    num_tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The heads of one group of a tile of neighbouring tokens against the union of their blocks.

    Rows of tokens that did not select a block pass it with weights of 0, so a row's result does not
    depend on its neighbours' blocks, as long as those are finite. `softmax_scale` must be positive.
    Limit: the matrix units and L2.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # The last tiles of a sequence have most blocks: start with them.
    tile = num_tiles - 1 - tl.program_id(0) // HEADS
    head_kv = tl.program_id(0) % HEADS
    b = tl.load(tiles_ptr + tile * 4)
    row = tl.load(tiles_ptr + tile * 4 + 1)
    row_limit = tl.load(tiles_ptr + tile * 4 + 2)
    shift = tl.load(tiles_ptr + tile * 4 + 3)
    if row >= row_limit:
        return
    program = (tile * HEADS + head_kv).to(tl.int64)
    whole = tl.load(counts_ptr + program * 2)
    count = tl.load(counts_ptr + program * 2 + 1)
    l_ptr = lists_ptr + program * TILE_T * TOPK

    BLOCK_M: tl.constexpr = TILE_T * BLOCK_G
    m = tl.arange(0, BLOCK_M)
    tokens = m // BLOCK_G
    rows = row + tokens
    heads = (head_kv * GROUP + m % BLOCK_G).to(tl.int64)
    live = (rows < row_limit) & (m % BLOCK_G < GROUP)
    positions = rows + shift
    last = tl.max(tl.where(live, positions, -1))
    d = tl.arange(0, BLOCK_D)
    q_ptrs = q_ptr + rows.to(tl.int64) * stride_q_t + heads * stride_q_h
    q_mask = live[:, None] & (d < DIM)[None, :]
    # [BLOCK_M, BLOCK_D]
    q = tl.load(q_ptrs[:, None] + d[None, :], q_mask, 0.0)
    if UPCAST:
        q = q.to(tl.float32)
    scale = tl.cast(softmax_scale, tl.float32) * _LOG2_E
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    PARTS: tl.constexpr = BLOCK_SIZE // BLOCK_N
    for step in range(0, whole * PARTS):
        entry = tl.load(l_ptr + step // PARTS)
        first = step % PARTS * BLOCK_N
        outer, token = block_coordinates(
            entry >> TILE_T, True, b, num_seqs, block_table_ptr, first_key_ptr, stride_table_b,
            num_pages, num_tokens, LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        keys = _load_tile(
            k, outer, head_kv, token + first, False, 0, stride_k_outer, stride_k_token,
            stride_k_h, DIM, BLOCK_N, BLOCK_D, TMA, UPCAST,
        )  # fmt: skip
        values = _load_tile(
            v, outer, head_kv, token + first, False, 0, stride_v_outer, stride_v_token,
            stride_v_h, DIM, BLOCK_N, BLOCK_D, TMA, UPCAST,
        )  # fmt: skip
        member = (entry >> tokens) & 1 > 0
        # [BLOCK_M, BLOCK_N]
        dots = tl.dot(q, tl.trans(keys), input_precision="ieee")
        new_top = tl.where(member, tl.maximum(top, tl.max(dots, 1) * scale), top)
        weights = tl.exp2(dots * scale - tl.where(member, new_top, float("inf"))[:, None])
        decay = tl.where(member, tl.exp2(top - new_top), 1.0)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        top = new_top
    for step in range(whole * PARTS, count * PARTS):
        entry = tl.load(l_ptr + step // PARTS)
        first = step % PARTS * BLOCK_N
        block = entry >> TILE_T
        outer, token = block_coordinates(
            block, True, b, num_seqs, block_table_ptr, first_key_ptr, stride_table_b, num_pages,
            num_tokens, LAYOUT, BLOCK_SIZE,
        )  # fmt: skip
        # Keys past the last position of the tile may be anything, and must not reach a product.
        num_keys = last + 1 - block * BLOCK_SIZE - first
        keys = _load_tile(
            k, outer, head_kv, token + first, True, num_keys, stride_k_outer, stride_k_token,
            stride_k_h, DIM, BLOCK_N, BLOCK_D, TMA, UPCAST,
        )  # fmt: skip
        values = _load_tile(
            v, outer, head_kv, token + first, True, num_keys, stride_v_outer, stride_v_token,
            stride_v_h, DIM, BLOCK_N, BLOCK_D, TMA, UPCAST,
        )  # fmt: skip
        member = (entry >> tokens) & 1 > 0
        seen = tl.where(member, positions - block * BLOCK_SIZE - first, -1)
        n = tl.arange(0, BLOCK_N)
        dots = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        dots = tl.where(n[None, :] <= seen[:, None], dots, float("-inf"))
        new_top = tl.maximum(top, tl.max(dots, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(dots - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        top = new_top

    divisor = tl.where(total > 0, total, 1.0)
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    o_ptrs = out_ptr + rows.to(tl.int64) * stride_o_t + heads * stride_o_h
    tl.store(o_ptrs[:, None] + d[None, :], out, q_mask)
    lse = tl.where(total > 0, (top + tl.log2(divisor)) * _LN_2, float("-inf"))
    tl.store(lse_ptr + rows.to(tl.int64) * stride_l_t + heads * stride_l_h, lse, live)


@triton.jit
def _load_tile(
    tensor,
    outer,
    head,
    token,
    MASKED: tl.constexpr,
    num_keys,
    stride_outer,
    stride_token,
    stride_h,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``[BLOCK_N, BLOCK_D]`` keys or values from one token on; if masked, 0 from `num_keys` on."""
    n = tl.arange(0, BLOCK_N)
    if TMA:
        tile = tensor.load([outer, head, token, 0]).reshape([BLOCK_N, BLOCK_D])
        if MASKED:
            tile = tl.where((n < num_keys)[:, None], tile, tl.zeros_like(tile))
    else:
        d = tl.arange(0, BLOCK_D)
        offset = element_offset(outer, token, stride_outer, stride_token)
        offset += tl.cast(head, tl.int64) * stride_h
        pointers = tensor + offset + n[:, None] * stride_token + d[None, :]
        mask = (d < DIM)[None, :]
        if MASKED:
            mask = mask & (n < num_keys)[:, None]
        tile = tl.load(pointers, mask, 0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile
