"""The layer under torch.compile: how many graphs, what is in them, and equal results."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from layer_oracle import SMALL, PagedSequences, make_layer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import m3ops
from m3ops import BatchMetadata, MiniMaxM3SparseAttention, PagedKVCache, Workspace

BLOCK = SMALL.index_block_size

# Name: (query lengths, contexts, columns of the table if wider than needed). Prefills, decodes,
# later chunks and mixtures, with T, B and W that are equal to each other now and then.
STEPS: dict[str, tuple[list[int], list[int], int | None]] = {
    "prefill": ([5], [0], None),
    "equal sizes": ([1, 1, 1, 1], [10, 47, 63, 0], 4),
    "two tokens": ([1, 1], [99, 3], None),
    "three tokens": ([1, 1, 1], [1, 200, 4999], None),
    "mixed": ([1, 1, 5, 8], [100, 200, 0, 33], None),
    "long prefill": ([300], [0], None),
    "chunks": ([100, 57, 1], [4000, 0, 77], None),
    "many decodes": ([1] * 33, [7 * i for i in range(33)], 33),
    "speculative": ([3, 1, 2], [60, 15, 16], None),
    "single": ([1], [100], None),
    "single, long": ([1], [4999], 400),
    "single, new": ([1], [0], None),
}
MAX_TOKENS, NUM_PAGES = 320, 700


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def counter() -> CompileCounterWithBackend:
    return CompileCounterWithBackend("aot_eager")


class Steps:
    """Steps over one cache whose content is random, so that each stands for itself."""

    def __init__(self, with_workspace: bool, dtype: torch.dtype = torch.float32) -> None:
        self.layer = make_layer(dtype=dtype)
        self.cache = PagedKVCache(SMALL, NUM_PAGES, dtype=dtype)
        for buffer in self.cache.buffers():
            buffer.normal_()
        self.workspace = Workspace(SMALL, MAX_TOKENS, 512 * BLOCK) if with_workspace else None
        self.dtype = dtype

    def inputs(self, name: str) -> tuple[Tensor, BatchMetadata]:
        query_lens, contexts, columns = STEPS[name]
        pages = iter(torch.randperm(NUM_PAGES).tolist())
        tables = [
            [next(pages) for _ in range(-(-(n + context) // BLOCK))]
            for n, context in zip(query_lens, contexts, strict=True)
        ]
        batch = BatchMetadata.from_lengths(
            query_lens, contexts, tables, num_columns=columns, block_size=BLOCK
        )
        return torch.randn(sum(query_lens), SMALL.hidden_size, dtype=self.dtype), batch

    def check(self, compiled: Callable[..., Any], name: str, tolerance: float = 1e-5) -> None:
        hidden, batch = self.inputs(name)
        options = {"workspace": self.workspace, "return_block_ids": True}
        out, ids = compiled(hidden, batch, self.cache, **options)
        # The workspace's ids are overwritten by the next call.
        out, ids = out.clone(), ids.clone()
        expected, expected_ids = self.layer(hidden, batch, self.cache, **options)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("with_workspace", [False, True])
@pytest.mark.parametrize("first", ["equal sizes", "single", "mixed"])
def test_two_graphs_for_every_step(
    counter: CompileCounterWithBackend, with_workspace: bool, first: str
) -> None:
    """Whatever comes first: one graph for T = 1 and one for all else."""
    steps = Steps(with_workspace)
    compiled = torch.compile(steps.layer, backend=counter, fullgraph=True, dynamic=True)
    steps.check(compiled, first)
    assert counter.frame_count == 1
    one_token = first == "single"
    for name in sorted(STEPS, key=lambda name: ("single" in name) != one_token):
        if ("single" in name) != one_token and counter.frame_count == 1:
            steps.check(compiled, name)
            assert counter.frame_count == 2
        with torch._dynamo.config.patch(error_on_recompile=True):
            steps.check(compiled, name)
    assert counter.frame_count == 2


@pytest.mark.usefixtures("no_grad")
def test_a_full_workspace_needs_no_graph_of_its_own(counter: CompileCounterWithBackend) -> None:
    steps = Steps(with_workspace=True)
    compiled = torch.compile(steps.layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (5, MAX_TOKENS, 6):
        hidden = torch.randn(tokens, SMALL.hidden_size)
        batch = BatchMetadata.from_lengths([tokens], None, [list(range(512))], block_size=BLOCK)
        out = compiled(hidden, batch, steps.cache, workspace=steps.workspace)
        expected = steps.layer(hidden, batch, steps.cache, workspace=steps.workspace)
        torch.testing.assert_close(out, expected)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("no_grad")
def test_refreshed_metadata_needs_no_new_graph(counter: CompileCounterWithBackend) -> None:
    layer, sequences = make_layer(), PagedSequences(SMALL, [200] * 4)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    bucket: dict[str, Any] = {"num_tokens": 8, "num_seqs": 4, "num_columns": 13}
    batch = sequences.step({0: 1, 1: 1, 2: 1}, **bucket)
    hidden = torch.randn(8, SMALL.hidden_size)
    for queries, contexts in (([1, 1], [1, 0]), ([1] * 4, [2, 1, 1, 0]), ([], [])):
        compiled(hidden, batch, sequences.cache)
        tables = [sequences.tables[i] for i in range(len(queries))]
        batch.update_(queries, contexts, tables)
    assert torch.equal(compiled(hidden, batch, sequences.cache), torch.zeros_like(hidden))
    assert counter.frame_count == 1


def test_two_graphs_for_training(counter: CompileCounterWithBackend) -> None:
    layer = make_layer()
    parameters = [p for name, p in layer.named_parameters() if "indexer" not in name]
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for lengths, total in (([40, 60], None), ([5], None), ([1], None), ([3, 70, 3], 80)):
        batch = BatchMetadata.from_lengths(lengths, num_tokens=total, block_size=BLOCK)
        hidden = torch.randn(batch.num_tokens, SMALL.hidden_size, requires_grad=True)
        weight = torch.randn(batch.num_tokens, SMALL.hidden_size)
        results = []
        for run in (layer, compiled):
            out = run(hidden, batch)
            grads = torch.autograd.grad((out * weight).sum(), [hidden, *parameters])
            results.append((out, *grads))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 2


def test_training_on_whole_batches(counter: CompileCounterWithBackend) -> None:
    layer = make_layer()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for shape in ((2, 40), (3, 70), (5, 9)):
        hidden = torch.randn(*shape, SMALL.hidden_size, requires_grad=True)
        expected, actual = layer(hidden), compiled(hidden)
        torch.testing.assert_close(actual, expected)
        want = torch.autograd.grad(expected.square().sum(), hidden)
        torch.testing.assert_close(torch.autograd.grad(actual.square().sum(), hidden), want)
    assert counter.frame_count == 1


class Stack(nn.Module):
    """Two layers, as a model has them: each with its cache, both with the workspace."""

    def __init__(self, with_workspace: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer() for _ in range(2))
        self.caches = nn.ModuleList(PagedKVCache(SMALL, NUM_PAGES) for _ in range(2))
        self.workspace = Workspace(SMALL, MAX_TOKENS, 512 * BLOCK) if with_workspace else None

    def forward(self, hidden: Tensor, batch: BatchMetadata) -> Tensor:
        for layer, cache in zip(self.layers, self.caches, strict=True):
            hidden = hidden + layer(hidden, batch, cache, workspace=self.workspace)
        return hidden


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("with_workspace", [False, True])
def test_inductor_copies_no_cache(with_workspace: bool) -> None:
    """Two layers take turns in one workspace, and nothing of a cache's size is allocated."""
    stack = Stack(with_workspace)
    hidden, batch = Steps(with_workspace=False).inputs("mixed")
    expected = stack(hidden, batch)
    compiled = torch.compile(stack, fullgraph=True, dynamic=True)
    out, (code,) = run_and_get_code(compiled, hidden, batch)
    torch.testing.assert_close(out, expected)
    # Then come the inputs of a benchmark, by names that differ between versions.
    body = code[code.index("def call(") :].partition("rand_strided")[0]
    assert body.count("torch.ops.m3ops.store_kv") == 2
    allocations = [line for line in body.splitlines() if "empty_strided" in line]
    assert allocations
    for size in (NUM_PAGES, MAX_TOKENS + 1):
        assert not any(f"({size}," in line for line in allocations)
    assert "clone" not in body and "copy_(" not in body


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_stores_and_scores_keep_their_order(backend: str) -> None:
    """Store, score, store, score: the second score sees the second store, the first does not."""
    cache = PagedKVCache(SMALL, 2)
    slots = torch.arange(20)
    offsets = torch.tensor([0, 1, 1], dtype=torch.int32)
    seqused = torch.tensor([20, 0], dtype=torch.int32)
    table = torch.tensor([[0, 1], [0, 0]], dtype=torch.int32)

    def run(keys: Tensor, index_keys: Tensor, index_q: Tensor) -> list[Tensor]:
        scores = []
        for factor in (1, -2):
            m3ops.store_kv(
                keys,
                keys,
                index_keys * factor,
                slots,
                cache.k_cache,
                cache.v_cache,
                cache.index_k_cache,
            )
            scores.append(
                m3ops.index_score(
                    index_q,
                    cache.index_k_cache,
                    cu_seqlens_q=offsets,
                    seqused_k=seqused,
                    block_table=table,
                    block_size=BLOCK,
                )
            )
        return scores

    keys, index_keys = torch.randn(20, 2, 16), torch.randn(20, 32)
    index_q = torch.randn(1, 2, 32)
    expected = run(keys, index_keys, index_q)
    dots = torch.einsum("hd,sd->hs", index_q[0], index_keys)
    for factor, scores in zip((1, -2), expected, strict=True):
        want = torch.stack([(dots * factor)[:, :16].amax(1), (dots * factor)[:, 16:].amax(1)], 1)
        torch.testing.assert_close(scores[0], want)
    cache.index_k_cache.zero_()
    actual = torch.compile(run, backend=backend, fullgraph=True)(keys, index_keys, index_q)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


