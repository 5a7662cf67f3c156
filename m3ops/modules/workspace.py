"""Score and id buffers that all layers share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..batch import check_at_least, check_device, check_instance, num_blocks
from .config import MiniMaxM3AttentionConfig
from .metadata import BatchMetadata


class Workspace(nn.Module):
    """One score buffer and one id buffer for decode and prefill rows of every layer.

    Each layer overwrites what the one before left. The buffers are in no state dict and keep their
    dtypes when the module is cast: ``scores`` float32 ``[max_tokens + 1, Hi, NB]`` and
    ``block_ids`` int32 ``[max_tokens + 1, Hi, K]``.

    Args:
        config: sizes.
        max_tokens: rows, the largest ``T`` of a step, padding included.
        max_seqlen_k: the largest ``W * N`` of a step's block table (tokens).
        device: where they are allocated.

    Raises:
        ValueError: a size is negative.
    """

    scores: Tensor
    block_ids: Tensor

    def __init__(
        self,
        config: MiniMaxM3AttentionConfig,
        max_tokens: int,
        max_seqlen_k: int,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_instance("config", config, MiniMaxM3AttentionConfig)
        check_at_least("max_tokens", max_tokens, 0)
        check_at_least("max_seqlen_k", max_seqlen_k, 0)
        heads = config.index_n_heads
        # Rows start at multiples of 16 bytes.
        columns = 4 * num_blocks(num_blocks(max_seqlen_k, config.index_block_size), 4)
        # One to spare: torch.compile makes another graph for a slice that is the whole buffer.
        rows = max_tokens + 1
        scores = torch.empty((rows, heads, columns), dtype=torch.float32, device=device)
        shape = (rows, heads, config.index_topk_blocks)
        block_ids = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.register_buffer("scores", scores, persistent=False)
        self.register_buffer("block_ids", block_ids, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Workspace:
        super()._apply(fn, recurse)
        # What it holds is scratch, so a cast need not convert it back.
        if self.scores.dtype != torch.float32:
            self.scores = torch.empty_like(self.scores, dtype=torch.float32)
        return self

    def check_fits(self, config: MiniMaxM3AttentionConfig, batch: BatchMetadata) -> None:
        """Refuse a layer or a step that the buffers are not for.

        Raises:
            ValueError: they have other heads or another top-k than the layer, too few rows or block
                columns for the step, or lie on another device.
        """
        self._check_rows(batch.num_tokens)
        check_device("workspace", self.scores, batch.seqused_k.device)
        sizes = (self.scores.shape[1], self.block_ids.shape[2])
        expected = (config.index_n_heads, config.index_topk_blocks)
        if sizes != expected:
            raise ValueError(
                f"`workspace` must be for {expected[0]} index heads and top-k {expected[1]}, "
                f"got one for {sizes[0]} and {sizes[1]}"
            )
        columns = 0 if batch.block_table is None else batch.block_table.shape[1]
        if self.scores.shape[2] < columns:
            raise ValueError(
                f"`workspace` must have at least W = {columns} block columns, "
                f"got {self.scores.shape[2]}"
            )

    def rows(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The first `num_tokens` rows of both buffers.

        Raises:
            ValueError: there are not that many.
        """
        self._check_rows(num_tokens)
        return self.scores[:num_tokens], self.block_ids[:num_tokens]

    def _check_rows(self, num_tokens: int) -> None:
        max_tokens = self.scores.shape[0] - 1
        if num_tokens > max_tokens:
            raise ValueError(
                f"`workspace` must have at least T = {num_tokens} rows, got {max_tokens}"
            )

    def extra_repr(self) -> str:
        rows, heads, columns = self.scores.shape
        return f"max_tokens={rows - 1}, heads={heads}, columns={columns}"
