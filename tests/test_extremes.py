"""Sizes at which narrow integers would overflow."""

from typing import Any

import pytest
import torch
from conftest import Target

import m3ops
from m3ops.testing import poisoned


def prompt(device: torch.device, tokens: int, keys: int) -> dict[str, Any]:
    """A packed batch of one sequence whose last `tokens` tokens are the queries."""
    return {
        "cu_seqlens_q": torch.tensor([0, tokens], dtype=torch.int32, device=device),
        "seqused_k": torch.tensor([keys], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, keys], dtype=torch.int32, device=device),
    }


def test_very_high_block_ids_of_a_small_group(target: Target) -> None:
    """Tiles of many tokens leave few bits for a block; the values are the blocks' numbers."""
    device, tokens, blocks = target.device, 20, 33_000
    v = torch.arange(blocks, device=device).repeat_interleave(16).float()
    v = v[:, None, None].expand(-1, 1, 16).contiguous()
    q = torch.randn(tokens, 1, 16, device=device)
    ids = torch.tensor([3, 32_997], dtype=torch.int32, device=device).expand(tokens, 1, 2)
    out = poisoned(tokens, 1, 16, dtype=torch.float32, device=device)
    m3ops.sparse_attention(
        q,
        torch.zeros_like(v),
        v,
        ids,
        **prompt(device, tokens, blocks * 16),
        block_size=16,
        out=out,
    )
    torch.testing.assert_close(out, torch.full_like(out, 16_500.0))


@pytest.mark.gpu
def test_heads_far_apart(device: torch.device) -> None:
    """Three heads 2^30 elements apart end past 2^31."""
    tokens, heads, dim, far = 300, 3, 128, 2**30
    batch = prompt(device, tokens, tokens)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).bfloat16()

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.new_empty(2 * far + tokens * dim)
        return storage.as_strided(tensor.shape, (dim, far, 1)).copy_(tensor)

    index_q, index_k = randn(tokens, heads, dim), randn(tokens, dim)
    expected = m3ops.select_blocks(index_q, index_k, **batch, topk=2)
    assert torch.equal(m3ops.select_blocks(apart(index_q), index_k, **batch, topk=2), expected)
    q, k = randn(tokens, heads, dim), randn(tokens, heads, dim)
    for num_splits in (0, 1):

        def attend(q: torch.Tensor, k: torch.Tensor, splits: int = num_splits) -> Any:
            return m3ops.sparse_attention(q, k, k, expected, **batch, num_splits=splits)

        assert torch.equal(attend(apart(q), k), attend(q, k))
        assert torch.equal(attend(q, apart(k)), attend(q, k))
