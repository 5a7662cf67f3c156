"""Schema, fake, dispatch and gradient of ``m3ops::sparse_attention`` and its variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...batch import Batch
from ..registration import define_op

NUM_BATCH_ARGS = len(Batch._fields)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _sparse_attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    max_scratch_bytes: int,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype(q))


def _sparse_attention_backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: Batch,
    softmax_scale: float,
    max_scratch_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, block_ids, *rest = inputs
    batch, (softmax_scale, _, max_scratch_bytes) = Batch(*rest[:NUM_BATCH_ARGS]), rest[-3:]
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, block_ids, out, lse, *batch[:5])
    ctx.host = (*batch[5:], softmax_scale, max_scratch_bytes)


def _backward(ctx: Any, dout: Tensor | None, dlse: None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (1 + NUM_BATCH_ARGS + 3)
    if dout is None:
        return None, None, None, *rest
    dq, dk, dv = torch.ops.m3ops.sparse_attention_backward(dout, *ctx.saved_tensors, *ctx.host)
    return dq, dk, dv, *rest


define_op(
    "sparse_attention",
    inputs="Tensor q, Tensor k, Tensor v, Tensor block_ids, {batch}",
    options="float softmax_scale, SymInt num_splits, SymInt max_scratch_bytes",
    outputs=("out", "lse"),
    allocate=_sparse_attention_fake,
    backward=_backward,
    setup_context=_setup_context,
)

define_op(
    "sparse_attention_backward",
    inputs="Tensor dout, Tensor q, Tensor k, Tensor v, Tensor block_ids, Tensor out, Tensor lse, "
    "{batch}",
    options="float softmax_scale, SymInt max_scratch_bytes",
    outputs=("dq", "dk", "dv"),
    allocate=_sparse_attention_backward_fake,
    out_variant=False,
    no_gradient="there is no second derivative of sparse attention",
)