def snapshot(graphs: list[torch.fx.GraphModule]) -> str:
    """The ops in order, then how often each function is called."""
    (graph,) = graphs
    targets = []
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method"):
            name = str(node.target) if "m3ops" in str(node.target) else None
            targets.append(name or getattr(node.target, "__name__", node.target))
    ops = [name.removesuffix(".default") for name in targets if "m3ops" in name]
    others = Counter(name for name in targets if "m3ops" not in name)
    counts = " ".join(f"{name}={count}" for name, count in sorted(others.items()))
    return "\n".join([*ops, *textwrap.wrap(counts, 90)])


def graph_of(
    counter: CompileCounterWithBackend, layer: MiniMaxM3SparseAttention, *args: Any, **options: Any
) -> list[torch.fx.GraphModule]:
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    compiled(*args, **options)
    return counter.graphs


@pytest.mark.usefixtures("no_grad")
def test_graph_of_a_step(counter: CompileCounterWithBackend) -> None:
    steps = Steps(with_workspace=False)
    graphs = graph_of(counter, steps.layer, *steps.inputs("mixed"), steps.cache)
    assert_expected_inline(
        snapshot(graphs),
        """\
m3ops.store_kv
m3ops.select_blocks
m3ops.sparse_attention
Size=1 add=8 cat=5 cos=1 flatten=1 float=1 getitem=40 linear=6 mul=18 rms_norm=4 sin=1
sub=7 to=22 unflatten=5""",
    )


