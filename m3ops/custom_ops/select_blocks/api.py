"""The public function ``select_blocks``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import check_at_least, check_no_grad, check_written
from ..index_score.api import check_index_inputs
from ..topk_select.api import check_ids_out, check_selection
from . import ops as ops


def select_blocks(
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
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    num_splits: int = 0,
    max_scratch_bytes: int = 2**30,
    out: Tensor | None = None,
) -> Tensor:
    """Score the visible blocks of every row and keep the best, without storing all scores.

    The result is that of :func:`m3ops.index_score` followed by :func:`m3ops.topk_select`.

    Args:
        index_q: ``[T, Hi, Di]``, one index query per KV group.
        index_k: index keys, of `index_q`'s dtype: paged ``[P, N, Di]``, packed ``[Tk, Di]`` or
            batched ``[B, S, Di]``.
        cu_seqlens_q, seqused_k, block_table, cu_seqlens_k, leftpad_k, max_seqlen_q, max_seqlen_k,
            num_decode_seqs, num_decode_tokens, block_size, num_splits: as in
            :func:`m3ops.index_score`.
        topk, init_blocks, local_blocks: as in :func:`m3ops.topk_select`.
        max_scratch_bytes: bound on the scores held at once (bytes); one row is always allowed.
            Lists of candidates come on top, at most 40 MB on an H200.
        out: int32 ``[T, Hi, K]`` to write into, any strides.

    Returns:
        int32 ``[T, Hi, K]``, `out` if given: distinct logical block ids in ascending order, then
        -1. Deterministic. The ids have no gradient.

    Raises:
        TypeError, ValueError, NotImplementedError: as in the two functions.
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
    check_selection(topk, init_blocks, local_blocks)
    check_at_least("num_splits", num_splits, 0)
    check_at_least("max_scratch_bytes", max_scratch_bytes, 1)
    options = (topk, init_blocks, local_blocks, num_splits, max_scratch_bytes)
    if out is None:
        return torch.ops.m3ops.select_blocks(index_q, index_k, *batch, *options)
    check_no_grad(index_q=index_q, index_k=index_k)
    check_ids_out(out, index_q.shape[0], index_q.shape[1], topk, index_q.device)
    check_written("out", out, index_q=index_q, index_k=index_k)
    torch.ops.m3ops.select_blocks_out(index_q, index_k, *batch, *options, out)
    return out
