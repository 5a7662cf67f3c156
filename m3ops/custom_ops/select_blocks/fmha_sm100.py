"""``select_blocks`` with MiniMax's library ``fmha_sm100``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import Batch, num_valid_blocks
from ..common.fmha_sm100 import check_call
from ..index_score.fmha_sm100 import MAX_SCORES, padded_columns, score_lengths, score_rows
from ..index_score.launch import launch_index_score_rows
from ..topk_select.fmha_sm100 import MAX_COLUMNS, topk_select_fmha_sm100


def select_blocks_fmha_sm100(
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
    """Decode and prefill rows are scored into one token-major buffer and selected in one call."""
    check_call("select_blocks", index_q.dtype, batch)
    rows, heads = index_q.shape[:2]
    lengths = score_lengths(index_q, index_k, batch)
    width = batch.num_block_columns
    if lengths is None:
        visible = index_q.new_empty((rows,), dtype=torch.int32)
    else:
        visible = num_valid_blocks(batch.cu_seqlens_q, batch.seqused_k, rows, batch.block_size)
        width = max(width, min(padded_columns(width), MAX_COLUMNS))
    # The library may score into a buffer of its own, as large as this one.
    budget = min(max_scratch_bytes // 8, MAX_SCORES)
    chunk = min(rows, max(1, budget // max(1, heads * width)))
    buffer = index_q.new_empty((chunk, heads, width), dtype=torch.float32)
    for begin in range(0, rows, max(1, chunk)):
        end = min(begin + chunk, rows)
        scores, counts = buffer[: end - begin], visible[begin:end]
        scores.fill_(-torch.inf)
        if lengths is None:
            launch_index_score_rows(index_q, index_k, batch, num_splits, scores, counts, begin, end)
        else:
            score_rows(index_q, index_k, batch, num_splits, lengths, scores, begin, end)
        topk_select_fmha_sm100(scores, counts, topk, init_blocks, local_blocks, out[begin:end])
