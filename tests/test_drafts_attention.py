"""Speculative rows on Hopper, in the kernel where the rows of a sequence share their blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import m3ops
from m3ops.testing import (
    LAYOUTS,
    Geometry,
    Inputs,
    assert_attention,
    lay_out,
    make_inputs,
    poisoned,
    random_ids,
    random_sequences,
)

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(heads_q=32, heads_kv=2, dim=128, index_dim=16, block_size=128)
# Keys around the edges of blocks and of their halves, few and many, and none.
LENGTHS = (1, 0, 63, 64, 65, 127, 128, 129, 191, 193, 256, 257, 1000, 2049, 2500)
COUNTS = (1, 2, 4, 0, 3, 1, 4, 2, 3, 4, 0, 4, 2, 1, 3)


@pytest.fixture(autouse=True)
def always(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever the number of sequences; the splits of every call."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("the kernel is Hopper's")
    from m3ops.custom_ops.sparse_attention.hopper import launch
    from m3ops.custom_ops.sparse_attention.hopper.drafts import launch as drafts

    taken: list[int] = []
    original = drafts.launch_hopper_drafts

    def record(*arguments: Any) -> None:
        taken.append(arguments[6])
        original(*arguments)

    monkeypatch.setattr(launch, "drafts_fill", lambda *arguments: True)
    monkeypatch.setattr(drafts, "launch_hopper_drafts", record)
    return taken


@pytest.fixture(params=[0, 1, 2, 3, 4])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A number of splits for every call, 0 for what would be chosen."""
    from m3ops.custom_ops.sparse_attention.hopper.drafts import launch as drafts

    if request.param > 0:
        monkeypatch.setattr(drafts, "choose_drafts_splits", lambda *arguments: request.param)
    return request.param


