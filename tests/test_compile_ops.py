"""The public functions under ``torch.compile``: no graph break, no recompile, the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import m3ops
from m3ops.testing import (
    LAYOUTS,
    Geometry,
    Inputs,
    assert_attention,
    assert_block_ids,
    lay_out,
    make_inputs,
    poisoned,
    random_ids,
    random_sequences,
)

devices = pytest.mark.parametrize("device", DEVICES)

Function = Callable[..., Any]

BATCHES = [
    [(90, 1), (20, 1), (77, 5), (16, 16)],
    [(40, 3), (33, 2)],
    [(130, 9), (0, 1), (300, 1)],
]


@pytest.fixture(autouse=True)
def _error_on_recompile() -> Iterator[None]:
    """Sizes that happen to agree in the first call are kept apart: what remains are our guards."""
    symbols: Any = torch.fx.experimental._config
    with torch._dynamo.config.patch(error_on_recompile=True), symbols.patch(use_duck_shape=False):
        yield


def compiled(function: Function) -> tuple[Function, CompileCounterWithBackend]:
    """`function` compiled as one graph with dynamic sizes, and the count of its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


def step(inputs: Inputs, **options: Any) -> tuple[torch.Tensor, ...]:
    """Everything from scores to attention, with the three ops apart and together."""
    batch, rows = inputs.batch, inputs.q.shape[0]
    scores = m3ops.index_score(inputs.index_q, inputs.index_k, **batch)
    visible = m3ops.num_valid_blocks(
        batch["cu_seqlens_q"], batch["seqused_k"], rows, batch["block_size"]
    )
    ids = m3ops.topk_select(scores, visible, topk=3)
    again = m3ops.select_blocks(inputs.index_q, inputs.index_k, **batch, topk=3)
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **batch, return_lse=True, **options
    )
    return visible, ids, again, out, lse


def assert_equal(compiled_results: Any, results: Any) -> None:
    for one, other in zip(compiled_results, results, strict=True):
        assert torch.equal(one, other)


@devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_serves_every_batch_of_a_layout(layout: str, device: torch.device) -> None:
    function, counter = compiled(step)
    for i, lengths in enumerate(BATCHES):
        inputs = make_inputs(lengths, layout=layout, device=device, padding_rows=i, extra_blocks=i)
        results = function(inputs)
        assert_equal(results, step(inputs))
        assert_block_ids(results[1], inputs, topk=3)
        assert_attention(results[3], results[4], inputs, results[1])
    assert counter.frame_count == 1


