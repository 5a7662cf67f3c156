"""Triton kernel of ``store_kv``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"], do_not_specialize=["num_pages"])
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    index_key_ptr,
    slot_mapping_ptr,
    k_cache_ptr,
    v_cache_ptr,
    index_k_cache_ptr,
    stride_key_t,
    stride_key_h,
    stride_value_t,
    stride_value_h,
    stride_index_key_t,
    stride_slot_t,
    stride_k_p,
    stride_k_h,
    stride_k_n,
    stride_v_p,
    stride_v_h,
    stride_v_n,
    stride_ik_p,
    stride_ik_n,
    num_pages,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DI: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: its key and value of every head, and its index key. Limit: memory bandwidth."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + t * stride_slot_t)
    page = slot // BLOCK_SIZE
    n = slot % BLOCK_SIZE
    if (slot >= 0) & (page < num_pages):
        h = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
        d = tl.arange(0, BLOCK_D)[None, :]
        mask = (h < HEADS) & (d < DIM)
        key = tl.load(key_ptr + t * stride_key_t + h * stride_key_h + d, mask)
        tl.store(k_cache_ptr + page * stride_k_p + h * stride_k_h + n * stride_k_n + d, key, mask)
        value = tl.load(value_ptr + t * stride_value_t + h * stride_value_h + d, mask)
        tl.store(v_cache_ptr + page * stride_v_p + h * stride_v_h + n * stride_v_n + d, value, mask)
        di = tl.arange(0, BLOCK_DI)
        index_key = tl.load(index_key_ptr + t * stride_index_key_t + di, di < INDEX_DIM)
        tl.store(
            index_k_cache_ptr + page * stride_ik_p + n * stride_ik_n + di, index_key, di < INDEX_DIM
        )
