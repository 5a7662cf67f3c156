"""The layer through torch.export and AOTInductor: other sizes, other processes, no Python ops."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bucket import FIXED, Bucket, bucket_tensors
from layer_oracle import SMALL, make_layer
from torch import Tensor, nn

import m3ops
from m3ops import BatchMetadata, MiniMaxM3AttentionConfig, PagedKVCache, Workspace

NUM_PAGES = 80

# Query lengths, contexts and table columns. The first is what programs are exported with; the
# others have T = 1, 7 and 300.
STEPS: list[tuple[list[int], list[int], int | None]] = [
    ([1, 1, 5, 8], [100, 200, 0, 33], None),
    ([1], [700], None),
    ([1, 1, 1, 2, 2], [10, 47, 63, 0, 300], 37),
    ([300], [150], None),
]


class Program(nn.Module):
    """Tensors and metadata in, tensors out: what torch.export takes."""

    def __init__(
        self,
        config: MiniMaxM3AttentionConfig = SMALL,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        with_workspace: bool = False,
    ) -> None:
        super().__init__()
        self.layer = make_layer(config, dtype, device)
        self.cache = PagedKVCache(config, NUM_PAGES, dtype=dtype, device=device)
        for buffer in self.cache.buffers():
            buffer.normal_()
        self.workspace = None
        if with_workspace:
            self.workspace = Workspace(config, 320, 64 * config.index_block_size, device=device)

    def forward(self, hidden: Tensor, batch: BatchMetadata) -> Tensor:
        return self.layer(hidden, batch, self.cache, workspace=self.workspace)

    def inputs(self, step: tuple[list[int], list[int], int | None]) -> tuple[Tensor, BatchMetadata]:
        query_lens, contexts, columns = step
        config, weight = self.layer.config, self.layer.q_proj.weight
        pages = iter(torch.randperm(NUM_PAGES).tolist())
        tables = [
            [next(pages) for _ in range(-(-(n + context) // config.index_block_size))]
            for n, context in zip(query_lens, contexts, strict=True)
        ]
        batch = BatchMetadata.from_lengths(
            query_lens,
            contexts,
            tables,
            num_columns=columns,
            block_size=config.index_block_size,
            device=weight.device,
        )
        hidden = torch.randn(batch.num_tokens, config.hidden_size)
        return hidden.to(weight), batch


def export(program: Program, inputs: tuple[Tensor, BatchMetadata]) -> torch.export.ExportedProgram:
    """With every size that a step may change left open."""
    shapes = ({0: torch.export.Dim.DYNAMIC}, inputs[1].dynamic_shapes())
    return torch.export.export(program, inputs, dynamic_shapes=shapes, strict=False)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# Reads a program and steps, and runs them with nothing else of the tests at hand.
RUN_PROGRAM = """
import sys
import torch
import m3ops
program, data = sys.argv[1:]
steps = torch.load(data)
run = torch.export.load(program).module()
for state, hidden, batch, expected in steps:
    run.load_state_dict(state)
    torch.testing.assert_close(run(hidden, batch), expected)
