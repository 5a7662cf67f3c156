"""What the harness asks of an implementation."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Inputs


class Unavailable(Exception):
    """An implementation that cannot run here, with the reason."""


class Implementation:
    """Something to time. `call` runs one op on one step and returns what it computed.

    ==================  =======================================================
    ``index_score``     scores ``[T, Hi, NB]``
    ``topk_select``     ids ``[T, Hi, K]`` from its own scores (prefill)
    ``score_topk``      ids ``[T, Hi, K]``, score and select one after the other
    ``select_blocks``   ids ``[T, Hi, K]``
    ``sparse_attention``  outputs ``[T, Hq, D]`` over ``step.block_ids``
    ``layer``           ``(ids, outputs)``
    ==================  =======================================================
    """

    # Variants of one peer are named "peer/variant"; the fastest counts.
    name: str
    version: str = ""
    ops: frozenset[str] = frozenset()
    # Whether a row's own block carries a marker in the scores.
    marks_own_block = False
    ascending_ids = False
    # Whether it attends to all keys, so that only rows that see them all compare.
    dense = False

    @property
    def peer(self) -> str:
        return self.name.split("/")[0]

    def prepare(self, op: str, inputs: Inputs) -> None:
        """Copies and buffers of its own, outside the timing. Called before every op."""

    def release(self) -> None:
        """Drop what `prepare` made."""

    def sets(self, op: str, inputs: Inputs) -> int:
        """Steps to rotate over."""
        return inputs.sets(op)

    def call(self, op: str, inputs: Inputs, index: int) -> Any:
        raise NotImplementedError