@pytest.mark.usefixtures("no_grad")
def test_graph_of_a_step_with_a_workspace(counter: CompileCounterWithBackend) -> None:
    steps = Steps(with_workspace=True)
    inputs = steps.inputs("mixed")
    graphs = graph_of(counter, steps.layer, *inputs, steps.cache, workspace=steps.workspace)
    assert_expected_inline(
        snapshot(graphs),
        """\
m3ops.store_kv
m3ops.index_score_out
m3ops.topk_select_out
m3ops.sparse_attention
Size=1 add=8 cat=5 cos=1 flatten=1 float=1 getitem=42 linear=6 mul=18 rms_norm=4 sin=1
sub=7 to=22 unflatten=5""",
    )


@pytest.mark.usefixtures("no_grad")
def test_graph_of_a_step_with_given_ids(counter: CompileCounterWithBackend) -> None:
    steps = Steps(with_workspace=False)
    hidden, batch = steps.inputs("mixed")
    ids = torch.zeros(len(hidden), 2, 3, dtype=torch.int32)
    graphs = graph_of(counter, steps.layer, hidden, batch, steps.cache, block_ids=ids)
    assert_expected_inline(
        snapshot(graphs),
        """\
m3ops.store_kv
m3ops.sparse_attention
Size=1 add=6 cat=4 cos=1 flatten=1 float=1 getitem=31 linear=5 mul=14 rms_norm=3 sin=1
sub=6 to=17 unflatten=4""",
    )


def test_graph_of_training(counter: CompileCounterWithBackend) -> None:
    batch = BatchMetadata.from_lengths([30, 40], block_size=BLOCK)
    graphs = graph_of(counter, make_layer(), torch.randn(70, SMALL.hidden_size), batch)
    assert_expected_inline(
        snapshot(graphs),
        """\
m3ops.select_blocks
m3ops.sparse_attention
Size=1 _set_grad_enabled=2 add=8 cat=5 cos=1 flatten=1 float=1 getitem=40 linear=6 mul=17
rms_norm=4 sin=1 sub=7 to=22 unflatten=5""",
    )


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("with_workspace", [False, True])
def test_what_cuda_graphs_need(counter: CompileCounterWithBackend, with_workspace: bool) -> None:
    """Mutated tensors are static inputs, and no input is a number in a tensor on the CPU."""
    steps = Steps(with_workspace)
    (graph,) = graph_of(
        counter, steps.layer, *steps.inputs("mixed"), steps.cache, workspace=steps.workspace
    )
    static = set()
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, Tensor):
            assert value.ndim > 0, node.name
            if node.meta["tensor_dict"].get("_dynamo_static_input_type"):
                static.add(node.name.strip("_").removeprefix("l_"))
    mutated = {f"cache_buffers_{name}" for name, _ in steps.cache.named_buffers()}
    if steps.workspace is not None:
        mutated |= {f"workspace_buffers_{name}" for name, _ in steps.workspace.named_buffers()}
    assert mutated <= static
