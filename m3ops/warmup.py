"""Compiling what a model will launch, before it matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .backends import FMHA_SM100, active_backend
from .batch import check_at_least, check_instance, num_blocks
from .custom_ops.index_score.api import index_score
from .custom_ops.select_blocks.api import select_blocks
from .custom_ops.sparse_attention.api import sparse_attention
from .custom_ops.store_kv.api import store_kv
from .custom_ops.topk_select.api import topk_select
from .modules import MiniMaxM3AttentionConfig


@torch.no_grad()
def warmup(
    config: MiniMaxM3AttentionConfig,
    steps: Sequence[tuple[int, int]],
    *,
    max_seqlen_k: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> None:
    """Run every op once per step, so that each kernel the steps need is compiled and loaded.

    A kernel that is first used inside the capture of a CUDA graph raises instead; call this before.
    The ops run on a paged cache of one page, with the active backend; the results are dropped.

    Args:
        config: sizes of the layer.
        steps: ``(total_q, max_seqlen_q)`` of each graph bucket or kind of step (tokens): (8, 1) is
            a decode step of 8 sequences, (4096, 4096) a chunk of a prompt.
        max_seqlen_k: bound on the keys of a sequence (tokens), which is ``W * N`` of the steps'
            block tables.
        dtype: dtype of queries and caches.
        device: where the model runs.

    Raises:
        TypeError: `config` is no configuration, or a size no int.
        ValueError: a step has no tokens, or ``max_seqlen_q`` is not in ``1 .. total_q``.
    """
    check_instance("config", config, MiniMaxM3AttentionConfig)
    check_at_least("max_seqlen_k", max_seqlen_k, 0)
    heads, dim, block = config.num_key_value_heads, config.head_dim, config.index_block_size
    selection: dict[str, Any] = {
        "topk": config.index_topk_blocks,
        "init_blocks": config.index_init_blocks,
        "local_blocks": config.index_local_blocks,
    }
    # Rows before their sequence's first key are computed as all rows are inside a capture.
    captured_too = active_backend(torch.device(device)) == FMHA_SM100
    k_cache, v_cache = (
        torch.zeros(1, heads, block, dim, dtype=dtype, device=device) for _ in range(2)
    )
    index_k_cache = torch.zeros(1, block, config.index_head_dim, dtype=dtype, device=device)
    for total_q, max_seqlen_q in steps:
        if not 1 <= max_seqlen_q <= total_q:
            raise ValueError(
                f"`steps` must hold pairs with 1 <= max_seqlen_q <= total_q, "
                f"got ({total_q}, {max_seqlen_q})"
            )
        num_seqs = num_blocks(total_q, max_seqlen_q)
        starts = torch.arange(num_seqs + 1) * max_seqlen_q
        columns = num_blocks(max_seqlen_k, block)
        zeros: dict[str, Any] = {"dtype": torch.int32, "device": device}
        batch: dict[str, Any] = {
            "cu_seqlens_q": starts.clamp(max=total_q).to(**zeros),
            "block_table": torch.zeros(num_seqs, columns, **zeros),
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "block_size": block,
        }
        token: dict[str, Any] = {"dtype": dtype, "device": device}
        q = torch.zeros(total_q, config.num_attention_heads, dim, **token)
        kv = torch.zeros(total_q, heads, dim, **token)
        index_q = torch.zeros(total_q, heads, config.index_head_dim, **token)
        slots = torch.full((total_q,), -1, dtype=torch.int64, device=device)
        store_kv(kv, kv, index_q[:, 0], slots, k_cache, v_cache, index_k_cache)
        # A workspace keeps the columns of a row side by side, at multiples of 16 bytes.
        padded = num_blocks(columns, 4) * 4
        workspace = torch.zeros(total_q, heads, padded, dtype=torch.float32, device=device)
        visible = torch.ones(total_q, **zeros)
        for seqused in (1, max_seqlen_q) if captured_too else (min(max_seqlen_q, block),):
            batch["seqused_k"] = torch.full((num_seqs,), min(seqused, max_seqlen_k), **zeros)
            block_ids = select_blocks(index_q, index_k_cache, **batch, **selection)
            for scores in (None, workspace):
                scores = index_score(index_q, index_k_cache, **batch, out=scores)
                topk_select(scores, visible, **selection)
            sparse_attention(q, k_cache, v_cache, block_ids, **batch)
