"""``sparse_attention`` with MiniMax's library ``fmha_sm100``."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ...batch import Batch, num_valid_blocks
from ..common.fmha_sm100 import (
    BLOCK_SIZE,
    DIM,
    Lengths,
    Rows,
    check_call,
    int32,
    library,
    on_device,
    plannable,
)
from ..common.launch import decode_rows, fetchable
from .launch import launch_sparse_attention

TOPKS = (4, 8, 16, 32)
"""Block ids per row that the library takes."""


def sparse_attention_fmha_sm100(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    max_scratch_bytes: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Decode rows on Triton, the others with the library if it takes and can plan them.

    A fixed number of splits asks for bits that do not depend on the batch: all rows on Triton.
    """
    check_call("sparse_attention", q.dtype, batch, q.shape[1] // block_ids.shape[1])
    rows, heads_q, dim = q.shape
    topk = block_ids.shape[2]
    decode = decode_rows(batch, rows)
    takes = dim == DIM and topk in TOPKS and fetchable(k) and fetchable(v)
    takes = takes and decode < rows and num_splits == 0 and softmax_scale > 0
    lengths = plannable(batch, decode, q.device) if takes else None
    options = (batch, softmax_scale, num_splits, max_scratch_bytes)
    if lengths is None:
        launch_sparse_attention(q, k, v, block_ids, *options, out, lse)
        return
    if decode > 0:
        part = slice(decode)
        launch_sparse_attention(q[part], k, v, block_ids[part], *options, out[part], lse[part])
    visible = num_valid_blocks(batch.cu_seqlens_q, batch.seqused_k, rows, BLOCK_SIZE)
    # A partial result of every block, in bfloat16, and the result.
    row_bytes = (topk + 1) * heads_q * (2 * dim + 4)
    chunk = max(1, max_scratch_bytes // row_bytes)
    for begin in range(decode, rows, chunk):
        part = slice(begin, min(begin + chunk, rows))
        ids = _ascending(block_ids[part], visible[part])
        _attend(q, k, v, ids, batch, softmax_scale, lengths, part, out[part], lse[part])


def _ascending(block_ids: Tensor, visible: Tensor) -> Tensor:
    """The ids ``[n, Hkv, K]`` in ascending order, those that the row does not see as -1 at the end.

    The library takes no other order.
    """
    last = torch.iinfo(torch.int32).max
    seen = (block_ids >= 0) & (block_ids < visible[:, None, None])
    ids = block_ids.masked_fill(~seen, last).sort(dim=2).values
    return ids.masked_fill(ids == last, -1).contiguous()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    lengths: Lengths,
    part: slice,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Fill `out` and `lse` of the rows `part`; ``ids [n, Hkv, K]`` are theirs and in order."""
    rows = lengths.rows(part.start, part.stop)
    live = rows.last - rows.first
    if live:
        with on_device(q.device):
            found, found_lse = _call(
                q[rows.first : rows.last], k, v, ids[:live], batch, softmax_scale, rows
            )
        group = q.shape[1] // ids.shape[1]
        # What the library leaves in rows without a block is not documented.
        empty = (ids[:live, :, 0] < 0).repeat_interleave(group, 1)
        out[:live] = found.masked_fill_(empty[..., None], 0)
        lse[:live] = found_lse.masked_fill_(empty, -torch.inf)
    out[live:] = 0
    lse[live:] = -torch.inf


def _call(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, batch: Batch, softmax_scale: float, rows: Rows
) -> tuple[Tensor, Tensor]:
    heads_kv, topk = ids.shape[1:]
    table = batch.block_table
    assert table is not None
    sequences = {
        "cu_seqlens_q": int32([0, *accumulate(rows.query_lens)], q),
        "cu_seqlens_k": int32([0, *accumulate(rows.key_lens)], q),
    }
    bounds = {"max_seqlen_q": max(rows.query_lens), "max_seqlen_k": max(rows.key_lens)}
    row_ptr, q_indices, schedule = library().build_k2q_csr(
        ids.transpose(0, 1),
        *sequences.values(),
        BLOCK_SIZE,
        total_k=sum(rows.key_lens),
        **bounds,
        total_rows=sum(rows.num_blocks),
        qhead_per_kv=q.shape[1] // heads_kv,
        return_schedule=True,
    )
    return library().sparse_atten_func(
        q.contiguous(),
        k,
        v,
        row_ptr,
        q_indices,
        topk,
        **sequences,
        **bounds,
        blk_kv=BLOCK_SIZE,
        causal=True,
        softmax_scale=softmax_scale,
        page_table=table[int32(rows.seqs, q)],
        seqused_k=int32(rows.key_lens, q),
        schedule=schedule,
        # Without it the library has a faster kernel, but the op always gives it.
        return_softmax_lse=True,
    )
