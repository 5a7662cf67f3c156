"""The layer without a cache: gradients, layouts, and what carries none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_oracle import SMALL, dense_layer, make_layer, position_tables, rotary_angles
from torch import Tensor

from m3ops import BatchMetadata, MiniMaxM3SparseAttention

BLOCK = SMALL.index_block_size


def trained(layer: MiniMaxM3SparseAttention) -> dict[str, Tensor]:
    return {k: v for k, v in layer.named_parameters() if not k.startswith("indexer")}


def test_gradients_match_a_dense_implementation() -> None:
    """Two sequences of five blocks, three of them kept: autograd through the oracle agrees."""
    length = 4 * BLOCK + 5
    layer = make_layer(dtype=torch.float64)
    angles = rotary_angles(SMALL, length)
    hidden = torch.randn(2, length, SMALL.hidden_size, dtype=torch.float64, requires_grad=True)
    tables = tuple(table[None] for table in position_tables(angles))
    out, ids = layer(hidden, position_embeddings=tables, return_block_ids=True)
    weight = torch.randn_like(out)
    inputs = [hidden, *trained(layer).values()]
    grads = torch.autograd.grad((out * weight).sum(), inputs)

    parameters = {k: v.detach().clone().requires_grad_() for k, v in layer.named_parameters()}
    x = hidden.detach().clone().requires_grad_()
    dense = torch.stack([dense_layer(layer, x[b], ids[b], angles, parameters).out for b in (0, 1)])
    torch.testing.assert_close(out, dense, rtol=1e-9, atol=1e-10)
    inputs = [x, *(parameters[name] for name in trained(layer))]
    expected = torch.autograd.grad((dense * weight).sum(), inputs)
    for name, grad, want in zip(["hidden", *trained(layer)], grads, expected, strict=True):
        assert float(want.abs().max()) > 1e-3
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-9, msg=name)


def test_packed_gradients_are_those_of_each_sequence_alone() -> None:
    lengths = [1, 70, 0, 55]
    layer = make_layer(dtype=torch.float64)
    hidden = torch.randn(sum(lengths), SMALL.hidden_size, dtype=torch.float64)
    weight = torch.randn_like(hidden)
    expected_out: list[Tensor] = []
    expected: Any = [torch.zeros_like(p) for p in trained(layer).values()]
    for x, w in zip(hidden.split(lengths), weight.split(lengths), strict=True):
        if len(x):
            out = layer(x[None])[0]
            alone = torch.autograd.grad((out * w).sum(), list(trained(layer).values()))
            expected = [a + b for a, b in zip(expected, alone, strict=True)]
            expected_out.append(out)

    batch = BatchMetadata.from_lengths(lengths, num_tokens=140, num_seqs=6, block_size=BLOCK)
    padded = torch.cat((hidden, torch.randn(140 - len(hidden), SMALL.hidden_size))).double()
    padded.requires_grad_()
    out = layer(padded, batch)
    torch.testing.assert_close(out[: len(hidden)], torch.cat(expected_out), rtol=1e-9, atol=1e-10)
    assert torch.equal(out[len(hidden) :], torch.zeros_like(out[len(hidden) :]))
    loss = (out[: len(hidden)] * weight).sum()
    dhidden, *grads = torch.autograd.grad(loss, [padded, *trained(layer).values()])
    assert torch.equal(dhidden[len(hidden) :], torch.zeros_like(dhidden[len(hidden) :]))
    for name, grad, want in zip(trained(layer), grads, expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-9, msg=name)


def test_the_indexer_gets_no_gradient() -> None:
    layer = make_layer()
    layer(torch.randn(2, 60, SMALL.hidden_size)).sum().backward()
    with_grad = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert with_grad == set(trained(layer))


def test_the_indexer_trains_on_a_loss_of_its_own() -> None:
    layer = make_layer()
    hidden = torch.randn(60, SMALL.hidden_size)
    index_q, index_k = layer.indexer(hidden, *layer.rotary_emb(hidden, torch.arange(60)))
    torch.einsum("thd,sd->ths", index_q, index_k).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.indexer.parameters())
    assert all(p.grad is None for p in trained(layer).values())


def test_blocks_that_no_token_keeps_get_no_gradient() -> None:
    layer = make_layer()
    hidden = torch.randn(1, 3 * BLOCK, SMALL.hidden_size)
    own = (torch.arange(3 * BLOCK) // BLOCK).int()
    own = own[None, :, None, None].expand(-1, -1, 2, -1)
    hidden.requires_grad_()
    out = layer(hidden, block_ids=own)
    (grad,) = torch.autograd.grad(out[:, 2 * BLOCK :].square().sum(), [hidden])
    assert torch.equal(grad[:, : 2 * BLOCK], torch.zeros_like(grad[:, : 2 * BLOCK]))
    assert grad[:, 2 * BLOCK :].abs().amax(-1).min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_training_is_near_the_oracle(dtype: torch.dtype) -> None:
    layer = make_layer(dtype=dtype)
    hidden = torch.randn(1, 80, SMALL.hidden_size).to(dtype).requires_grad_()
    out, ids = layer(hidden, return_block_ids=True)
    out.float().square().sum().backward()
    exact = hidden.detach()[0].double().requires_grad_()
    dense = dense_layer(layer, exact, ids[0]).out
    dense.square().sum().backward()
    assert out.dtype == dtype and hidden.grad is not None and exact.grad is not None
    for actual, want in ((out[0], dense), (hidden.grad[0], exact.grad)):
        error = (actual.double() - want).norm() / want.norm()
        assert float(error.detach()) < (0.02 if dtype == torch.bfloat16 else 0.003)


def test_autocast_mixes_no_dtypes() -> None:
    layer, hidden = make_layer(), torch.randn(1, 60, SMALL.hidden_size)
    with torch.autocast("cpu", torch.bfloat16):
        out, ids = layer(hidden, return_block_ids=True)
    assert out.dtype == torch.bfloat16
    dense = dense_layer(layer, hidden[0], ids[0]).out
    assert float((out[0].detach().double() - dense).norm() / dense.norm()) < 0.03
    out.float().sum().backward()
    assert layer.q_proj.weight.grad is not None and layer.q_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (1, 1)])
def test_empty_and_single_token_calls(shape: tuple[int, int]) -> None:
    layer = make_layer()
    hidden: Any = torch.randn(*shape, SMALL.hidden_size, requires_grad=True)
    out = layer(hidden)
    assert out.shape == hidden.shape
    out.sum().backward()
    assert hidden.grad.shape == hidden.shape
    if hidden.numel():
        # The only key is the token itself.
        values = layer.v_proj(hidden[0]).view(1, 2, 1, 16).expand(-1, -1, 2, -1)
        torch.testing.assert_close(out[0], layer.o_proj(values.flatten(1)))
