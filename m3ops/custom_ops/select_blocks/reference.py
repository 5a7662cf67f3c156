"""The meaning of ``select_blocks``: one score buffer, one selection."""

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
    """Score everything, then select."""
    rows, heads = index_q.shape[:2]
    scores = index_q.new_empty((rows, heads, batch.num_block_columns), dtype=torch.float32)
    index_score_reference(index_q, index_k, batch, num_splits, scores)
    visible = num_valid_blocks(batch.cu_seqlens_q, batch.seqused_k, rows, batch.block_size)
    topk_select_reference(scores, visible, topk, init_blocks, local_blocks, out)
