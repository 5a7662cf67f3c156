"""m3ops itself, through its public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import m3ops
from benchmarks.cases import OPS, Inputs, Step
from benchmarks.peers.base import Implementation


class Ours(Implementation):
    name = "ours"
    version = str(getattr(m3ops, "__version__", ""))
    ops = frozenset(OPS)
    ascending_ids = True

    def prepare(self, op: str, inputs: Inputs) -> None:
        if op == "topk_select":
            self.scores = self._score(inputs, inputs.steps[0])

    def release(self) -> None:
        self.__dict__.pop("scores", None)

    def call(self, op: str, inputs: Inputs, index: int) -> Any:
        step = inputs.steps[index]
        if op == "index_score":
            return self._score(inputs, step)
        if op == "topk_select":
            return self._select(inputs, self.scores)
        if op == "score_topk":
            return self._select(inputs, self._score(inputs, step))
        if op == "select_blocks":
            return self._select_blocks(inputs, step)
        if op == "sparse_attention":
            return self._attend(inputs, step, step.block_ids)
        ids = self._select_blocks(inputs, step)
        return ids, self._attend(inputs, step, ids)

    def _score(self, inputs: Inputs, step: Step) -> Tensor:
        return m3ops.index_score(step.index_q, inputs.index_k, **step.batch)

    def _select(self, inputs: Inputs, scores: Tensor) -> Tensor:
        return m3ops.topk_select(scores, inputs.num_valid, topk=inputs.shape.topk)

    def _select_blocks(self, inputs: Inputs, step: Step) -> Tensor:
        return m3ops.select_blocks(
            step.index_q, inputs.index_k, topk=inputs.shape.topk, **step.batch
        )

    def _attend(self, inputs: Inputs, step: Step, ids: Tensor) -> Tensor:
        out = m3ops.sparse_attention(step.q, inputs.k, inputs.v, ids, **step.batch)
        assert isinstance(out, Tensor)
        return out
