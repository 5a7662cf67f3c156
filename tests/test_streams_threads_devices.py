"""The same results on another stream, in another thread, on another device and in other modes."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEVICES, HAS_TRITON, Target
from torch import Tensor

import m3ops
from m3ops.testing import MIXED, Inputs, make_inputs

TESTS = Path(__file__).parent
CONFIG = m3ops.MiniMaxM3AttentionConfig(
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    index_n_heads=2,
    index_head_dim=32,
    index_block_size=16,
    index_topk_blocks=3,
)
# Decode, speculative rows and a chunk, with more blocks than are kept.
QUERIES, CONTEXTS = [1, 1, 3, 6], [70, 15, 45, 30]
BUCKET: dict[str, Any] = {"num_tokens": 16, "num_seqs": 5, "block_size": 16}
PAGES = 16

second_device = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device"),
]


def all_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Bit for bit, wherever they are."""
    return len(actual) == len(expected) and all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(actual, expected, strict=True)
    )


def run_ops(inputs: Inputs) -> list[Tensor]:
    """What every op gives; of the scores, those that are specified."""
    batch, rows, size = inputs.batch, inputs.total_q, inputs.block_size
    visible = m3ops.num_valid_blocks(batch["cu_seqlens_q"], batch["seqused_k"], rows, size)
    scores = m3ops.index_score(inputs.index_q, inputs.index_k, **batch)
    seen = torch.arange(scores.shape[2], device=scores.device) < visible[:, None, None]
    ids = m3ops.topk_select(scores, visible, topk=3)
    selected = m3ops.select_blocks(inputs.index_q, inputs.index_k, **batch, topk=3)
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **batch, num_splits=2, return_lse=True
    )
    caches = [x.nan_to_num().clone() for x in (inputs.k, inputs.v, inputs.index_k)]
    slots = torch.arange(rows, device=inputs.q.device) * 3
    queries, index_queries = inputs.q.nan_to_num(), inputs.index_q.nan_to_num()
    m3ops.store_kv(queries[:, :2], queries[:, 2:], index_queries[:, 0], slots, *caches)
    return [visible, scores.where(seen, 0), ids, selected, out, lse, *caches]


