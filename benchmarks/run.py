"""Time m3ops beside its peers: ``python benchmarks/run.py --suite decode --peers vllm,dense``.

The method stands in ``benchmarks/README.md``.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import traceback
from collections import defaultdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checks
from benchmarks.cases import (
    CASES,
    DRY_CASES,
    DRY_SHAPE,
    OPS,
    SUITES,
    Case,
    Inputs,
    Job,
    Shape,
    jobs_of,
)
from benchmarks.floors import Ceilings, measure_ceilings, work
from benchmarks.peers import PEERS, Implementation, Ours, Unavailable, load_peers
from benchmarks.timing import Timer, make_timer, sample_all, spread

SEED = 20251
CHECKED_ROWS = 48
CHECKED_DENSE_ROWS = 2
Record = dict[str, Any]


class Bench:
    """One run: the device, its ceilings, and who takes part."""

    def __init__(self, peers: list[str], dry: bool, quick: bool) -> None:
        self.device = torch.device("cpu" if dry else "cuda")
        # Most samples of each, and seconds for them.
        self.sampling = (1, 0.0) if dry else (10, 0.05) if quick else (40, 0.2)
        self.shape = DRY_SHAPE if dry else Shape()
        self.l2_bytes = 2**16
        self.device_name = "cpu"
        if not dry:
            properties = torch.cuda.get_device_properties(self.device)
            self.l2_bytes, self.device_name = properties.L2_cache_size, properties.name
        self.notes: list[str] = []
        self.implementations: list[Implementation] = [Ours()]
        for peer in peers:
            try:
                self.implementations += load_peers([peer])
            except Unavailable as reason:
                self.notes.append(f"{peer}: {reason}")
        self.ceilings: Ceilings = measure_ceilings(self.device, self.shape.dtype, quick)
        self.common: Record = {
            "device": self.device_name,
            "torch": torch.__version__,
            "triton": version("triton"),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {i.peer: i.version for i in self.implementations},
            "ceilings": self.ceilings.report(),
        }

    def run_case(self, case: Case, jobs: list[Job], records: list[Record], progress: tqdm) -> None:
        inputs = Inputs(case, self.shape, self.device, SEED, self.l2_bytes)
        try:
            for job in jobs:
                progress.set_postfix_str(f"{job.name} {job.op}")
                record = new_record(job) | self.common
                records.append(record)
                try:
                    self.run_job(job, inputs, record)
                except Exception as error:
                    record["errors"]["harness"] = _describe(error)
                progress.update()
        finally:
            for implementation in self.implementations:
                implementation.release()

    def run_job(self, job: Job, inputs: Inputs, record: Record) -> None:
        """Check everyone who has the op, then time them in turns."""
        if job.op == "sparse_attention":
            inputs.select(job.overlap)
        timers: dict[str, dict[str, Timer]] = {}
        ids = inputs.steps[0].block_ids
        for implementation in self.implementations:
            if job.op not in implementation.ops:
                continue
            try:
                timers[implementation.name] = self.checked_timers(job, inputs, implementation)
            except Unavailable:
                continue
            except Exception as error:
                record["errors"][implementation.name] = _describe(error)
                continue
            if job.op == "layer" and isinstance(implementation, Ours):
                ids = next(iter(timers["ours"].values())).outputs[0][0].clone()
            for timer in timers[implementation.name].values():
                timer.outputs.clear()
        if "ours" in timers:
            flat = {(who, op): t for who, ops in timers.items() for op, t in ops.items()}
            samples = sample_all(flat, *self.sampling)
            record |= self.results(job, inputs, ids, samples)

    def checked_timers(
        self, job: Job, inputs: Inputs, implementation: Implementation
    ) -> dict[str, Timer]:
        """Timers of one implementation, by op, whose outputs have been compared."""
        ops: tuple[str, ...] = (job.op,)
        if job.op == "topk_select" and job.case.kind == "decode":
            # Too short alone: what it adds to the scores in one graph counts.
            ops = ("index_score", "score_topk")
        timers = {}
        for op in ops:
            implementation.prepare(op, inputs)
            calls = [
                lambda op=op, i=i: implementation.call(op, inputs, i)
                for i in range(implementation.sets(op, inputs))
            ]
            timer = make_timer(calls, job.case.kind, self.device, self.l2_bytes)
            for index in {0, len(timer.outputs) - 1}:
                check(op, inputs, index, timer.outputs[index], implementation)
            timers[op] = timer
        return timers

    def results(
        self, job: Job, inputs: Inputs, ids: Tensor, samples: dict[tuple[str, str], list[float]]
    ) -> Record:
        """Times, floor and ratios, from seconds by implementation and op."""
        us: dict[str, float] = {}
        for (name, op), values in samples.items():
            sign = -1 if len(_ops_of(name, samples)) == 2 and op == "index_score" else 1
            us[name] = us.get(name, 0.0) + sign * statistics.median(values) * 1e6
        # A difference of two times may vanish.
        us = {name: max(value, 1e-3) for name, value in us.items()}
        ours = us.pop("ours")
        peers: dict[str, float] = {}
        variants: dict[str, str] = {}
        for name in sorted(us, key=lambda name: us[name]):
            peer, _, variant = name.partition("/")
            if peer not in peers:
                peers[peer] = us[name]
                variants |= {peer: variant} if variant else {}
        needed = work(job.op, inputs, ids)
        floor, bound = needed.floor(self.ceilings)
        record: Record = {
            "ours_us": round(ours, 3),
            "peers": {name: round(value, 3) for name, value in peers.items()},
            "floor_us": round(floor * 1e6, 3),
            "ratio": {name: round(ours / value, 4) for name, value in peers.items()},
            "bound": bound,
            "flops": needed.flops,
            "bytes": needed.bytes,
            "spread": round(max(spread(values) for values in samples.values()), 4),
            "samples": min(len(values) for values in samples.values()),
        }
        if len(samples) > len(us) + 1:
            record["parts_us"] = {
                f"{name} {op}": round(statistics.median(values) * 1e6, 3)
                for (name, op), values in samples.items()
            }
        if variants:
            record["variants"] = variants
            record["variants_us"] = {k: round(v, 3) for k, v in us.items() if "/" in k}
        if job.op == "sparse_attention":
            record["selection"] = inputs.selection
        else:
            record["selection"] = {"query_drift": round(inputs.query_drift, 6), "seed": SEED}
            if job.op == "layer":
                record["selection"] |= inputs.union(ids)
        return record


def new_record(job: Job) -> Record:
    return {
        "case": job.name,
        "op": job.op,
        "ours_us": None,
        "peers": {},
        "floor_us": None,
        "ratio": {},
        "errors": {},
    }


def check(op: str, inputs: Inputs, index: int, output: Any, implementation: Implementation) -> None:
    """Compare a sample of rows with the reference; raises `Mismatch`."""
    step = inputs.steps[index]
    if implementation.dense:
        rows = checks.last_rows(inputs, CHECKED_DENSE_ROWS)
        checks.check_outputs(output[rows], checks.dense_rows(inputs, step, rows))
        return
    rows = checks.sample_rows(inputs, CHECKED_ROWS)
    num_valid = inputs.num_valid[rows]
    if op == "sparse_attention":
        checks.check_outputs(
            output[rows], checks.attend_rows(inputs, step, rows, step.block_ids[rows])
        )
        return
    scores = checks.score_rows(inputs, step, rows)
    if op == "index_score":
        marked = checks.own_blocks(scores, num_valid) if implementation.marks_own_block else None
        checks.check_scores(output[rows], scores, marked)
        return
    ids = output[0] if op == "layer" else output
    checks.check_ids(
        ids[rows], scores, num_valid, checks.SCORE_TOLERANCE, implementation.ascending_ids
    )
    if op == "layer":
        attended = checks.attend_rows(inputs, step, rows, ids[rows])
        checks.check_outputs(output[1][rows], attended)


def _ops_of(name: str, samples: dict[tuple[str, str], list[float]]) -> list[str]:
    return [op for who, op in samples if who == name]


def _describe(error: Exception) -> str:
    if isinstance(error, checks.Mismatch):
        return f"mismatch: {error}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


def plan(suite: str, ops: str, names: str, dry: bool, quick: bool) -> dict[Case, list[Job]]:
    """The jobs of every case, as the command line asks."""
    kind, suite_ops = SUITES[suite]
    wanted_ops = tuple(op for op in OPS if op in (ops.split(",") if ops else suite_ops))
    jobs = [
        job
        for case in (DRY_CASES if dry else CASES)
        if kind in ("", case.kind)
        for job in jobs_of(case, wanted_ops)
        if job.op in case.quick_ops or not quick
    ]
    if names:
        known = {name for job in jobs for name in (job.name, job.case.name)}
        if unknown := set(names.split(",")) - known:
            raise typer.BadParameter(f"no case {', '.join(unknown)}; known: {', '.join(known)}")
        jobs = [job for job in jobs if {job.name, job.case.name} & set(names.split(","))]
    by_case: dict[Case, list[Job]] = defaultdict(list)
    for job in jobs:
        by_case[job.case].append(job)
    return by_case


def table_of(records: list[Record], peers: list[str]) -> Table:
    table = Table(title="median us; ratio = ours / peer")
    table.add_column("case")
    table.add_column("op")
    for heading in ("ours", "rate", "floor", "reached", *peers):
        table.add_column(heading, justify="right")
    for record in records:
        cells = [record["case"], record["op"]]
        if record["ours_us"] is None:
            reason = "failed" if record["errors"] else "not timed"
            cells += [f"[red]{reason}", "", "", ""]
        else:
            ours, floor = record["ours_us"], record["floor_us"]
            cells += [f"{ours:.1f}", _rate(record), f"{floor:.1f}", f"{floor / ours:.0%}"]
        for peer in peers:
            if peer in record["peers"]:
                cells.append(f"{record['peers'][peer]:.1f} ({record['ratio'][peer]:.2f})")
            else:
                failed = any(name.split("/")[0] == peer for name in record["errors"])
                cells.append("[red]failed" if failed else "-")
        table.add_row(*cells)
    return table


def unanswered(record: Record) -> dict[str, str]:
    """Errors, but for those of variants of a peer that another variant could stand in for."""
    answered = set(record["peers"])
    return {who: why for who, why in record["errors"].items() if who.split("/")[0] not in answered}


def progress_bar(planned: dict[Case, list[Job]]) -> tqdm:
    total = sum(map(len, planned.values()))
    return tqdm(total=total, mininterval=0.1 if sys.stderr.isatty() else 10.0)


def _rate(record: Record) -> str:
    if record["bound"] == "flops":
        return f"{record['flops'] / record['ours_us'] / 1e6:.0f} TFLOP/s"
    return f"{record['bytes'] / record['ours_us'] / 1e3:.0f} GB/s"


def main(
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "all",
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}; comma-separated.")] = (
        "vllm,dense"
    ),
    cases: Annotated[str, typer.Option(help="Only these cases; comma-separated.")] = "",
    ops: Annotated[str, typer.Option(help=f"Only these of {', '.join(OPS)}.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write records here.")] = None,
    quick: Annotated[bool, typer.Option(help="Three cases, few repeats.")] = False,
    dry_run: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Time m3ops beside its peers, after checking every result against the reference."""
    if suite not in SUITES:
        raise typer.BadParameter(f"suite must be one of {', '.join(SUITES)}")
    console = Console(width=None if sys.stdout.isatty() else 180)
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_float32_matmul_precision("highest")
    planned = plan(suite, ops, cases, dry_run, quick)
    names = [name for name in peers.split(",") if name]
    bench = Bench(names, dry_run, quick)
    console.print(f"{bench.device_name}; ceilings (TB/s, TFLOP/s): {bench.ceilings.report()}")
    records: list[Record] = []
    with torch.inference_mode(), progress_bar(planned) as progress:
        for case, jobs in planned.items():
            try:
                bench.run_case(case, jobs, records, progress)
            except Exception as error:
                bench.notes.append(f"{case.name}: {_describe(error)}")
            gc.collect()
            if not dry_run:
                torch.cuda.empty_cache()
            if json_file is not None:
                json_file.parent.mkdir(parents=True, exist_ok=True)
                json_file.write_text(json.dumps(records, indent=1) + "\n")
    console.print(table_of(records, names))
    for record in records:
        for who, why in unanswered(record).items():
            console.print(f"{record['case']} {record['op']}: {who}: {why}", markup=False)
    for note in bench.notes:
        console.print(note, markup=False)
    complete = len(records) == sum(map(len, planned.values())) > 0
    if not complete or any(record["ours_us"] is None for record in records):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
