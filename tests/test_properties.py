"""Random batches against the float64 oracle, and what must not change their results.

The quick profile is the same on every run. The soak profile is for a GPU::

    pytest -m gpu -n 8 --hypothesis-profile=soak tests/test_properties.py

Its shards differ in sizes of the heads and layout, which compile kernels anew; everything else is
drawn. ``M3OPS_SOAK_SEED`` gives other examples.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from conftest import Target
from hypothesis import strategies as st
from torch import Tensor

import m3ops
from m3ops.testing import (
    LAYOUTS,
    Geometry,
    Inputs,
    SequenceData,
    assert_attention,
    assert_block_ids,
    assert_scores,
    lay_out,
    random_ids,
    random_sequences,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for."""

    dtype: torch.dtype
    geometry: Geometry
    topk: int
    init_blocks: int = 0
    local_blocks: int = 1
    leftpad: bool = True

    @property
    def selection(self) -> dict[str, Any]:
        return {
            "topk": self.topk,
            "init_blocks": self.init_blocks,
            "local_blocks": self.local_blocks,
        }


# Heads q and kv, head dim, index dim, block size.
SMALL = [
    Sizes(torch.float32, Geometry(2, 1, 32, 16, 16), topk=3, init_blocks=1),
    Sizes(torch.bfloat16, Geometry(6, 2, 16, 32, 16), topk=2, leftpad=False),
]
ALL = [
    *SMALL,
    Sizes(torch.bfloat16, Geometry(32, 2, 128, 128, 128), topk=4),
    Sizes(torch.float16, Geometry(6, 3, 48, 32, 16), topk=5, init_blocks=1, local_blocks=2),
    Sizes(torch.bfloat16, Geometry(2, 2, 64, 64, 32), topk=4, local_blocks=0, leftpad=False),
]

STRIDES = ("contiguous", "sliced", "transposed", "interleaved")

SHARDS = len(ALL) * len(LAYOUTS)

sharded = pytest.mark.parametrize(
    ("target", "shard"),
    [
        ("reference", 0),
        ("triton", 0),
        *(
            pytest.param("triton", shard, marks=pytest.mark.gpu, id=f"triton-gpu-{shard}")
            for shard in range(SHARDS)
        ),
    ],
    indirect=["target"],
)


@dataclasses.dataclass(frozen=True)
class Example:
    """A batch on the CPU, and how to lay it out."""

    sizes: Sizes
    sequences: list[SequenceData]
    options: dict[str, Any]
    target: Target

    def lay_out(self, sequences: list[SequenceData] | None = None, **changes: Any) -> Inputs:
        """The batch, or another of its kind, on the device under test."""
        chosen = self.sequences if sequences is None else sequences
        moved = [
            SequenceData(*(x.to(self.target.device) for x in vars(s).values())) for s in chosen
        ]
        return lay_out(moved, **{**self.options, **changes})


def on_cpu(inputs: Inputs, sequences: list[SequenceData]) -> Inputs:
    """What the oracle reads: small sums are faster there."""
    return dataclasses.replace(
        inputs, sequences=sequences, q=inputs.q.cpu(), index_q=inputs.index_q.cpu()
    )


def draw_lengths(draw: Callable[..., Any], block_size: int, target: Target) -> Any:
    """``(seqused_k, new)`` of each sequence: decode, drafts, chunks, prompts, and empty ones."""
    blocks, most_new, most_sequences = target.scale((5, 6, 2), (10, 20, 5))
    keys = st.one_of(
        st.integers(0, blocks * block_size),
        # Around the end of a block.
        st.builds(
            lambda block, more: max(0, block * block_size + more),
            st.integers(0, blocks - 1),
            st.integers(-1, 1),
        ),
    )
    new = st.one_of(st.just(1), st.just(0), st.integers(2, 5), st.integers(6, most_new))
    return draw(st.lists(st.tuples(keys, new), min_size=1, max_size=most_sequences))


def draw_example(draw: Callable[..., Any], target: Target, shard: int) -> Example:
    if target.device.type == "cuda":
        # Compiling takes seconds: a shard is of one kind.
        sizes, layout = ALL[shard % len(ALL)], LAYOUTS[shard % len(LAYOUTS)]
    else:
        sizes = draw(st.sampled_from(target.scale(SMALL, ALL)))
        layout = draw(st.sampled_from(LAYOUTS))
    block_size = sizes.geometry.block_size
    lengths = draw_lengths(draw, block_size, target)
    torch.manual_seed(draw(st.integers(0, 2**20)))
    options = {
        "layout": layout,
        "block_size": block_size,
        "padding_rows": draw(st.integers(0, 3)),
        "extra_blocks": draw(st.integers(0, 3)),
        "num_decode_seqs": draw(st.none() | st.integers(0, len(lengths))),
        "host_bounds": draw(st.booleans()),
        "leftpad": sizes.leftpad,
        "strides": draw(st.sampled_from(STRIDES)),
        "seed": draw(st.integers(0, 2**20)),
    }
    sequences = random_sequences(lengths, sizes.geometry, dtype=sizes.dtype)
    return Example(sizes, sequences, options, target)


