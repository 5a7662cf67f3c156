"""A MiniMax-M3 text model of transformers that is built in a moment."""

from __future__ import annotations

import torch
from transformers.models.minimax_m3_vl import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig


def small_config() -> MiniMaxM3VLTextConfig:
    """One dense layer and three sparse ones over bytes; a token keeps 8 blocks of 32 tokens."""
    return MiniMaxM3VLTextConfig(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=["full_attention"] + ["minimax_m3_sparse"] * 3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        index_n_heads=2,
        index_head_dim=32,
        index_block_size=32,
        index_topk_blocks=8,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        dense_intermediate_size=256,
        intermediate_size=64,
        shared_intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


@torch.no_grad()
def small_model(seed: int) -> MiniMaxM3VLForCausalLM:
    """The model with random weights, in float32 on the CPU.

    Its index heads prefer tokens like the one that asks, and its attention is sharp enough for
    another selection of blocks to give another text.
    """
    config = small_config()
    model = MiniMaxM3VLForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter.normal_(std=std, generator=generator)
    model.model.embed_tokens.weight *= config.hidden_size**0.5
    for layer in model.model.layers:
        attention, indexer = layer.self_attn, layer.self_attn.indexer
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight += 1
        if indexer is not None:
            indexer.q_proj.weight += indexer.k_proj.weight.repeat(config.index_n_heads, 1)
    return model
