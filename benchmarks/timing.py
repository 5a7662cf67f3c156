"""Clocks: graph replays for decode, events for prefill, the host's clock without a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

# A replay this long makes the gap before its first kernel small.
REPLAY_SECONDS = 1e-3
# The GPU waits this many cycles before each sample while the host queues the launches.
HEAD_START_CYCLES = 2_000_000

Call = Callable[[], Any]
K = TypeVar("K")


class Timer(Protocol):
    """A warmed-up measurement; `outputs` are those of the last run of each call."""

    outputs: list[Any]

    def sample(self) -> float:
        """Seconds of one call."""


class GraphTimer:
    """Replays one CUDA graph of many calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()
        self._capture(calls, 1)
        repeats = math.ceil(REPLAY_SECONDS / max(self._replay(), 1e-6))
        if repeats > 1:
            self._capture(calls, repeats)
            self._replay()

    def sample(self) -> float:
        return self._replay() / self.num_calls

    def _capture(self, calls: Sequence[Call], repeats: int) -> None:
        self.outputs = []
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for _ in range(repeats - 1):
                for call in calls:
                    call()
            self.outputs = [call() for call in calls]
        self.num_calls = len(calls) * repeats

    def _replay(self) -> float:
        return _seconds_on_gpu(self.graph.replay)


class EventTimer:
    """Times one call by events, with the L2 cache overwritten before it."""

    def __init__(self, call: Call, l2_bytes: int) -> None:
        self.call = call
        self.flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
        self.outputs = [call()]
        torch.cuda.synchronize()

    def sample(self) -> float:
        self.flush.zero_()
        return _seconds_on_gpu(self.call)


class HostTimer:
    """Times one call by the host's clock."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.outputs = [call() for call in calls]

    def sample(self) -> float:
        start = time.perf_counter()
        self.calls[0]()
        return time.perf_counter() - start


def make_timer(calls: Sequence[Call], kind: str, device: torch.device, l2_bytes: int) -> Timer:
    """A timer over `calls`, one for each step to rotate over."""
    if device.type != "cuda":
        return HostTimer(calls)
    if kind == "decode":
        return GraphTimer(calls)
    return EventTimer(calls[0], l2_bytes)


def sample_all(timers: dict[K, Timer], most: int, seconds: float) -> dict[K, list[float]]:
    """Sample every timer in turn, so that a drifting clock meets all alike.

    Takes at most `most` samples each, and once it has three, stops after `seconds` for each timer.
    """
    samples: dict[K, list[float]] = {name: [] for name in timers}
    started = time.perf_counter()
    for count in range(most):
        if count >= 3 and time.perf_counter() - started > seconds * len(timers):
            break
        for name, timer in timers.items():
            samples[name].append(timer.sample())
    return samples


def median_seconds(call: Call, device: torch.device, repeats: int) -> float:
    """Median time of a call after a warm-up."""
    if device.type != "cuda":
        timer = HostTimer([call])
        return statistics.median(timer.sample() for _ in range(repeats))
    for _ in range(3):
        call()
    return statistics.median(_seconds_on_gpu(call) for _ in range(repeats))


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4)
    return (high - low) / statistics.median(samples)


def _seconds_on_gpu(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
