"""The cases, and the inputs of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import selections

OPS = ("index_score", "topk_select", "select_blocks", "sparse_attention", "layer")
SUITES = {
    "decode": ("decode", OPS[:4]),
    "prefill": ("prefill", OPS[:4]),
    "select": ("", OPS[:3]),
    "layer": ("", OPS[4:]),
    "all": ("", OPS),
}
# Rotated inputs must not come out of the L2 cache.
WORKING_SET_OF_L2 = 2.2


@dataclass(frozen=True)
class Shape:
    """MiniMax-M3's attention."""

    num_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    index_dim: int = 128
    block_size: int = 128
    topk: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Case:
    """`num_seqs` sequences of `seq_len` keys, the last `query_len` of them new."""

    name: str
    num_seqs: int
    seq_len: int
    query_len: int
    # Selections that `sparse_attention` is timed on; empty for one random selection per token.
    overlaps: tuple[str, ...] = ()
    # Columns of the score buffer and the block table, as in a captured graph; 0 for what fits.
    columns: int = 0
    ops: tuple[str, ...] = OPS
    # What a quick run times.
    quick_ops: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.split("_", 1)[0]

    @property
    def total_q(self) -> int:
        return self.num_seqs * self.query_len


@dataclass(frozen=True)
class Job:
    """One row of the table."""

    case: Case
    op: str
    overlap: str = ""

    @property
    def name(self) -> str:
        return f"{self.case.name}_{self.overlap}" if self.overlap else self.case.name


_K = 1024
_DRIFTS = ("real", "high", "random")
CASES = (
    Case("decode_1x4k", 1, 4 * _K, 1),
    Case("decode_1x32k", 1, 32 * _K, 1, quick_ops=OPS[2:]),
    Case("decode_1x128k", 1, 128 * _K, 1),
    Case("decode_1x1M", 1, _K * _K, 1),
    Case("decode_8x32k", 8, 32 * _K, 1, quick_ops=OPS[2:]),
    Case("decode_8x128k", 8, 128 * _K, 1),
    Case("decode_32x32k", 32, 32 * _K, 1),
    Case("decode_64x8k", 64, 8 * _K, 1),
    Case("decode_64x128k", 64, 128 * _K, 1),
    Case("decode_16x32k_4q", 16, 32 * _K, 4, ("real", "random")),
    Case("decode_1x4k_w8192", 1, 4 * _K, 1, columns=8192, ops=OPS[:3]),
    Case("decode_8x32k_w8192", 8, 32 * _K, 1, columns=8192, ops=OPS[:3]),
    Case("prefill_8k", 1, 8 * _K, 8 * _K, _DRIFTS, quick_ops=(OPS[0], OPS[3])),
    Case("prefill_32k", 1, 32 * _K, 32 * _K, _DRIFTS),
    Case("prefill_8k_at_120k", 1, 128 * _K, 8 * _K, _DRIFTS),
    Case("prefill_8x1k", 8, _K, _K),
    Case("prefill_128k", 1, 128 * _K, 128 * _K, ("real", "random")),
    Case("prefill_8k_at_1M", 1, 1032 * _K, 8 * _K, ("real", "random")),
)
# Small enough for a CPU: they test the harness, their times mean nothing.
DRY_SHAPE = Shape(8, 2, 32, 32, 128, 4, torch.float32)
DRY_CASES = (
    Case("decode_2x1k", 2, _K, 1),
    Case("decode_1x1k_4q", 1, _K, 4, ("real", "random")),
    Case("decode_1x1k_w16", 1, _K, 1, columns=16, ops=OPS[:3]),
    Case("prefill_24_at_1000", 1, 1024, 24, _DRIFTS),
    Case("prefill_2x140", 2, 140, 140, ops=(OPS[0], OPS[3])),
)


def jobs_of(case: Case, ops: tuple[str, ...]) -> list[Job]:
    jobs = []
    for op in (op for op in ops if op in case.ops):
        overlaps: tuple[str, ...] = ("",)
        if op == "sparse_attention" and case.overlaps:
            overlaps = case.overlaps
        elif op == "layer" and case.overlaps:
            overlaps = case.overlaps[:1]
        jobs += [Job(case, op, overlap) for overlap in overlaps]
    return jobs


@dataclass
class Step:
    """What one call reads; decode rotates over several."""

    q: Tensor
    index_q: Tensor
    block_table: Tensor
    block_ids: Tensor
    batch: dict[str, Any]


