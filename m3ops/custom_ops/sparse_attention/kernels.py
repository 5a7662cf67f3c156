"""Triton kernels of ``sparse_attention``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..common.kernels import block_coordinates, element_offset, find_row

_METADATA = ["cu_seqlens_q_ptr", "seqused_k_ptr", "block_table_ptr", "first_key_ptr"]
_COUNTS = [
    "stride_table_b",
    "num_seqs",
    "num_pages",
    "row_begin",
    "row_end",
    "stride_o_s",
    "stride_l_s",
]

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


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
    row_begin,
    row_end,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
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
        cu_seqlens_q_ptr, seqused_k_ptr, row.to(tl.int32), num_seqs, row_begin, row_end, BLOCK_B
    )
    own_block = tl.where(position < 0, -1, position // BLOCK_SIZE)

    # The ids and pages of this share are fetched at once: inside the loop, a load that waits for a
    # load that waits for a load would leave nothing to run ahead.
    SHARE: tl.constexpr = (TOPK + NUM_SPLITS - 1) // NUM_SPLITS
    slots = tl.arange(0, BLOCK_K)
    in_share = (slots >= split * SHARE) & (slots < (split + 1) * SHARE) & (slots < TOPK)
    ids = tl.load(
        ids_ptr + row * stride_i_t + head_kv * stride_i_h + slots * stride_i_k, in_share, -1
    )
    live = (ids >= 0) & (ids <= own_block)
    ids = tl.where(live, ids, -1)
    last_slot = tl.max(tl.where(live, slots, -1))
    outers, tokens = block_coordinates(
        tl.where(live, ids, 0), b, block_table_ptr, first_key_ptr, stride_table_b, num_pages, PAGED,
        BLOCK_SIZE, live,
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
    for step in range(split * SHARE * PARTS, (last_slot + 1) * PARTS):
        block = tl.sum(tl.where(slots == step // PARTS, ids, 0))
        n = step % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
        # [BLOCK_N]
        seen = block * BLOCK_SIZE + n <= tl.where(block < 0, -1, position)
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


@triton.jit(do_not_specialize=["stride_po_s", "stride_pl_s"])
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
    DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the splits of one head of one row by their lse. Limit: memory bandwidth."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    # [BLOCK_S]
    lses = tl.load(
        partial_lse_ptr + s * stride_pl_s + row * stride_pl_t + head * stride_pl_h,
        mask=s < NUM_SPLITS,
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
        mask=(s < NUM_SPLITS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    divisor = tl.where(total > 0, total, 1.0)
    out = tl.sum(outs * weights[:, None], 0) / divisor
    o_ptrs = out_ptr + row * stride_o_t + head * stride_o_h + d
    tl.store(o_ptrs, out.to(out_ptr.dtype.element_ty), d < DIM)
    lse = tl.where(total > 0, top + tl.log(divisor), float("-inf"))
    tl.store(lse_ptr + row * stride_l_t + head * stride_l_h, lse)