def attend(inputs: Inputs, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out = poisoned(*inputs.q.shape, dtype=inputs.q.dtype, device=inputs.q.device)
    lse = poisoned(*inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
    options = {"out": out, "lse_out": lse} | options
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True, **options
    )
    return out, lse


def drafts_of(device: torch.device, copies: int = 1, **options: Any) -> Inputs:
    lengths = [(LENGTHS[b], count) for b, count in enumerate(COUNTS)] * copies
    inputs = make_inputs(lengths, GEOMETRY, device=device, **options)
    inputs.batch["max_seqlen_q"] = 4
    return inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copies", [1, 5])
def test_rows_of_uneven_sequences(
    device: torch.device,
    always: list[int],
    splits: int,
    copies: int,
    layout: str,
    dtype: torch.dtype,
) -> None:
    inputs = drafts_of(device, copies, layout=layout, dtype=dtype, padding_rows=5)
    ids = random_ids(inputs, 16)
    assert_attention(*attend(inputs, ids), inputs, ids)
    assert len(always) == 1 and (splits == 0 or always == [splits])


@pytest.mark.parametrize("topk", [1, 2, 5, 15, 16])
def test_every_topk(device: torch.device, splits: int, topk: int) -> None:
    inputs = drafts_of(device, dtype=torch.bfloat16)
    ids = random_ids(inputs, topk)
    assert_attention(*attend(inputs, ids), inputs, ids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_garbage_around_the_keys_changes_no_bit(
    device: torch.device, splits: int, layout: str
) -> None:
    lengths = [(LENGTHS[b], count) for b, count in enumerate(COUNTS)]
    sequences = random_sequences(lengths, GEOMETRY, dtype=torch.bfloat16, device=device)
    runs = []
    for poison in (math.nan, 3e38, -math.inf, 0.0):
        inputs = lay_out(sequences, layout=layout, block_size=128, poison=poison, padding_rows=3)
        inputs.batch["max_seqlen_q"] = 4
        runs.append(attend(inputs, random_ids(inputs, 16)))
    assert runs[0][0].isfinite().all()
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


def test_wild_ids_and_pages_stay_inside(device: torch.device, splits: int) -> None:
    inputs = drafts_of(device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    wild = torch.tensor([-(2**31), -2, 2**31 - 1, 2**30, 2**24, 10**6], dtype=torch.int32)
    picks = torch.randint(len(wild), ids.shape)
    ids = torch.where(ids < 0, wild[picks].to(device), ids)
    expected = attend(inputs, ids)
    assert_attention(*expected, inputs, ids)
    # One sequence's table is wild too: its own rows are wrong, and no other is.
    b = len(COUNTS) - 1
    inputs.batch["block_table"][b, ::2] = 2**31 - 1
    inputs.batch["block_table"][b, 1::2] = -(2**31)
    results = attend(inputs, ids)
    torch.cuda.synchronize()
    others = slice(0, inputs.span(b).start)
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result[others], right[others])


def test_strides_of_ids_and_outputs(device: torch.device, splits: int) -> None:
    inputs = drafts_of(device, dtype=torch.bfloat16, padding_rows=2)
    ids = random_ids(inputs, 16)
    expected = attend(inputs, ids)
    rows, heads, dim = inputs.q.shape
    buffer = poisoned(16, rows + 7, 4, dtype=torch.int32, device=device)
    sliced = buffer.permute(1, 2, 0)[3 : 3 + rows, 1:3]
    sliced.copy_(ids)
    guarded = poisoned(rows + 2, heads + 1, dim + 8, dtype=torch.bfloat16, device=device)
    guarded_lse = poisoned(heads, rows + 2, dtype=torch.float32, device=device)
    out, lse = guarded[1:-1, 1:, 8:], guarded_lse[:, 1:-1].T
    results = attend(inputs, sliced, out=out, lse_out=lse)
    assert all(map(torch.equal, results, expected))
    assert guarded.isnan().sum() == guarded.numel() - out.numel()
    assert guarded_lse.isnan().sum() == guarded_lse.numel() - lse.numel()


def test_runs_repeat_bit_for_bit(device: torch.device, splits: int) -> None:
    inputs = drafts_of(device, 5, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    first = attend(inputs, ids)
    for _ in range(50):
        assert all(map(torch.equal, attend(inputs, ids), first))


def test_launches_that_overlap_in_a_graph(device: torch.device, splits: int) -> None:
    """Nothing lies between them, and each has other inputs than the one before."""
    steps = []
    for seed in range(3):
        inputs = drafts_of(device, 5, dtype=torch.bfloat16, seed=seed)
        ids = random_ids(inputs, 16, seed=seed)
        results = attend(inputs, ids)
        assert_attention(*results, inputs, ids)
        steps.append((inputs, ids, results, tuple(result.clone() for result in results)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs, ids, (out, lse), _ in steps * 4:
            m3ops.sparse_attention(
                inputs.q, inputs.k, inputs.v, ids, **inputs.batch, out=out, lse_out=lse
            )
    for _ in range(10):
        for *_, results, _ in steps:
            for result in results:
                result.fill_(math.nan)
        graph.replay()
        for *_, results, expected in steps:
            assert all(map(torch.equal, results, expected))


def test_too_little_scratch_is_none(device: torch.device, always: list[int], splits: int) -> None:
    inputs = drafts_of(device, dtype=torch.bfloat16, padding_rows=3)
    ids = random_ids(inputs, 16)
    assert_attention(*attend(inputs, ids, max_scratch_bytes=1), inputs, ids)
    assert always == [1]


def test_a_choice_of_splits() -> None:
    from m3ops.custom_ops.sparse_attention.hopper.drafts.launch import choose_drafts_splits

    device = torch.device("cuda", torch.cuda.current_device())
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    assert choose_drafts_splits(programs, 16, device) == 1
    assert choose_drafts_splits(programs // 2, 16, device) == 2
    assert choose_drafts_splits(1, 16, device) == 4
