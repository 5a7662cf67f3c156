"""The index branch: which blocks a token attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..batch import check_instance
from ..custom_ops.index_score.api import index_score
from ..custom_ops.select_blocks.api import select_blocks
from ..custom_ops.topk_select.api import topk_select
from .config import MiniMaxM3AttentionConfig
from .metadata import BatchMetadata
from .norm import GemmaRMSNorm
from .rotary import apply_rotary
from .workspace import Workspace


class LightningIndexer(nn.Module):
    """Index queries and keys of a layer, and the blocks they select.

    One index query per KV head and one index key per token, each projected, normed and rotated
    like the main ones. A block's score is the largest dot product of the index query with the
    visible index keys of the block (MiniMax Sparse Attention, arXiv 2606.13392).

    Block ids carry no gradient: a loss on the layer's output trains nothing in here. To train the
    indexer, call it and put a loss of your own on what it returns.

    Args:
        config: sizes.
        dtype, device: of the parameters.
    """

    def __init__(
        self,
        config: MiniMaxM3AttentionConfig,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_instance("config", config, MiniMaxM3AttentionConfig)
        self.config = config
        hidden, heads, dim = config.hidden_size, config.index_n_heads, config.index_head_dim
        self.q_proj = nn.Linear(hidden, heads * dim, bias=False, dtype=dtype, device=device)
        self.k_proj = nn.Linear(hidden, dim, bias=False, dtype=dtype, device=device)
        self.q_norm = GemmaRMSNorm(dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.k_norm = GemmaRMSNorm(dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Project the index queries and keys.

        Args:
            hidden: ``[T, hidden_size]``.
            cos, sin: ``[T, rotary_dim]``, of the tokens' positions.

        Returns:
            ``(index_q, index_k)``, ``[T, Hi, Di]`` and ``[T, Di]``.
        """
        return self.project_q(hidden, cos, sin), self.project_k(hidden, cos, sin)

    def project_q(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The index queries ``[T, Hi, Di]``; arguments as in :meth:`forward`."""
        heads = self.q_proj(hidden).unflatten(-1, (self.config.index_n_heads, -1))
        return apply_rotary(self.q_norm(heads), cos, sin)

    def project_k(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The index keys ``[T, Di]``; arguments as in :meth:`forward`."""
        head = self.k_proj(hidden)[:, None]
        return apply_rotary(self.k_norm(head), cos, sin)[:, 0]

    def select(
        self,
        index_q: Tensor,
        index_k: Tensor,
        batch: BatchMetadata,
        workspace: Workspace | None = None,
    ) -> Tensor:
        """Score the visible blocks of every token and keep the best.

        Args:
            index_q: ``[T, Hi, Di]``.
            index_k: index keys: pages ``[P, N, Di]`` if the batch has a block table, otherwise
                the rows ``[T, Di]`` of the call.
            batch: the step.
            workspace: where the scores and the ids go, overwriting both; None to allocate.

        Returns:
            int32 ``[T, Hi, K]``, logical block ids in ascending order, then -1; a view of the
            workspace's buffer if there is one. Without gradient.

        Raises:
            TypeError, ValueError: see :func:`m3ops.select_blocks`; or the workspace is too small.
        """
        config = self.config
        selection: dict[str, Any] = {
            "topk": config.index_topk_blocks,
            "init_blocks": config.index_init_blocks,
            "local_blocks": config.index_local_blocks,
        }
        if workspace is None:
            return select_blocks(index_q, index_k, **batch.keywords(), **selection)
        workspace.check_fits(config, batch)
        scores, block_ids = workspace.rows(index_q.shape[0])
        index_score(index_q, index_k, **batch.keywords(), out=scores)
        return topk_select(scores, batch.num_valid_blocks, **selection, out=block_ids)
