"""Launching the Gluon kernel of ``sparse_attention`` for Hopper's decode rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .....batch import PACKED, PAGED, Batch
from ....common.launch import launch, layout_args, num_multiprocessors
from ...merge import allocate_parts, launch_merge
from ..descriptors import key_descriptor
from .join.counters import take_counters
from .kernels import _sparse_attention_decode_kernel

GROUP, BLOCK_SIZE = 16, 128
"""The one geometry: heads of a group are the columns of a product, keys of a part its rows."""

BLOCK_B = 128
"""Sequences that one step of the search for a row's sequence looks at."""

PART, STAGES, MAX_REGISTERS = 64, 3, 128
"""Keys that are fetched as one, such parts in flight, and registers of a thread.

Two programs fit on a multiprocessor: with more of them than those, one starts while one ends.
"""

STAGES_ALONE = 6
"""Parts in flight that leave a multiprocessor no room for a second program.

Where splits are joined and there are no more programs than multiprocessors, those that start while
the predecessor ends would else share some of these, and others would have none.
"""

MAX_JOINED_SPLITS = 4
"""Splits that the program that comes last joins: 4 are faster so, 8 in the kernel that merges."""

CLUSTERS = {
    16: range(1, 13),
    8: range(13, 29),
    4: range(34, 57),
    2: range(57, 133),
}
"""Sizes of clusters, whose multiprocessors join a split each, and (row, KV head) pairs for which.

Up to the end of a range all its clusters find room at once, two programs to a multiprocessor. From
29 to 33 pairs the program that comes last joins four splits as fast.
"""

CLUSTER_STAGES, MAX_LONE_PROGRAMS = 2, 96
"""Parts in flight in each multiprocessor of a cluster, and most of them that can each be alone.

Those have `STAGES`, and so keep clear of one another while the predecessor ends.
"""

CLUSTERED_MULTIPROCESSORS = 132
"""Those of the chips that the ranges are for; fewer may have no room for a cluster of 16 at all."""

MAX_PART_SPLITS = 32
"""Splits of which each may have less than a block."""


class Joined(NamedTuple):
    """Where splits are joined by the program that comes last.

    Attributes:
        counters: int32, 0 before and after, one for each row and KV head.
        out: ``[rows, Hq, D]``.
        lse: float32 ``[rows, Hq]``.
    """

    counters: Tensor
    out: Tensor
    lse: Tensor


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Whether clusters join splits on the device.

    Later versions of Triton put barriers of the cluster where not all of its warps come.
    """
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return num_multiprocessors(device) == CLUSTERED_MULTIPROCESSORS and version < (3, 7)


def most_decode_splits(topk: int) -> int:
    """A split per part, unless those are more than can well be joined."""
    return max(topk, min(topk * BLOCK_SIZE // PART, MAX_PART_SPLITS))


def choose_decode_splits(
    rows: int, heads_kv: int, topk: int, device: torch.device
) -> tuple[int, bool]:
    """Splits that give every multiprocessor a program or two, and whether a cluster joins them."""
    pairs, most = max(1, rows * heads_kv), most_decode_splits(topk)
    if has_clusters(device):
        for size, fitting in CLUSTERS.items():
            if pairs in fitting and size <= most:
                return size, True
    return max(1, min(most, num_multiprocessors(device) // pairs)), False


def attend_decode_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    max_scratch_bytes: int,
    rows: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The first `rows` rows, in one pass or in splits.

    A cluster joins these, or the program that comes last, or a kernel.
    """
    heads_kv, topk = block_ids.shape[1:]
    if num_splits == 0:
        num_splits, clustered = choose_decode_splits(rows, heads_kv, topk, q.device)
    else:
        # Whatever the batch, so that a row's bits do not depend on it.
        num_splits = min(num_splits, most_decode_splits(topk))
        clustered = num_splits in CLUSTERS and has_clusters(q.device)
    attend = functools.partial(
        launch_hopper_decode, q, k, v, block_ids, batch, softmax_scale, num_splits, clustered
    )
    if num_splits == 1 or clustered:
        attend(0, rows, out[None, :rows], lse[None, :rows])
        return
    partial_out, partial_lse = allocate_parts(q, num_splits, rows, max_scratch_bytes)
    chunk = partial_lse.shape[1]
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        parts = partial_out[:, : end - begin], partial_lse[:, : end - begin]
        results = out[begin:end], lse[begin:end]
        if num_splits <= MAX_JOINED_SPLITS:
            counters = take_counters((end - begin) * heads_kv, q.device)
            attend(begin, end, *parts, Joined(counters, *results))
        else:
            attend(begin, end, *parts)
            launch_merge(most_decode_splits(topk), *parts, *results)


