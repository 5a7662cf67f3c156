"""``select_blocks``: scores and selection in one op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import Target

import m3ops
from m3ops.testing import (
    LAYOUTS,
    MIXED,
    Geometry,
    Inputs,
    assert_attention,
    assert_block_ids,
    dense_ids,
    lay_out,
    make_inputs,
    poisoned,
    random_sequences,
)


def select(inputs: Inputs, **options: Any) -> torch.Tensor:
    return m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_matches_the_oracle(target: Target, layout: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(MIXED, layout=layout, dtype=dtype, device=target.device, padding_rows=3)
    options: dict[str, Any] = {"topk": 4, "init_blocks": 1, "local_blocks": 2}
    assert_block_ids(select(inputs, **options), inputs, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_scoring_then_selecting(target: Target, layout: str) -> None:
    inputs = make_inputs(MIXED, layout=layout, device=target.device, padding_rows=3)
    scores = m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)
    in_two_steps = m3ops.topk_select(scores, inputs.num_valid_blocks(), topk=3)
    assert torch.equal(select(inputs, topk=3), in_two_steps)


@pytest.mark.parametrize("max_scratch_bytes", [1, 400, 5000])
def test_a_bound_on_scratch_changes_no_id(target: Target, max_scratch_bytes: int) -> None:
    lengths = target.scale([(70, 1), (50, 4), (0, 1)], MIXED)
    inputs = make_inputs(lengths, device=target.device, padding_rows=1)
    expected = select(inputs, topk=3)
    assert_block_ids(expected, inputs, topk=3)
    assert torch.equal(select(inputs, topk=3, max_scratch_bytes=max_scratch_bytes), expected)


def test_the_number_of_splits_changes_no_id(target: Target) -> None:
    inputs = make_inputs([(330, 1), (80, 3)], device=target.device)
    expected = select(inputs, topk=5, num_splits=1)
    assert_block_ids(expected, inputs, topk=5)
    for num_splits in (0, 2, 7, 64):
        assert torch.equal(select(inputs, topk=5, num_splits=num_splits), expected)


def test_a_persistent_buffer_is_overwritten_in_full(target: Target) -> None:
    """Also its padding rows and the places past a row's last id: what follows indexes with it."""
    lengths = target.scale([(70, 1), (50, 4), (0, 1)], MIXED)
    inputs = make_inputs(lengths, device=target.device, padding_rows=3)
    buffer = poisoned(inputs.total_q + 2, 3, 6, dtype=torch.int32, device=target.device)
    out = buffer[1:-1, 1:, 1:-1]
    assert select(inputs, topk=4, out=out) is out
    assert_block_ids(out, inputs, topk=4)
    assert (buffer == 2**30).sum() == buffer.numel() - out.numel()
    result, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, out, **inputs.batch, return_lse=True
    )
    assert_attention(result, lse, inputs, out)


def test_the_only_block_kept_is_the_own_one(target: Target) -> None:
    size = target.scale(16, 128)
    prompt = size * 3 + size // 8
    inputs = make_inputs([(prompt, prompt)], Geometry(block_size=size), device=target.device)
    ids = select(inputs, topk=1)
    rows = (size // 12, size + 2, prompt - 1)
    assert [ids[row].flatten().tolist() for row in rows] == [[0, 0], [1, 1], [3, 3]]
    assert torch.equal(ids[:, 0, 0].cpu(), torch.arange(prompt, dtype=torch.int32) // size)


def test_with_room_for_every_block_attention_is_dense(target: Target) -> None:
    inputs = make_inputs([(60, 60), (35, 3)], device=target.device)
    ids = select(inputs, topk=4)
    assert torch.equal(ids, dense_ids(inputs))


def test_every_row_of_a_long_prompt_keeps_as_many_as_it_sees(target: Target) -> None:
    size, prompt = target.scale((16, 280), (128, 2300))
    geometry = Geometry(heads_q=1, heads_kv=1, block_size=size)
    inputs = make_inputs([(prompt, prompt)], geometry, device=target.device)
    ids = select(inputs)[:, 0].cpu()
    own = torch.arange(prompt) // size
    assert torch.equal((ids >= 0).sum(1), (own + 1).clamp(max=16))
    assert torch.equal(ids.amax(1), own.int())
    assert own[-1] >= 16
    assert_block_ids(select(inputs), inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_needle_in_a_block_of_low_keys_is_found(target: Target, layout: str) -> None:
    """Forty blocks, four kept: one high key in the lowest block of all."""
    sequence = random_sequences([(16 * 40, 2)], device=target.device)[0]
    sequence.index_q[:] = 0
    sequence.index_q[..., 0] = 1
    sequence.index_k[:, 0] = -torch.rand(640, device=target.device)
    sequence.index_k[16 * 23 : 16 * 24, 0] = -50
    sequence.index_k[16 * 23 + 9, 0] = 0.5
    inputs = lay_out([sequence], layout=layout)
    ids = select(inputs, topk=4)
    assert (ids == 23).any(-1).all()
    assert_block_ids(ids, inputs, topk=4)


def test_garbage_around_the_keys_is_never_read(target: Target) -> None:
    sequences = random_sequences([(100, 1), (70, 3), (1, 1), (0, 1)], device=target.device)
    for layout in LAYOUTS:
        first, *others = (
            select(lay_out(sequences, layout=layout, poison=poison, seed=seed), topk=4)
            for seed, poison in enumerate(
                target.scale((math.nan, 3e38), (math.nan, math.inf, -3e38))
            )
        )
        assert all(torch.equal(first, other) for other in others)
