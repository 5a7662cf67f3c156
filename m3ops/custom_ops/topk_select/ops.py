"""Schema, fake and dispatch of ``m3ops::topk_select`` and ``m3ops::topk_select_out``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..registration import define_op


def _topk_select_fake(
    scores: Tensor, num_valid_blocks: Tensor, topk: int, init_blocks: int, local_blocks: int
) -> Tensor:
    return scores.new_empty((scores.shape[0], scores.shape[1], topk), dtype=torch.int32)


define_op(
    "topk_select",
    inputs="Tensor scores, Tensor num_valid_blocks",
    options="SymInt topk, SymInt init_blocks, SymInt local_blocks",
    outputs=("block_ids",),
    allocate=_topk_select_fake,
)
