"""One way to register an op: its schemas, its fake function, its dispatch and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..backends import implementation
from ..batch import BATCH_SCHEMA, Batch
from ..checks import check_arguments, checking
from ..visible import may_be_visible, tracing

NAMESPACE = "m3ops"
_BATCH_LEN = len(Batch._fields)

library = Library(NAMESPACE, "FRAGMENT")

Outputs = Tensor | tuple[Tensor, ...]


def define_op(
    name: str,
    inputs: str,
    options: str,
    outputs: tuple[str, ...],
    allocate: Callable[..., Outputs],
    *,
    out_variant: bool = True,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    no_gradient: str = "block scores and block ids are not differentiable; detach its inputs, or "
    "train the indexer with a loss of its own",
) -> None:
    """Register ``m3ops::name`` and, if asked for, the mutating ``m3ops::name_out``.

    A functional op allocates its outputs and fills them with the implementation of the active
    backend; its fake function is that same allocation, so that the two cannot disagree. The
    out-variant takes the outputs as trailing arguments and returns nothing.

    Args:
        name: the op.
        inputs: schema of the leading tensors. ``{batch}`` stands for the batch description, which
            `allocate` and the implementation get as one :class:`~m3ops.batch.Batch`.
        options: schema of the trailing host arguments; may be empty.
        outputs: names of the outputs.
        allocate: all arguments but the outputs -> the uninitialised outputs.
        out_variant: whether to register ``name_out``.
        backward, setup_context: as in ``torch.library.register_autograd``. Without `backward`, one
            that raises and says that the op has no gradient.
        no_gradient: why it has none.
    """
    arguments = ", ".join(part for part in (inputs.format(batch=BATCH_SCHEMA), options) if part)
    batch_at = len(inputs.split("{batch}")[0].split(",")) - 1 if "{batch}" in inputs else None

    def fill(*args: Any) -> None:
        run_implementation(name, *_pack(args, batch_at))

    def fake(*args: Any) -> Outputs:
        return allocate(*_pack(args, batch_at))

    def functional(*args: Any) -> Outputs:
        results = fake(*args)
        fill(*args, *(results if isinstance(results, tuple) else (results,)))
        return results

    returns = ", ".join(f"Tensor {output}" for output in outputs)
    library.define(f"{name}({arguments}) -> ({returns})", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, functional, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}",
        backward or _no_gradient(name, no_gradient),
        setup_context=setup_context,
        lib=library,
    )
    if out_variant:
        may_be_visible(name, functional)
        mutated = ", ".join(
            f"Tensor({chr(ord('a') + i)}!) {output}" for i, output in enumerate(outputs)
        )
        define_mutating_op(f"{name}_out", f"{arguments}, {mutated}", len(outputs), fill)


def run_implementation(name: str, *args: Any) -> None:
    """Compute an op with the active backend, in the dtypes it is given even under autocast."""
    device = args[0].device
    if checking() and not tracing():
        check_arguments(name, args)
    compute = implementation(name, device)
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            compute(*args)
    else:
        compute(*args)


def define_mutating_op(
    name: str, arguments: str, num_mutated: int, fill: Callable[..., None]
) -> None:
    """Register an op that writes its last `num_mutated` arguments and returns nothing."""
    library.define(f"{name}({arguments}) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, fill, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: None, lib=library)
    may_be_visible(name, fill)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    # Autograd must notice when a tensor that it saved is written here.
    def bump_versions(keyset: Any, *args: Any) -> None:
        for written in args[-num_mutated:]:
            torch.autograd.graph.increment_version(written)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    library.impl(name, bump_versions, "ADInplaceOrView", with_keyset=True)


def _pack(args: tuple[Any, ...], batch_at: int | None) -> tuple[Any, ...]:
    if batch_at is None:
        return args
    stop = batch_at + _BATCH_LEN
    return (*args[:batch_at], Batch(*args[batch_at:stop]), *args[stop:])


def _no_gradient(name: str, why: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"m3ops::{name} has no gradient: {why}")

    return backward
