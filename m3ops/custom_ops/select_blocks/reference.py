"""The meaning of ``select_blocks``: score some rows, select, go on."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import Batch, num_valid_blocks
from ..index_score.reference import index_score_reference
from ..topk_select.reference import topk_select_reference


def select_blocks_reference(
    index_q: Tensor,
    index_k: Tensor,
    batch: Batch,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_splits: int,
    max_scratch_bytes: int,
    out: Tensor,
) -> None:
    """Rows in chunks whose scores stay under the bound."""
    rows, heads = index_q.shape[:2]
    columns = batch.num_block_columns
    chunk = max(1, max_scratch_bytes // max(1, 4 * heads * columns))
    for first in range(0, rows, chunk):
        last = min(first + chunk, rows)
        part = _rows_of(batch, first, last)
        scores = index_q.new_empty((last - first, heads, columns), dtype=torch.float32)
        index_score_reference(index_q[first:last], index_k, part, num_splits, scores)
        visible = num_valid_blocks(
            part.cu_seqlens_q, part.seqused_k, last - first, batch.block_size
        )
        topk_select_reference(scores, visible, topk, init_blocks, local_blocks, out[first:last])


def _rows_of(batch: Batch, first: int, last: int) -> Batch:
    """The batch of rows ``first .. last`` alone; every row keeps its position."""
    starts = batch.cu_seqlens_q.clamp(first, last)
    ends = batch.cu_seqlens_q[1:]
    cut_off = ends - ends.clamp(max=last)
    return batch._replace(cu_seqlens_q=starts - first, seqused_k=batch.seqused_k - cut_off)
