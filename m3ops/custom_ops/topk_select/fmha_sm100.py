"""``topk_select`` with MiniMax's library ``fmha_sm100``."""

from __future__ import annotations

from torch import Tensor

from ..common.fmha_sm100 import library, on_device
from .launch import launch_topk_select

TOPK = 16

MAX_COLUMNS = 12287
"""Widest row that the library searches."""


def topk_select_fmha_sm100(
    scores: Tensor,
    num_valid_blocks: Tensor,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
) -> None:
    """All rows in one call; other `topk` and wider rows on Triton."""
    if topk != TOPK or scores.shape[2] > MAX_COLUMNS or scores.numel() == 0:
        launch_topk_select(scores, num_valid_blocks, topk, init_blocks, local_blocks, out)
        return
    ids = out if out.is_contiguous() else out.new_empty(out.shape)
    with on_device(scores.device):
        # It asks for -inf past a row's blocks, but given the blocks of every row it reads nothing
        # there. The buffer is not this op's to write.
        library().sparse_topk_select(
            scores.contiguous(),
            topk,
            num_valid_pages=num_valid_blocks.contiguous(),
            output=ids,
            force_begin_blocks=init_blocks,
            force_end_blocks=local_blocks,
            max_score_layout="THK",
        )
    if ids is not out:
        out.copy_(ids)
