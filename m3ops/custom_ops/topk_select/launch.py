"""Launching the Triton kernels of ``topk_select``."""

from __future__ import annotations

from torch import Tensor

from ..common.launch import launch, next_power_of_2
from .kernels import _topk_select_kernel, _topk_select_wide_kernel

MAX_REGISTER_COLUMNS = 32768
"""Widest row that is kept in registers."""


def launch_topk_select(
    scores: Tensor,
    num_valid_blocks: Tensor,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
) -> None:
    """One program per row and head."""
    rows, heads, columns = scores.shape
    block_j = next_power_of_2(columns)
    kernel = _topk_select_kernel
    if block_j > MAX_REGISTER_COLUMNS:
        kernel, block_j = _topk_select_wide_kernel, 8192
    launch(
        kernel,
        (rows * heads,),
        scores.device,
        scores_ptr=scores,
        visible_ptr=num_valid_blocks,
        ids_ptr=out,
        stride_s_t=scores.stride(0),
        stride_s_h=scores.stride(1),
        stride_s_j=scores.stride(2),
        stride_v_t=num_valid_blocks.stride(0),
        stride_i_t=out.stride(0),
        stride_i_h=out.stride(1),
        stride_i_k=out.stride(2),
        num_columns=columns,
        HEADS=heads,
        TOPK=topk,
        INIT=init_blocks,
        LOCAL=local_blocks,
        BLOCK_J=block_j,
        BLOCK_K=next_power_of_2(topk),
        num_warps=_num_warps(block_j),
    )


def _num_warps(block_j: int) -> int:
    """Eight scores a thread while one warp can hold a row, then at most 32 a thread."""
    return max(1, min(32, block_j // 512))