@devices
def test_two_graphs_serve_every_number_of_rows_and_every_bound(device: torch.device) -> None:
    """One for T = 1, one for all others; the bound on lengths changes at every step."""
    geometry = Geometry(heads_q=2, heads_kv=1, block_size=128)
    function, counter = compiled(step)
    bounds = iter(range(100, 5000, 350))
    with torch._dynamo.config.patch(error_on_recompile=False):
        for rows in (77, 2, 3, 5, 8, 13, 300, 1, 4, 1):
            lengths = [(max(rows, 20), rows - rows // 2), (max(rows, 290), rows // 2)]
            inputs = make_inputs(lengths, geometry, device=device, extra_blocks=4 + rows % 3)
            inputs.batch["max_seqlen_k"] = max(next(bounds), rows, 290)
            inputs.batch["max_seqlen_q"] = rows
            assert_equal(function(inputs), step(inputs))
    assert counter.frame_count <= 2


@devices
def test_out_variants_write_what_eager_writes(device: torch.device) -> None:
    def into(inputs: Inputs, scores: Any, ids: Any, out: Any, lse: Any) -> None:
        batch = inputs.batch
        m3ops.index_score(inputs.index_q, inputs.index_k, **batch, out=scores)
        m3ops.topk_select(scores, inputs_visible(inputs), topk=3, out=ids)
        m3ops.sparse_attention(inputs.q, inputs.k, inputs.v, ids, **batch, out=out, lse_out=lse)
        m3ops.select_blocks(inputs.index_q, inputs.index_k, **batch, topk=3, out=ids)

    def inputs_visible(inputs: Inputs) -> torch.Tensor:
        batch = inputs.batch
        return m3ops.num_valid_blocks(
            batch["cu_seqlens_q"], batch["seqused_k"], inputs.q.shape[0], batch["block_size"]
        )

    function, _ = compiled(into)
    for lengths in BATCHES:
        inputs = make_inputs(lengths, device=device, padding_rows=2)
        rows = inputs.total_q
        buffers = [
            poisoned(rows, 2, 40, dtype=torch.float32, device=device),
            poisoned(rows + 3, 2, 3, dtype=torch.int32, device=device)[:rows],
            poisoned(rows, 4, 48, dtype=torch.float32, device=device)[..., :32],
            poisoned(rows, 4, dtype=torch.float32, device=device),
        ]
        function(inputs, *buffers)
        _, ids, _, out, lse = step(inputs)
        assert_equal(buffers[1:], (ids, out, lse))


@devices
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_scores_follow_the_cache_that_is_stored_into(backend: str, device: torch.device) -> None:
    """store; score; store; score: no op is moved across another, none writes what it must not."""
    inputs = make_inputs([(40, 1), (33, 1)], device=device, extra_blocks=1)
    table = inputs.batch["block_table"]
    slots = torch.stack([table[0, 2] * 16 + 7, table[1, 2] * 16]).long()

    def function(
        inputs: Inputs, caches: list[torch.Tensor], new: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        scores = []
        for sign in (1, -1):
            key, value, index_key = (sign * x for x in new)
            m3ops.store_kv(key, value, index_key, slots, *caches)
            scores.append(m3ops.index_score(inputs.index_q, caches[2], **inputs.batch)[..., :3])
        return tuple(scores)

    new = [torch.randn(2, *shape, device=device) * 5 for shape in ((2, 32), (2, 32), (16,))]
    runs = []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        caches = [x.clone() for x in (inputs.k, inputs.v, inputs.index_k)]
        given = [x.clone() for x in (*new, inputs.index_q, slots, table)]
        runs.append((*run(inputs, caches, new), *caches))
        assert_equal((*new, inputs.index_q, slots, table), given)
    eager, after = runs
    assert not torch.equal(after[0], after[1])
    for one, other in zip(after, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_eager(layout: str, device: torch.device) -> None:
    def attend(qkv: list[torch.Tensor], ids: torch.Tensor, batch: Any) -> Any:
        # What comes before and after shows whether the gradient reaches them.
        q, k, v = 2 * qkv[0], qkv[1].tanh(), qkv[2].tanh()
        return m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True)[0] * 3

    function, counter = compiled(attend)
    for lengths in BATCHES:
        inputs = make_inputs(lengths, layout=layout, device=device, padding_rows=2, poison=0.5)
        ids = random_ids(inputs, 3)
        grads = []
        for run in (function, attend):
            leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
            out = run(leaves, ids, inputs.batch)
            grads.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert all(grad.count_nonzero() > 0 for grad in grads[0])
    assert counter.frame_count == 1


@devices
def test_batches_without_rows_or_with_empty_sequences(device: torch.device) -> None:
    function, _ = compiled(step)
    for lengths in ([(30, 4), (0, 0), (91, 5)], [(30, 2), (0, 0), (0, 0), (41, 2)]):
        inputs = make_inputs(lengths, device=device)
        assert_equal(function(inputs), step(inputs))
    torch.compiler.reset()
    function, _ = compiled(step)
    inputs = make_inputs([(30, 0), (0, 0), (41, 0)], device=device)
    results = function(inputs)
    assert_equal(results, step(inputs))
    assert [len(result) for result in results] == [0] * 5


@devices
def test_sliced_metadata_after_aligned(device: torch.device) -> None:
    function, counter = compiled(step)
    inputs = make_inputs([(70, 1), (33, 3), (50, 9)], device=device)
    expected = function(inputs)
    for offset in (1, 2):
        batch = dict(inputs.batch)
        for name in ("cu_seqlens_q", "seqused_k"):
            base = poisoned(20, dtype=torch.int32, device=device)
            batch[name] = base[offset:][: len(batch[name])]
            batch[name].copy_(inputs.batch[name])
        rows, columns = batch["block_table"].shape
        base = poisoned(rows * 37 + 2, dtype=torch.int32, device=device)
        wide = base[offset:][: rows * 37].unflatten(0, (rows, 37))[:, :columns]
        batch["block_table"] = wide.copy_(batch["block_table"])
        sliced = Inputs(**{**vars(inputs), "batch": batch})
        with torch._dynamo.config.patch(error_on_recompile=False):
            assert_equal(function(sliced), expected)
    # A table with another stride between rows may need a graph of its own, an offset may not.
    assert counter.frame_count <= 2


def kinds_of_q(inputs: Inputs, name: str) -> dict[str, torch.Tensor]:
    """The same queries contiguous, as part of a fused projection, and with heads first."""
    q = getattr(inputs, name)
    rows, heads, dim = q.shape
    fused = q.new_zeros(rows, heads + 4, dim)
    fused[:, 2 : 2 + heads] = q
    flat = q.new_zeros(rows, heads * dim + 24)
    flat[:, 16:-8] = q.flatten(1)
    return {
        "contiguous": q,
        "sliced from fused heads": fused[:, 2 : 2 + heads],
        "sliced from fused channels": flat[:, 16:-8].unflatten(1, (heads, dim)),
        "transposed": q.transpose(0, 1).contiguous().transpose(0, 1),
    }


@devices
@pytest.mark.parametrize("kind", kinds_of_q(make_inputs([(3, 1)]), "q"))
@pytest.mark.parametrize(
    "name", ["index_score", "select_blocks", "sparse_attention", "sparse_attention_backward"]
)
def test_fake_and_real_results_agree(name: str, kind: str, device: torch.device) -> None:
    inputs = make_inputs([(40, 3), (33, 2)], device=device, padding_rows=1)
    ids = random_ids(inputs, 3)
    q, index_q = kinds_of_q(inputs, "q")[kind], kinds_of_q(inputs, "index_q")[kind]

    def run(tensors: Sequence[torch.Tensor], batch: Any) -> Any:
        q, k, v, index_q, index_k, ids = tensors
        if name == "sparse_attention":
            return m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True)
        if name == "sparse_attention_backward":
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out, _ = m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True)
            return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        return (getattr(m3ops, name)(index_q, index_k, **batch),)

    tensors = [q, inputs.k, inputs.v, index_q, inputs.index_k, ids]
    real = run(tensors, inputs.batch)
    with FakeTensorMode() as mode:
        # Views keep their strides and offsets.
        fakes = [mode.from_tensor(x) for x in tensors]
        batch = {
            key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in inputs.batch.items()
        }
        fake = run(fakes, batch)
    for one, other in zip(fake, real, strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        assert one.dtype == other.dtype
        assert one.device == other.device
        assert one.storage_offset() == other.storage_offset()


@devices
@pytest.mark.parametrize("kind", kinds_of_q(make_inputs([(3, 1)]), "q"))
def test_strides_of_queries_change_no_result(kind: str, device: torch.device) -> None:
    inputs = make_inputs([(40, 3), (33, 2)], device=device, padding_rows=1)
    function, _ = compiled(step)
    q, index_q = kinds_of_q(inputs, "q")[kind], kinds_of_q(inputs, "index_q")[kind]
    twin = Inputs(**{**vars(inputs), "q": q, "index_q": index_q})
    assert_equal(function(twin), step(inputs))


@devices
def test_merging_inside_a_compiled_function(device: torch.device) -> None:
    def merged(inputs: Inputs, ids: torch.Tensor) -> Any:
        parts = [
            m3ops.sparse_attention(
                inputs.q, inputs.k, inputs.v, share, **inputs.batch, return_lse=True
            )
            for share in ids.chunk(2, 2)
        ]
        return m3ops.merge_attention(*zip(*parts, strict=True))

    inputs = lay_out(random_sequences([(70, 3), (33, 2)], device=device), padding_rows=2)
    ids = random_ids(inputs, 4)
    out, lse = torch.compile(merged, backend="aot_eager", fullgraph=True)(inputs, ids)
    assert_attention(out, lse, inputs, ids)


def test_errors_come_through_a_compiled_function() -> None:
    inputs = make_inputs([(40, 3), (33, 2)])

    def wrong(inputs: Inputs) -> torch.Tensor:
        return m3ops.select_blocks(
            inputs.index_q, inputs.index_k, **inputs.batch, topk=2, init_blocks=2
        )

    function = torch.compile(wrong, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="must be at most topk = 2"):
        function(inputs)


def test_a_backend_cannot_be_chosen_inside_a_compiled_function() -> None:
    def inside(inputs: Inputs) -> torch.Tensor:
        with m3ops.use_backend("reference"):
            return m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)

    inputs = make_inputs([(40, 3), (33, 2)])
    function = torch.compile(inside, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="use_backend must surround the compiled call"):
        function(inputs)