class Server:
    """A layer with a filled cache, and one step of it."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.layer = m3ops.MiniMaxM3SparseAttention(CONFIG)
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                parameter.normal_(std=0.3 if "norm" in name else parameter.shape[-1] ** -0.5)
            # The same in bfloat16.
            self.layer.bfloat16().to(device, dtype)
        self.cache = m3ops.PagedKVCache(CONFIG, PAGES, dtype=dtype, device=device)
        for buffer in self.cache.buffers():
            buffer.copy_(torch.randn(buffer.shape))
        self.workspace = m3ops.Workspace(CONFIG, 16, 16 * 8, device=device)
        self.hidden = torch.randn(16, CONFIG.hidden_size).bfloat16().to(device, dtype)
        pages = iter(torch.randperm(PAGES).tolist())
        self.table = [
            [next(pages) for _ in range(-(-(new + context) // 16))]
            for new, context in zip(QUERIES, CONTEXTS, strict=True)
        ]
        self.batch = self.describe(device)

    def describe(self, device: torch.device) -> m3ops.BatchMetadata:
        return m3ops.BatchMetadata.from_lengths(
            QUERIES, CONTEXTS, self.table, **BUCKET, num_columns=8, device=device
        )

    def step(self, run: Callable[..., Any] | None = None) -> list[Tensor]:
        """Output and ids, the same each time: a step writes the same keys to the same slots."""
        out, ids = (self.layer if run is None else run)(
            self.hidden,
            self.batch,
            self.cache,
            workspace=self.workspace,
            return_block_ids=True,
        )
        return [out.clone(), ids.clone()]


@pytest.fixture
def server(device: torch.device) -> Iterator[Server]:
    with torch.no_grad():
        yield Server(device)


def mixed(device: torch.device) -> Inputs:
    return make_inputs(MIXED, device=device, padding_rows=3)


def inputs_of(target: Target, dtype: torch.dtype = torch.float32) -> Inputs:
    lengths = target.scale([(33, 3), (20, 1)], MIXED)
    return make_inputs(lengths, dtype=dtype, device=target.device, padding_rows=1)


# Streams and threads.


@pytest.mark.parametrize("device", DEVICES)
def test_threads_do_not_disturb_each_other(device: torch.device) -> None:
    """Each on a batch of its own; on a GPU, on a stream of its own."""
    inputs = [mixed(device), make_inputs([(120, 1), (64, 5), (9, 9)], device=device)]
    with torch.no_grad():
        servers = [Server(device), Server(device)]
        expected = [
            (run_ops(own), server.step()) for own, server in zip(inputs, servers, strict=True)
        ]
    together = threading.Barrier(2)

    def serve(which: int) -> bool:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        together.wait()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(10):
                ops, layer = run_ops(inputs[which]), servers[which].step()
                if not all_equal(ops, expected[which][0]):
                    return False
                for actual, wanted in zip(layer, expected[which][1], strict=True):
                    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(serve, range(2), timeout=200)) == [True, True]


@pytest.mark.gpu
def test_work_goes_to_the_current_stream(device: torch.device, server: Server) -> None:
    """What they read is written on that stream, late: on another one they would read NaN."""
    inputs = mixed(device)
    expected, expected_step = run_ops(inputs), server.step()
    tensors = {name: getattr(inputs, name) for name in ("q", "index_q", "k", "v", "index_k")}
    late: dict[str, Any] = {
        name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()
    }
    hidden = server.hidden
    server.hidden = torch.full_like(hidden, torch.nan)
    # The bucket holds another step until then.
    server.batch.update_([1], [0], [[0]])
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        for name, tensor in tensors.items():
            late[name].copy_(tensor)
        results = run_ops(dataclasses.replace(inputs, **late))
        server.hidden.copy_(hidden)
        server.batch.update_(QUERIES, CONTEXTS, server.table)
        step = server.step()
        assert not stream.query(), "the stream was not busy long enough to tell"
    torch.cuda.synchronize(device)
    assert all_equal(results, expected)
    assert all_equal(step, expected_step)


needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")


def capturing() -> Any:
    """What surrounds a launch while its stream is captured."""
    from m3ops.custom_ops.common import launch

    return launch._no_compilation(SimpleNamespace(__name__="_some_kernel"))


@needs_triton
def test_only_the_thread_that_captures_is_refused_a_compilation() -> None:
    from triton import knobs

    with ThreadPoolExecutor(1) as pool, capturing():
        hook: Any = knobs.runtime.jit_cache_hook
        with pytest.raises(RuntimeError, match="_some_kernel must be compiled before"):
            hook()
        # False or None: go on.
        assert not pool.submit(hook).result()


@needs_triton
def test_captures_in_two_threads_leave_no_refusal_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    def previous(**_: Any) -> None:
        return None

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", previous)
    entered, leave = threading.Event(), threading.Event()

    def capture() -> None:
        with capturing():
            entered.set()
            leave.wait(10)

    with ThreadPoolExecutor(1) as pool:
        with capturing():
            other = pool.submit(capture)
            # It gets in only where nothing makes it wait.
            entered.wait(0.3)
        leave.set()
        other.result()
    assert knobs.runtime.jit_cache_hook is previous


@pytest.mark.gpu
def test_one_thread_captures_while_another_runs(device: torch.device) -> None:
    inputs, others = mixed(device), make_inputs([(120, 1), (64, 5)], device=device)
    expected, others_expected = run_ops(inputs), run_ops(others)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    started, done = threading.Event(), threading.Event()

    def run() -> bool:
        started.wait(30)
        with torch.cuda.stream(stream):
            same = all_equal(run_ops(others), others_expected)
        done.set()
        return same

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run)
        # Other threads may do what a capture forbids, copying to the host for one.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run_ops(inputs)
            started.set()
            assert done.wait(60)
            again = run_ops(inputs)
        assert other.result()
    graph.replay()
    torch.cuda.synchronize(device)
    assert all_equal(results, expected)
    assert all_equal(again, expected)


# Devices.


@pytest.mark.parametrize("count", [pytest.param(2, marks=second_device)])
def test_a_device_that_is_not_current(count: int) -> None:
    """All on the second device while the first one is current: the same bits."""
    first, second = (torch.device("cuda", i) for i in range(count))
    torch.cuda.set_device(first)
    results, steps = [], []
    for device in (first, second):
        torch.manual_seed(0)
        inputs = make_inputs(MIXED, dtype=torch.bfloat16, padding_rows=3)
        moved = {
            field.name: getattr(inputs, field.name).to(device)
            for field in dataclasses.fields(inputs)
            if isinstance(getattr(inputs, field.name), Tensor)
        }
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.batch.items()}
        results.append(run_ops(dataclasses.replace(inputs, **moved, batch=batch)))
        with torch.no_grad():
            steps.append(Server(device).step())
        assert all(result.device == device for result in [*results[-1], *steps[-1]])
        assert torch.cuda.current_device() == 0
    assert all_equal(*results)
    assert all_equal(*steps)


@pytest.mark.parametrize("count", [pytest.param(2, marks=second_device)])
def test_a_graph_on_the_second_device(count: int) -> None:
    device = torch.device("cuda", count - 1)
    with torch.no_grad():
        server = Server(device)
        expected = server.step()
        graph = torch.cuda.CUDAGraph()
        # The stream that captures by default is one of the device that was current first.
        stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
            results = server.step()
        graph.replay()
    torch.cuda.synchronize(device)
    assert all_equal(results, expected)


def test_the_default_device_does_not_matter(target: Target) -> None:
    """Every tensor is made where its inputs are, not where PyTorch would put it."""
    inputs, device = inputs_of(target), target.device
    with torch.no_grad():
        server = Server(device)
        expected, expected_step = run_ops(inputs), server.step()
        with torch.device("meta"):
            results = run_ops(inputs)
            server.batch = server.describe(device)
            server.batch.update_(QUERIES, CONTEXTS, server.table)
            step = server.step()
            whole = server.layer(server.hidden[None])
        assert torch.equal(whole, server.layer(server.hidden[None]))
    assert all_equal(results, expected)
    assert all_equal(step, expected_step)


# Modes.


def test_inference_mode(target: Target) -> None:
    """Tensors made inside, used inside and outside; tensors from outside, used inside."""
    inputs = inputs_of(target)
    with torch.no_grad():
        server = Server(target.device)
        expected, expected_step = run_ops(inputs), server.step()
    with torch.inference_mode():
        assert all_equal(run_ops(inputs), expected)
        assert all_equal(server.step(), expected_step)
        names = ("q", "index_q", "k", "v", "index_k")
        inside = {name: getattr(inputs, name).clone() for name in names}
        twin = dataclasses.replace(inputs, **inside)
        assert twin.q.is_inference() and all_equal(run_ops(twin), expected)
        server.cache, server.workspace = copy.deepcopy((server.cache, server.workspace))
        server.batch = server.describe(target.device)
        assert server.cache.k_cache.is_inference()
        assert all_equal(server.step(), expected_step)
    with torch.no_grad():
        assert all_equal(run_ops(twin), expected)
        assert all_equal(server.step(), expected_step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ops_compute_in_their_own_dtype_under_autocast(target: Target, dtype: torch.dtype) -> None:
    inputs = inputs_of(target, dtype)
    expected = run_ops(inputs)
    with torch.autocast(target.device.type, torch.float16):
        results = run_ops(inputs)
    assert [result.dtype for result in results] == [result.dtype for result in expected]
    assert all_equal(results, expected)


def test_the_layer_under_autocast_is_the_layer_in_that_dtype(target: Target) -> None:
    """Float32 weights that bfloat16 holds exactly, over a cache in bfloat16."""
    with torch.no_grad():
        server = Server(target.device)
        server.cache.bfloat16()
        with torch.autocast(target.device.type, torch.bfloat16):
            results = server.step()
        assert server.layer.q_proj.weight.dtype == torch.float32
        server.layer.bfloat16()
        server.hidden = server.hidden.bfloat16()
        expected = server.step()
    assert results[0].dtype == torch.bfloat16
    assert all_equal(results, expected)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    """Off at the start and at the end; uninitialised memory is NaN while it is on."""
    assert not torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
def test_ops_with_deterministic_algorithms(target: Target) -> None:
    """Everything they allocate is then filled with NaN, which must not show either."""
    inputs = inputs_of(target)
    expected = run_ops(inputs)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    assert all_equal(run_ops(inputs), expected)


def check_layer_with_deterministic_algorithms(device: torch.device) -> None:
    """A step, and a training step with its gradients."""
    torch.manual_seed(0)
    server = Server(device)

    def train() -> list[Tensor]:
        hidden = server.hidden.repeat(6, 1)[None].requires_grad_()
        out = server.layer(hidden)
        weights = [w for name, w in server.layer.named_parameters() if "indexer" not in name]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [hidden, *weights])]

    def run() -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            step = server.step()
        return step, train()

    step, trained = run()
    torch.use_deterministic_algorithms(True)
    twice = [run(), run()]
    assert all_equal(twice[0][0], step)
    assert all_equal(twice[0][1], twice[1][1])
    for actual, expected in zip(twice[0][1], trained, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_deterministic")
def test_the_layer_with_deterministic_algorithms() -> None:
    check_layer_with_deterministic_algorithms(torch.device("cpu"))


@pytest.mark.gpu
def test_the_layer_with_deterministic_algorithms_on_a_gpu() -> None:
    """In a process of its own: cuBLAS asks for a variable that is read once."""
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); import torch\n"
        "from test_streams_threads_devices import check_layer_with_deterministic_algorithms\n"
        "check_layer_with_deterministic_algorithms(torch.device('cuda', 0)); print('equal')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path]),
        },
    )
    assert "equal" in result.stdout, result.stderr[-2000:]


# Compiled and eager code beside each other. aot_eager leaves every operation as it is, so bits are
# those of eager code.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_compiled_after_eager_and_eager_after_compiled(
    device: torch.device, inference: bool
) -> None:
    mode = torch.inference_mode if inference else torch.no_grad
    with torch.no_grad():
        server = Server(device)
    compiled = torch.compile(server.layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with mode():
        expected = server.step()
        assert all_equal(server.step(compiled), expected)
        assert all_equal(server.step(), expected)
        assert all_equal(server.step(compiled), expected)
    # A graph made in one mode and called in the other.
    with torch.no_grad() if inference else torch.inference_mode():
        assert all_equal(server.step(compiled), expected)
        assert all_equal(server.step(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_training_compiled_after_eager_and_eager_after_compiled(device: torch.device) -> None:
    layer = Server(device).layer
    hidden = torch.randn(2, 70, CONFIG.hidden_size, device=device).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    results = []
    for run in (layer, compiled, layer, compiled):
        out = run(hidden)
        weights = [layer.q_proj.weight, layer.v_proj.weight]
        results.append([out, *torch.autograd.grad(out.square().sum(), [hidden, *weights])])
    assert all_equal(results[2], results[0])
    assert all_equal(results[3], results[1])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_around_compiled_code(device: torch.device) -> None:
    with torch.no_grad():
        server = Server(device)
        server.cache.bfloat16()
        compiled = torch.compile(server.layer, fullgraph=True, dynamic=True, backend="aot_eager")
        with torch.autocast(device.type, torch.bfloat16):
            expected = server.step()
            assert all_equal(server.step(compiled), expected)
        # Outside it again, in float32.
        server.cache.float()
        plain = server.step()
        assert all_equal(server.step(compiled), plain)
    assert expected[0].dtype == torch.bfloat16 and plain[0].dtype == torch.float32


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_compiled_layer_is_copied_and_pickled(
    server: Server, duplicate: Callable[[Any], Any]
) -> None:
    """Compiled in place and used; the copy is of the layer, not of its graphs."""
    expected = server.step()
    server.layer.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    assert all_equal(server.step(), expected)
    server.layer, server.cache, server.batch = duplicate((server.layer, server.cache, server.batch))
    assert all_equal(server.step(), expected)
