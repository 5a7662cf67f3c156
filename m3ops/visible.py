"""Ops that give way to the launches they consist of, so that Inductor sees their kernels."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .backends import TRITON, active_backend, interpreting

_enabled: ContextVar[bool] = ContextVar("m3ops_visible_kernels", default=False)
_tracing: ContextVar[bool] = ContextVar("m3ops_tracing_launches", default=False)

# What each op runs, by its qualified name.
_bodies: dict[str, Callable[..., Any]] = {}


@contextmanager
def visible_kernels() -> Iterator[None]:
    """Let ``torch._inductor.aoti_compile_and_package`` see the Triton kernels of the ops.

    A package that is built inside the block has the kernels in it, compiled: a process that runs it
    needs libtorch, neither m3ops nor Triton nor Python. Outside, and in ``torch.export.export``
    anywhere, the ops stay the ops they are. They are those of a forward pass.

    All sizes must be fixed, as those of a CUDA graph's bucket are; lengths, pages and slots are
    data and may change. The kernels are those that run on any GPU: without the ones for Hopper
    alone, without descriptors of the copy engine, and without launches that overlap their
    predecessor, none of which Inductor takes. Tensors must start at multiples of 16 bytes, as
    allocations do. Check mode verifies nothing in a package.

    Raises:
        RuntimeError: kernels are interpreted here; the block stands inside a compiled function; or,
            by an op inside the block, another backend than ``"triton"`` is active.
        NotImplementedError: by an op inside the block, a size is dynamic.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("visible_kernels must surround the compilation, not stand inside it")
    if interpreting():
        raise RuntimeError(
            "visible_kernels takes kernels that are compiled, got TRITON_INTERPRET=1"
        )
    _register()
    token = _enabled.set(True)
    try:
        # Whose key does not tell whether kernels are visible.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield
    finally:
        _enabled.reset(token)


def tracing() -> bool:
    """Whether a launch becomes a node of a graph now, rather than a launch."""
    return _tracing.get()


def may_be_visible(name: str, body: Callable[..., Any]) -> None:
    """Let the op ``m3ops::name`` give way to `body`, which takes the op's arguments."""
    _bodies[f"m3ops::{name}"] = body


_lock = threading.Lock()
_registered: set[str] = set()


def _register() -> None:
    """Give every op its rule, once."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    with _lock:
        for name in _bodies.keys() - _registered:
            rule = functools.partial(
                _expand, name, _bodies[name], custom_triton_ops_decomposition_disabled
            )
            torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule)
            _registered.add(name)


def _expand(
    name: str,
    body: Callable[..., Any],
    stays_op: Callable[[], bool],
    mode: Any,
    op: Any,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What ``torch.library.triton_op`` does with its ops, if it is asked for."""
    if not _enabled.get() or stays_op():
        return mode.__torch_dispatch__(op, types, args, kwargs or {})
    _check(name, args)
    token = _tracing.set(True)
    try:
        with mode:
            return body(*args)
    finally:
        _tracing.reset(token)


def _check(name: str, args: tuple[Any, ...]) -> None:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    backend = active_backend(tensors[0].device)
    if backend != TRITON:
        raise RuntimeError(
            f"visible_kernels shows the kernels of backend 'triton', got {backend!r} for {name}"
        )
    sizes = [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]
    for size in (*sizes, *args):
        if isinstance(size, torch.SymInt):
            raise NotImplementedError(
                f"visible_kernels takes fixed sizes, got {size} in {name}: export with "
                "`dynamic_shapes` of {} for each tensor"
            )
