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


def test_page_order_does_not_matter_and_pages_can_be_shared(target: Target) -> None:
    geometry = Geometry(block_size=128)
    sequence = random_sequences([(300, 1)], geometry, device=target.device)[0]
    inputs = lay_out([sequence], block_size=128, extra_blocks=7)
    scores = m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)[..., :3]
    pages, swapped = inputs.batch["block_table"][0, :3].tolist(), [7, 2, 9]
    index_k = torch.full_like(inputs.index_k, math.nan)
    index_k[swapped] = inputs.index_k[pages]
    # The second sequence ends with the second page.
    int32: dict[str, Any] = {"dtype": torch.int32, "device": target.device}
    batch: dict[str, Any] = {
        "block_table": torch.tensor([swapped, swapped], **int32),
        "cu_seqlens_q": torch.tensor([0, 1, 2], **int32),
        "seqused_k": torch.tensor([300, 256], **int32),
    }
    twice = inputs.index_q.repeat(2, 1, 1)
    shared = m3ops.index_score(twice, index_k, **batch)
    assert torch.equal(shared[0], scores[0])
    assert torch.equal(shared[1, :, :2], scores[0, :, :2])
    ids = m3ops.select_blocks(twice, index_k, **batch, topk=2)
    assert torch.equal(ids[:1], select(inputs, topk=2))
    assert ids[1].tolist() == [[0, 1], [0, 1]]


def test_page_ids_that_16_bits_do_not_hold(target: Target) -> None:
    """Page 65536 is not page 0."""
    device = target.device
    index_k = torch.zeros(65537, 16, 4, device=device)
    v = torch.zeros(65537, 1, 16, 4, device=device)
    v[65536], v[0], index_k[65536], index_k[0] = 7, 1, 7, 1
    batch: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "seqused_k": torch.tensor([16], dtype=torch.int32, device=device),
        "block_table": torch.tensor([[65536]], dtype=torch.int32, device=device),
        "block_size": 16,
    }
    q = torch.ones(1, 1, 4, device=device)
    assert m3ops.index_score(q, index_k, **batch).tolist() == [[[28]]]
    ids = m3ops.select_blocks(q, index_k, **batch, topk=1)
    out = m3ops.sparse_attention(q, torch.zeros_like(v), v, ids, **batch)
    assert isinstance(out, torch.Tensor)
    assert out.unique().tolist() == [7]
