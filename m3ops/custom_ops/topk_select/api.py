"""The public function ``topk_select``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import (
    check_at_least,
    check_device,
    check_dtype,
    check_no_grad,
    check_shape,
    check_written,
)
from . import ops as ops


def topk_select(
    scores: Tensor,
    num_valid_blocks: Tensor,
    *,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Keep the best blocks of every row.

    The last `local_blocks` and the first `init_blocks` visible blocks are always kept, inside
    `topk`; the rest by score, highest first, ties to the lower id. NaN ranks with -inf.

    Args:
        scores: float32 ``[T, Hi, NB]``, any strides. Nothing at or past `num_valid_blocks` counts.
        num_valid_blocks: int32 ``[T]``, visible blocks of each row; 0 or less for none.
        topk: ``K >= 1``, ids per row.
        init_blocks: first visible blocks that are always kept.
        local_blocks: last visible blocks that are always kept; 1 is the row's own block.
        out: int32 ``[T, Hi, K]`` to write into, any strides.

    Returns:
        int32 ``[T, Hi, K]``, `out` if given: ``n = min(K, num_valid_blocks)`` distinct logical
        block ids in ascending order, then -1. The same row gives the same ids, bit for bit,
        whatever batch it stands in. The ids have no gradient.

    Raises:
        TypeError: a dtype is not the expected one.
        ValueError: shapes or devices do not fit, or ``init_blocks + local_blocks > topk``.
    """
    check_dtype("scores", scores, torch.float32)
    check_shape("scores", scores, "[T, Hi, NB]", (None, None, None))
    check_dtype("num_valid_blocks", num_valid_blocks, torch.int32)
    check_shape("num_valid_blocks", num_valid_blocks, "[T]", (scores.shape[0],))
    check_device("num_valid_blocks", num_valid_blocks, scores.device)
    check_selection(topk, init_blocks, local_blocks)
    if out is None:
        return torch.ops.m3ops.topk_select(
            scores, num_valid_blocks, topk, init_blocks, local_blocks
        )
    check_no_grad(scores=scores)
    check_ids_out(out, scores.shape[0], scores.shape[1], topk, scores.device)
    check_written("out", out, scores=scores, num_valid_blocks=num_valid_blocks)
    torch.ops.m3ops.topk_select_out(scores, num_valid_blocks, topk, init_blocks, local_blocks, out)
    return out


def check_selection(topk: int, init_blocks: int, local_blocks: int) -> None:
    check_at_least("topk", topk, 1)
    check_at_least("init_blocks", init_blocks, 0)
    check_at_least("local_blocks", local_blocks, 0)
    if init_blocks + local_blocks > topk:
        raise ValueError(
            f"`init_blocks + local_blocks` must be at most topk = {topk}, "
            f"got {init_blocks} + {local_blocks}"
        )


def check_ids_out(out: Tensor, rows: int, heads: int, topk: int, device: torch.device) -> None:
    check_dtype("out", out, torch.int32)
    check_shape("out", out, "[T, Hi, K]", (rows, heads, topk))
    check_device("out", out, device)
