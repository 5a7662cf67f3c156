"""Schema, fake and dispatch of ``m3ops::select_blocks`` and ``m3ops::select_blocks_out``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import Batch
from ..registration import define_op


def _select_blocks_fake(
    index_q: Tensor,
    index_k: Tensor,
    batch: Batch,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_splits: int,
    max_scratch_bytes: int,
) -> Tensor:
    return index_q.new_empty((index_q.shape[0], index_q.shape[1], topk), dtype=torch.int32)


define_op(
    "select_blocks",
    inputs="Tensor index_q, Tensor index_k, {batch}",
    options="SymInt topk, SymInt init_blocks, SymInt local_blocks, SymInt num_splits, "
    "SymInt max_scratch_bytes",
    outputs=("block_ids",),
    allocate=_select_blocks_fake,
)
