"""What every test shares: where it runs, what makes it skip, and how it is seeded.

Importing this module decides whether Triton interprets its kernels, so it comes before any
import of triton: without a CUDA device they are interpreted on the CPU, with one they are compiled.
"""

import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported. The workers share the cores, as do the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

import m3ops

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

# Values for `@pytest.mark.parametrize("backend", BACKENDS)`. Triton skips where it cannot run.
BACKENDS = ["reference", "triton"]

# Values for `@pytest.mark.parametrize("device", DEVICES)`, for a test that runs on both.
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(torch.device("cuda", 0), id="cuda", marks=pytest.mark.gpu),
]

# What the fixture `target` runs over: each backend on the CPU, and compiled kernels on a GPU.
TARGETS = [*BACKENDS, pytest.param("triton", id="triton-gpu", marks=pytest.mark.gpu)]

hypothesis.settings.register_profile(
    "m3ops",
    deadline=None,
    derandomize=True,
    max_examples=25,
    # `device` and `backend` do not change from one example to the next.
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
    ],
)
# For a GPU: `pytest -m gpu -n 8 --hypothesis-profile=soak tests/test_properties.py`.
hypothesis.settings.register_profile(
    "soak",
    hypothesis.settings.get_profile("m3ops"),
    derandomize=False,
    database=None,
    max_examples=700,
    print_blob=True,
)
hypothesis.settings.load_profile("m3ops")


def pytest_xdist_auto_num_workers() -> int | None:
    """One process where there is a GPU: tests measure its memory and need most of it."""
    return 0 if HAS_CUDA else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := _skip_reason(item):
        pytest.skip(reason)


def _skip_reason(item: pytest.Item) -> str | None:
    gpu = item.get_closest_marker("gpu") is not None
    if gpu and not HAS_CUDA:
        return "needs a CUDA device"
    if gpu and INTERPRETED:
        return "needs compiled kernels, but TRITON_INTERPRET=1 is set"
    callspec = getattr(item, "callspec", None)
    if callspec is None or "triton" not in (callspec.params.get(k) for k in ("backend", "target")):
        return None
    if not HAS_TRITON:
        return "needs triton"
    if not gpu and not INTERPRETED:
        return "kernels run on CPU tensors only under TRITON_INTERPRET=1"
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many examples the property tests ran, over all processes."""
    counts = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "examples" and report.when == "call"
    ]
    if counts:
        terminalreporter.write_line(f"{sum(counts)} examples in {len(counts)} property tests")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The first CUDA device in tests marked `gpu`, the CPU in all others."""
    gpu = request.node.get_closest_marker("gpu") is not None
    return torch.device("cuda", 0) if gpu else torch.device("cpu")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend's name in turn; the test chooses it with `m3ops.use_backend`."""
    return request.param


class Target(NamedTuple):
    """Where one run of a test computes the ops."""

    backend: str
    device: torch.device

    def scale(self, small: Any, full: Any) -> Any:
        """`small` where kernels are interpreted, which is slow; `full` elsewhere."""
        return small if self.backend == "triton" and self.device.type == "cpu" else full


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Target]:
    """Each backend on the CPU and compiled kernels on a GPU; chosen for the whole test."""
    with m3ops.use_backend(request.param):
        yield Target(request.param, device)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """Seeds torch from the test's name, so that order and selection change no input."""
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Forgets compiled code after each test, so that none meets another's recompile limit."""
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
