"""Choosing who computes an op: the reference, Triton, or a vendor's library."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from .custom_ops.common import fmha_sm100

REFERENCE, TRITON, FMHA_SM100 = "reference", "triton", "fmha_sm100"

# What the library has nothing for, so that this backend computes it as Triton's does.
_NOT_IN_FMHA_SM100 = ("store_kv", "sparse_attention_backward")

_requested: ContextVar[str | None] = ContextVar("m3ops_backend", default=None)


@dataclass(frozen=True)
class Backend:
    """What :func:`backends` tells of one backend.

    Attributes:
        name: what :func:`use_backend` and ``M3OPS_BACKEND`` take.
        usable: whether it can run on some device of this machine.
        reason: why not; empty when usable.
        version: version of what it runs on.
        notes: where its results or limits differ from the reference.
    """

    name: str
    usable: bool
    reason: str
    version: str
    notes: str


def backends() -> dict[str, Backend]:
    """The backends by name: whether each is usable on this machine, why not, and what differs."""
    reason = _triton_unusable()
    fmha_sm100_reason = _fmha_sm100_unusable()
    return {
        REFERENCE: Backend(
            REFERENCE,
            True,
            "",
            torch.__version__,
            "plain PyTorch on any device; the meaning of every op. On a GPU it reads lengths back "
            "to the host, so it cannot be captured in a CUDA graph",
        ),
        TRITON: Backend(
            TRITON,
            not reason,
            reason,
            _triton_version(),
            "block sizes 16-256 (powers of two), head and index dims up to 256, float32, float16 "
            "and bfloat16; gradients are a formula in PyTorch, not a kernel; two scores within "
            "rounding of each other may rank differently than in the "
            "reference",
        ),
        FMHA_SM100: Backend(
            FMHA_SM100,
            not fmha_sm100_reason,
            fmha_sm100_reason,
            fmha_sm100.version(),
            "MiniMax's library on compute capability 10.x, only when asked for: untried on "
            "one. bfloat16, paged keys, blocks of 128 tokens and 1, 2, 4, 8 or 16 query heads "
            "per KV head; anything else is refused. Triton computes what it lacks: decode rows, "
            "head and index dims other than 128, selection of other than 16 or from 12288 and more "
            "blocks, attention to other than 4, 8, 16 or 32. Prefill rows are planned with lengths "
            "read back to the host; inside the capture of a CUDA graph they are on Triton too, all "
            "but the selection. Where the library selects, ties at the last place go to no fixed "
            "block, a visible NaN or -inf may be taken or not, and a row with NaN may get too few "
            "ids. Whether NaN in the unwritten slots of a page stays out of its attention is not "
            "known",
        ),
    }


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Compute every op inside the block with one backend, in this thread or task.

    Args:
        name: a name :func:`backends` lists, or None for the default choice.

    Raises:
        ValueError: no such backend.
        RuntimeError: the backend is not usable here (with the reason), or the block stands inside
            a compiled function, where the choice would not hold when the graph runs.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("use_backend must surround the compiled call, not stand inside it")
    if name is not None:
        _check_usable(name)
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def active_backend(device: torch.device) -> str:
    """The backend that computes ops on `device` now; an explicit request never falls back."""
    name = _requested.get() or os.environ.get("M3OPS_BACKEND")
    if not name:
        return TRITON if device.type == "cuda" and not _triton_missing() else REFERENCE
    _check_usable(name)
    if name == TRITON and device.type != "cuda" and not interpreting():
        raise RuntimeError(
            f"backend 'triton' was requested for tensors on {device}: it needs a CUDA or ROCm "
            "device, or TRITON_INTERPRET=1 set before Triton is imported"
        )
    if name == FMHA_SM100 and (reason := fmha_sm100.unfit(device)):
        raise RuntimeError(f"backend 'fmha_sm100' was requested for tensors on {device}: {reason}")
    return name


def implementation(op: str, device: torch.device) -> Callable[..., None]:
    """The function that computes `op` (by its out-variant's arguments) on `device`."""
    return _load(active_backend(device), op)


@functools.cache
def _load(backend: str, op: str) -> Callable[..., None]:
    package = f"m3ops.custom_ops.{op.removesuffix('_backward')}"
    if backend == FMHA_SM100 and op not in _NOT_IN_FMHA_SM100:
        return getattr(importlib.import_module(f"{package}.fmha_sm100"), f"{op}_fmha_sm100")
    if backend in (TRITON, FMHA_SM100):
        launch = importlib.import_module(f"{package}.launch")
        return getattr(launch, f"launch_{op}")
    return getattr(importlib.import_module(f"{package}.reference"), f"{op}_reference")


def _check_usable(name: str) -> None:
    known: dict[str, Callable[[], str]] = {
        REFERENCE: str,
        TRITON: _triton_unusable,
        FMHA_SM100: _fmha_sm100_unusable,
    }
    if name not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {name!r}")
    reason = known[name]()
    if reason:
        raise RuntimeError(f"backend {name!r} is not usable here: {reason}")


@functools.cache
def _triton_missing() -> bool:
    return importlib.util.find_spec("triton") is None


def interpreting() -> bool:
    """Whether Triton kernels run interpreted, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _triton_unusable() -> str:
    if _triton_missing():
        return "the package triton is not installed"
    if not torch.cuda.is_available() and not interpreting():
        return "no CUDA or ROCm device is available (TRITON_INTERPRET=1 interprets on the CPU)"
    return ""


def _fmha_sm100_unusable() -> str:
    return fmha_sm100.unusable() or _triton_unusable()


def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