print(len(steps))
"""


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("with_workspace", [False, True])
def test_a_fresh_process_runs_a_saved_program(
    tmp_path: Path, decomposed: bool, with_workspace: bool
) -> None:
    program = Program(with_workspace=with_workspace)
    exported = export(program, program.inputs(STEPS[0]))
    if decomposed:
        exported = exported.run_decompositions()
    # No size is tied to another, or to a number.
    ranges = exported.range_constraints.values()
    assert all(bounds.lower != bounds.upper for bounds in ranges) and len(ranges) >= 7
    torch.export.save(exported, tmp_path / "layer.pt2")
    steps = []
    for step in STEPS:
        state = {name: tensor.clone() for name, tensor in program.state_dict().items()}
        hidden, batch = program.inputs(step)
        steps.append((state, hidden, batch, program(hidden, batch)))
    torch.save(steps, tmp_path / "steps.pt")
    command = [sys.executable, "-c", RUN_PROGRAM, "layer.pt2", "steps.pt"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.split()[-1] == str(len(STEPS))


# The time goes into optimising a wrapper that only calls kernels and ops.
FAST_TO_BUILD = {"aot_inductor.compile_wrapper_opt_level": "O0"}


def package(program: Program, path: Path) -> Any:
    """A compiled package of the program, loaded."""
    hidden, batch = program.inputs(STEPS[0])
    exported = export(program, (hidden, batch.without_bounds()))
    built = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(path), inductor_configs=FAST_TO_BUILD
    )
    return torch._inductor.aoti_load_package(built)


@pytest.fixture
def cpp_compiler(tmp_path: Path) -> None:
    """One that makes packages which load: a libstdc++ of their own breaks ``std::regex`` in them,
    which torch calls on a device's name.
    """
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler):
        pytest.skip(f"needs a C++ compiler, found no {compiler}")
    source, library = tmp_path / "words.cpp", tmp_path / "words.so"
    source.write_text("#include <iostream>\nvoid say(int n) { std::cout << n; }\n")
    command = [compiler, "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    if b"libstdc++.so" not in library.read_bytes():
        pytest.skip(
            f"needs a C++ compiler that links libstdc++.so, got {compiler}, which copies it"
        )


@pytest.mark.usefixtures("cpp_compiler")
def test_a_package_runs_every_step(tmp_path: Path) -> None:
    program = Program()
    run = package(program, tmp_path / "layer.pt2")
    for step in STEPS:
        hidden, batch = program.inputs(step)
        actual = run(hidden, batch.without_bounds())
        expected = program(hidden, batch)
        torch.testing.assert_close(actual, expected)
        # It passes over bounds, rather than over a batch that has them.
        torch.testing.assert_close(run(hidden, batch), expected)


def test_a_bound_that_becomes_a_constant_is_pointed_out() -> None:
    program = Program()
    hidden, batch = program.inputs(STEPS[0])
    shapes = batch.dynamic_shapes()
    frozen = [*shapes[:-2], (None,) * 3, None]
    with pytest.warns(UserWarning, match=r"`max_seqlen_q` = 15 becomes a constant"):
        torch.export.export(
            program,
            (hidden, batch),
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC}, frozen),
            strict=False,
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("cpp_compiler")
def test_a_package_runs_every_step_on_a_gpu(tmp_path: Path, device: torch.device) -> None:
    """In float32, where what a compiler fuses does not change which blocks are best."""
    config = MiniMaxM3AttentionConfig(hidden_size=512)
    program = Program(config, torch.float32, device)
    run = package(program, tmp_path / "layer.pt2")
    for query_lens, contexts, columns in (*STEPS, ([1] * 33, [50] * 33, None)):
        hidden, batch = program.inputs((query_lens, contexts, columns))
        actual = run(hidden, batch.without_bounds())
        torch.testing.assert_close(actual, program(hidden, batch), rtol=1e-3, atol=1e-3)


def test_a_decode_step_is_traced_with_its_kernels() -> None:
    """In a process of its own, where kernels are compiled; they are only analysed there."""
    pytest.importorskip("triton")
    tests = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(tests / "visible_graph.py"), "sm_90"]
    result = subprocess.run(
        command, cwd=tests.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    traced = json.loads(result.stdout.splitlines()[-1])
    assert traced["exported"] == [
        "m3ops.store_kv.default",
        "m3ops.select_blocks.default",
        "m3ops.sparse_attention.default",
    ]
    # What a kernel is not taken to write is not copied. That scoring writes the offsets is a
    # mistake of the analysis without effect: they stay where they are.
    assert traced["kernels"] == [
        ["_store_kv_kernel", ["index_k_cache_ptr", "k_cache_ptr", "v_cache_ptr"]],
        ["_index_score_kernel", ["cu_seqlens_q_ptr", "scores_ptr", "seqused_k_ptr", "visible_ptr"]],
        ["_topk_select_rows_kernel", ["ids_ptr"]],
        ["_sparse_attention_kernel", ["lse_ptr", "out_ptr"]],
        ["_sparse_attention_merge_kernel", ["lse_ptr", "out_ptr"]],
    ]
    assert all(op.startswith(("aten.", "<built-in")) for op in traced["others"])
    # The kernel for many rows is beyond the analysis.
    assert traced["many rows"] == ["_topk_select_rows_kernel"]
    assert "visible_kernels takes fixed sizes, got s" in traced["dynamic"]


def test_visible_kernels_refuse_what_they_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="got TRITON_INTERPRET=1"), m3ops.visible_kernels():
        pass
    monkeypatch.delenv("TRITON_INTERPRET")
    program = Program()
    exported = export(program, program.inputs(STEPS[0]))
    with m3ops.visible_kernels():
        # Its key does not tell graphs with kernels from those with ops.
        assert not torch._functorch.config.enable_autograd_cache
        # Programs keep their ops, so that they can be saved.
        assert "m3ops.store_kv" in str(exported.run_decompositions().graph)
        with pytest.raises(RuntimeError, match="backend 'triton', got 'reference' for m3ops::"):
            exported.run_decompositions(decompose_custom_triton_ops=True)

    def inside(x: Tensor) -> Tensor:
        with m3ops.visible_kernels():
            return x + 1

    with pytest.raises(RuntimeError, match="must surround the compilation"):
        torch.compile(inside, fullgraph=True, backend="eager")(torch.ones(1))


# Neither m3ops nor Triton can be imported here.
RUN_PACKAGE = """
import sys
sys.modules["m3ops"] = sys.modules["triton"] = None
import torch
package, data = sys.argv[1:]
run = torch._inductor.aoti_load_package(package)
steps = torch.load(data)
for hidden, caches, batch, expected in steps:
    out = run(hidden, caches, batch)
    torch.testing.assert_close((out, *caches), expected, rtol=1e-3, atol=1e-3)