def launch_hopper_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    clustered: bool,
    begin: int,
    end: int,
    out: Tensor,
    lse: Tensor,
    joined: Joined | None = None,
) -> None:
    """Rows ``begin .. end`` into `out` ``[S, rows, Hq, D]`` and `lse` float32 ``[S, rows, Hq]``.

    Args:
        q, k, v, block_ids, batch, softmax_scale: as the op has them.
        clustered: whether a cluster joins the splits: then S is 1.
        joined: where the program that comes last joins the splits, if one does.
    """
    heads_kv = block_ids.shape[1]
    programs, num_ctas, stages = (end - begin) * heads_kv * num_splits, 1, STAGES
    if clustered:
        num_ctas = num_splits
        stages = STAGES if programs <= MAX_LONE_PROGRAMS else CLUSTER_STAGES
    elif joined is not None and programs <= num_multiprocessors(q.device):
        stages = STAGES_ALONE
    arguments = decode_args(
        q, k, v, block_ids, batch, softmax_scale, out, lse, joined, PART, num_ctas
    )
    launch(
        _sparse_attention_decode_kernel,
        (programs // num_ctas,),
        q.device,
        row_begin=begin,
        row_end=end,
        num_splits=num_splits,
        BLOCK_B=BLOCK_B,
        STAGES=stages,
        MAX_JOINED_SPLITS=MAX_JOINED_SPLITS,
        num_warps=4,
        num_ctas=num_ctas,
        maxnreg=MAX_REGISTERS,
        **arguments,
    )


def decode_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    joined: Joined | None,
    part: int,
    num_ctas: int = 1,
) -> dict[str, Any]:
    """Arguments of a kernel that lists what its rows selected, fetched `part` keys at once."""
    heads_kv, topk = block_ids.shape[1:]
    counters, final_out, final_lse = joined or (None, None, None)
    arguments: dict[str, Any] = layout_args(batch, k)
    layout = arguments.pop("LAYOUT")
    del arguments["BLOCK_SIZE"], arguments["BLOCK_B"]
    return arguments | dict(
        q_ptr=q,
        k_desc=key_descriptor(k, batch, part, num_ctas),
        v_desc=key_descriptor(v, batch, part, num_ctas),
        ids_ptr=block_ids,
        out_ptr=out,
        lse_ptr=lse,
        counters_ptr=counters,
        final_out_ptr=final_out,
        final_lse_ptr=final_lse,
        softmax_scale=softmax_scale,
        stride_q_t=q.stride(0),
        stride_q_h=q.stride(1),
        stride_i_t=block_ids.stride(0),
        stride_i_h=block_ids.stride(1),
        stride_i_k=block_ids.stride(2),
        stride_o_s=out.stride(0),
        stride_o_t=out.stride(1),
        stride_o_h=out.stride(2),
        stride_l_s=lse.stride(0),
        stride_l_t=lse.stride(1),
        stride_l_h=lse.stride(2),
        stride_fo_t=0 if final_out is None else final_out.stride(0),
        stride_fo_h=0 if final_out is None else final_out.stride(1),
        stride_fl_t=0 if final_lse is None else final_lse.stride(0),
        stride_fl_h=0 if final_lse is None else final_lse.stride(1),
        HEADS_KV=heads_kv,
        GROUP=GROUP,
        TOPK=topk,
        PAGED=layout == PAGED,
        PACKED=layout == PACKED,
    )
