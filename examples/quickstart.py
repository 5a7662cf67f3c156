"""Reads a text with one MiniMax-M3 attention layer and checks every output.

The bytes of the text are embedded by a seeded random table and go through one layer of MiniMax-M3's
geometry with random weights and a paged cache: the prompt in chunks, then 32 more tokens one by
one, all through torch.compile. A dense float64 layer recomputes every row. The exit status is 1 if
an output, a selection of blocks or the compilation is not as it should be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from block_map import PLOT_TYPES, draw_map, text_map
from command_line import (
    Clock,
    Device,
    Dtype,
    check_device,
    check_writable,
    default_dtype,
    progress,
    read_text,
)
from comparison import Check, compare
from dense_oracle import Geometry, row_chunks
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

import m3ops
from m3ops.backends import active_backend

Layer = Callable[..., Any]

DECODE_TOKENS = 32
GEOMETRY = Geometry()
# One for a single token, one for any other number of them.
MAX_GRAPHS = 2


@dataclass
class Run:
    """What the layer computed, and how.

    Attributes:
        outputs: ``[S, hidden]``.
        block_ids: ``[S, Hkv, K]``.
        compiler: backend of torch.compile.
        graphs, graph_breaks: as torch.compile counts them.
        compile_seconds: a first pass over three tokens, compilation included.
        prefill_seconds, decode_seconds: after that, for all tokens.
    """

    outputs: Tensor
    block_ids: Tensor
    compiler: str
    graphs: int
    graph_breaks: int
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float

    def checks(self) -> list[Check]:
        return [
            Check("graphs", self.graphs, MAX_GRAPHS, least=1),
            Check("graph breaks", self.graph_breaks, 0),
        ]

    def results(self) -> dict[str, Any]:
        device, (total, groups, _) = self.outputs.device, self.block_ids.shape
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": str(self.outputs.dtype).removeprefix("torch."),
            "backend": active_backend(device),
            "torch": torch.__version__,
            "m3ops": m3ops.__version__,
            "hidden_size": self.outputs.shape[1],
            "decoded": DECODE_TOKENS,
            "blocks_visible": num_blocks(total),
            "blocks_kept": int((self.block_ids[-1, 0] >= 0).sum()),
            "share_of_keys_attended": share_of_keys_attended(self.block_ids),
            "selections": total * groups,
            "compile_seconds": self.compile_seconds,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "compiler": self.compiler,
            "graphs": self.graphs,
            "graph_breaks": self.graph_breaks,
        }


def main(
    text_file: Annotated[
        Path | None,
        typer.Argument(help="Text to read; without it, the help texts that Python comes with."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the layer runs.")] = Device.cpu,
    context: Annotated[int, typer.Option(min=1, help="Tokens (bytes) of the prompt.")] = 4096,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens per step.")] = 300,
    hidden_size: Annotated[int, typer.Option(min=1, help="Channels of the layer's input.")] = 128,
    dtype: Annotated[
        Dtype | None, typer.Option(help="float32 on the CPU, bfloat16 on a GPU.")
    ] = None,
    factor: Annotated[
        float, typer.Option(min=0, help="Error allowed, in errors of a plain dense layer.")
    ] = 3.0,
    seed: Annotated[int, typer.Option(help="Seed of table and weights.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the blocks that each token kept there."),
    ] = None,
) -> None:
    """Read a text with one MiniMax-M3 attention layer and check every output."""
    check_writable("--json", json_file)
    check_writable("--plot", plot_file, PLOT_TYPES)
    check_device(device)
    source, text = read_text(text_file)
    total = context + DECODE_TOKENS
    if len(text) < total:
        raise typer.BadParameter(
            f"--context {context} and the {DECODE_TOKENS} tokens to decode after it need "
            f"{total} bytes, and there are {len(text)} in {source}",
            param_hint="TEXT_FILE",
        )
    dtype = dtype or default_dtype(device)
    kind: dict[str, Any] = {"device": device.value, "dtype": getattr(torch, dtype.value)}

    with torch.no_grad():
        config = m3ops.MiniMaxM3AttentionConfig(hidden_size=hidden_size)
        layer = random_layer(config, seed).to(**kind)
        hidden = embed(text[:total], hidden_size, seed).to(**kind)
        run = run_layer(layer, hidden, context, chunk)
        weights = dict(layer.named_parameters())
        comparison = compare(weights, hidden, run.outputs, run.block_ids, context, GEOMETRY)

    checks = [*comparison.checks(factor), *run.checks()]
    settings = {"text": source, "context": context, "chunk": chunk, "seed": seed}
    results = settings | run.results() | comparison.results()
    results["checks"] = [check.as_dict() for check in checks]
    results["passed"] = all(check.passed for check in checks)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")
    block_ids, blocks = run.block_ids.cpu(), num_blocks(len(hidden))
    if plot_file is not None:
        draw_map(block_ids, blocks, GEOMETRY.block_size).savefig(plot_file, dpi=120)
    console = Console()
    console.print(result_table(results, checks))
    console.print(text_map(block_ids, blocks, GEOMETRY.block_size), highlight=False)
    if not results["passed"]:
        failed = ", ".join(check.name for check in checks if not check.passed)
        console.print(f"FAILED: {failed}", style="bold red")
        raise typer.Exit(1)


def embed(text: bytes, hidden_size: int, seed: int) -> Tensor:
    """``[S, hidden_size]``: a random vector for each value of a byte."""
    table = torch.randn(256, hidden_size, generator=torch.Generator().manual_seed(seed))
    return table[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]


def random_layer(
    config: m3ops.MiniMaxM3AttentionConfig, seed: int
) -> m3ops.MiniMaxM3SparseAttention:
    """A layer whose index heads prefer, each in its own way, tokens like the one that asks."""
    layer = m3ops.MiniMaxM3SparseAttention(config)
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in layer.parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.1
        parameter.normal_(std=std, generator=generator)
    indexer = layer.indexer
    indexer.q_proj.weight += indexer.k_proj.weight.repeat(config.index_n_heads, 1)
    return layer


def run_layer(
    layer: m3ops.MiniMaxM3SparseAttention, hidden: Tensor, context: int, chunk: int
) -> Run:
    """Prefill `context` tokens of `hidden` in chunks, then decode the others one by one."""
    device, total = hidden.device, len(hidden)
    cache = m3ops.PagedKVCache(layer.config, num_blocks(total), dtype=hidden.dtype, device=device)
    # In no order, as a cache that many sequences share would hand them out.
    pages = [torch.randperm(num_blocks(total)).tolist()]
    outputs = torch.full_like(hidden, torch.nan)
    block_ids = torch.empty(
        (total, GEOMETRY.heads_kv, GEOMETRY.topk), dtype=torch.int32, device=device
    )

    def describe(rows: slice) -> m3ops.BatchMetadata:
        return m3ops.BatchMetadata.from_lengths(
            [rows.stop - rows.start], [rows.start], pages, device=device
        )

    def compute(step: Layer, rows: slice, batch: m3ops.BatchMetadata) -> None:
        outputs[rows], block_ids[rows] = step(hidden[rows], batch, cache, return_block_ids=True)

    def warm_up(step: Layer) -> None:
        for rows in progress([slice(0, 2), slice(0, 1)], "compile"):
            compute(step, rows, describe(rows))

    clock = Clock(device)
    step, compiler = compile_layer(layer, warm_up)
    compile_seconds = clock.lap()
    for rows in progress(list(row_chunks(context, chunk)), "prefill"):
        compute(step, rows, describe(rows))
    prefill_seconds = clock.lap()
    batch = describe(slice(context, context + 1))
    for row in progress(range(context, total), "decode"):
        compute(step, slice(row, row + 1), batch.update_([1], [row], pages))
    decode_seconds = clock.lap()
    return Run(
        outputs=outputs,
        block_ids=block_ids,
        compiler=compiler,
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        compile_seconds=compile_seconds,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
    )


def compile_layer(
    layer: m3ops.MiniMaxM3SparseAttention, warm_up: Callable[[Layer], None]
) -> tuple[Layer, str]:
    """The compiled layer, `warm_up` run with it, and the name of the backend that compiled it."""
    counters.clear()
    compiler = "inductor"
    # Trying out each instruction set of the CPU would take as long as compiling one of the graphs.
    options: dict[str, Any] = {"cpp.vec_isa_ok": True}
    step = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler, options=options)
    try:
        warm_up(step)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, InvalidCxxCompiler | CppCompileError):
            raise
        cause = str(error.inner_exception).splitlines()[0]
        typer.echo(f"Note: compiling without Inductor, for want of a C++ compiler ({cause})")
        torch.compiler.reset()
        counters.clear()
        compiler = "aot_eager"
        step = torch.compile(layer, fullgraph=True, dynamic=True, backend=compiler)
        warm_up(step)
    return step, compiler


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // GEOMETRY.block_size)


def share_of_keys_attended(block_ids: Tensor) -> float:
    """Keys attended to over keys visible, of all tokens and groups."""
    visible = torch.arange(1, len(block_ids) + 1, device=block_ids.device)[:, None, None]
    keys = (visible - block_ids * GEOMETRY.block_size).clamp(0, GEOMETRY.block_size)
    attended = keys.where(block_ids >= 0, 0).sum()
    return float(attended / (visible.sum() * block_ids.shape[1]))


def result_table(r: dict[str, Any], checks: list[Check]) -> Table:
    table = Table(title="One sparse attention layer of MiniMax-M3", show_header=False)
    rate = r["context"] / r["prefill_seconds"]
    for name, value in (
        ("text", r["text"]),
        ("computed by", f"{r['backend']}, {r['dtype']}, {r['device']}"),
        ("tokens", f"{r['context']} prefilled in steps of {r['chunk']}, {r['decoded']} decoded"),
        ("blocks, last token", f"{r['blocks_visible']} visible, {r['blocks_kept']} kept"),
        ("keys attended", f"{r['share_of_keys_attended']:.1%} of all visible"),
        ("compilation", f"{r['compile_seconds']:.1f} s, {r['compiler']}"),
        ("prefill", f"{r['prefill_seconds']:.2f} s, {rate:.0f} tokens/s"),
        ("decode", f"{r['decode_seconds'] / r['decoded'] * 1e3:.1f} ms per token"),
        ("selections", f"{r['selections']}, {r['decided_by_rounding']} decided by rounding"),
    ):
        table.add_row(name, value)
    table.add_section()
    for check in checks:
        table.add_row(check.name, check.describe(), style="" if check.passed else "bold red")
    return table


if __name__ == "__main__":
    typer.run(main)
