"""Choosing a backend: an explicit request is kept or refused, never replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HAS_CUDA, HAS_TRITON, INTERPRETED

import m3ops
from m3ops.testing import (
    MIXED,
    Inputs,
    assert_attention,
    assert_block_ids,
    make_inputs,
    random_ids,
)


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs([(40, 1), (33, 3)])


@pytest.fixture
def computed_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """``(backend, op)`` of every computation, which the reference does in the backend's place."""
    calls: list[tuple[str, str]] = []
    # The package's attribute of this name is the function.
    module = sys.modules["m3ops.backends"]
    load = module._load

    def record(backend: str, op: str) -> Callable[..., None]:
        calls.append((backend, op))
        return load("reference", op)

    monkeypatch.setattr(module, "_load", record)
    monkeypatch.delenv("M3OPS_BACKEND", raising=False)
    return calls


def score(inputs: Inputs) -> torch.Tensor:
    return m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` where no kernel is interpreted and no device is visible."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


SMALL_STEP = """
import torch, m3ops
from m3ops.testing import make_inputs
inputs = make_inputs([(40, 1)])
print(m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=2).tolist())
"""


def test_each_backend_says_what_it_is() -> None:
    found = m3ops.backends()
    assert list(found)[:2] == ["reference", "triton"]
    for name, backend in found.items():
        assert backend.name == name
        assert backend.notes
        # Usable, or with a reason why not.
        assert backend.usable == (not backend.reason)
    assert found["reference"].usable
    assert found["reference"].version == torch.__version__
    assert found["triton"].usable == (HAS_TRITON and (HAS_CUDA or INTERPRETED))


def test_the_reference_is_the_default_on_the_cpu(inputs: Inputs, computed_by: list[Any]) -> None:
    score(inputs)
    assert computed_by == [("reference", "index_score")]


@pytest.mark.gpu
def test_triton_is_the_default_on_a_gpu(computed_by: list[Any]) -> None:
    score(make_inputs([(40, 1)], device="cuda"))
    assert computed_by == [("triton", "index_score")]


@pytest.mark.gpu
def test_the_reference_runs_on_a_gpu_when_it_is_asked_for(computed_by: list[Any]) -> None:
    inputs = make_inputs(MIXED, device="cuda", padding_rows=2)
    with m3ops.use_backend("reference"):
        ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=3)
        out, lse = m3ops.sparse_attention(
            inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True
        )
    assert_block_ids(ids, inputs, topk=3)
    assert_attention(out, lse, inputs, ids)
    assert computed_by == [("reference", "select_blocks"), ("reference", "sparse_attention")]


@pytest.mark.parametrize("backend", ["triton"])
def test_the_innermost_choice_counts_until_its_block_ends(
    inputs: Inputs, computed_by: list[Any], backend: str
) -> None:
    with m3ops.use_backend(backend):
        score(inputs)
        with m3ops.use_backend("reference"):
            score(inputs)
        score(inputs)
        with m3ops.use_backend(None):
            score(inputs)
        with pytest.raises(KeyError), m3ops.use_backend("reference"):
            raise KeyError
        score(inputs)
    score(inputs)
    used = [name for name, _ in computed_by]
    assert used == ["triton", "reference", "triton", "reference", "triton", "reference"]


@pytest.mark.parametrize("backend", ["triton"])
def test_every_op_asks_for_the_chosen_backend(
    inputs: Inputs, computed_by: list[Any], backend: str
) -> None:
    ids = random_ids(inputs, 2)
    with m3ops.use_backend(backend):
        scores = score(inputs)
        m3ops.topk_select(scores, inputs.num_valid_blocks())
        m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch)
        q = inputs.q.requires_grad_()
        out, _ = m3ops.sparse_attention(q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True)
        out.sum().backward()
        new = torch.randn(1, 2, 32)
        slots = torch.tensor([0])
        caches = inputs.k, inputs.v, inputs.index_k
        m3ops.store_kv(new, new, torch.randn(1, 16), slots, *caches)
    assert computed_by == [
        ("triton", name)
        for name in (
            "index_score",
            "topk_select",
            "select_blocks",
            "sparse_attention",
            "sparse_attention_backward",
            "store_kv",
        )
    ]


@pytest.mark.parametrize("backend", ["triton"])
def test_the_choice_is_that_of_one_thread(
    inputs: Inputs, computed_by: list[Any], backend: str
) -> None:
    with m3ops.use_backend(backend):
        thread = threading.Thread(target=score, args=(inputs,))
        thread.start()
        thread.join()
    assert computed_by == [("reference", "index_score")]


@pytest.mark.parametrize("backend", ["triton"])
def test_the_environment_chooses_unless_the_code_does(
    inputs: Inputs, computed_by: list[Any], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("M3OPS_BACKEND", backend)
    score(inputs)
    with m3ops.use_backend("reference"):
        score(inputs)
    monkeypatch.setenv("M3OPS_BACKEND", "")
    score(inputs)
    assert [name for name, _ in computed_by] == ["triton", "reference", "reference"]


@pytest.mark.parametrize("backend", ["triton"])
def test_a_compiled_function_runs_on_the_backend_around_its_call(
    inputs: Inputs, computed_by: list[Any], backend: str
) -> None:
    function = torch.compile(score, backend="aot_eager", fullgraph=True)
    function(inputs)
    with m3ops.use_backend(backend):
        function(inputs)
    assert [name for name, _ in computed_by] == ["reference", "triton"]


@pytest.mark.parametrize("name", ["fmha", "Triton", "cuda", "reference "])
def test_an_unknown_name(inputs: Inputs, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with (
        pytest.raises(ValueError, match=rf"must be one of reference, triton.*, got '{name}'"),
        m3ops.use_backend(name),
    ):
        pass
    monkeypatch.setenv("M3OPS_BACKEND", name)
    with pytest.raises(ValueError, match=rf"got '{name}'"):
        score(inputs)


def test_a_backend_that_cannot_run_here_is_refused_with_the_reason() -> None:
    refused = python(f"import m3ops\nwith m3ops.use_backend('triton'):\n    pass\n{SMALL_STEP}")
    assert refused.returncode == 1
    assert "RuntimeError: backend 'triton' is not usable here: " in refused.stderr
    # Not replaced by the reference.
    refused = python(SMALL_STEP, M3OPS_BACKEND="triton")
    assert refused.returncode == 1
    assert not refused.stdout
    assert "RuntimeError: backend 'triton' is not usable here: " in refused.stderr


@pytest.mark.gpu
def test_compiled_kernels_are_refused_for_tensors_on_the_cpu(inputs: Inputs) -> None:
    with m3ops.use_backend("triton"), pytest.raises(RuntimeError, match="for tensors on cpu"):
        score(inputs)