assert sys.modules["m3ops"] is None
print(len(steps))
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("cpp_compiler")
def test_a_package_with_its_kernels_needs_libtorch_alone(
    tmp_path: Path, device: torch.device
) -> None:
    """Over contexts that change within one bucket."""
    config = MiniMaxM3AttentionConfig(hidden_size=512)
    layer = make_layer(config, torch.float32, device)
    cache = PagedKVCache(config, NUM_PAGES, dtype=torch.float32, device=device)
    steps = []
    for contexts in ([2500, 2300, 7, 2049], [0, 1, 127, 128], [2559, 900, 0], [1500] * 4):
        for buffer in cache.buffers():
            buffer.normal_()
        # Of 20 blocks the best 16 are kept.
        tables = torch.randperm(NUM_PAGES).reshape(4, 20)[: len(contexts)]
        batch = BatchMetadata.from_lengths(
            [1] * len(contexts), contexts, tables, num_tokens=4, num_seqs=4, device=device
        )
        hidden = torch.randn(4, config.hidden_size, device=device)
        caches = tuple(buffer.clone() for buffer in cache.buffers())
        # Copies, since batches mark the sizes of their tensors as open.
        inputs = (hidden, caches, tuple(tensor.clone() for tensor in bucket_tensors(batch)))
        out = layer(hidden, batch, cache)
        steps.append((*inputs, (out, *(buffer.clone() for buffer in cache.buffers()))))
    exported = torch.export.export(Bucket(layer, batch), inputs, dynamic_shapes=FIXED, strict=False)
    with m3ops.visible_kernels():
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "layer.pt2"), inductor_configs=FAST_TO_BUILD
        )
    torch.save(steps, tmp_path / "steps.pt")
    command = [sys.executable, "-c", RUN_PACKAGE, path, "steps.pt"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.split()[-1] == str(len(steps))
