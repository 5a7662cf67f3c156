"""Implementations to time: one small class each."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers.base import Implementation, Unavailable
from benchmarks.peers.dense import dense_variants
from benchmarks.peers.ours import Ours
from benchmarks.peers.vllm import VllmPeer

PEERS: dict[str, Callable[[], list[Implementation]]] = {
    "vllm": lambda: [VllmPeer()],
    "dense": dense_variants,
}


def load_peers(names: list[str]) -> list[Implementation]:
    """The peers of these names; a name may stand for several variants, of which one counts."""
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise ValueError(f"peers must be among {', '.join(PEERS)}, got {', '.join(unknown)}")
    return [peer for name in names for peer in PEERS[name]()]


__all__ = ["PEERS", "Implementation", "Ours", "Unavailable", "load_peers"]
