"""Serves random requests with one MiniMax-M3 attention layer for many steps, and checks all along.

A small scheduler batches requests continuously over a paged cache: they arrive in waves, their
prompts are prefilled in chunks beside decode rows, some speculate and are rolled back, some begin
with a common prefix and share its pages, some are cancelled, and some must give up their pages and
start over. Freed pages are overwritten with NaN. Each step runs in the smallest bucket that fits, a
CUDA graph on a GPU and a compiled function on the CPU. After a step, sequences are drawn and
recomputed alone, in float64, from nothing but their tokens. The exit status is 1 if an output, a
selection, the pages, memory or compilation is not as it should be.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from command_line import (
    Clock,
    Device,
    Dtype,
    check_device,
    check_writable,
    default_dtype,
    progress,
)
from comparison import Check, Part
from dense_oracle import DenseLayer, Geometry, force_own_block, selection_gap
from quickstart import random_layer
from rich.console import Console
from rich.table import Table
from scheduler import MAX_DRAFTS, Chunk, Load, Scheduler, gather_table
from torch import Tensor, nn
from torch._dynamo.utils import counters

import m3ops
from m3ops.backends import active_backend
from m3ops.testing import assert_within_budget

FACTOR = 3.0
# Of a long chunk, so many neighbouring rows are compared.
ROWS_COMPARED = 16
MAX_MESSAGES = 5
MIB = 2**20


class Size(str, Enum):
    small = "small"
    m3 = "m3"


@dataclass(frozen=True)
class Setup:
    """Sizes of the layer and what is asked of it."""

    geometry: Geometry
    hidden_size: int
    load: Load


SETUPS = {
    Size.m3: Setup(
        Geometry(),
        hidden_size=512,
        load=Load(
            block_size=128,
            num_pages=320,
            num_columns=40,
            max_seqs=32,
            max_tokens=512,
            arrivals=0.17,
            period=400,
            prompt=(1, 4600),
            output=(1, 500),
            prefix=3 * 128 + 17,
        ),
    ),
    Size.small: Setup(
        Geometry(heads_q=4, heads_kv=2, head_dim=16, rotary_dim=8, block_size=16, topk=4),
        hidden_size=32,
        load=Load(
            block_size=16,
            num_pages=64,
            num_columns=25,
            max_seqs=8,
            max_tokens=64,
            arrivals=0.25,
            period=80,
            prompt=(1, 330),
            output=(1, 60),
            prefix=3 * 16 + 5,
        ),
    ),
}


@dataclass(frozen=True)
class Shape:
    """What a bucket holds.

    Attributes:
        kind: what its steps are called.
        num_tokens, num_seqs: ``T`` and ``B``.
        max_seqlen_q: most tokens of a sequence.
        num_decode: single decode rows in front that are named as such; None if all rows may be.
    """

    kind: str
    num_tokens: int
    num_seqs: int
    max_seqlen_q: int
    num_decode: int | None

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether a step of sequences with so many tokens, the single ones first, has room."""
        return (
            len(lengths) <= self.num_seqs
            and sum(lengths) <= self.num_tokens
            and max(lengths) <= self.max_seqlen_q
            and (self.num_decode is None or lengths[: self.num_decode] == [1] * self.num_decode)
        )


