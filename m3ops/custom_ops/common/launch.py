"""What the launchers share: device facts, layout arguments and the launch itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from ...batch import PACKED, PAGED, Batch, storage_tokens
from ...visible import tracing

_LARGEST = 2**31 - 1

MAX_DECODE_QUERIES = 16
"""Batches with at most this many query tokens per sequence are taken as decode rows."""

BLOCK_B = 32
"""Sequences that one step of the search for a row's sequence looks at."""

KINDS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
"""Kinds of GPU that have columns of their own in the tables of configurations.

A program's shared memory is 163 KiB, 99, 227, 227, 99 and 64.
"""

_Config = TypeVar("_Config")


def per_kind(
    default: dict[str, _Config], changes: dict[str, dict[str, _Config]]
) -> dict[str, dict[str, _Config]]:
    """A table of configurations by kind of GPU and case: `default`, and what some kinds change."""
    return {kind: default | changes.get(kind, {}) for kind in KINDS}


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(n: int, minimum: int = 16) -> int:
    return max(minimum, 1 << (n - 1).bit_length())


def check_sizes(op: str, dtype: torch.dtype, block_size: int, **dims: int) -> None:
    """Refuse what the Triton kernels do not take, naming the first size that does not fit."""
    if dtype == torch.float64:
        raise NotImplementedError(
            f"{op} on backend 'triton' takes float32, float16 and bfloat16, got float64: use "
            "m3ops.use_backend('reference')"
        )
    if block_size & (block_size - 1) or not 16 <= block_size <= 256:
        raise NotImplementedError(
            f"`block_size` must be a power of two from 16 to 256 for {op} on backend 'triton', "
            f"got {block_size}"
        )
    for name, dim in dims.items():
        if dim > 256:
            raise NotImplementedError(
                f"the {name} must be at most 256 for {op} on backend 'triton', got {dim}"
            )


def layout_args(batch: Batch, keys: Tensor) -> dict[str, Any]:
    """Kernel arguments that say where sequences and blocks lie."""
    table = batch.block_table
    return {
        "cu_seqlens_q_ptr": batch.cu_seqlens_q,
        "seqused_k_ptr": batch.seqused_k,
        "block_table_ptr": table,
        "first_key_ptr": batch.cu_seqlens_k if batch.layout == PACKED else batch.leftpad_k,
        "stride_table_b": 0 if table is None else table.stride(0),
        "num_pages": keys.shape[0],
        "num_seqs": batch.num_seqs,
        "num_tokens": storage_tokens(batch, keys),
        # Wider integers would compile the kernel anew.
        "max_seqlen_k": min(batch.max_seqlen_k, _LARGEST),
        "LAYOUT": batch.layout,
        "BLOCK_SIZE": batch.block_size,
        "BLOCK_B": BLOCK_B,
    }


def key_strides(batch: Batch, keys: Tensor) -> tuple[int, int]:
    """Elements from page to page (or sequence to sequence) and from token to token."""
    if batch.layout == PACKED:
        return 0, keys.stride(0)
    if batch.layout == PAGED:
        return keys.stride(0), keys.stride(-2)
    return keys.stride(0), keys.stride(1)


def head_stride(batch: Batch, keys: Tensor) -> int:
    return keys.stride(1 if batch.layout == PAGED else -2)


@functools.cache
def device_kind(device: torch.device) -> str:
    """The kind of GPU whose configurations a device takes: the newest one that is not too new."""
    if device.type == "cpu":
        return "sm_80"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    fitting = [kind for kind in KINDS[:5] if int(kind[3:]) <= 10 * major + minor]
    return fitting[-1] if fitting else "sm_80"


def supports_hopper(device: torch.device) -> bool:
    """Tiles fetched by the copy engine, and launches that overlap their predecessor.

    A launch that becomes a node of a graph has neither: Inductor takes no descriptors from traced
    Python code, no attributes of a launch, and no Gluon.
    """
    return not tracing() and device_kind(device) in ("sm_90", "sm_100", "sm_120")


def max_warps(device: torch.device) -> int:
    """Warps of the largest program: 1024 threads."""
    return 16 if device_kind(device) == "gfx942" else 32


def decode_rows(batch: Batch, rows: int) -> int:
    """How many leading rows are decode rows: all in a batch of short queries, else the named."""
    if batch.max_seqlen_q <= MAX_DECODE_QUERIES:
        return rows
    return min(batch.num_decode_tokens, rows)


def num_tiles(rows: int, tile_t: int, batch: Batch) -> int:
    """Tiles that `find_tile` may cut `rows` rows of the batch into."""
    return rows // tile_t + batch.num_seqs + 1


def aligned(tensor: Tensor) -> bool:
    """Whether `tensor` starts at a multiple of 16 bytes."""
    if tracing():
        # There is no memory yet, and what will be allocated is aligned.
        return tensor.storage_offset() * tensor.element_size() % 16 == 0
    return tensor.data_ptr() % 16 == 0


def fetchable(tensor: Tensor) -> bool:
    """Whether the copy engine can fetch tiles of `tensor`: aligned rows, and not empty."""
    return (
        tensor.numel() > 0
        and aligned(tensor)
        and all(
            stride > 0 and stride * tensor.element_size() % 16 == 0
            for stride in tensor.stride()[:-1]
        )
    )


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
    """Launch on `device`; a kernel that must first be compiled is refused during a capture."""
    if 0 in grid:
        return
    # A kernel's prologue may run while its predecessor ends; it waits before it touches memory.
    arguments["PDL"] = supports_hopper(device)
    if arguments["PDL"]:
        arguments["launch_pdl"] = True
    run(kernel, grid, device, arguments)


def run(
    kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]
) -> None:
    if tracing():
        torch.library.wrap_triton(kernel)[grid](**arguments)
        return
    if device.type == "cpu":
        kernel[grid](**arguments)
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            with _no_compilation(kernel):
                kernel[grid](**arguments)
        else:
            kernel[grid](**arguments)


# Triton's hook is one for all threads: another capture must not put back this one's.
_hook_lock = threading.Lock()


@contextmanager
def _no_compilation(kernel: Any) -> Iterator[None]:
    """Refuse to compile in this thread; others, which capture nothing, go on as they would."""
    runtime, capturing = triton.knobs.runtime, threading.get_ident()

    def refuse(**arguments: Any) -> bool | None:
        if threading.get_ident() != capturing:
            return None if previous is None else previous(**arguments)
        raise RuntimeError(
            f"{kernel.__name__} must be compiled before a CUDA graph is captured, got its first "
            "use for these sizes inside a capture: call m3ops.warmup(...) or run the step once"
        )

    with _hook_lock:
        previous, runtime.jit_cache_hook = runtime.jit_cache_hook, refuse
        try:
            yield
        finally:
            runtime.jit_cache_hook = previous
