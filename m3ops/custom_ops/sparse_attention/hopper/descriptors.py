"""What the copy engine fetches and stores."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ....batch import PACKED, PAGED, Batch
from ...common.launch import head_stride, key_strides
from .layouts import _operand


def key_descriptor(
    keys: Tensor, batch: Batch, num_keys: int, num_ctas: int = 1
) -> TensorDescriptor:
    """Keys or values as ``[pages or sequences, heads, tokens, D]``, fetched `num_keys` at once.

    By every multiprocessor of a program, if it has several.
    """
    stride_outer, stride_token = key_strides(batch, keys)
    stride_h = head_stride(batch, keys)
    outer, tokens, heads = 1, keys.shape[0], keys.shape[1]
    if batch.layout == PAGED:
        outer, heads, tokens = keys.shape[:3]
    elif batch.layout != PACKED:
        outer, tokens, heads = keys.shape[:3]
    dim = keys.shape[-1]
    # One packed sequence of keys has no outer stride, but the copy engine wants one.
    strides = [stride_outer or stride_token, stride_h, stride_token, 1]
    block_shape = [1, 1, num_keys, dim]
    layout = _layout(keys, block_shape, num_ctas)
    return TensorDescriptor(keys, [outer, heads, tokens, dim], strides, block_shape, layout)


def descriptor(tensor: Tensor, block_shape: list[int]) -> TensorDescriptor:
    """Any tensor, in blocks of a shape."""
    layout = _layout(tensor, block_shape)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block_shape, layout)


def _layout(tensor: Tensor, block_shape: list[int], num_ctas: int = 1) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    return _operand(block_shape, element, num_ctas)
