"""Generates text with a MiniMax-M3 model of transformers, with and without m3ops.

The model is a small one with random weights, or one from a folder or the Hub (`--model`). It reads
the start of a text and goes on greedily: once as transformers computes it, once with m3ops. A table
compares speed, memory and tokens. The exit status is 1 if the tokens differ in float32; in other
dtypes rounding may decide between two tokens that are about as likely.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from command_line import Device, Dtype, check_device, check_writable, default_dtype, read_text
from rich.console import Console
from rich.table import Table
from small_model import small_model
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

import m3ops
from m3ops.integrations.transformers import apply_m3ops, remove_m3ops

UNPATCHED, PATCHED = "transformers", "m3ops"
# Enough to load and set up on a CPU what is only loaded when it is first used.
SHORT_PROMPT = 64


@dataclass
class Run:
    """One continuation of the prompt.

    Attributes:
        tokens: the new ones.
        prompt_seconds: until the first of them.
        decode_seconds: from then to the last.
        peak_bytes: the most memory that it took beyond the model; None where that is not known.
    """

    tokens: list[int]
    prompt_seconds: float
    decode_seconds: float
    peak_bytes: int | None

    def results(self, context: int) -> dict[str, Any]:
        return {
            "prompt_tokens_per_second": context / self.prompt_seconds,
            "decode_tokens_per_second": (len(self.tokens) - 1) / self.decode_seconds,
            "peak_bytes": self.peak_bytes,
            "tokens": self.tokens,
        }


def main(
    text_file: Annotated[
        Path | None,
        typer.Argument(help="Text to read; without it, the help texts that Python comes with."),
    ] = None,
    model_path: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Folder or Hub name of a MiniMax-M3; without it, a small one with random weights.",
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the model runs.")] = Device.cpu,
    dtype: Annotated[
        Dtype | None, typer.Option(help="float32 on the CPU, bfloat16 on a GPU.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 2048,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the small model's weights.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.")
    ] = None,
) -> None:
    """Generate text with a MiniMax-M3 of transformers, with and without m3ops."""
    check_writable("--json", json_file)
    check_device(device)
    source, text = read_text(text_file)
    dtype = dtype or default_dtype(device)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    model, tokenizer = load(model_path, seed)
    ids = list(text) if tokenizer is None else tokenizer(text.decode(errors="replace")).input_ids
    if len(ids) < context:
        raise typer.BadParameter(
            f"--context {context} needs as many tokens, and there are {len(ids)} in {source}",
            param_hint="TEXT_FILE",
        )
    model = model.to(device.value, getattr(torch, dtype.value))
    prompt = torch.tensor([ids[:context]], device=device.value)

    runs: dict[str, Run | None] = {}
    for name, switch in ((UNPATCHED, remove_m3ops), (PATCHED, apply_m3ops)):
        switch(model)
        runs[name] = generate(model, prompt, new_tokens, name)

    results = {
        "model": model_path or "small, random weights",
        "text": source,
        "device": torch.cuda.get_device_name() if device is Device.cuda else "cpu",
        "dtype": dtype.value,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "m3ops": m3ops.__version__,
        "seed": seed,
        "context": context,
        "new_tokens": new_tokens,
        "runs": {name: run and run.results(context) for name, run in runs.items()},
        "tokens_that_agree": tokens_that_agree(runs),
    }
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")
    console = Console()
    console.print(result_table(results))
    if tokenizer is not None and (run := runs[PATCHED]) is not None:
        console.print(tokenizer.decode(run.tokens), markup=False, highlight=False)
    if results["tokens_that_agree"] not in (None, new_tokens) and dtype is Dtype.float32:
        console.print("FAILED: the tokens differ in float32", style="bold red")
        raise typer.Exit(1)


def load(path: str | None, seed: int) -> tuple[Any, Any]:
    """The model, and its tokenizer or None for bytes."""
    if path is None:
        return small_model(seed), None
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        # The published model has a vision tower, which a text leaves alone.
        kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(path).eval()
        apply_m3ops(model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error
    return model, tokenizer


def generate(model: Any, prompt: Tensor, new_tokens: int, name: str) -> Run | None:
    """Continue `prompt` ``[1, S]`` greedily; None if the GPU's memory does not suffice."""
    # On a GPU, kernels are compiled for the sizes they meet.
    warm_up = prompt if prompt.is_cuda else prompt[:, :SHORT_PROMPT]
    try:
        _generate(model, warm_up, 2)
        memory = MemoryPeak(prompt.device)
        with TokenClock(name, new_tokens) as clock:
            tokens = _generate(model, prompt, new_tokens, clock)
    except torch.OutOfMemoryError:
        return None
    start, first, *_, last = clock.times
    return Run(tokens, first - start, last - first, memory.read())


def _generate(
    model: Any, prompt: Tensor, new_tokens: int, streamer: BaseStreamer | None = None
) -> list[int]:
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        # No end of text ends it early.
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        streamer=streamer,
    )
    return tokens[0, prompt.shape[1] :].tolist()


class TokenClock(BaseStreamer):
    """When generation began and when each new token was there, and a bar on a terminal."""

    def __init__(self, name: str, new_tokens: int) -> None:
        self.times: list[float] = []
        self.bar = tqdm(total=new_tokens, desc=name, unit="token", leave=False, disable=None)

    def __enter__(self) -> TokenClock:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with each token, all of them copied to the CPU."""
        if self.times:
            self.bar.update()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class MemoryPeak:
    """The most memory in use since this was made, beyond what was in use then.

    On a CPU that is the whole process's; what it holds unused from before does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before: int | None = torch.cuda.memory_allocated(device)
        else:
            self.before = _reset_resident_peak()

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return _resident_bytes("VmHWM") - self.before


def _reset_resident_peak() -> int | None:
    """Let Linux measure this process's peak anew; what it holds now, or None on other systems."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _resident_bytes("VmRSS")
    except OSError:
        return None


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values[field].removesuffix("kB")) * 1024


def tokens_that_agree(runs: dict[str, Run | None]) -> int | None:
    """How many tokens are equal before the first that differs; None if a run is missing."""
    unpatched, patched = runs[UNPATCHED], runs[PATCHED]
    if unpatched is None or patched is None:
        return None
    pairs = zip(unpatched.tokens, patched.tokens, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(patched.tokens))


def result_table(r: dict[str, Any]) -> Table:
    table = Table(title=f"MiniMax-M3 of transformers, {r['dtype']}, {r['device']}")
    table.add_column(r["text"])
    for name in r["runs"]:
        table.add_column(name, justify="right")
    runs = list(r["runs"].values())

    def add(name: str, key: str, write: Any) -> None:
        table.add_row(name, *("out of memory" if run is None else write(run[key]) for run in runs))

    add(f"{r['context']} prompt tokens", "prompt_tokens_per_second", per_second)
    add(f"{r['new_tokens']} new tokens", "decode_tokens_per_second", per_second)
    add("peak memory beyond the model", "peak_bytes", mebibytes)
    agree = r["tokens_that_agree"]
    table.add_section()
    verdict = "n/a" if agree is None else f"{agree} of {r['new_tokens']}"
    style = "" if agree in (None, r["new_tokens"]) else "bold red"
    table.add_row("tokens that agree", "", verdict, style=style)
    return table


def per_second(rate: float) -> str:
    return f"{rate:.1f} tokens/s"


def mebibytes(count: int | None) -> str:
    return "n/a" if count is None else f"{count / 2**20:.0f} MiB"


if __name__ == "__main__":
    typer.run(main)
