"""A small MiniMax-M3 of transformers, and the index scores its layers select by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")

from transformers import MiniMaxM3VLForCausalLM
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from m3ops.integrations import transformers as integration

VOCABULARY, TOPK, BLOCK = 97, 4, 16
# Relative distance of two scores below which either block may be selected.
TIE = 1e-5
# The argument's name changed between versions of transformers.
CACHE: str = integration._CACHE
# Options of a model that compiles in less time.
TWO_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "dense"],
}


def make_config(**options: Any) -> MiniMaxM3VLTextConfig:
    """One dense and two sparse layers, blocks of 16 tokens of which 4 are kept."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": BLOCK,
        "index_topk_blocks": TOPK,
        "intermediate_size": 32,
        "dense_intermediate_size": 32,
        "shared_intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        # Large enough for logits that tell one context from another.
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return MiniMaxM3VLTextConfig(**sizes | options)


def make_model(seed: int = 0, *, norms: bool = True, **options: Any) -> MiniMaxM3VLForCausalLM:
    """A model in eval mode; with `norms`, its norms scale, which they do not when initialised."""
    torch.manual_seed(seed)
    model = MiniMaxM3VLForCausalLM(make_config(**options)).eval()
    if norms:
        for module in model.modules():
            if isinstance(module, modeling.MiniMaxM3VLRMSNorm):
                module.weight.data.normal_(std=0.2)
    return model


def make_ids(*shape: int, seed: int = 0) -> Tensor:
    """Tokens that are neither padding nor special."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def block_scores(
    indexer: Any, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> Tensor:
    """float64 ``[B, Hi, S, NB]``: the score of every block for every token of unpadded sequences,
    +inf for the token's own block and -inf for later ones."""
    rows = hidden.shape[:2]
    index_q = indexer.q_norm(indexer.q_proj(hidden).view(*rows, -1, indexer.head_dim))
    index_k = indexer.k_norm(indexer.k_proj(hidden).view(*rows, 1, indexer.head_dim))
    cos, sin = (table[..., : indexer.head_dim] for table in position_embeddings)
    index_q, index_k = modeling.apply_rotary_pos_emb(index_q, index_k, cos, sin, unsqueeze_dim=2)
    scores = torch.einsum("bshd,btd->bhst", index_q.double(), index_k[:, :, 0].double())
    position = torch.arange(rows[1])
    scores.masked_fill_(position > position[:, None], -torch.inf)
    size = indexer.block_size
    scores = torch.nn.functional.pad(scores, (0, -rows[1] % size), value=-torch.inf)
    blocks = scores.unflatten(-1, (-1, size)).amax(-1)
    own = (position // size)[None, None, :, None].expand(*blocks.shape[:3], 1)
    return blocks.scatter(-1, own, torch.inf)


def near_ties(scores: Tensor, topk: int = TOPK) -> Tensor:
    """bool, the rows of ``[..., NB]`` whose last kept and best dropped block are too close."""
    kept, dropped = scores.topk(topk + 1).values[..., -2:].unbind(-1)
    # Where no block is dropped both are -inf, and their difference is NaN.
    return (kept - dropped) <= TIE * kept.abs()
