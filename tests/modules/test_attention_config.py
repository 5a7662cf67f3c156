"""The layer's sizes: MiniMax-M3's by default, those of a transformers object, or an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from m3ops import MiniMaxM3AttentionConfig


def theirs(**changes: Any) -> SimpleNamespace:
    """What ``MiniMaxM3VLTextConfig`` looks like, the parts that count and some that do not."""
    attributes = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_block_size": 64,
        "index_topk_blocks": 8,
        "index_local_blocks": 2,
        "rms_norm_eps": 1e-5,
        "rotary_dim": 16,
        "attention_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "vocab_size": 1000,
    }
    return SimpleNamespace(**attributes | changes)


def test_defaults_are_those_of_minimax_m3() -> None:
    config = MiniMaxM3AttentionConfig()
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (
        6144,
        64,
        4,
    )
    assert (config.index_n_heads, config.index_head_dim, config.head_dim) == (4, 128, 128)
    assert (config.index_block_size, config.index_topk_blocks) == (128, 16)
    assert (config.index_init_blocks, config.index_local_blocks) == (0, 1)
    assert (config.rotary_dim, config.rope_theta) == (64, 5e6)


def test_from_transformers() -> None:
    expected = MiniMaxM3AttentionConfig(
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        index_n_heads=2,
        index_head_dim=32,
        index_block_size=64,
        index_topk_blocks=8,
        index_local_blocks=2,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    )
    assert MiniMaxM3AttentionConfig.from_transformers(theirs()) == expected
    outer = SimpleNamespace(text_config=theirs(), vision_config=SimpleNamespace(hidden_size=1))
    assert MiniMaxM3AttentionConfig.from_transformers(outer) == expected


@pytest.mark.parametrize(("factor", "rotated"), [(None, 64), (0.5, 32), (0.25, 16)])
def test_only_the_factor_says_what_is_rotated(factor: float | None, rotated: int) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if factor is not None:
        rope["partial_rotary_factor"] = factor
    config = MiniMaxM3AttentionConfig.from_transformers(theirs(rope_parameters=rope))
    assert config.rotary_dim == rotated


def test_the_head_dim_may_follow_from_the_hidden_size() -> None:
    config = theirs(head_dim=None)
    assert MiniMaxM3AttentionConfig.from_transformers(config).head_dim == 32
    del config.head_dim
    assert MiniMaxM3AttentionConfig.from_transformers(config).head_dim == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rope_parameters": {"minimax_m3_sparse": {"rope_type": "default", "rope_theta": 1e4}}},
        {"attention_dropout": 0.1},
    ],
)
def test_what_the_layer_cannot_do_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="must be"):
        MiniMaxM3AttentionConfig.from_transformers(theirs(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "`hidden_size` must be at least 1, got 0"),
        ({"num_attention_heads": 33}, "must be a multiple of `num_key_value_heads` = 4, got 33"),
        ({"index_n_heads": 8}, "`index_n_heads` must be `num_key_value_heads` = 4, got 8"),
        ({"index_init_blocks": -1}, "`index_init_blocks` must be at least 0"),
        ({"index_init_blocks": 9, "index_local_blocks": 8}, "at most `index_topk_blocks` = 16"),
        ({"partial_rotary_factor": 1.5}, "got 1.5: 192 channels"),
        ({"head_dim": 6, "partial_rotary_factor": 0.5}, "got 0.5: 3 channels"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MiniMaxM3AttentionConfig(**changes)
