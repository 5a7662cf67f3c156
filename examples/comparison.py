"""Compares every output and every selection of a run with the float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from dense_oracle import DenseLayer, Geometry, force_own_block, row_chunks, selection_gap
from torch import Tensor
from tqdm import tqdm

# Larger temporaries would be returned to the system, and paged in again, each time.
ROWS_AT_ONCE = 32
# Of the prompt, one in so many rows tells how far rounding goes; computing all would tell no more.
PLAIN_EVERY = 4


@dataclass
class Error:
    """Largest and root-mean-square difference from the oracle; NaN as soon as anything is."""

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, difference: Tensor) -> None:
        # Unlike the built-in `max`, these keep NaN.
        self.largest = difference.abs().amax().clamp(min=self.largest).item()
        self.squares += difference.square().sum().item()
        self.count += difference.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count)


@dataclass
class Check:
    """One number against the most, and the least, that it may be."""

    name: str
    value: float
    budget: float
    least: float = 0

    @property
    def passed(self) -> bool:
        return self.least <= self.value <= self.budget

    def describe(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return f"{self.value:.2g}, at most {self.budget:.2g}: {verdict}"

    def as_dict(self) -> dict[str, Any]:
        # JSON knows no NaN and no infinity.
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {"name": self.name, "value": value, "budget": self.budget, "passed": self.passed}


@dataclass
class Part:
    """Errors of some rows: the layer's, and in a sample of them the dense layer's in its dtype."""

    layer: Error = field(default_factory=Error)
    plain: Error = field(default_factory=Error)

    def checks(self, name: str, factor: float) -> list[Check]:
        return [
            Check(f"largest error, {name}", self.layer.largest, factor * self.plain.largest),
            Check(f"RMS error, {name}", self.layer.rms, factor * self.plain.rms),
        ]


@dataclass
class Comparison:
    """How far the layer is from the oracle, and how far plain rounding is.

    Attributes:
        prefill, decode: errors of the rows of the prompt, and of the others.
        plain_scores: errors of the dense layer's block scores, in the same sample.
        gaps: of every row and index head, by how much the blocks left out beat those kept.
    """

    prefill: Part = field(default_factory=Part)
    decode: Part = field(default_factory=Part)
    plain_scores: Error = field(default_factory=Error)
    gaps: list[Tensor] = field(default_factory=list)

    def checks(self, factor: float) -> list[Check]:
        """Every number against `factor` times what rounding alone makes of it."""
        # Either of two scores may be off by the error of a score.
        largest_gap = 2 * factor * self.plain_scores.largest
        return [
            *self.prefill.checks("prefill", factor),
            *self.decode.checks("decode", factor),
            Check("score gap, blocks left out", torch.cat(self.gaps).amax().item(), largest_gap),
        ]

    def results(self) -> dict[str, Any]:
        # Selections, of one row and index head, that are not the oracle's to the id.
        return {"decided_by_rounding": int((torch.cat(self.gaps) > 0).sum())}


def compare(
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    outputs: Tensor,
    block_ids: Tensor,
    num_prefill: int,
    geometry: Geometry,
) -> Comparison:
    """Recompute the whole run densely in float64 and compare row by row.

    Args:
        weights: the layer's parameters by their names in transformers.
        hidden: ``[S, hidden]``, its inputs.
        outputs: ``[S, hidden]``, its outputs: `num_prefill` rows of the prompt, then decode rows.
        block_ids: ``[S, Hkv, K]``, the blocks it kept.
        num_prefill: rows of the prompt.
        geometry: sizes of the layer.

    Where the layer kept other blocks than the oracle would, the oracle attends to the layer's:
    whether those were right to keep is judged by their scores.
    """
    result = Comparison()
    oracle = DenseLayer(weights, hidden, torch.float64, geometry)
    plain = DenseLayer(weights, hidden, hidden.dtype, geometry)
    chunks = list(row_chunks(num_prefill, ROWS_AT_ONCE))
    # A product with one row may round differently, so decode rows come alone here as well.
    decode_rows = [slice(row, row + 1) for row in range(num_prefill, len(hidden))]
    with_plain = {rows.start for rows in [*chunks[::PLAIN_EVERY], *decode_rows]}
    for rows in tqdm(chunks + decode_rows, "check against float64", leave=False, disable=None):
        part = result.prefill if rows.start < num_prefill else result.decode
        ids = block_ids[rows]
        scores, expected = oracle.block_scores(rows), oracle.attend(rows, ids)
        forced = force_own_block(scores, rows, geometry.block_size)
        result.gaps.append(selection_gap(ids, forced))
        part.layer.add(outputs[rows] - expected)
        if rows.start in with_plain:
            seen = scores > -torch.inf
            result.plain_scores.add((plain.block_scores(rows) - scores)[seen])
            part.plain.add(plain.attend(rows, ids) - expected)
    return result
