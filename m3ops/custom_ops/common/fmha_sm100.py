"""MiniMax's library ``fmha_sm100``: finding it, what it takes, and the lengths that it plans with.

It is built from https://github.com/MiniMax-AI/MSA or comes inside vLLM. Nothing here imports it
before an op runs on it, or somebody asks whether one could.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ...batch import PAGED, Batch, num_blocks

STANDALONE, IN_VLLM = "fmha_sm100", "vllm.third_party.fmha_sm100"

_NEEDED = "it needs a GPU of compute capability 10.x"

BLOCK_SIZE, DIM = 128, 128

GROUPS = (1, 2, 4, 8, 16)
"""Query heads per KV head that its attention takes."""


@functools.cache
def installed_name() -> str:
    """The name it is installed under, found without importing anything; empty if it is not."""
    if importlib.util.find_spec(STANDALONE) is not None:
        return STANDALONE
    vllm = importlib.util.find_spec("vllm")
    folders = [] if vllm is None else list(vllm.submodule_search_locations or [])
    if any((Path(folder) / "third_party" / "fmha_sm100").is_dir() for folder in folders):
        return IN_VLLM
    return ""


def version() -> str:
    """The distribution it comes from and that one's version; empty if it is not installed."""
    distribution = installed_name().split(".")[0]
    if not distribution:
        return ""
    try:
        return f"{distribution} {distribution_version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution} of unknown version"


@functools.cache
def unusable() -> str:
    """Why no device of this machine can use it; empty if one can."""
    reasons = [unfit(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    if all(reasons):
        return reasons[0] if reasons else f"{_NEEDED}, got none"
    if not installed_name():
        return f"neither {STANDALONE} nor {IN_VLLM} is installed"
    try:
        library()
    except Exception as error:
        return f"{installed_name()} cannot be used: {error}"
    return ""


def unfit(device: torch.device) -> str:
    """Why it cannot run on `device`; empty if it can."""
    if device.type != "cuda" or torch.version.hip:
        return f"{_NEEDED}, got {device if device.type != 'cuda' else 'a ROCm device'}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major == 10 else f"{_NEEDED}, got {major}.{minor}"


@functools.cache
def library() -> ModuleType:
    """The library's module, whose names resolve when they are first used.

    Raises:
        ImportError: it, or what it needs, cannot be imported.
        RuntimeError: it is a version that selects with one block count for all rows.
    """
    module = importlib.import_module(installed_name())
    if "max_score_layout" not in inspect.signature(module.sparse_topk_select).parameters:
        raise RuntimeError(
            "sparse_topk_select must take `max_score_layout` and a block count of every row, "
            f"got the older {version()}"
        )
    return module


def check_call(op: str, dtype: torch.dtype, batch: Batch, group: int = 1) -> None:
    """Refuse calls that none of its kernels takes any row of, naming the first misfit."""
    takes = f"{op} on backend 'fmha_sm100' takes"
    if dtype != torch.bfloat16:
        raise NotImplementedError(f"{takes} bfloat16, got {dtype}")
    if batch.block_size != BLOCK_SIZE:
        raise NotImplementedError(f"{takes} blocks of {BLOCK_SIZE} tokens, got {batch.block_size}")
    if batch.layout != PAGED:
        raise NotImplementedError(f"{takes} paged keys, got {batch.layout} ones")
    if group not in GROUPS:
        raise NotImplementedError(
            f"{takes} {', '.join(map(str, GROUPS))} query heads per KV head, got {group}"
        )


class Rows(NamedTuple):
    """Consecutive rows of a batch as sequences of their own, on the host.

    Attributes:
        first, last: the rows, without padding.
        seqs: the batch's sequences that have some of them.
        query_lens: how many each has.
        key_lens: keys that the last one of each sees (tokens).
    """

    first: int
    last: int
    seqs: list[int]
    query_lens: list[int]
    key_lens: list[int]

    @property
    def num_blocks(self) -> list[int]:
        """Blocks of each sequence's keys, the last perhaps partial."""
        return [num_blocks(length, BLOCK_SIZE) for length in self.key_lens]


class Lengths(NamedTuple):
    """A batch's lengths on the host."""

    cu_seqlens_q: list[int]
    seqused_k: list[int]

    def rows(self, first: int, last: int) -> Rows:
        """The rows ``first .. last``; every row keeps its position."""
        seqs, query_lens, key_lens = [], [], []
        for b, seqused in enumerate(self.seqused_k):
            start, end = self.cu_seqlens_q[b : b + 2]
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                seqs.append(b)
                query_lens.append(stop - begin)
                key_lens.append(seqused - (end - stop))
        return Rows(first, first + sum(query_lens), seqs, query_lens, key_lens)


def plannable(batch: Batch, first: int, device: torch.device) -> Lengths | None:
    """The lengths to plan the rows from `first` on with, which waits for the device.

    None where the library cannot plan them: inside the capture of a CUDA graph, where nothing can
    be read back, and where rows stand before their sequence's first key.
    """
    if capturing(device):
        return None
    lengths = torch.cat([batch.cu_seqlens_q, batch.seqused_k]).tolist()
    cu_seqlens_q, seqused_k = lengths[: batch.num_seqs + 1], lengths[batch.num_seqs + 1 :]
    for (start, end), seqused in zip(pairwise(cu_seqlens_q), seqused_k, strict=True):
        if end > first and seqused < end - start:
            return None
    return Lengths(cu_seqlens_q, seqused_k)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be read from the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """The library allocates and launches on the current device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


def int32(values: list[int], like: Tensor) -> Tensor:
    """`values` as int32 on the device of `like`."""
    return torch.tensor(values, dtype=torch.int32, device=like.device)
