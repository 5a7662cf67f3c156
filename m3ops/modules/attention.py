"""MiniMax-M3's sparse attention layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..batch import check_floating, check_instance, check_shape
from ..custom_ops.sparse_attention.api import sparse_attention
from ..custom_ops.store_kv.api import store_kv
from .cache import PagedKVCache
from .config import MiniMaxM3AttentionConfig
from .indexer import LightningIndexer
from .metadata import BatchMetadata
from .norm import GemmaRMSNorm
from .rotary import RotaryEmbedding, apply_rotary
from .workspace import Workspace


class MiniMaxM3SparseAttention(nn.Module):
    """One block-sparse attention layer of MiniMax-M3.

    Queries, keys and values are projected; queries and keys get a per-head Gemma RMSNorm and a
    partial rotary embedding; every token then attends to the visible tokens of the blocks that the
    indexer selects for its KV head. The parameters are those of transformers'
    ``MiniMaxM3VLAttention`` of a sparse layer, by name and shape, so either loads the other's
    state dict.

    ``torch.compile(layer, fullgraph=True, dynamic=True)`` makes one graph for ``T = 1`` and one for
    every other step. It ties sizes of one tensor that are equal when it compiles, so let the first
    step of several tokens not have ``T = hidden_size``.

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
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        q_dim, kv_dim = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.q_proj = nn.Linear(hidden, q_dim, bias=False, dtype=dtype, device=device)
        self.k_proj = nn.Linear(hidden, kv_dim, bias=False, dtype=dtype, device=device)
        self.v_proj = nn.Linear(hidden, kv_dim, bias=False, dtype=dtype, device=device)
        self.o_proj = nn.Linear(q_dim, hidden, bias=False, dtype=dtype, device=device)
        self.q_norm = GemmaRMSNorm(dim, eps, dtype=dtype, device=device)
        self.k_norm = GemmaRMSNorm(dim, eps, dtype=dtype, device=device)
        self.indexer = LightningIndexer(config, dtype=dtype, device=device)
        self.rotary_emb = RotaryEmbedding(config.rotary_dim, config.rope_theta, device=device)

    def forward(
        self,
        hidden: Tensor,
        batch: BatchMetadata | None = None,
        cache: PagedKVCache | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        block_ids: Tensor | None = None,
        workspace: Workspace | None = None,
        return_block_ids: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to the cache, or within the call.

        With a cache, this step's tokens are written into it first; nothing there has a gradient,
        so call it under ``torch.no_grad()`` or ``torch.inference_mode()``. Without one, the
        sequences of the call attend to themselves and the result is differentiable, except that
        the indexer's parameters get no gradient (see :class:`LightningIndexer`).

        Args:
            hidden: ``[T, hidden_size]``; or, without a batch, ``[B, S, hidden_size]``, B sequences
                of S tokens. Padding rows may hold anything with a cache, and anything finite
                without one.
            batch: the step, as :class:`BatchMetadata` of ``T`` tokens. With a cache it has a block
                table, without one it has none.
            cache: this layer's cache, written in place.
            position_embeddings: ``(cos, sin)``, each ``[T, rotary_dim]``, or ``[B, S, rotary_dim]``
                (B or 1 of them) for a `hidden` of three axes. None to compute them from the
                positions.
            block_ids: int32, `hidden`'s leading axes and ``[Hkv, K]``: blocks to attend to, as
                :func:`m3ops.sparse_attention` takes them, from another layer say. The indexer then
                scores nothing; with a cache it still adds its keys, so that the cache stays whole.
            workspace: buffers for scores and ids that layers share, overwritten by this one; only
                with a cache. None to allocate.
            return_block_ids: whether to return the ids too.

        Returns:
            ``out``, or ``(out, block_ids)``: the shape and dtype of `hidden`, zeros in padding
            rows; and int32, `hidden`'s leading axes and ``[Hkv, K]``, a view of the workspace's
            buffer if there is one, which the next layer overwrites.

        Raises:
            TypeError: a dtype is not the expected one.
            ValueError: arguments do not fit each other, or a gradient would be lost.
        """
        check_floating("hidden", hidden)
        for name, value, expected in (
            ("batch", batch, BatchMetadata),
            ("cache", cache, PagedKVCache),
            ("workspace", workspace, Workspace),
        ):
            if value is not None:
                check_instance(name, value, expected)
        leading = hidden.shape[:-1]
        if batch is None and cache is None:
            hidden, batch, position_embeddings, block_ids = self._flatten(
                hidden, position_embeddings, block_ids
            )
        batch = self._check(hidden, batch, cache, block_ids, workspace)
        if position_embeddings is None:
            position_embeddings = self.rotary_emb(hidden, batch.positions)
        cos, sin = _pair(position_embeddings)
        for name, table in (("cos", cos), ("sin", sin)):
            check_shape(name, table, "[T, rotary_dim]", (hidden.shape[0], self.rotary_emb.dim))
        q, k, v = self._project(hidden, cos, sin)
        if cache is None:
            if block_ids is None:
                with torch.no_grad():
                    index_q, index_k = self.indexer(hidden, cos, sin)
                    block_ids = self.indexer.select(index_q, index_k, batch)
        else:
            index_k = self.indexer.project_k(hidden, cos, sin)
            assert batch.slot_mapping is not None
            k_cache, v_cache, index_k_cache = cache.k_cache, cache.v_cache, cache.index_k_cache
            store_kv(k, v, index_k, batch.slot_mapping, k_cache, v_cache, index_k_cache)
            k, v = k_cache, v_cache
            if block_ids is None:
                index_q = self.indexer.project_q(hidden, cos, sin)
                block_ids = self.indexer.select(index_q, index_k_cache, batch, workspace)
        attended = sparse_attention(q, k, v, block_ids, **batch.keywords())
        assert isinstance(attended, Tensor)
        out = self.o_proj(attended.flatten(1)).unflatten(0, leading)
        return (out, block_ids.unflatten(0, leading)) if return_block_ids else out

    def _project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``q [T, Hq, D]``, ``k [T, Hkv, D]`` and ``v [T, Hkv, D]``."""
        heads_q = (self.config.num_attention_heads, self.config.head_dim)
        heads_kv = (self.config.num_key_value_heads, self.config.head_dim)
        q = self.q_norm(self.q_proj(hidden).unflatten(-1, heads_q))
        k = self.k_norm(self.k_proj(hidden).unflatten(-1, heads_kv))
        v = self.v_proj(hidden).unflatten(-1, heads_kv)
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v

    def _flatten(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        block_ids: Tensor | None,
    ) -> tuple[Tensor, BatchMetadata, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Turn B sequences of S tokens into a packed batch."""
        check_shape(
            "hidden",
            hidden,
            "[B, S, hidden_size] without a batch",
            (None, None, self.config.hidden_size),
        )
        num_seqs, seqlen = hidden.shape[:2]
        if position_embeddings is not None:
            cos, sin = _pair(position_embeddings)
            position_embeddings = (
                _flatten_table("cos", cos, num_seqs, seqlen),
                _flatten_table("sin", sin, num_seqs, seqlen),
            )
        if block_ids is not None:
            sizes = (num_seqs, seqlen, self.config.num_key_value_heads, None)
            check_shape("block_ids", block_ids, "[B, S, Hkv, K]", sizes)
            block_ids = block_ids.flatten(0, 1)
        batch = BatchMetadata.uniform(num_seqs, seqlen, self.config.index_block_size, hidden.device)
        return hidden.flatten(0, 1), batch, position_embeddings, block_ids

    def _check(
        self,
        hidden: Tensor,
        batch: BatchMetadata | None,
        cache: PagedKVCache | None,
        block_ids: Tensor | None,
        workspace: Workspace | None,
    ) -> BatchMetadata:
        """Refuse what the ops would refuse later, when the cache is written already."""
        if batch is None:
            raise ValueError("`batch` must come with `cache`, got None")
        check_shape(
            "hidden",
            hidden,
            "[T, hidden_size] with a batch",
            (batch.num_tokens, self.config.hidden_size),
        )
        if batch.block_size != self.config.index_block_size:
            raise ValueError(
                f"`batch` must be of block size {self.config.index_block_size}, "
                f"got {batch.block_size}"
            )
        if (cache is None) != (batch.block_table is None):
            raise ValueError(
                f"`batch` must have a block table with a cache and none without, got "
                f"{'none' if batch.block_table is None else 'one'} "
                f"{'without' if cache is None else 'with'} a cache"
            )
        if cache is not None:
            sizes = (
                None,
                self.config.num_key_value_heads,
                self.config.index_block_size,
                self.config.head_dim,
            )
            check_shape("cache.k_cache", cache.k_cache, "[P, Hkv, N, D] of the layer", sizes)
            if batch.slot_mapping is None:
                raise ValueError("`batch.slot_mapping` must be [T] with a cache, got None")
        if block_ids is not None:
            shape = (batch.num_tokens, self.config.num_key_value_heads, None)
            check_shape("block_ids", block_ids, "[T, Hkv, K]", shape)
        if workspace is not None:
            if cache is None:
                raise ValueError("`workspace` must come with `cache`, got `cache=None`")
            workspace.check_fits(self.config, batch)
        return batch


def _pair(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not isinstance(position_embeddings, (tuple, list)) or len(position_embeddings) != 2:
        raise TypeError(
            "`position_embeddings` must be a pair of tensors (cos, sin), "
            f"got {type(position_embeddings).__name__}"
        )
    cos, sin = position_embeddings
    check_floating("cos", cos)
    check_floating("sin", sin)
    return cos, sin


def _flatten_table(name: str, table: Tensor, num_seqs: int, seqlen: int) -> Tensor:
    """``[B * S, rotary_dim]`` from a table for each sequence, or from one for all of them."""
    table = table[None] if table.ndim == 2 else table
    rows = num_seqs if table.ndim == 3 and table.shape[0] != 1 else 1
    check_shape(name, table, "[B or 1, S, rotary_dim]", (rows, seqlen, None))
    return table.expand(num_seqs, -1, -1).flatten(0, 1)