def check_examples(
    target: Target, shard: int, record_property: Any, check: Callable[[Any, Example], None]
) -> None:
    """Run `check` on as many examples as the profile asks for."""
    examples = hypothesis.settings().max_examples
    passed = 0

    @hypothesis.settings(max_examples=target.scale(max(1, examples // 12), examples))
    @hypothesis.seed(shard + 1000 * int(os.environ.get("M3OPS_SOAK_SEED", "0")))
    @hypothesis.given(st.data())
    def examine(data: Any) -> None:
        nonlocal passed
        check(data.draw, draw_example(data.draw, target, shard))
        passed += 1

    examine()
    record_property("examples", passed)


def select(inputs: Inputs, sizes: Sizes) -> Tensor:
    return m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, **sizes.selection)


def attend(inputs: Inputs, ids: Tensor, **options: Any) -> Any:
    """Outputs and lse."""
    return m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True, **options
    )


def check_against_oracle(draw: Callable[..., Any], example: Example) -> None:
    sizes, inputs = example.sizes, example.lay_out()
    oracle = on_cpu(inputs, example.sequences)
    num_splits, scratch = draw(st.integers(0, 6)), draw(st.sampled_from([2**30, 1, 5000]))
    scores = m3ops.index_score(
        inputs.index_q, inputs.index_k, **inputs.batch, num_splits=num_splits
    )
    assert_scores(scores.cpu(), oracle)
    visible = oracle.num_valid_blocks().to(scores.device)
    ids = m3ops.topk_select(scores, visible, **sizes.selection)
    assert_block_ids(ids.cpu(), oracle, **sizes.selection)
    at_once = m3ops.select_blocks(
        inputs.index_q,
        inputs.index_k,
        **inputs.batch,
        **sizes.selection,
        max_scratch_bytes=scratch,
    )
    assert torch.equal(at_once, ids)
    if draw(st.booleans()):
        # Any order, with dead ids in between.
        ids = random_ids(oracle, sizes.topk, seed=draw(st.integers(0, 99))).to(ids.device)
    out, lse = attend(inputs, ids, num_splits=num_splits, max_scratch_bytes=scratch)
    assert_attention(out.cpu(), lse.cpu(), oracle, ids.cpu())


@sharded
def test_any_batch_matches_the_oracle(target: Target, shard: int, record_property: Any) -> None:
    check_examples(target, shard, record_property, check_against_oracle)


@dataclasses.dataclass(frozen=True)
class Twin:
    """A batch some of whose rows are rows of another, and which they are."""

    inputs: Inputs
    sequences: list[SequenceData]
    mine: Tensor
    theirs: Tensor


def rows_of(sequences: list[SequenceData], order: list[int]) -> Tensor:
    """The rows of some sequences of a batch, in that order."""
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence.q))
    rows = [row for b in order for row in range(starts[b], starts[b + 1])]
    return torch.tensor(rows, dtype=torch.int64)


def other_order(draw: Callable[..., Any], example: Example) -> list[Twin]:
    sequences = example.sequences
    order = draw(st.permutations(range(len(sequences))))
    shuffled = [sequences[b] for b in order]
    rows = rows_of(sequences, order)
    inputs = example.lay_out(shuffled, num_decode_seqs=None)
    return [Twin(inputs, shuffled, torch.arange(len(rows)), rows)]


def in_chunks(draw: Callable[..., Any], example: Example) -> list[Twin]:
    """One sequence in two calls: the first sees no key that comes later."""
    b = draw(st.integers(0, len(example.sequences) - 1))
    whole, rows = example.sequences[b], rows_of(example.sequences, [b])
    cut = draw(st.integers(0, len(whole.q)))
    twins = []
    for start, stop in ((0, cut), (cut, len(whole.q))):
        keys = max(0, len(whole.k) - len(whole.q) + stop)
        part = SequenceData(
            whole.q[start:stop],
            whole.index_q[start:stop],
            whole.k[:keys],
            whole.v[:keys],
            whole.index_k[:keys],
        )
        inputs = example.lay_out([part], num_decode_seqs=None)
        twins.append(Twin(inputs, [part], torch.arange(stop - start), rows[start:stop]))
    return twins