@dataclass
class Inputs:
    """Caches of randomly permuted pages, and the steps that read them."""

    case: Case
    shape: Shape
    device: torch.device
    seed: int
    l2_bytes: int
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    index_k: Tensor = field(init=False)
    cu_seqlens_q: Tensor = field(init=False)
    seqused_k: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    num_valid: Tensor = field(init=False)
    steps: list[Step] = field(init=False)
    num_tables: int = field(init=False)
    query_drift: float = field(init=False, default=0.0)
    selection: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        case, shape = self.case, self.shape
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.num_tables = self._sets(case.num_seqs * case.seq_len * shape.index_dim)
        num_steps = max(self.num_tables, self._sets(self._attend_elements()))
        pages = self.num_tables * case.num_seqs * self.num_blocks
        kv = (pages, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.k, self.v = self._randn(*kv), self._randn(*kv)
        self.index_k = self._randn(pages, shape.block_size, shape.index_dim)

        lengths = torch.arange(case.num_seqs + 1, device=self.device, dtype=torch.int32)
        self.cu_seqlens_q = lengths * case.query_len
        self.seqused_k = torch.full_like(lengths[1:], case.seq_len)
        first = case.seq_len - case.query_len
        self.positions = torch.arange(first, case.seq_len, device=self.device).repeat(case.num_seqs)
        self.num_valid = (self.positions // shape.block_size + 1).int()

        tables = self._tables(pages)
        if case.query_len > 1 and self.num_blocks > shape.topk:
            self.query_drift = self._calibrate_query_drift(tables[0])
        self.steps = [self._step(tables[i % self.num_tables]) for i in range(num_steps)]

    @property
    def num_blocks(self) -> int:
        return math.ceil(self.case.seq_len / self.shape.block_size)

    def sets(self, op: str) -> int:
        """Steps that `op` must rotate over for its reads to miss the L2 cache."""
        if op == "sparse_attention":
            return self._sets(self._attend_elements())
        return self.num_tables

    def select(self, overlap: str) -> None:
        """Draw the ids that `sparse_attention` is given."""
        case, shape = self.case, self.shape
        drift = selections.TARGET_UNION.get(overlap)
        choices = selections.windows_with_choice(
            case.query_len, case.seq_len, shape.topk, shape.block_size
        )
        r = 0.0
        if drift is not None and choices.size:
            r = selections.calibrate_r(choices, drift * shape.topk, shape.topk, shape.block_size)
        for i, step in enumerate(self.steps):
            step.block_ids = self._drifting_ids(r, i) if r > 0 else self._random_ids()
        self.selection = {"overlap": overlap or "random", "r": round(r, 4), "seed": self.seed}
        self.selection |= self.union(self.steps[0].block_ids)

    def union(self, ids: Tensor) -> dict[str, float]:
        """Mean union of four consecutive tokens: where there is a choice, and everywhere."""
        if self.case.query_len == 1:
            return {}
        chosen, overall = selections.mean_union(ids, self.num_valid, self.case.query_len)
        measured = {"union4": chosen, "union4_all": overall}
        return {name: round(value, 2) for name, value in measured.items() if value == value}

    def _sets(self, elements: int) -> int:
        if self.case.kind != "decode":
            return 1
        wanted = WORKING_SET_OF_L2 * self.l2_bytes
        return max(1, math.ceil(wanted / (elements * self.shape.dtype.itemsize)))

    def _attend_elements(self) -> int:
        blocks = min(self.shape.topk, self.num_blocks) * self.shape.num_kv_heads
        return 2 * self.case.num_seqs * blocks * self.shape.block_size * self.shape.head_dim

    def _randn(self, *size: int) -> Tensor:
        return torch.randn(
            size, device=self.device, dtype=self.shape.dtype, generator=self.generator
        )

    def _tables(self, pages: int) -> Tensor:
        """``[tables, B, W]``; entries past a sequence's blocks name pages of others."""
        order = torch.randperm(pages, device=self.device, generator=self.generator).int()
        tables = order.view(self.num_tables, self.case.num_seqs, self.num_blocks)
        if self.case.columns > self.num_blocks:
            spare = self.case.columns - self.num_blocks
            tables = torch.cat([tables, tables[..., :1].expand(-1, -1, spare)], dim=-1)
        return tables.contiguous()

    def _step(self, table: Tensor) -> Step:
        case, shape = self.case, self.shape
        index_q = selections.drifting_queries(
            case.total_q, shape.num_kv_heads, shape.index_dim, self.query_drift, self.generator
        )
        batch = {
            "cu_seqlens_q": self.cu_seqlens_q,
            "seqused_k": self.seqused_k,
            "block_table": table,
            "max_seqlen_q": case.query_len,
            "max_seqlen_k": max(case.seq_len, case.columns * shape.block_size),
            "block_size": shape.block_size,
        }
        if case.kind == "decode":
            batch |= {"num_decode_seqs": case.num_seqs, "num_decode_tokens": case.total_q}
        return Step(
            q=self._randn(case.total_q, shape.num_heads, shape.head_dim),
            index_q=index_q.to(shape.dtype),
            block_table=table,
            block_ids=torch.empty(0, dtype=torch.int32, device=self.device),
            batch=batch,
        )

    def _random_ids(self) -> Tensor:
        own = self.positions // self.shape.block_size
        return selections.random_ids(own, self.shape.num_kv_heads, self.shape.topk, self.generator)

    def _drifting_ids(self, r: float, step: int) -> Tensor:
        case, shape = self.case, self.shape
        parts = [
            selections.drifting_ids(
                case.query_len,
                case.seq_len,
                shape.num_kv_heads,
                shape.topk,
                shape.block_size,
                r,
                self.seed + step * case.num_seqs + b,
            )
            for b in range(case.num_seqs)
        ]
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def _calibrate_query_drift(self, table: Tensor) -> float:
        """Correlation of index queries at which selections by score overlap as in `real`.

        Bisects on the last tokens of the first sequence.
        """
        shape = self.shape
        keys = self.index_k[table[0, : self.num_blocks].long()].flatten(0, 1).float()
        rows = 128
        valid = torch.full((rows,), self.num_blocks, device=self.device)
        target = selections.TARGET_UNION["real"] * shape.topk
        low, high = 0.0, 5.0
        for _ in range(12):
            middle = (low + high) / 2
            generator = torch.Generator(self.device).manual_seed(self.seed)
            queries = selections.drifting_queries(
                rows, shape.num_kv_heads, shape.index_dim, 1 - 10**-middle, generator
            )
            products = queries.flatten(0, 1).to(shape.dtype).float() @ keys.T
            scores = products.unflatten(1, (self.num_blocks, shape.block_size)).amax(-1)
            scores[:, -1] = math.inf
            ids = scores.topk(shape.topk).indices.unflatten(0, (rows, shape.num_kv_heads))
            union, _ = selections.mean_union(ids, valid, rows)
            low, high = (middle, high) if union > target else (low, middle)
        return 1 - 10**-high
