"""The public functions ``sparse_attention`` and ``merge_attention``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...batch import (
    check_at_least,
    check_device,
    check_dtype,
    check_floating,
    check_no_grad,
    check_number,
    check_rows,
    check_shape,
    check_written,
    make_batch,
)
from .ops import lse_dtype


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_decode_seqs: int = 0,
    num_decode_tokens: int = 0,
    block_size: int = 128,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    max_scratch_bytes: int = 2**30,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to the visible tokens of the listed blocks, and to nothing else.

    ``out[t, h] = softmax(softmax_scale * q[t, h] K^T) V`` in float32, K and V being the tokens
    ``s <= p(t)`` of the blocks ``block_ids[t, h // G]``, ``G = Hq / Hkv``; MiniMax Sparse
    Attention, arXiv 2606.13392.

    Args:
        q: ``[T, Hq, D]``; finite, as the visible keys and values must be.
        k: of `q`'s dtype, paged ``[P, Hkv, N, D]``, packed ``[Tk, Hkv, D]`` or batched
            ``[B, S, Hkv, D]``; any strides with the last one 1.
        v: like `k`, with strides of its own.
        block_ids: int32 ``[T, Hkv, K]``, logical block ids in any order, any strides; -1 and ids
            past the row's own block are skipped; a row's live ids are distinct.
        cu_seqlens_q, seqused_k, block_table, cu_seqlens_k, leftpad_k, max_seqlen_q, max_seqlen_k,
            num_decode_seqs, num_decode_tokens, block_size: as in :func:`m3ops.index_score`.
        softmax_scale: factor of the logits; None for ``D ** -0.5``.
        num_splits: parts a row's keys are attended to in, bounded by what can be split; 0 to
            choose by size and device. A fixed number makes a row's bits independent of its batch.
        max_scratch_bytes: bound on temporary memory (bytes); one row is always allowed.
        return_lse: return the logsumexp too.
        out: ``[T, Hq, D]`` to write into, of `q`'s dtype, last stride 1; overlaps no input.
        lse_out: float32 ``[T, Hq]`` to write into; needs `out`.

    Returns:
        `out` ``[T, Hq, D]`` in `q`'s dtype, and with `return_lse` also `lse`, float32 ``[T, Hq]``:
        natural log of the summed exponentials of the scaled logits (float64 for float64 inputs).
        Rows that attend to nothing, padding among them, get 0 and -inf. Deterministic.
        Differentiable in `q`, `k` and `v` when `out` is None; `lse` carries no gradient.

    Raises:
        TypeError: a dtype is not the expected one.
        ValueError: shapes, strides, devices or layouts do not fit, or inputs require grad while
            `out` is given.
        NotImplementedError: sizes that the active backend does not take.
    """
    check_shape("q", q, "[T, Hq, D]", (None, None, None))
    check_floating("q", q)
    check_at_least("q.shape[1]", q.shape[1], 1)
    check_at_least("q.shape[2]", q.shape[2], 1)
    for name, tensor in (("k", k), ("v", v)):
        check_dtype(name, tensor, q.dtype)
        check_rows(name, tensor)
    check_rows("q", q)
    batch = make_batch(
        q,
        k,
        "k",
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        block_table=block_table,
        cu_seqlens_k=cu_seqlens_k,
        leftpad_k=leftpad_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        num_decode_seqs=num_decode_seqs,
        num_decode_tokens=num_decode_tokens,
        block_size=block_size,
        num_head_axes=1,
    )
    rows, heads_q, dim = q.shape
    heads_kv = k.shape[1] if batch.block_table is not None else k.shape[-2]
    check_shape("v", v, "the shape of `k`", tuple(k.shape))
    check_device("v", v, q.device)
    if k.shape[-1] != dim:
        raise ValueError(f"`k` must have the head dim of `q`, {dim}, got {k.shape[-1]}")
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(
            f"`q` must have a multiple of the {heads_kv} KV heads of `k`, got {heads_q} heads"
        )
    check_dtype("block_ids", block_ids, torch.int32)
    check_shape("block_ids", block_ids, "[T, Hkv, K]", (rows, heads_kv, None))
    check_at_least("block_ids.shape[2]", block_ids.shape[2], 1)
    check_device("block_ids", block_ids, q.device)
    check_at_least("num_splits", num_splits, 0)
    check_at_least("max_scratch_bytes", max_scratch_bytes, 1)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    options = (scale, num_splits, max_scratch_bytes)
    if out is None:
        if lse_out is not None:
            raise ValueError("`lse_out` must come with `out`, got `out=None`")
        out, lse = torch.ops.m3ops.sparse_attention(q, k, v, block_ids, *batch, *options)
        return (out, lse) if return_lse else out
    check_no_grad(q=q, k=k, v=v, out=out)
    check_dtype("out", out, q.dtype)
    check_shape("out", out, "[T, Hq, D]", (rows, heads_q, dim))
    check_rows("out", out)
    check_device("out", out, q.device)
    if lse_out is None:
        lse_out = q.new_empty((rows, heads_q), dtype=lse_dtype(q))
    check_dtype("lse_out", lse_out, lse_dtype(q))
    check_shape("lse_out", lse_out, "[T, Hq]", (rows, heads_q))
    check_device("lse_out", lse_out, q.device)
    inputs = {"q": q, "k": k, "v": v, "block_ids": block_ids}
    check_written("out", out, **inputs, lse_out=lse_out)
    check_written("lse_out", lse_out, **inputs)
    torch.ops.m3ops.sparse_attention_out(q, k, v, block_ids, *batch, *options, out, lse_out)
    return (out, lse_out) if return_lse else out


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention results over disjoint sets of keys into the result over all of them.

    ``lse = log(sum_i exp(lse_i))``, ``out = sum_i exp(lse_i - lse) out_i``, in float32 or wider.

    Args:
        outs: partial outputs, each ``[..., D]``, of one shape and dtype.
        lses: their natural logsumexps, each float32 ``[...]``; an empty part has -inf, and its
            output, whatever it holds, does not count.

    Returns:
        ``(out, lse)``: ``[..., D]`` in the dtype of `outs`, and ``[...]`` in that of `lses`.
        Where all parts are empty, 0 and -inf. Deterministic.

    Raises:
        TypeError: parts are not tensors, or of several dtypes.
        ValueError: no parts, or their numbers, shapes or devices differ.
    """
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"`{name}` must be a list of tensors, got {type(given).__name__}")
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"`outs` and `lses` must be as many, at least one, got {len(outs)} and {len(lses)}"
        )
    check_floating("outs[0]", outs[0])
    check_dtype("lses[0]", lses[0], torch.float32, torch.float64)
    sizes = tuple(outs[0].shape) or (None,)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        check_shape(f"outs[{i}]", out, "[..., D], the shape of the others", sizes)
        check_shape(f"lses[{i}]", lse, "[...]", tuple(outs[0].shape[:-1]))
        check_dtype(f"outs[{i}]", out, outs[0].dtype)
        check_dtype(f"lses[{i}]", lse, lses[0].dtype)
        check_device(f"outs[{i}]", out, outs[0].device)
        check_device(f"lses[{i}]", lse, outs[0].device)
    lse = torch.stack(tuple(lses))
    top = lse.amax(0)
    # Not exp(lse - total): where the sums are large, the rounding of `total` would be in the mean.
    weights = torch.exp(lse - top.where(top > -torch.inf, 0))[..., None]
    total = weights.sum(0)
    parts = torch.stack(tuple(outs)).to(lse.dtype)
    out = (weights * parts.where(weights > 0, 0)).sum(0) / total.where(total > 0, 1)
    return out.to(outs[0].dtype), top + total[..., 0].log()
