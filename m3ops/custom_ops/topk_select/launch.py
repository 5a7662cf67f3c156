"""Launching the Triton kernels of ``topk_select``."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...visible import tracing
from ..common.launch import (
    device_kind,
    launch,
    max_warps,
    next_power_of_2,
    num_multiprocessors,
)
from .kernels import (
    _topk_select_columns_kernel,
    _topk_select_rows_kernel,
    _topk_select_wide_kernel,
    list_depth,
)

MAX_REGISTER_COLUMNS = 8192
"""Widest row that a program keeps in registers."""

MAX_SORTED = 16
"""Most ids of a row that a thread keeps sorted in registers: networks for more compile for long."""

RESIDENT_WARPS, MAX_REGISTERS = 16, 128
"""Warps of a thread per row that a multiprocessor runs at once, and what that leaves a thread."""

SORTING_WARPS, SORTING_REGISTERS = 20, 96
"""The same where all scores are sorted."""

BATCH = 32
"""Scores that a thread loads at once where it lists candidates."""

SAMPLE = 2
"""One column in so many bounds what a row keeps. More candidates reach the bound of fewer columns,
but only those columns are read twice."""

SORTED_COLUMNS = 256
"""Of no more columns than this all scores are sorted: for candidates a row takes longer."""

NARROW_COLUMNS = 256
"""Rows that see no more blocks than this are searched as if the buffer were so wide."""

GROUPS = 64
"""Groups of columns, whose maxima bound what a row keeps; fewer columns are as many groups."""

GATHERED_COLUMNS = 2048
"""In rows wider than this only the groups that reach the bound are searched."""


def launch_topk_select(
    scores: Tensor,
    num_valid_blocks: Tensor,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
) -> None:
    """A thread per row and share of its columns if there are many, else a program per row."""
    rows, heads, columns = scores.shape
    arguments: dict[str, Any] = {
        "scores_ptr": scores,
        "visible_ptr": num_valid_blocks,
        "ids_ptr": out,
        "stride_s_t": scores.stride(0),
        "stride_s_h": scores.stride(1),
        "stride_s_j": scores.stride(2),
        "stride_v_t": num_valid_blocks.stride(0),
        "stride_i_t": out.stride(0),
        "stride_i_h": out.stride(1),
        "stride_i_k": out.stride(2),
        "num_rows": rows * heads,
        "num_columns": columns,
        "HEADS": heads,
        "TOPK": topk,
        "INIT": init_blocks,
        "LOCAL": local_blocks,
        "BLOCK_K": next_power_of_2(topk),
    }
    if topk <= MAX_SORTED and many_rows(rows, heads, scores.device):
        sorts = columns <= SORTED_COLUMNS
        block_r, shares = _rows_and_shares(columns)
        warps = max(1, block_r * shares * max_warps(scores.device) // 1024)
        # As many programs as run at once, each with its own lists, go through all the rows.
        resident_warps = SORTING_WARPS if sorts else RESIDENT_WARPS
        resident = num_multiprocessors(scores.device) * resident_warps // warps
        grid: tuple[int, ...] = (min(triton.cdiv(rows * heads, block_r), resident),)
        kernel, arguments["num_warps"] = _topk_select_columns_kernel, warps
        arguments["BLOCK_R"], arguments["SHARES"] = block_r, shares
        arguments["BATCH"], arguments["SAMPLE"], arguments["SORTS"] = BATCH, SAMPLE, sorts
        lists = (*grid, shares, list_depth(BATCH), block_r)
        arguments["lists_ptr"] = None if sorts else scores.new_empty(lists, dtype=torch.int64)
        if device_kind(scores.device) != "gfx942":
            arguments["maxnreg"] = SORTING_REGISTERS if sorts else MAX_REGISTERS
    elif columns > MAX_REGISTER_COLUMNS:
        grid = (rows * heads,)
        kernel, arguments["BLOCK_J"] = _topk_select_wide_kernel, 8192
        arguments["num_warps"] = max_warps(scores.device) // 2
    else:
        grid = (rows * heads,)
        kernel, block_j = _topk_select_rows_kernel, next_power_of_2(columns, 32)
        arguments["BLOCK_J"], arguments["NARROW_J"] = block_j, min(block_j, NARROW_COLUMNS)
        arguments["GROUPS"] = min(block_j, GROUPS)
        arguments["GATHER"] = block_j > GATHERED_COLUMNS
        arguments["CONTIGUOUS"] = scores.stride(2) == 1
        arguments["num_warps"] = _num_warps(block_j)
    launch(kernel, grid, scores.device, **arguments)


def many_rows(rows: int, heads: int, device: torch.device) -> bool:
    """Whether a thread per row fills the device.

    Not where the launch becomes a node of a graph: torch's analysis of a kernel does not get to the
    end of a sorting network.
    """
    return not tracing() and rows * heads >= 64 * num_multiprocessors(device)


def _rows_and_shares(columns: int) -> tuple[int, int]:
    """Rows of a program, and threads that share the columns of each: the fewer the less work, but
    what all programs read should stay in L2 for a second pass.
    """
    return (16, 2) if columns <= SORTED_COLUMNS else (32, 4)


def _num_warps(block_j: int) -> int:
    """One warp while it can hold a row: a search across warps waits at a barrier each step."""
    return 1 if block_j <= 512 else 4 if block_j <= 2048 else 8
