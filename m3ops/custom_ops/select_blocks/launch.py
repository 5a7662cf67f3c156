"""Score and select on Triton: chunks of rows through one bounded buffer of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import Batch
from ..common.launch import check_sizes
from ..index_score.launch import launch_index_score_rows
from ..topk_select.launch import launch_topk_select, many_rows


def launch_select_blocks(
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
    """Every chunk is scored and selected before the next one overwrites the buffer."""
    rows, heads, dim = index_q.shape
    check_sizes("select_blocks", index_q.dtype, batch.block_size, **{"index dim": dim})
    columns = batch.num_block_columns
    chunk = min(rows, max(1, max_scratch_bytes // max(1, 4 * heads * columns)))
    scores = _score_buffer(index_q, chunk, heads, columns)
    visible = index_q.new_empty((chunk,), dtype=torch.int32)
    for begin in range(0, rows, max(1, chunk)):
        end = min(begin + chunk, rows)
        size = end - begin
        launch_index_score_rows(
            index_q, index_k, batch, num_splits, scores[:size], visible[:size], begin, end
        )
        launch_topk_select(
            scores[:size], visible[:size], topk, init_blocks, local_blocks, out[begin:end]
        )


def _score_buffer(index_q: Tensor, rows: int, heads: int, columns: int) -> Tensor:
    """``[rows, Hi, NB]`` in the memory order that selecting reads fastest."""
    if many_rows(rows, heads, index_q.device):
        buffer = index_q.new_empty((columns, rows, heads), dtype=torch.float32)
        return buffer.permute(1, 2, 0)
    padded = (columns + 3) // 4 * 4
    return index_q.new_empty((rows, heads, padded), dtype=torch.float32)[..., :columns]
