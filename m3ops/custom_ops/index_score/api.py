"""The public function ``index_score``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import (
    Batch,
    check_at_least,
    check_device,
    check_dtype,
    check_floating,
    check_no_grad,
    check_rows,
    check_shape,
    check_written,
    make_batch,
    num_blocks,
)
from . import ops as ops


def index_score(
    index_q: Tensor,
    index_k: Tensor,
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
    num_splits: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Score every visible block of keys for every index query.

    ``scores[t, h, j] = max dot(index_q[t, h], index_k[s])`` over the keys ``s <= p(t)`` of block
    `j`, in float32, unscaled (a positive scale changes no order); MiniMax Sparse Attention,
    arXiv 2606.13392.

    Args:
        index_q: ``[T, Hi, Di]``, one index query per KV group.
        index_k: index keys, of `index_q`'s dtype: paged ``[P, N, Di]``, packed ``[Tk, Di]`` or
            batched ``[B, S, Di]``.
        cu_seqlens_q: int32 ``[B + 1]``, where each sequence's query tokens start; rows from
            ``cu_seqlens_q[B]`` on are padding.
        seqused_k: int32 ``[B]``, keys of each sequence (tokens), this step's included; may be 0.
        block_table: int32 ``[B, W]``, logical block -> page, for paged keys. Entries past
            ``ceil(seqused_k / N)`` may hold anything.
        cu_seqlens_k: int32 ``[B + 1]``, first key of each sequence, for packed keys.
        leftpad_k: int32 ``[B]``, slots before each sequence's first key, for batched keys; None
            for 0.
        max_seqlen_q: host bound on a sequence's query tokens; None for ``T``. Rows past it may stay
            unwritten.
        max_seqlen_k: host bound on `seqused_k` (tokens); None for what the layout holds.
        num_decode_seqs: how many leading sequences are decode sequences.
        num_decode_tokens: how many leading rows are theirs.
        block_size: ``N``, tokens of a block and of a page.
        num_splits: parts the blocks of one row are scored in; 0 to choose by size and device. The
            scores are the same bits for every value.
        out: float32 ``[T, Hi, NB]`` to write into, any strides, ``NB >= ceil(max_seqlen_k / N)``;
            overlaps no input.

    Returns:
        float32 ``[T, Hi, NB]``, `out` if given. Columns past a row's visible blocks are
        unspecified. Deterministic. The scores have no gradient.

    Raises:
        TypeError: a dtype is not the expected one.
        ValueError: shapes, strides, devices or layouts do not fit, or `out` is too small.
        NotImplementedError: sizes that the active backend does not take.
    """
    batch = check_index_inputs(
        index_q,
        index_k,
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
    )
    check_at_least("num_splits", num_splits, 0)
    if out is None:
        return torch.ops.m3ops.index_score(index_q, index_k, *batch, num_splits)
    check_no_grad(index_q=index_q, index_k=index_k, out=out)
    check_dtype("out", out, torch.float32)
    check_device("out", out, index_q.device)
    check_shape("out", out, "[T, Hi, NB]", (index_q.shape[0], index_q.shape[1], None))
    # Not the batch's property: torch.compile of torch 2.10 reads none of a named tuple.
    columns = num_blocks(batch.max_seqlen_k, block_size)
    if out.shape[2] < columns:
        raise ValueError(
            f"`out` must have at least ceil(max_seqlen_k / block_size) = {columns} block columns, "
            f"got {out.shape[2]}"
        )
    check_written("out", out, index_q=index_q, index_k=index_k)
    torch.ops.m3ops.index_score_out(index_q, index_k, *batch, num_splits, out)
    return out


def check_index_inputs(
    index_q: Tensor,
    index_k: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    leftpad_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_decode_seqs: int,
    num_decode_tokens: int,
    block_size: int,
) -> Batch:
    """The checks that scoring and selecting share; returns the resolved batch."""
    check_shape("index_q", index_q, "[T, Hi, Di]", (None, None, None))
    check_floating("index_q", index_q)
    check_at_least("index_q.shape[1]", index_q.shape[1], 1)
    check_at_least("index_q.shape[2]", index_q.shape[2], 1)
    check_dtype("index_k", index_k, index_q.dtype)
    check_rows("index_q", index_q)
    check_rows("index_k", index_k)
    batch = make_batch(
        index_q,
        index_k,
        "index_k",
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
        num_head_axes=0,
    )
    if index_k.shape[-1] != index_q.shape[-1]:
        raise ValueError(
            f"`index_k` must have the index dim of `index_q`, {index_q.shape[-1]}, "
            f"got {index_k.shape[-1]}"
        )
    return batch
