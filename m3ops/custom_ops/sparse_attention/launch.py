"""Launching the Triton kernels of ``sparse_attention``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ...backends import interpreting
from ...batch import Batch
from ..common.launch import (
    check_sizes,
    head_stride,
    key_strides,
    launch,
    layout_args,
    next_power_of_2,
    num_multiprocessors,
)
from .kernels import _sparse_attention_kernel, _sparse_attention_merge_kernel
from .reference import sparse_attention_backward_reference as launch_sparse_attention_backward

__all__ = ["launch_sparse_attention", "launch_sparse_attention_backward"]


@dataclass(frozen=True)
class Config:
    """Heads and keys per product, and how the program runs."""

    block_g: int
    block_n: int
    num_warps: int
    num_stages: int


def _config(dtype: torch.dtype, group: int, block_size: int, block_d: int) -> Config:
    block_g = min(64, next_power_of_2(group))
    if dtype == torch.float32:
        return Config(min(16, block_g), min(block_size, 32), 4, 1)
    if block_d > 128:
        return Config(block_g, min(block_size, 64), 4, 2)
    return Config(block_g, min(block_size, 64), 4, 3)


def launch_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    max_scratch_bytes: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend in one pass, or in splits that a second kernel joins."""
    rows, heads_q, dim = q.shape
    check_sizes("sparse_attention", q.dtype, batch.block_size, **{"head dim": dim})
    topk = block_ids.shape[2]
    if num_splits == 0:
        num_splits = _choose_splits(rows * k.shape[1 if k.ndim == 4 else -2], topk, q.device)
    num_splits = min(num_splits, topk)
    if num_splits == 1:
        _attend(q, k, v, block_ids, batch, softmax_scale, 1, 0, rows, out[None], lse[None])
        return
    chunk = min(rows, max(1, max_scratch_bytes // (4 * num_splits * heads_q * (dim + 1))))
    partial_out = q.new_empty((num_splits, chunk, heads_q, dim), dtype=torch.float32)
    partial_lse = q.new_empty((num_splits, chunk, heads_q), dtype=torch.float32)
    for begin in range(0, rows, max(1, chunk)):
        end = min(begin + chunk, rows)
        parts = partial_out[:, : end - begin], partial_lse[:, : end - begin]
        _attend(q, k, v, block_ids, batch, softmax_scale, num_splits, begin, end, *parts)
        _merge(*parts, out[begin:end], lse[begin:end])


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    begin: int,
    end: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Rows ``begin .. end`` into `out` ``[S, rows, Hq, D]`` and `lse` ``[S, rows, Hq]``."""
    heads_q, dim = q.shape[1:]
    heads_kv, topk = block_ids.shape[1:]
    block_d = next_power_of_2(dim)
    group = heads_q // heads_kv
    config = _config(q.dtype, group, batch.block_size, block_d)
    stride_k_outer, stride_k_token = key_strides(batch, k)
    stride_v_outer, stride_v_token = key_strides(batch, v)
    launch(
        _sparse_attention_kernel,
        (end - begin, heads_kv * triton.cdiv(group, config.block_g), num_splits),
        q.device,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        ids_ptr=block_ids,
        out_ptr=out,
        lse_ptr=lse,
        softmax_scale=softmax_scale,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_k_outer=stride_k_outer,
        stride_k_token=stride_k_token,
        stride_k_h=head_stride(batch, k),
        stride_v_outer=stride_v_outer,
        stride_v_token=stride_v_token,
        stride_v_h=head_stride(batch, v),
        stride_i_t=block_ids.stride(0),
        stride_i_h=block_ids.stride(1),
        stride_i_k=block_ids.stride(2),
        stride_o_s=out.stride(0),
        stride_o_t=out.stride(1),
        stride_o_h=out.stride(2),
        stride_l_s=lse.stride(0),
        stride_l_t=lse.stride(1),
        stride_l_h=lse.stride(2),
        row_begin=begin,
        row_end=end,
        GROUP=group,
        DIM=dim,
        TOPK=topk,
        NUM_SPLITS=num_splits,
        BLOCK_G=config.block_g,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        BLOCK_K=next_power_of_2(topk),
        UPCAST=interpreting() and q.dtype == torch.bfloat16,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **layout_args(batch, k),
    )


def _merge(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    num_splits, rows, heads, dim = partial_out.shape
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
        NUM_SPLITS=num_splits,
        BLOCK_S=next_power_of_2(num_splits, 2),
        BLOCK_D=next_power_of_2(dim),
        num_warps=2,
    )


def _choose_splits(programs: int, topk: int, device: torch.device) -> int:
    """Enough programs to fill the device twice over, and no more splits than block ids."""
    return max(1, min(topk, triton.cdiv(2 * num_multiprocessors(device), max(1, programs))))
