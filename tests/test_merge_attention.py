"""``merge_attention``: joining partial results over disjoint keys."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES

import m3ops
from m3ops.testing import assert_attention, dense_ids, make_inputs, random_ids

INF = math.inf


def parts_of(
    *lses: float, device: torch.device | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of two heads of three channels, with the given lse in both heads."""
    outs = [torch.randn(1, 2, 3, device=device) for _ in lses]
    return outs, [torch.full((1, 2), lse, device=device) for lse in lses]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_parts_over_disjoint_blocks_join_to_the_whole(dtype: torch.dtype) -> None:
    inputs = make_inputs([(150, 1), (0, 1), (100, 20)], dtype=dtype, padding_rows=2)
    ids = dense_ids(inputs)
    parts = [
        m3ops.sparse_attention(
            inputs.q, inputs.k, inputs.v, share.contiguous(), **inputs.batch, return_lse=True
        )
        for share in ids.split(3, dim=2)
    ]
    # Rows of few blocks find nothing in the last shares.
    assert any((lse == -INF).any() and (lse > -INF).any() for _, lse in parts)
    out, lse = m3ops.merge_attention(*zip(*parts, strict=True))
    assert out.dtype == dtype
    assert lse.dtype == parts[0][1].dtype
    # A part is rounded once more than the whole.
    assert_attention(out, lse, inputs, ids, factor=6)


def test_the_mean_is_weighted_by_the_sums() -> None:
    outs = [torch.tensor([1.0]), torch.tensor([4.0])]
    lses = [torch.tensor(math.log(1)), torch.tensor(math.log(2))]
    out, lse = m3ops.merge_attention(outs, lses)
    assert out.item() == pytest.approx(3.0)
    assert lse.item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("live", [0, 1])
def test_an_empty_part_changes_nothing(live: int, device: torch.device) -> None:
    lses = [-INF, -INF]
    lses[live] = -2.5
    outs, parts = parts_of(*lses, device=device)
    outs[1 - live].fill_(math.nan)
    out, lse = m3ops.merge_attention(outs, parts)
    assert torch.equal(out, outs[live])
    assert torch.equal(lse, parts[live])


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_but_empty_parts(device: torch.device) -> None:
    outs, parts = parts_of(-INF, -INF, -INF, device=device)
    outs[1].fill_(math.nan)
    out, lse = m3ops.merge_attention(outs, parts)
    assert torch.equal(out, torch.zeros_like(out))
    assert out.shape == (1, 2, 3)
    assert torch.equal(lse, torch.full_like(parts[0], -INF))


def test_one_part() -> None:
    outs, parts = parts_of(7.0)
    out, lse = m3ops.merge_attention(outs, parts)
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, parts[0])


@pytest.mark.parametrize("scale", [1e3, -1e3])
def test_large_sums_neither_overflow_nor_blur_the_mean(scale: float) -> None:
    outs, parts = parts_of(scale, scale)
    out, lse = m3ops.merge_attention(outs, parts)
    torch.testing.assert_close(out, (outs[0] + outs[1]) / 2)
    torch.testing.assert_close(lse, torch.full((1, 2), scale + math.log(2)))


def test_order_and_grouping_do_not_matter() -> None:
    outs, parts = parts_of(1.0, -3.0, 2.0)
    together = m3ops.merge_attention(outs, parts)
    first = m3ops.merge_attention(outs[:2], parts[:2])
    stepwise = m3ops.merge_attention([outs[2], first[0]], [parts[2], first[1]])
    for a, b in zip(together, stepwise, strict=True):
        torch.testing.assert_close(a, b)


def test_a_split_along_each_rows_ids() -> None:
    inputs = make_inputs([(150, 1), (100, 20)])
    ids = random_ids(inputs, 6)
    parts = [
        m3ops.sparse_attention(
            inputs.q, inputs.k, inputs.v, ids[..., i::2], **inputs.batch, return_lse=True
        )
        for i in range(2)
    ]
    assert_attention(*m3ops.merge_attention(*zip(*parts, strict=True)), inputs, ids)


def test_what_does_not_fit_is_refused() -> None:
    outs, parts = parts_of(0.0, 0.0)
    with pytest.raises(ValueError, match="at least one, got 0 and 0"):
        m3ops.merge_attention([], [])
    with pytest.raises(ValueError, match="got 2 and 1"):
        m3ops.merge_attention(outs, parts[:1])
    with pytest.raises(ValueError, match=r"`outs\[1\]` must be .* got \[1, 2, 2\]"):
        m3ops.merge_attention([outs[0], outs[1][..., :2]], parts)
    with pytest.raises(ValueError, match=r"`lses\[1\]` must be .* got \[2\]"):
        m3ops.merge_attention(outs, [parts[0], parts[1][0]])
