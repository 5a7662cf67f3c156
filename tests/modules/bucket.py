"""A decode step at fixed sizes as a program of tensors alone, as docs/export.md has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from m3ops import BatchMetadata, MiniMaxM3SparseAttention, PagedKVCache


class Bucket(nn.Module):
    """Tensors in, tensors out; the caches are the caller's, and written."""

    def __init__(self, layer: MiniMaxM3SparseAttention, batch: BatchMetadata) -> None:
        super().__init__()
        self.layer = layer
        self.constants: tuple[Any, ...] = (batch.generic_ints, batch.block_size)

    def forward(self, hidden: Tensor, caches: tuple[Tensor, ...], batch: tuple[Any, ...]) -> Tensor:
        cache = PagedKVCache(self.layer.config, 1, device="meta")
        cache.k_cache, cache.v_cache, cache.index_k_cache = caches
        return self.layer(hidden, BatchMetadata(*batch, *self.constants), cache)


def bucket_tensors(batch: BatchMetadata) -> tuple[Tensor, ...]:
    """The tensors of a batch with a cache, in the order of its fields."""
    tensors = (
        batch.cu_seqlens_q,
        batch.seqused_k,
        batch.positions,
        batch.num_valid_blocks,
        batch.block_table,
        batch.slot_mapping,
    )
    return tuple(tensor for tensor in tensors if tensor is not None)


# Batches let sizes be dynamic where nothing is said.
FIXED: tuple[Any, ...] = ({}, ({},) * 3, ({},) * 6)
