"""Launching the Gluon kernel of ``index_score`` for Hopper."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....batch import PACKED, PAGED, Batch
from ...common.launch import (
    fetchable,
    launch,
    layout_args,
    num_multiprocessors,
    supports_hopper,
)
from .kernels import _index_score_hopper_kernel

BLOCK_SIZE, DIM = 128, 128
"""The one geometry: an accumulator of 64 rows, and blocks that are fetched as one."""

ROWS, PIECES = 256, 4
"""(token, head) pairs of a tile, and the parts in which they are multiplied."""

STAGES = 4
"""Blocks of keys in flight."""


def supports(index_q: Tensor, index_k: Tensor, batch: Batch) -> bool:
    """Whether the kernel takes these inputs."""
    heads = index_q.shape[1]
    return (
        ROWS // BLOCK_SIZE <= heads <= ROWS // PIECES
        and ROWS % heads == 0
        and takes(index_q, index_k, batch)
    )


def takes(index_q: Tensor, index_k: Tensor, batch: Batch) -> bool:
    """Whether the copy engine and the matrix units do, however many heads there are."""
    return (
        supports_hopper(index_q.device)
        and torch.cuda.get_device_capability(index_q.device)[0] == 9
        and index_q.dtype in (torch.bfloat16, torch.float16)
        and (batch.block_size, index_q.shape[2]) == (BLOCK_SIZE, DIM)
        and fetchable(index_q)
        and fetchable(_keys(index_k))
    )


def launch_hopper_score(
    index_q: Tensor,
    index_k: Tensor,
    batch: Batch,
    scores: Tensor,
    visible: Tensor | None,
    begin: int,
    end: int,
    columns: int,
) -> None:
    """Score rows ``begin .. end`` as `launch_index_score_rows` does.

    Programs take equal shares of all blocks of all rows, so that there is no number of splits.

    Args:
        index_q, index_k, batch: as the op has them.
        scores: the first `columns` columns may be written.
        visible: int32 ``[end - begin]`` or None.
    """
    heads = index_q.shape[1]
    tile_t = ROWS // heads
    keys = _keys(index_k)
    arguments = layout_args(batch, index_k)
    layout = arguments.pop("LAYOUT")
    del arguments["BLOCK_SIZE"]
    launch(
        _index_score_hopper_kernel,
        (num_multiprocessors(index_q.device),),
        index_q.device,
        q_desc=_descriptor(index_q, [tile_t // PIECES, heads, DIM]),
        k_desc=_descriptor(keys, [1, BLOCK_SIZE, DIM]),
        scores_ptr=scores,
        visible_ptr=visible,
        stride_s_t=scores.stride(0),
        stride_s_h=scores.stride(1),
        stride_s_j=scores.stride(2),
        row_begin=begin,
        row_end=end,
        num_columns=columns,
        HEADS=heads,
        TILE_T=tile_t,
        PAGED=layout == PAGED,
        PACKED=layout == PACKED,
        STAGES=STAGES,
        num_warps=4,
        **arguments,
    )


def _keys(index_k: Tensor) -> Tensor:
    """Keys as ``[pages or sequences, tokens, Di]``."""
    return index_k if index_k.ndim == 3 else index_k[None]


def _descriptor(tensor: Tensor, block_shape: list[int]) -> TensorDescriptor:
    element = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, element)
    strides = [*tensor.stride()[:2], 1]
    return TensorDescriptor(tensor, list(tensor.shape), strides, block_shape, layout)
