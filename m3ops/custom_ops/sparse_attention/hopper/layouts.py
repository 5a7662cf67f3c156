"""Layouts of tensors of which every multiprocessor of a cluster has its own."""

from typing import Any

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@constexpr_function
def _copies(num_ctas: int, rank: int) -> list[list[int]]:
    """A basis per bit of a multiprocessor's number in the cluster: it moves along no axis."""
    return [[0] * rank for _ in range(num_ctas.bit_length() - 1)]


@constexpr_function
def _blocked(
    size: list[int], threads: list[int], warps: list[int], order: list[int], num_ctas: int
) -> gl.BlockedLayout:
    copies = _copies(num_ctas, len(size))
    return gl.BlockedLayout(list(size), list(threads), list(warps), list(order), copies)


@constexpr_function
def _products(warps: int, columns: int, num_ctas: int) -> gl.NVMMADistributedLayout:
    """A warpgroup's products, whose instructions have `columns` columns."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16], _copies(num_ctas, 2))


@constexpr_function
def _operand(shape: list[int], dtype: Any, num_ctas: int) -> gl.NVMMASharedLayout:
    """What a product reads from shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), dtype)
    return gl.NVMMASharedLayout(
        layout.swizzle_byte_width,
        layout.element_bitwidth,
        layout.rank,
        cga_layout=_copies(num_ctas, len(shape)),
    )


@constexpr_function
def _plain(num_ctas: int) -> gl.SwizzledSharedLayout:
    return gl.SwizzledSharedLayout(1, 1, 1, [0], _copies(num_ctas, 1))


@constexpr_function
def _barriers(num_ctas: int) -> mbarrier.MBarrierLayout:
    return mbarrier.MBarrierLayout(_copies(num_ctas, 1))


@constexpr_function
def _heads_apart(num_ctas: int) -> gl.BlockedLayout:
    """``[splits, heads, D]``: a thread has all splits, a multiprocessor some of the heads."""
    bases = [[0, 1 << bit, 0] for bit in range(num_ctas.bit_length() - 1)]
    return gl.BlockedLayout([num_ctas, 1, 1], [1, 1, 32], [1, 1, 4], [2, 1, 0], bases)
