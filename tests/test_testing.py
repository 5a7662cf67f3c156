"""``m3ops.testing``: inputs are what they say, and the checks fail on what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import m3ops
from m3ops.testing import (
    LAYOUTS,
    MIXED,
    Inputs,
    assert_attention,
    assert_block_ids,
    assert_gradients,
    assert_scores,
    assert_within_budget,
    dense_ids,
    gradient_oracle,
    interleave,
    make_inputs,
    random_ids,
    restride,
    select_oracle,
)


@pytest.mark.parametrize("strides", ["contiguous", "sliced", "transposed", "interleaved"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_holds_its_sequences_and_nothing_else(layout: str, strides: str) -> None:
    inputs = make_inputs(MIXED, layout=layout, strides=strides, padding_rows=3)
    assert inputs.layout == layout
    for b, sequence in enumerate(inputs.sequences):
        assert torch.equal(inputs.q[inputs.span(b)], sequence.q)
        assert torch.equal(inputs.unstore(inputs.k, b), sequence.k)
        assert torch.equal(inputs.unstore(inputs.v, b), sequence.v)
        assert torch.equal(inputs.unstore(inputs.index_k, b), sequence.index_k)
    keys = sum(len(sequence.k) for sequence in inputs.sequences)
    assert (~inputs.index_k.isnan()).sum() == keys * inputs.index_k.shape[-1]
    assert (~inputs.k.isnan()).sum() == keys * 2 * inputs.k.shape[-1]
    assert inputs.q[-3:].isnan().all()


def test_the_description_leads_to_the_keys() -> None:
    """Each layout read by its definition, token by token."""
    for layout in LAYOUTS:
        inputs = make_inputs(MIXED, layout=layout)
        for b, sequence in enumerate(inputs.sequences):
            for s, expected in enumerate(sequence.index_k):
                if layout == "paged":
                    page = inputs.batch["block_table"][b, s // 16]
                    found = inputs.index_k[page, s % 16]
                elif layout == "packed":
                    found = inputs.index_k[inputs.batch["cu_seqlens_k"][b] + s]
                else:
                    found = inputs.index_k[b, inputs.batch["leftpad_k"][b] + s]
                assert torch.equal(found, expected)


def test_the_seed_changes_places_and_garbage_alone() -> None:
    one = make_inputs(MIXED, seed=1)
    other = m3ops.testing.lay_out(one.sequences, seed=2)
    assert not torch.equal(one.batch["block_table"], other.batch["block_table"])
    for b in range(len(MIXED)):
        assert torch.equal(one.unstore(one.k, b), other.unstore(other.k, b))


@pytest.mark.parametrize("kind", ["sliced", "transposed"])
def test_restrided_twins_are_equal_and_strided(kind: str) -> None:
    tensor = torch.randn(3, 4, 5)
    twin = restride(tensor, kind)
    assert torch.equal(twin, tensor)
    assert not twin.is_contiguous()
    assert twin.stride(-1) == 1
    k, v = interleave(tensor, -tensor)
    assert torch.equal(k, -v)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_a_selection_by_hand() -> None:
    scores = [3.0, 1.0, math.nan, 3.0, 2.0, -math.inf]
    assert select_oracle(scores, 6, 3, 0, 0) == [0, 3, 4]
    assert select_oracle(scores, 6, 3, 0, 1) == [0, 3, 5]
    assert select_oracle(scores, 6, 3, 2, 1) == [0, 1, 5]
    assert select_oracle(scores, 2, 3, 0, 1) == [0, 1, -1]
    # NaN and -inf are one rank.
    assert select_oracle(scores, 6, 5, 0, 0) == [0, 1, 2, 3, 4]


def computed(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)
    ids = m3ops.topk_select(scores, inputs.num_valid_blocks(), topk=3)
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True
    )
    return scores, ids, out, lse


def put(value: float, *at: int) -> Callable[[Tensor], None]:
    def corrupt(tensor: Tensor) -> None:
        tensor[at] = value

    return corrupt


def scale(by: float) -> Callable[[Tensor], None]:
    def corrupt(tensor: Tensor) -> None:
        tensor *= by

    return corrupt


@pytest.mark.parametrize(
    "corrupt",
    [put(math.nan, 0, 1, 4), put(-math.inf, 0, 0, 0), put(9e9, 3, 1, 1), scale(1 + 1e-5)],
)
def test_wrong_scores_are_noticed(corrupt: Callable[[Tensor], None]) -> None:
    inputs = make_inputs(MIXED, padding_rows=2)
    scores, _, _, _ = computed(inputs)
    assert_scores(scores, inputs)
    corrupt(scores)
    with pytest.raises(AssertionError, match="scores"):
        assert_scores(scores, inputs)


def test_unspecified_scores_are_not_looked_at() -> None:
    inputs = make_inputs(MIXED, padding_rows=2)
    scores, _, _, _ = computed(inputs)
    seen = torch.arange(scores.shape[2]) < inputs.num_valid_blocks()[:, None, None]
    assert_scores(scores.where(seen, math.nan), inputs)


@pytest.mark.parametrize(
    "wrong",
    [
        [0, 1, 3],
        [1, 4, 3],
        [1, 3, 3],
        [1, 3, -1],
        [-1, 1, 4],
        [1, 4, 5],
    ],
    ids=["own block lost", "not ascending", "twice", "too few", "-1 first", "past the own block"],
)
def test_wrong_ids_are_noticed(wrong: list[int]) -> None:
    inputs = make_inputs([(70, 1)])
    inputs.sequences[0].index_k[:] = 0
    inputs.sequences[0].index_q[:] = 1
    for block, value in ((1, 2), (3, 1)):
        inputs.sequences[0].index_k[block * 16] = value
    right = torch.tensor([[[1, 3, 4]] * 2], dtype=torch.int32)
    assert_block_ids(right, inputs, topk=3)
    with pytest.raises(AssertionError, match="row 0, head 1"):
        assert_block_ids(torch.tensor([[[1, 3, 4], wrong]]).int(), inputs, topk=3)


def test_only_ids_of_almost_equal_scores_may_change_places() -> None:
    inputs = make_inputs([(70, 1)])
    keys, queries = inputs.sequences[0].index_k, inputs.sequences[0].index_q
    keys[:], queries[:] = 0, 0
    queries[..., 0] = 1
    keys[0, 0], keys[16, 0], keys[32, 0] = 1, 1 + 1e-7, 1.001
    ids = torch.tensor([[[0, 4]] * 2], dtype=torch.int32)
    with pytest.raises(AssertionError, match="scores differ"):
        assert_block_ids(ids, inputs, topk=2)
    keys[32, 0] = 0
    assert_block_ids(ids, inputs, topk=2)


@pytest.mark.parametrize(
    ("which", "corrupt"),
    [
        ("out", put(math.nan, 0, 0, 0)),
        ("out", put(math.inf, 2, 0, 0)),
        ("out", put(1e-3, -1, 0, 0)),
        ("out", scale(1.0001)),
        ("lse", put(0.0, -1, 0)),
        ("lse", put(-math.inf, 0, 0)),
        ("lse", put(math.nan, 0, 0)),
        ("lse", scale(1.0001)),
    ],
)
def test_wrong_attention_is_noticed(which: str, corrupt: Callable[[Tensor], None]) -> None:
    inputs = make_inputs(MIXED, padding_rows=2)
    _, ids, out, lse = computed(inputs)
    assert_attention(out, lse, inputs, ids)
    corrupt({"out": out, "lse": lse}[which])
    with pytest.raises(AssertionError, match=f"`{which}`"):
        assert_attention(out, lse, inputs, ids)


def test_attention_to_other_blocks_is_noticed() -> None:
    inputs = make_inputs([(70, 1), (60, 3)], dtype=torch.bfloat16)
    ids = random_ids(inputs, 3)
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, dense_ids(inputs), **inputs.batch, return_lse=True
    )
    assert_attention(out, lse, inputs, dense_ids(inputs))
    with pytest.raises(AssertionError, match="`out`"):
        assert_attention(out, lse, inputs, ids)


@pytest.mark.parametrize("which", ["dq", "dk", "dv", "unowned"])
def test_wrong_gradients_are_noticed(which: str) -> None:
    inputs = make_inputs([(40, 1), (33, 3)])
    ids, dout = random_ids(inputs, 2), torch.randn_like(inputs.q)
    exact_dq, exact_keys = gradient_oracle(inputs, ids, dout)
    dk, dv = torch.zeros_like(inputs.k), torch.zeros_like(inputs.v)
    for b, (slots, (one, other)) in enumerate(zip(inputs.slots, exact_keys, strict=True)):
        assert len(inputs.sequences[b].k) == len(slots)
        dk[slots // 16, :, slots % 16] = one.float()
        dv[slots // 16, :, slots % 16] = other.float()
    grads = {"dq": exact_dq.float(), "dk": dk, "dv": dv}
    assert_gradients(grads["dq"], dk, dv, inputs, ids, dout)
    if which == "unowned":
        unowned = sorted(set(range(len(dv))) - set(inputs.batch["block_table"].flatten().tolist()))
        dv[unowned[0]] = 1e-30
        message = "`dv` is not 0 in slots of no sequence"
    else:
        # The largest gradient, so that it is not one of an unselected key.
        grads[which].view(-1)[grads[which].abs().argmax()] *= 1.001
        message = f"`{which}`"
    with pytest.raises(AssertionError, match=message):
        assert_gradients(grads["dq"], dk, dv, inputs, ids, dout)


def test_the_budget_grows_with_the_error_of_the_same_dtype() -> None:
    oracle = torch.randn(1000, dtype=torch.float64)
    eager = oracle.bfloat16()
    assert_within_budget("x", eager, oracle, eager)
    assert_within_budget("x", (oracle * 1.003).bfloat16(), oracle, eager, factor=3, ulps=0)
    with pytest.raises(AssertionError, match="largest error"):
        assert_within_budget("x", (oracle * 1.05).bfloat16(), oracle, eager)
    # Every error within the largest one, but all of them as large.
    sloppy = eager.clone()
    sloppy += 0.9 * (eager - oracle).abs().amax()
    with pytest.raises(AssertionError, match="RMS error"):
        assert_within_budget("x", sloppy, oracle, eager, factor=2, ulps=0)
