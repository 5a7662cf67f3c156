"""Launching the Gluon kernel that walks unions, and the way to the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ....batch import PACKED, PAGED, Batch
from ...common.launch import fetchable, num_multiprocessors, run, supports_hopper
from .decode.launch import attend_decode_rows
from .descriptors import key_descriptor
from .drafts.launch import attend_drafts, drafts_fill
from .kernels import _sparse_attention_hopper_kernel
from .kv_major.launch import allocate_lists, launch_kv_major

__all__ = [
    "TILE_T",
    "allocate_lists",
    "attend_decode_rows",
    "attend_drafts",
    "drafts_fill",
    "launch_hopper_attention",
    "launch_kv_major",
    "supports",
]

TILE_T = 8
"""Tokens of a tile; each of the two warpgroups multiplies half of them."""

BLOCK_SIZE, DIM, GROUP = 128, 128, 16
"""The one geometry: a warpgroup's 64 rows are half a tile, and the rings fill shared memory."""

STAGES = 3
"""Blocks in flight, at least two."""


def supports(q: Tensor, k: Tensor, v: Tensor, batch: Batch, group: int) -> bool:
    """Whether the kernel takes these inputs; `softmax_scale` must also be positive."""
    return (
        supports_hopper(q.device)
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and k.dtype == v.dtype == q.dtype
        and (batch.block_size, q.shape[2], v.shape[-1], group) == (BLOCK_SIZE, DIM, DIM, GROUP)
        and fetchable(k)
        and fetchable(v)
    )


def launch_hopper_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tensor,
    lists: Tensor,
    counts: Tensor,
    batch: Batch,
    softmax_scale: float,
    balance: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attend to the listed blocks of each tile.

    Args:
        q, k, v, batch, softmax_scale: as the op has them.
        tiles: int32 ``[tiles, 4]``: sequence, first row, end row, shift from row to position.
        lists: int32 ``[tiles, Hkv, L]``: ascending ``block << TILE_T | tokens that selected it``.
        counts: int32 ``[tiles, Hkv, 2]``: entries wholly visible to the tile, which come first,
            and all.
        balance: int32 ``[1]``, above 0 if nothing is to be done; or None.
        out: ``[T, Hq, D]``, written for the rows of the tiles.
        lse: float32 ``[T, Hq]``, likewise.
    """
    num_tiles, heads_kv, width = lists.shape
    if num_tiles == 0:
        return
    table = batch.block_table
    arguments = dict(
        q_ptr=q,
        k_desc=key_descriptor(k, batch, BLOCK_SIZE),
        v_desc=key_descriptor(v, batch, BLOCK_SIZE),
        out_ptr=out,
        lse_ptr=lse,
        tiles_ptr=tiles,
        lists_ptr=lists,
        counts_ptr=counts,
        balance_ptr=balance,
        block_table_ptr=table,
        first_key_ptr=batch.cu_seqlens_k if batch.layout == PACKED else batch.leftpad_k,
        softmax_scale=softmax_scale,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_o_t=out.stride(0),
        stride_o_h=out.stride(1),
        stride_l_t=lse.stride(0),
        stride_l_h=lse.stride(1),
        stride_table_b=0 if table is None else table.stride(0),
        num_seqs=batch.num_seqs,
        num_pages=k.shape[0],
        width=width,
        num_items=num_tiles * heads_kv,
        HEADS_KV=heads_kv,
        GROUP=GROUP,
        TILE_T=TILE_T,
        PAGED=batch.layout == PAGED,
        PACKED=batch.layout == PACKED,
        STAGES=STAGES,
        OVERLAP=True,
        num_warps=4,
    )
    programs = min(num_tiles * heads_kv, num_multiprocessors(q.device))
    run(_sparse_attention_hopper_kernel, (programs,), q.device, arguments)
