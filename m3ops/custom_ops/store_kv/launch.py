"""Launching the Triton kernel of ``store_kv``."""

from __future__ import annotations

from torch import Tensor

from ..common.launch import launch, next_power_of_2
from .kernels import _store_kv_kernel


def launch_store_kv(
    key: Tensor,
    value: Tensor,
    index_key: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_k_cache: Tensor,
) -> None:
    """One program per token."""
    tokens, heads, dim = key.shape
    index_dim = index_key.shape[1]
    launch(
        _store_kv_kernel,
        (tokens,),
        key.device,
        key_ptr=key,
        value_ptr=value,
        index_key_ptr=index_key,
        slot_mapping_ptr=slot_mapping,
        k_cache_ptr=k_cache,
        v_cache_ptr=v_cache,
        index_k_cache_ptr=index_k_cache,
        stride_key_t=key.stride(0),
        stride_key_h=key.stride(1),
        stride_value_t=value.stride(0),
        stride_value_h=value.stride(1),
        stride_index_key_t=index_key.stride(0),
        stride_slot_t=slot_mapping.stride(0),
        stride_k_p=k_cache.stride(0),
        stride_k_h=k_cache.stride(1),
        stride_k_n=k_cache.stride(2),
        stride_v_p=v_cache.stride(0),
        stride_v_h=v_cache.stride(1),
        stride_v_n=v_cache.stride(2),
        stride_ik_p=index_k_cache.stride(0),
        stride_ik_n=index_k_cache.stride(1),
        num_pages=k_cache.shape[0],
        HEADS=heads,
        DIM=dim,
        INDEX_DIM=index_dim,
        BLOCK_SIZE=k_cache.shape[2],
        BLOCK_H=next_power_of_2(heads, 1),
        BLOCK_D=next_power_of_2(dim),
        BLOCK_DI=next_power_of_2(index_dim),
    )