def bucket_shapes(load: Load) -> list[Shape]:
    """The buckets; of those that fit a step, the first is the best."""
    seqs, tokens, drafted = load.max_seqs, load.max_tokens, 1 + MAX_DRAFTS
    return [
        *(Shape("decode", count, count, 1, None) for count in (seqs // 4, seqs)),
        *(Shape("drafts", count, seqs, drafted, None) for count in (seqs, drafted * seqs)),
        *(
            Shape("mixed", count, seqs, count, num_decode)
            for count in (tokens // 4, tokens)
            for num_decode in (seqs // 2, seqs // 8, 0)
        ),
    ]


class Model(nn.Module):
    """Embeddings and one layer, with what the layer keeps between steps."""

    embeddings: Tensor

    def __init__(
        self,
        layer: m3ops.MiniMaxM3SparseAttention,
        embeddings: Tensor,
        cache: m3ops.PagedKVCache,
        workspace: m3ops.Workspace,
    ) -> None:
        super().__init__()
        self.layer, self.cache, self.workspace = layer, cache, workspace
        self.register_buffer("embeddings", embeddings)

    def forward(self, tokens: Tensor, batch: m3ops.BatchMetadata) -> Any:
        """``(out, block_ids)``: ``[T, hidden_size]`` and int32 ``[T, Hkv, K]``."""
        hidden = F.embedding(tokens, self.embeddings)
        return self.layer(
            hidden, batch, self.cache, workspace=self.workspace, return_block_ids=True
        )


class Bucket:
    """Fixed tensors of one shape and what runs over them: a captured graph, or `run` itself."""

    def __init__(self, run: Any, shape: Shape, load: Load, device: torch.device) -> None:
        self.run, self.shape = run, shape
        # One more sequence, or all would count as decode sequences.
        lengths = [] if shape.num_decode is None else [1] * shape.num_decode + [0]
        self.batch = m3ops.BatchMetadata.from_lengths(
            lengths,
            [0] * len(lengths),
            torch.zeros(len(lengths), load.num_columns, dtype=torch.int32),
            num_tokens=shape.num_tokens,
            num_seqs=shape.num_seqs,
            num_columns=load.num_columns,
            max_seqlen_q=shape.max_seqlen_q,
            num_decode_seqs=shape.num_decode,
            block_size=load.block_size,
            device=device,
        )
        self.tokens = torch.zeros(shape.num_tokens, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch.update_([], [], torch.zeros(0, load.num_columns, dtype=torch.int32))
        self.results: tuple[Tensor, Tensor] = self.run(self.tokens, self.batch)

    def capture(self, pool: Any) -> None:
        """Capture the step; its kernels must have run before."""
        # Nothing is given back while a graph is captured.
        del self.results
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.results = self.run(self.tokens, self.batch)

    def step(self, chunks: Sequence[Chunk], table: Tensor) -> tuple[Tensor, Tensor]:
        """``(out, block_ids)``, until the next step: captured graphs share their memory."""
        lengths = [len(chunk.tokens) for chunk in chunks]
        self.batch.update_(lengths, [chunk.context for chunk in chunks], table)
        tokens = np.zeros(self.shape.num_tokens, dtype=np.int64)
        tokens[: sum(lengths)] = np.concatenate([chunk.tokens for chunk in chunks])
        self.tokens.copy_(_staged(torch.from_numpy(tokens), self.tokens), non_blocking=True)
        if self.graph is None:
            self.results = self.run(self.tokens, self.batch)
        else:
            self.graph.replay()
        return self.results


class Judge:
    """Recomputes sequences from their tokens alone and remembers how far they were off."""

    def __init__(
        self, weights: Mapping[str, Tensor], embeddings: Tensor, geometry: Geometry
    ) -> None:
        self.weights = dict(weights)
        self.exact_weights = {name: weight.double() for name, weight in weights.items()}
        self.embeddings, self.geometry = embeddings, geometry
        self.parts: dict[str, Part] = {}
        self.rows, self.by_rounding = 0, 0

    def compare(self, kind: str, history: Tensor, out: Tensor, block_ids: Tensor) -> str | None:
        """Compare the last rows of a sequence; what is wrong, or None.

        Args:
            kind: which rows these are, for the statistics.
            history: int64 ``[S]``, the tokens of the sequence up to the last of the rows.
            out: ``[C, hidden_size]``, the layer's outputs of the last `C` tokens.
            block_ids: ``[C, Hkv, K]``, the blocks it kept.

        Where it kept other blocks than the oracle would, the oracle attends to the layer's, and
        their scores must lie within rounding.
        """
        rows = slice(len(history) - len(out), len(history))
        hidden = self.embeddings[history]
        oracle = DenseLayer(self.exact_weights, hidden, torch.float64, self.geometry)
        plain = DenseLayer(self.weights, hidden, hidden.dtype, self.geometry)
        scores, plain_scores = oracle.block_scores(rows), plain.block_scores(rows)
        expected, rounded = oracle.attend(rows, block_ids), plain.attend(rows, block_ids)

        part = self.parts.setdefault(kind, Part())
        part.layer.add(out - expected)
        part.plain.add(rounded - expected)
        self.rows += len(out)
        forced = force_own_block(scores, rows, self.geometry.block_size)
        gaps = selection_gap(block_ids, forced)
        self.by_rounding += int((gaps > 0).sum())
        gap, seen = gaps.amax().item(), scores > -torch.inf
        # Either of two scores may be off by the error of a score.
        error = (plain_scores - scores)[seen].abs().amax().item()
        rounding = 4 * torch.finfo(torch.float32).eps * scores[seen].abs().amax().item()
        if gap > 2 * (FACTOR * error + rounding):
            return f"blocks were left out whose scores are higher by {gap:.2g}"
        try:
            assert_within_budget("out", out, expected, rounded, factor=FACTOR)
        except AssertionError as failure:
            return str(failure)
        return None

    def checks(self) -> list[Check]:
        return [
            check
            for kind, part in sorted(self.parts.items())
            for check in part.checks(kind, FACTOR)
        ]


@dataclass(frozen=True)
class Memory:
    """What is held between two steps (bytes).

    Attributes:
        device: what the allocator of the GPU has reserved and cannot give back; 0 on the CPU.
        host: of the process.
    """

    device: int
    host: int

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        gc.collect()
        reserved = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            reserved = torch.cuda.memory_reserved(device)
        return cls(reserved, _resident_bytes())


# On a device one segment of the allocator; on the host what an allocator may keep for itself, and
# kernels that CUDA loads when a size of the comparisons first asks for them.
MAX_GROWTH = {
    "cpu": Memory(device=0, host=32 * MIB),
    "cuda": Memory(device=2 * MIB, host=128 * MIB),
}


class Soak:
    """A model, a scheduler that feeds it, and what was found wrong so far.

    Args:
        setup: sizes.
        device, dtype: of the model.
        seed: of weights, requests and samples.
        samples: sequences compared after each step, on average.
    """

    def __init__(
        self,
        setup: Setup,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        samples: float = 1.0,
    ) -> None:
        self.device, self.samples, load = device, samples, setup.load
        self.scheduler = Scheduler(load, seed)
        self.rng = np.random.default_rng(seed + 1)
        config = _config(setup)
        layer = random_layer(config, seed)
        # Logits of a standard deviation of about 2, so that some tens of keys have all the weight
        # and a wrong one shows.
        layer.q_norm.weight.add_(1)
        generator = torch.Generator().manual_seed(seed)
        embeddings = torch.randn(load.vocabulary, setup.hidden_size, generator=generator)
        cache = m3ops.PagedKVCache(config, load.num_pages, dtype=dtype, device=device)
        for buffer in cache.buffers():
            buffer.fill_(torch.nan)
        workspace = m3ops.Workspace(
            config, load.max_tokens, load.num_columns * load.block_size, device=device
        )
        self.model = Model(layer.to(device, dtype), embeddings.to(device, dtype), cache, workspace)
        weights = {name: weight.detach() for name, weight in layer.named_parameters()}
        self.judge = Judge(weights, self.model.embeddings, setup.geometry)
        self.buckets = self._buckets(load)
        self.graphs = counters["stats"]["unique_graphs"]
        self.uses: Counter[str] = Counter()
        self.mismatches: list[str] = []
        self.page_errors: list[str] = []
        self.compared = 0

    def step(self) -> None:
        """One step of the server, and its checks."""
        scheduler = self.scheduler
        chunks = scheduler.plan()
        self.page_errors += scheduler.errors(chunks)
        self._poison(scheduler.pool.drain_freed())
        if chunks:
            lengths = [len(chunk.tokens) for chunk in chunks]
            bucket = next(bucket for bucket in self.buckets if bucket.shape.fits(lengths))
            out, block_ids = bucket.step(chunks, gather_table(scheduler, chunks))
            self.uses[bucket.shape.kind] += 1
            self._compare(chunks, out, block_ids)
        else:
            self.uses["idle"] += 1
        scheduler.commit(chunks)

    def finish(self) -> None:
        """Cancel what still runs; every page must come back."""
        self.scheduler.cancel_all()
        self.page_errors += self.scheduler.pool.errors([])
        if not self.compared:
            self._mismatch("nothing was compared")

    def recompilations(self) -> int:
        """Graphs that torch.compile made since the buckets were ready."""
        return counters["stats"]["unique_graphs"] - self.graphs

    def _buckets(self, load: Load) -> list[Bucket]:
        run: Any = self.model
        if self.device.type == "cpu":
            run = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        shapes = bucket_shapes(load)
        if self.device.type == "cpu":
            return [Bucket(run, shape, load, self.device) for shape in shapes]
        # As the documentation asks, what a graph will do is first done on another stream.
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            buckets = [Bucket(run, shape, load, self.device) for shape in shapes]
        torch.cuda.current_stream(self.device).wait_stream(stream)
        pool = torch.cuda.graph_pool_handle()
        for bucket in buckets:
            bucket.capture(pool)
        return buckets

    def _poison(self, pages: Sequence[int]) -> None:
        if not pages:
            return
        cache = self.model.cache
        index = _staged(torch.tensor(pages), cache.k_cache).to(self.device, non_blocking=True)
        for buffer in cache.buffers():
            buffer.index_fill_(0, index, torch.nan)

    def _compare(self, chunks: Sequence[Chunk], out: Tensor, block_ids: Tensor) -> None:
        """Compare some sequences of a step, drawn at random."""
        count = min(int(self.samples + self.rng.random()), len(chunks))
        if count == 0:
            return
        starts = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
        if out[starts[-1] :].any() or (block_ids[starts[-1] :] != -1).any():
            self._mismatch("padding rows are not empty")
        for i in self.rng.choice(len(chunks), count, replace=False):
            chunk, length = chunks[i], len(chunks[i].tokens)
            first = int(self.rng.integers(max(1, length - ROWS_COMPARED + 1)))
            last = min(first + ROWS_COMPARED, length)
            history = torch.from_numpy(chunk.history[: chunk.context + last]).to(self.device)
            rows = slice(int(starts[i]) + first, int(starts[i]) + last)
            wrong = self.judge.compare(chunk.kind, history, out[rows], block_ids[rows])
            self.compared += 1
            if wrong is not None:
                self._mismatch(
                    f"request {chunk.request.number}, tokens {chunk.context + first} to "
                    f"{chunk.context + last - 1}, {chunk.kind}: {wrong}"
                )

    def _mismatch(self, message: str) -> None:
        self.mismatches.append(f"step {self.scheduler.steps}: {message}")


def main(
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps; 300 on the CPU, 10000 on a GPU.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the layer runs.")] = Device.cpu,
    dtype: Annotated[
        Dtype | None, typer.Option(help="float32 on the CPU, bfloat16 on a GPU.")
    ] = None,
    size: Annotated[
        Size | None, typer.Option(help="Sizes: small on the CPU, MiniMax-M3's on a GPU.")
    ] = None,
    samples: Annotated[
        float, typer.Option(min=0.01, help="Sequences compared after a step, on average.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, requests and samples.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None,
) -> None:
    """Serve random requests with one MiniMax-M3 attention layer and check all along."""
    check_writable("--json", json_file)
    check_device(device)
    on_cpu = device is Device.cpu
    steps = (300 if on_cpu else 10_000) if steps is None else steps
    dtype = dtype or default_dtype(device)
    size = (Size.small if on_cpu else Size.m3) if size is None else size
    place = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    if size is Size.small:
        # Products as small as these only wait for other threads.
        torch.set_num_threads(1)

    clock = Clock(place)
    with torch.no_grad(), kernels_compiled() as kernels:
        soak = Soak(SETUPS[size], place, getattr(torch, dtype.value), seed, samples)
        warmup_seconds, kernels_before = clock.lap(), len(kernels)
        # By then the comparisons, too, have met every kind of step.
        settled = min(steps, max(20, steps // 20))
        start = Memory.now(place)
        for step in progress(range(steps), "serve"):
            if step == settled:
                start = Memory.now(place)
            soak.step()
        end = Memory.now(place)
        soak.finish()
        serve_seconds = clock.lap()
        recompilations = soak.recompilations() + len(kernels) - kernels_before

    checks = [
        Check("mismatches", len(soak.mismatches), 0),
        *soak.judge.checks(),
        Check("errors of page accounting", len(soak.page_errors), 0),
        Check("recompilations", recompilations, 0),
        *_memory_checks(start, end, MAX_GROWTH[place.type]),
    ]
    results: dict[str, Any] = {
        "steps": steps,
        "seed": seed,
        "size": size.value,
        "dtype": dtype.value,
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(place),
        "backend": active_backend(place),
        "torch": torch.__version__,
        "m3ops": m3ops.__version__,
        "warmup_seconds": warmup_seconds,
        "serve_seconds": serve_seconds,
        "buckets": len(soak.buckets),
        "steps_by_kind": dict(soak.uses),
        **{name.replace(" ", "_"): count for name, count in soak.scheduler.counts.items()},
        "pages_reused": soak.scheduler.pool.reused,
        "sequences_compared": soak.compared,
        "rows_compared": soak.judge.rows,
        "decided_by_rounding": soak.judge.by_rounding,
        "mismatches": soak.mismatches,
        "page_errors": soak.page_errors,
        "recompilations": recompilations,
        "memory": {"start": vars(start), "end": vars(end)},
        "checks": [check.as_dict() for check in checks],
        "passed": all(check.passed for check in checks),
    }
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")
    console = Console()
    console.print(result_table(results, checks))
    if not results["passed"]:
        for message in [*soak.mismatches[:MAX_MESSAGES], *soak.page_errors[:MAX_MESSAGES]]:
            console.print(message, highlight=False)
        failed = ", ".join(check.name for check in checks if not check.passed)
        console.print(f"FAILED: {failed}", style="bold red")
        raise typer.Exit(1)


@contextmanager
def kernels_compiled() -> Iterator[list[str]]:
    """Names of the Triton kernels compiled meanwhile, once for each variant."""
    names: list[str] = []
    if not torch.cuda.is_available():
        yield names
        return
    import triton

    runtime = triton.knobs.runtime
    previous = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = lambda **compiled: names.append(compiled["repr"])
    try:
        yield names
    finally:
        runtime.jit_post_compile_hook = previous


def result_table(r: dict[str, Any], checks: Sequence[Check]) -> Table:
    table = Table(title="One attention layer of MiniMax-M3, served", show_header=False)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(r["steps_by_kind"].items()))
    rate = r["steps"] / r["serve_seconds"]
    for name, value in (
        ("computed by", f"{r['backend']}, {r['dtype']}, {r['device']}, sizes: {r['size']}"),
        ("steps", f"{r['steps']}: {kinds}; in {r['buckets']} buckets"),
        (
            "time",
            f"{r['serve_seconds']:.1f} s, {rate:.0f} steps/s, after {r['warmup_seconds']:.1f}",
        ),
        ("tokens", f"{r['tokens']}, of these {r['rejected']} drafts rejected"),
        (
            "sequences",
            f"{r['arrived']} arrived, {r['finished']} finished, {r['cancelled']} cancelled, "
            f"{r['preempted']} times preempted",
        ),
        (
            "pages",
            f"{r['pages_reused']} times reused, {r['pages_rolled_back']} rolled back, "
            f"{r['prefixes_shared']} prefixes shared",
        ),
        (
            "compared",
            f"{r['sequences_compared']} sequences, {r['rows_compared']} rows, "
            f"{r['decided_by_rounding']} selections decided by rounding",
        ),
        ("memory at the start", _megabytes(r["memory"]["start"])),
        ("memory at the end", _megabytes(r["memory"]["end"])),
    ):
        table.add_row(name, value)
    table.add_section()
    for check in checks:
        table.add_row(check.name, check.describe(), style="" if check.passed else "bold red")
    return table


def _megabytes(memory: dict[str, int]) -> str:
    return ", ".join(f"{place} {held / MIB:.0f} MiB" for place, held in memory.items())


def _memory_checks(start: Memory, end: Memory, budget: Memory) -> list[Check]:
    return [
        Check(f"{where} memory grown (MiB)", max(0, after - before) / MIB, most / MIB)
        for where, before, after, most in (
            ("device", start.device, end.device, budget.device),
            ("host", start.host, end.host, budget.host),
        )
    ]


def _config(setup: Setup) -> m3ops.MiniMaxM3AttentionConfig:
    g = setup.geometry
    return m3ops.MiniMaxM3AttentionConfig(
        hidden_size=setup.hidden_size,
        num_attention_heads=g.heads_q,
        num_key_value_heads=g.heads_kv,
        head_dim=g.head_dim,
        index_n_heads=g.heads_kv,
        index_head_dim=g.head_dim,
        index_block_size=g.block_size,
        index_topk_blocks=g.topk,
        rms_norm_eps=g.norm_eps,
        rope_theta=g.rope_theta,
        partial_rotary_factor=g.rotary_dim / g.head_dim,
    )


def _staged(tensor: Tensor, target: Tensor) -> Tensor:
    """`tensor`, in pinned memory if it has to travel to a GPU: other copies wait for it."""
    return tensor.pin_memory() if target.is_cuda else tensor


def _resident_bytes() -> int:
    """Memory of the process; the most it ever held where the system tells no more."""
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    typer.run(main)
