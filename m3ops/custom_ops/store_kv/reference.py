"""The meaning of ``store_kv``, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def store_kv_reference(
    key: Tensor,
    value: Tensor,
    index_key: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_k_cache: Tensor,
) -> None:
    """``cache[slot // N, ..., slot % N, :] = token`` for every slot inside the cache."""
    num_pages, _, block_size, _ = k_cache.shape
    inside = (slot_mapping >= 0) & (slot_mapping < num_pages * block_size)
    slots = slot_mapping[inside]
    if slots.numel() == 0:
        return
    pages, offsets = slots // block_size, slots % block_size
    k_cache[pages, :, offsets] = key[inside]
    v_cache[pages, :, offsets] = value[inside]
    index_k_cache[pages, offsets] = index_key[inside]
