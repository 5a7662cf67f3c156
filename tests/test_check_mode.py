"""Check mode names the op, the argument and the first bad place; without it nothing is read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Target
from torch import Tensor

import m3ops
from m3ops import checks
from m3ops.testing import LAYOUTS, MIXED, Inputs, make_inputs, random_ids

# Keys and query tokens of each sequence, N = 16, two spare columns and pages.
LENGTHS = [(70, 1), (33, 3), (0, 1)]


def edited(inputs: Inputs, name: str, at: Any, value: Any) -> None:
    tensor = inputs.batch[name] if name in inputs.batch else getattr(inputs, name)
    tensor[at] = value


Case = tuple[str, str, Any, Any, str]

# Layout, argument, place, value, message.
BATCH: list[Case] = [
    ("paged", "cu_seqlens_q", 0, 1, r"`cu_seqlens_q` must start at 0.*cu_seqlens_q\[0\] = 1"),
    ("paged", "cu_seqlens_q", 1, 9, r"not decrease.*got cu_seqlens_q\[2\] = 4"),
    ("paged", "cu_seqlens_q", 3, 6, r"end within T = 5, got cu_seqlens_q\[3\] = 6"),
    ("paged", "seqused_k", 1, -1, r"`seqused_k` must stay within 0 .. 112, .*\[1\] = -1"),
    ("paged", "seqused_k", 2, 113, r"the paged layout and max_seqlen_k = 112 .*\[2\] = 113"),
    ("paged", "block_table", (0, 4), 10, r"must hold pages 0 .. 9 .*block_table\[0, 4\] = 10"),
    ("paged", "block_table", (1, 2), -1, r"block_table\[1, 2\] = -1"),
    ("packed", "cu_seqlens_k", 1, -3, r"stay within 0 .. Tk = \d+, got cu_seqlens_k\[1\] = -3"),
    ("packed", "cu_seqlens_k", 1, 10**6, r"Tk = \d+, got cu_seqlens_k\[1\] = 1000000"),
    ("packed", "cu_seqlens_k", 2, 1, r"not decrease .*got cu_seqlens_k\[2\] = 1"),
    ("packed", "seqused_k", 2, 40, r"what the packed layout .*got seqused_k\[2\] = 40"),
    ("batched", "leftpad_k", 0, -1, r"within 0 .. S = \d+, got leftpad_k\[0\] = -1"),
    ("batched", "leftpad_k", 2, 999, r"got leftpad_k\[2\] = 999"),
    ("batched", "seqused_k", 0, 150, r"what the batched layout .*got seqused_k\[0\] = 150"),
]


def score(inputs: Inputs) -> Tensor:
    return m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)


def select(inputs: Inputs) -> Tensor:
    return m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=3)


def attend(inputs: Inputs, ids: Tensor | None = None) -> Any:
    given = torch.full((inputs.total_q, 2, 3), -1, dtype=torch.int32, device=inputs.q.device)
    ids = given if ids is None else ids
    return m3ops.sparse_attention(inputs.q, inputs.k, inputs.v, ids, **inputs.batch)


OPS: dict[str, Callable[[Inputs], Any]] = {
    "index_score": score,
    "select_blocks": select,
    "sparse_attention": attend,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_right_passes(target: Target, layout: str) -> None:
    lengths = target.scale(LENGTHS, [*MIXED, (90, 30)])
    inputs = make_inputs(lengths, layout=layout, device=target.device, padding_rows=2)
    expected = select(inputs), attend(inputs, random_ids(inputs, 3, ordered=True))
    with m3ops.check_mode():
        ids = select(inputs)
        out = attend(inputs, random_ids(inputs, 3, ordered=True))
        m3ops.topk_select(score(inputs), inputs.num_valid_blocks(), topk=3)
    assert torch.equal(ids, expected[0])
    assert torch.equal(out, expected[1])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", BATCH, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_a_wrong_batch_is_named(target: Target, op: str, case: Case) -> None:
    layout, name, at, value, message = case
    inputs = make_inputs(LENGTHS, layout=layout, device=target.device)
    edited(inputs, name, at, value)
    with (
        m3ops.check_mode(),
        pytest.raises(ValueError, match=rf"^m3ops::{op} in check mode: .*{message}"),
    ):
        OPS[op](inputs)
    # Without it, the kernels bound what they follow.
    OPS[op](inputs)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_seqlen_q", 2, r"more than max_seqlen_q = 2 tokens, got cu_seqlens_q\[2\] = 4"),
        ("max_seqlen_k", 69, r"within 0 .. 69, .*got seqused_k\[0\] = 70"),
        ("num_decode_tokens", 2, "must be the 1 tokens of the first 1 sequences, got 2"),
        ("num_decode_tokens", 0, "must be the 1 tokens of the first 1 sequences, got 0"),
    ],
)
def test_wrong_bounds_of_the_host_are_named(
    target: Target, option: str, value: int, message: str
) -> None:
    inputs = make_inputs(LENGTHS, device=target.device, num_decode_seqs=1)
    with m3ops.check_mode():
        select(inputs)
        inputs.batch[option] = value
        with pytest.raises(ValueError, match=message):
            select(inputs)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 5, -1], r"must hold -1 or blocks that the row sees, got block_ids\[0, 1, 1\] = 5"),
        ([-2, 0, 1], r"got block_ids\[0, 1, 0\] = -2"),
        ([4, 0, 4], r"must hold each block of a row once, got block_ids\[0, 1, 2\] = 4"),
    ],
)
def test_wrong_ids_are_named(target: Target, ids: list[int], message: str) -> None:
    inputs = make_inputs(LENGTHS, device=target.device)
    given = random_ids(inputs, 3, ordered=True)
    given[0, 1] = torch.tensor(ids, dtype=torch.int32)
    with m3ops.check_mode(), pytest.raises(ValueError, match=message):
        attend(inputs, given)


def test_wrong_counts_are_named(target: Target) -> None:
    scores = torch.randn(3, 2, 5, device=target.device)
    visible = torch.tensor([5, -4, 6], dtype=torch.int32, device=target.device)
    message = r"^m3ops::topk_select .* at most the 5 columns .* got num_valid_blocks\[2\] = 6"
    with m3ops.check_mode(), pytest.raises(ValueError, match=message):
        m3ops.topk_select(scores, visible, topk=2)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, -1, 48, -1], r"must hold slots below P \* N = 48, got slot_mapping\[2\] = 48"),
        ([3, -1, 7, 3], r"must hold each slot once, got slot_mapping\[3\] = 3"),
    ],
)
def test_wrong_slots_are_named(target: Target, slots: list[int], message: str) -> None:
    device = target.device
    shapes = ((2, 16), (2, 16), (8,))
    key, value, index_key = (torch.randn(4, *shape, device=device) for shape in shapes)
    caches = [torch.zeros(3, *s, device=device) for s in ((2, 16, 16), (2, 16, 16), (16, 8))]
    with m3ops.check_mode():
        m3ops.store_kv(key, value, index_key, torch.tensor([0, -1, 47, -1], device=device), *caches)
        before = [cache.clone() for cache in caches]
        with pytest.raises(ValueError, match=rf"^m3ops::store_kv in check mode: .*{message}"):
            m3ops.store_kv(key, value, index_key, torch.tensor(slots, device=device), *caches)
    assert all(map(torch.equal, caches, before))


def test_gradients_are_checked(backend: str) -> None:
    inputs = make_inputs(LENGTHS)
    leaf = inputs.q.requires_grad_()
    message = r"^m3ops::sparse_attention_backward in check mode: `block_table`"
    with m3ops.use_backend(backend), m3ops.check_mode():
        out = attend(inputs)
        # Behind autograd's back, which would notice.
        inputs.batch["block_table"].data.clamp_(min=100)
        with pytest.raises(ValueError, match=message):
            torch.autograd.grad(out.sum(), leaf)


def test_it_ends_with_its_block_and_can_be_suspended() -> None:
    inputs = make_inputs(LENGTHS)
    inputs.batch["seqused_k"][0] = 10**6
    assert not checks.checking()
    with m3ops.check_mode():
        with m3ops.check_mode(False):
            select(inputs)
        with pytest.raises(ValueError, match="seqused_k"):
            select(inputs)
    select(inputs)


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_it_on(value: str, on: bool) -> None:
    root = Path(__file__).parents[1]
    code = "from m3ops import checks; print(checks.checking())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root), "M3OPS_CHECK": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(on)


def test_a_compiled_call_is_checked_and_nothing_is_traced() -> None:
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    function = torch.compile(select, backend=keep, fullgraph=True)
    inputs = make_inputs(LENGTHS)
    expected = function(inputs)
    with m3ops.check_mode():
        assert torch.equal(function(inputs), expected)
        inputs.batch["block_table"][0, 0] = 99
        with pytest.raises(ValueError, match=r"m3ops::select_blocks .* block_table\[0, 0\] = 99"):
            function(inputs)
    # The same graph with and without.
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert names == ["m3ops.select_blocks"]


def test_it_cannot_stand_inside_a_compiled_function() -> None:
    def inside(inputs: Inputs) -> Tensor:
        with m3ops.check_mode():
            return select(inputs)

    with pytest.raises(Exception, match="check_mode must surround the compiled call"):
        torch.compile(inside, backend="eager", fullgraph=True)(make_inputs(LENGTHS))


@pytest.mark.gpu
def test_nothing_waits_for_the_device_when_it_is_off(device: torch.device) -> None:
    inputs = make_inputs(LENGTHS, device=device)
    select(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        select(inputs)
        with m3ops.check_mode(), pytest.raises(RuntimeError, match="synchronizing"):
            select(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_launch_says_that_it_is_not_checked(device: torch.device) -> None:
    inputs = make_inputs(LENGTHS, device=device)
    expected = select(inputs)
    graph = torch.cuda.CUDAGraph()
    with (
        m3ops.check_mode(),
        pytest.warns(RuntimeWarning, match="m3ops::select_blocks is not checked"),
        torch.cuda.graph(graph),
    ):
        ids = select(inputs)
    graph.replay()
    assert torch.equal(ids, expected)
