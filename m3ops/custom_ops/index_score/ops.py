"""Schema, fake and dispatch of ``m3ops::index_score`` and ``m3ops::index_score_out``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import Batch
from ..registration import define_op


def _index_score_fake(index_q: Tensor, index_k: Tensor, batch: Batch, num_splits: int) -> Tensor:
    rows, heads = index_q.shape[0], index_q.shape[1]
    # Rows lie side by side, which is how many rows are selected fastest.
    scores = index_q.new_empty((batch.num_block_columns, rows, heads), dtype=torch.float32)
    return scores.permute(1, 2, 0)


define_op(
    "index_score",
    inputs="Tensor index_q, Tensor index_k, {batch}",
    options="SymInt num_splits",
    outputs=("scores",),
    allocate=_index_score_fake,
)
