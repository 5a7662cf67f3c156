"""What splits leave, and launching the kernel that joins it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.launch import launch, next_power_of_2
from .kernels import _sparse_attention_merge_kernel


def allocate_parts(
    q: Tensor, num_splits: int, rows: int, max_scratch_bytes: int
) -> tuple[Tensor, Tensor]:
    """Outputs float32 ``[S, chunk, Hq, D]`` and lse ``[S, chunk, Hq]`` of as many rows as fit."""
    heads, dim = q.shape[1:]
    chunk = min(rows, max(1, max_scratch_bytes // (4 * num_splits * heads * (dim + 1))))
    out = q.new_empty((num_splits, chunk, heads, dim), dtype=torch.float32)
    return out, q.new_empty((num_splits, chunk, heads), dtype=torch.float32)


def launch_merge(
    most_splits: int, partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Join the parts of all splits into `out` ``[rows, Hq, D]`` and `lse` ``[rows, Hq]``."""
    num_splits, rows, heads, dim = partial_out.shape
    block_s, block_d = next_power_of_2(most_splits, 2), next_power_of_2(dim)
    launch(
        _sparse_attention_merge_kernel,
        (rows, heads),
        out.device,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        out_ptr=out,
        lse_ptr=lse,
        stride_po_s=partial_out.stride(0),
        stride_po_t=partial_out.stride(1),
        stride_po_h=partial_out.stride(2),
        stride_pl_s=partial_lse.stride(0),
        stride_pl_t=partial_lse.stride(1),
        stride_pl_h=partial_lse.stride(2),
        stride_o_t=out.stride(0),
        stride_o_h=out.stride(1),
        stride_l_t=lse.stride(0),
        stride_l_h=lse.stride(1),
        DIM=dim,
        num_splits=num_splits,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=min(8, max(2, block_s * block_d // 1024)),
    )