def other_places(draw: Callable[..., Any], example: Example) -> list[Twin]:
    """Other pages or starts, and other strides."""
    changes = {
        "seed": draw(st.integers(0, 2**20)),
        "strides": draw(st.sampled_from(STRIDES)),
        "poison": draw(st.sampled_from([float("nan"), float("inf"), -3e4])),
    }
    return [same_rows(example, example.sequences, **changes)]


def more_padding(draw: Callable[..., Any], example: Example) -> list[Twin]:
    """Rows, columns and sequences that are not there."""
    nothing = [
        SequenceData(*(x[:0] for x in vars(example.sequences[0]).values()))
        for _ in range(draw(st.integers(0, 40)))
    ]
    changes = {
        "padding_rows": draw(st.integers(0, 30)),
        "extra_blocks": draw(st.integers(0, 20)),
        "num_decode_seqs": None,
    }
    return [same_rows(example, [*example.sequences, *nothing], **changes)]


def other_routes(draw: Callable[..., Any], example: Example) -> list[Twin]:
    """Decode rows named or not, bounds exact or not: another kernel may do the work."""
    changes = {
        "num_decode_seqs": draw(st.none() | st.integers(0, len(example.sequences))),
        "host_bounds": draw(st.booleans()),
    }
    return [same_rows(example, example.sequences, **changes)]


def same_rows(example: Example, sequences: list[SequenceData], **changes: Any) -> Twin:
    rows = torch.arange(sum(len(sequence.q) for sequence in sequences))
    return Twin(example.lay_out(sequences, **changes), sequences, rows, rows)


VARIATIONS = [other_order, in_chunks, other_places, more_padding, other_routes]


def check_twins(draw: Callable[..., Any], example: Example) -> None:
    sizes, inputs = example.sizes, example.lay_out()
    num_splits = draw(st.integers(1, 3))
    ids = select(inputs, sizes)
    out, lse = attend(inputs, ids, num_splits=num_splits)
    ids_cpu = ids.cpu()
    for twin in draw(st.sampled_from(VARIATIONS))(draw, example):
        device, oracle = ids.device, on_cpu(twin.inputs, twin.sequences)
        # Exact, but where another kernel rounds two near scores in another order.
        assert_block_ids(select(twin.inputs, sizes).cpu(), oracle, **sizes.selection)
        given = ids.new_full((twin.inputs.total_q, *ids.shape[1:]), 2**30)
        given[twin.mine.to(device)] = ids[twin.theirs.to(device)]
        # Fixed splits make a row's bits its own.
        twin_out, twin_lse = attend(twin.inputs, given, num_splits=num_splits)
        mine, theirs = twin.mine.to(device), twin.theirs.to(device)
        assert torch.equal(twin_out[mine], out[theirs])
        assert torch.equal(twin_lse[mine], lse[theirs])
        free_out, free_lse = attend(twin.inputs, given)
        expected = ids_cpu.new_full(given.shape, -1)
        expected[twin.mine] = ids_cpu[twin.theirs]
        assert_attention(free_out.cpu(), free_lse.cpu(), oracle, expected)


@sharded
def test_what_changes_no_result(target: Target, shard: int, record_property: Any) -> None:
    """Batch order, chunks, pages, strides, padding and routes."""
    check_examples(target, shard, record_property, check_twins)


def check_heads(draw: Callable[..., Any], example: Example) -> None:
    """A rank of tensor parallelism computes its heads as if it had them all."""
    sizes, inputs = example.sizes, example.lay_out()
    heads = sizes.geometry.heads_kv
    group, head = sizes.geometry.heads_q // heads, draw(st.integers(0, heads - 1))
    axis = 1 if inputs.layout == "paged" else -2
    index_q = inputs.index_q[:, head : head + 1]
    q = inputs.q[:, head * group : (head + 1) * group]
    k, v = (x.narrow(axis, head, 1) for x in (inputs.k, inputs.v))
    ids = select(inputs, sizes)
    mine = m3ops.select_blocks(index_q, inputs.index_k, **inputs.batch, **sizes.selection)
    assert torch.equal(mine, ids[:, head : head + 1])
    num_splits = draw(st.integers(1, 3))
    out, lse = attend(inputs, ids, num_splits=num_splits)
    alone = dataclasses.replace(inputs, q=q, k=k, v=v)
    out_alone, lse_alone = attend(alone, mine, num_splits=num_splits)
    assert torch.equal(out_alone, out[:, head * group : (head + 1) * group])
    assert torch.equal(lse_alone, lse[:, head * group : (head + 1) * group])


@sharded
def test_heads_alone_equal_heads_together(target: Target, shard: int, record_property: Any) -> None:
    check_examples(target, shard, record_property, check_heads)
