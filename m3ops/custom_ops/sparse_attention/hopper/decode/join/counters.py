"""Counters for programs that find out which of them comes last.

They are 0 before a launch and 0 after it. Outside a capture each launch has its own, which are
filled with zeros before it. A captured launch would fill them at every replay, so it is given a
slice of a buffer that was filled when the device was first used, and that slice is never given to
another launch: graphs may be replayed beside each other, and one graph not beside itself. A capture
that finds no slice captures the filling.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

SIZE = 2**18
"""Counters in a buffer: a megabyte. A captured launch takes one or two for each row or sequence
and KV head."""


class _Buffer:
    """Zeros, and how many of them are taken."""

    def __init__(self, zeros: Tensor) -> None:
        self.zeros = zeros
        self.taken = 0

    def take(self, count: int) -> Tensor | None:
        if self.taken + count > len(self.zeros):
            return None
        self.taken += count
        return self.zeros[self.taken - count : self.taken]


_lock = threading.Lock()
# Those that graphs may use stay; the last one gives slices.
_buffers: dict[torch.device, list[_Buffer]] = {}


def take_counters(count: int, device: torch.device) -> Tensor:
    """`count` int32 zeros for one launch on the current stream, which leaves them 0."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            _provide(device)
        elif (taken := _take(count, device)) is not None:
            return taken
    return torch.zeros(count, dtype=torch.int32, device=device)


def _take(count: int, device: torch.device) -> Tensor | None:
    with _lock:
        buffers = _buffers.get(device)
        return buffers[-1].take(count) if buffers else None


def _provide(device: torch.device) -> None:
    """Have a buffer with room for captures to come."""
    with _lock:
        buffers = _buffers.setdefault(device, [])
        if buffers and buffers[-1].taken <= SIZE // 2:
            return
        # What this thread allocates may belong to the pool of a graph that is about to be captured.
        with ThreadPoolExecutor(1) as thread:
            zeros = thread.submit(_allocate, device).result()
        buffers.append(_Buffer(zeros))


def _allocate(device: torch.device) -> Tensor:
    with torch.cuda.device(device):
        zeros = torch.zeros(SIZE, dtype=torch.int32, device=device)
        # Once: whoever is given a slice must find the zeros, on whichever stream.
        torch.cuda.current_stream().synchronize()
    return zeros
