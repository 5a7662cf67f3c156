"""The paged cache of one layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..batch import check_at_least, check_dtype, check_instance, check_shape
from .config import MiniMaxM3AttentionConfig


class PagedKVCache(nn.Module):
    """Keys, values and index keys of one layer, in pages of ``N`` tokens.

    Three buffers, each an allocation of its own, which move, cast, copy and serialise together:
    ``k_cache`` and ``v_cache`` ``[P, Hkv, N, D]``, ``index_k_cache`` ``[P, N, Di]``. A sequence
    owns the pages that its row of a block table lists; forgetting or cropping a sequence takes
    nothing more than another table or a smaller ``seqused_k``.

    Args:
        config: sizes.
        num_pages: ``P``.
        dtype: of all three; PyTorch's default if None. It must be the layer's.
        device: where they are allocated, zeroed.

    Raises:
        ValueError: `num_pages` is less than 1.
    """

    k_cache: Tensor
    v_cache: Tensor
    index_k_cache: Tensor

    def __init__(
        self,
        config: MiniMaxM3AttentionConfig,
        num_pages: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_instance("config", config, MiniMaxM3AttentionConfig)
        check_at_least("num_pages", num_pages, 1)
        block_size = config.index_block_size
        main = (num_pages, config.num_key_value_heads, block_size, config.head_dim)
        index = (num_pages, block_size, config.index_head_dim)
        for name, shape in (("k_cache", main), ("v_cache", main), ("index_k_cache", index)):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    @property
    def num_pages(self) -> int:
        """``P``."""
        return self.k_cache.shape[0]

    @property
    def block_size(self) -> int:
        """``N``, tokens of a page."""
        return self.k_cache.shape[2]

    def copy_pages_(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, keys, values and index keys together, in place.

        Args:
            source: int64 ``[n]``, pages to read.
            target: int64 ``[n]``, distinct pages to write; all pages are read before any is
                written.

        Raises:
            TypeError: they are not int64 tensors.
            ValueError: they differ in length, or one on the CPU holds a page that is not there.
        """
        for name, pages in (("source", source), ("target", target)):
            check_dtype(name, pages, torch.int64)
            check_shape(name, pages, "[n]", (source.numel(),))
            # On a GPU, looking would wait for the device.
            if pages.is_cpu and ((pages < 0) | (pages >= self.num_pages)).any():
                raise ValueError(
                    f"`{name}` must hold pages 0 .. {self.num_pages - 1}, got {pages.tolist()}"
                )
        for cache in (self.k_cache, self.v_cache, self.index_k_cache):
            cache[target] = cache[source]

    def extra_repr(self) -> str:
        return f"num_pages={self.num_pages}, block_size={self.block_size}"
