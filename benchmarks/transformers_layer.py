"""Time transformers' sparse layer with and without m3ops.

``python benchmarks/transformers_layer.py --json benchmarks/results/transformers_layer.json``

One layer of MiniMax-M3's sizes, batch 1, no cache, bfloat16: projections, norms, rotary embedding,
indexer, attention and output projection. Before a length is timed, the layer's output is compared
with that of the unpatched layer for the first tokens, which later ones cannot change.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import m3ops
import m3ops.integrations.transformers
from benchmarks.timing import median_seconds

SEED = 20251
LENGTHS, UNPATCHED_LENGTHS = "4096,8192,16384,32768,131072", "4096,8192,16384"
DRY_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "index_n_heads": 2,
    "head_dim": 16,
    "index_head_dim": 16,
    "index_block_size": 16,
}
# Of the outputs' RMS. In bfloat16 the unpatched layer rounds the attention weights, m3ops does not.
TOLERANCE = 0.02
Record = dict[str, Any]


class Layer:
    """The layer, its input, and who computes it."""

    def __init__(self, longest: int, dry: bool) -> None:
        self.device = torch.device("cpu" if dry else "cuda")
        self.repeats = 1 if dry else 10
        rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
        self.config = MiniMaxM3VLTextConfig(
            num_hidden_layers=1,
            layer_types=["minimax_m3_sparse"],
            rope_parameters=rope,
            **(DRY_SIZES if dry else {}),
        )
        torch.manual_seed(SEED)
        dtype = torch.float32 if dry else torch.bfloat16
        with self.device:
            self.layer = modeling.MiniMaxM3VLAttention(self.config, 0).to(dtype).eval()
            self.rotary = modeling.MiniMaxM3VLRotaryEmbedding(self.config)
            # On the host, so that what a length does not use does not count as its memory.
            self.hidden = torch.randn(1, longest, self.config.hidden_size, dtype=dtype).cpu()

    def call(self, name: str, length: int) -> Callable[[], Tensor]:
        hidden = self.hidden[:, :length].to(self.device)
        positions = torch.arange(length, device=self.device)[None]
        tables = self.rotary(hidden, positions)
        self.config._attn_implementation = name
        return lambda: self.layer(hidden, tables, None, position_ids=positions)[0]

    def measure(self, name: str, length: int, expected: Tensor) -> tuple[float, float]:
        """Microseconds of a call, and the most GiB allocated during one: parameters, input, all."""
        call = self.call(name, length)
        first = call()[:, : expected.shape[1]].float()
        error = (first - expected[:, : first.shape[1]]).pow(2).mean().sqrt()
        if not error <= TOLERANCE * expected.pow(2).mean().sqrt():
            raise AssertionError(f"mismatch: RMS error {float(error):.3g}")
        del first
        peak = 0.0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            call()
            peak = torch.cuda.max_memory_allocated() / 2**30
        return median_seconds(call, self.device, self.repeats) * 1e6, peak

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def run(length: int, with_unpatched: bool, layer: Layer, expected: Tensor) -> Record:
    record: Record = {
        "case": f"transformers_layer_{length}",
        "op": "MiniMaxM3VLAttention",
        "ours_us": None,
        "peers": {},
        "ratio": {},
        "peak_gib": {},
        "errors": {},
    }
    for name, who in (("m3ops", "ours"), ("sdpa", "sdpa")):
        if who == "sdpa" and not with_unpatched:
            continue
        try:
            us, peak = layer.measure(name, length, expected)
        except (AssertionError, torch.OutOfMemoryError) as error:
            record["errors"][who] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        finally:
            layer.release()
        record["peak_gib"][who] = round(peak, 3)
        if who == "ours":
            record["ours_us"] = round(us, 3)
        else:
            record["peers"][who] = round(us, 3)
            if record["ours_us"] is not None:
                record["ratio"][who] = round(record["ours_us"] / us, 4)
    return record


def main(
    lengths: Annotated[str, typer.Option(help="Tokens; comma-separated.")] = LENGTHS,
    unpatched: Annotated[
        str, typer.Option(help="Lengths at which the unpatched layer is timed too.")
    ] = UNPATCHED_LENGTHS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write records here.")] = None,
    dry_run: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Time transformers' sparse layer with and without m3ops."""
    if dry_run:
        lengths, unpatched = "300,700", "300"
    torch.set_float32_matmul_precision("highest")
    wanted = [int(length) for length in lengths.split(",")]
    compared = [int(length) for length in unpatched.split(",") if length]
    records: list[Record] = []
    with torch.inference_mode():
        layer = Layer(max(wanted), dry_run)
        name = torch.cuda.get_device_name(layer.device) if not dry_run else "cpu"
        common = {
            "device": name,
            "torch": torch.__version__,
            "triton": version("triton"),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {"ours": m3ops.__version__, "transformers": version("transformers")},
        }
        expected = layer.call("sdpa", min(wanted))().float()
        for length in wanted:
            records.append(run(length, length in compared, layer, expected) | common)
            print(json.dumps({k: v for k, v in records[-1].items() if k not in common}))
            if json_file is not None:
                json_file.parent.mkdir(parents=True, exist_ok=True)
                json_file.write_text(json.dumps(records, indent=1) + "\n")
    if any(record["ours_us"] is None for record in records):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
