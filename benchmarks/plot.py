"""Draw benchmark records: ``python benchmarks/plot.py benchmarks/results/*.json``.

``time.png`` shows the layer core against the context, for m3ops, its peers and dense attention;
``floor.png`` the share of its floor that every op reaches.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

Record = dict[str, Any]
_NAMES = {"ours": "m3ops", "vllm": "vLLM", "dense": "dense (SDPA)"}
_COLORS = {"ours": "#1b6ca8", "vllm": "#d1682a", "dense": "#777777", "floor": "#222222"}
_OPS = {
    "index_score": ("o", "#1b6ca8"),
    "topk_select": ("s", "#d1682a"),
    "select_blocks": ("^", "#3d8f4f"),
    "sparse_attention": ("D", "#8a4fa3"),
    "layer": ("*", "#222222"),
}
_UNITS = {"": 1, "k": 1024, "M": 1024**2}


def context_of(case: str) -> tuple[str, int] | None:
    """Family and keys of the cases that form a curve: one sequence, growing."""
    if match := re.fullmatch(r"decode_1x(\d+)([kM])", case):
        return "one token, batch 1", int(match[1]) * _UNITS[match[2]]
    if match := re.fullmatch(r"prefill_(\d+)([kM])(_real)?", case):
        return "whole prompt, batch 1", int(match[1]) * _UNITS[match[2]]
    return None


def draw_time(records: list[Record], path: Path) -> None:
    families: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for record in records:
        place = context_of(record["case"])
        if place is None or record["op"] != "layer" or record["ours_us"] is None:
            continue
        times = {"ours": record["ours_us"], "floor": record["floor_us"], **record["peers"]}
        for name, us in times.items():
            curve = families.setdefault(place[0], {}).setdefault(name, [])
            curve.append((place[1], us))
    if not families:
        return
    figure, axes = plt.subplots(1, len(families), figsize=(5.2 * len(families), 4), squeeze=False)
    for axis, (family, curves) in zip(axes[0], families.items(), strict=True):
        for name, curve in curves.items():
            tokens, us = zip(*sorted(curve), strict=True)
            style = ":" if name == "floor" else "-o"
            axis.plot(tokens, us, style, label=_NAMES.get(name, name), color=_COLORS.get(name))
        _label_contexts(axis, family)
    axes[0][0].legend(loc="upper left")
    figure.suptitle(f"Score + select + attend of one layer, {records[-1]['device']}")
    _save(figure, path)


def _label_contexts(axis: Axes, family: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_title(family)
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel("time (us)")
    axis.xaxis.set_major_formatter(lambda tokens, _: _short(int(tokens)))
    axis.grid(alpha=0.3)


def _short(tokens: int) -> str:
    return f"{tokens // 1024**2}M" if tokens >= 1024**2 else f"{tokens // 1024}k"


def draw_floor(records: list[Record], path: Path) -> None:
    timed = [record for record in records if record["ours_us"] is not None]
    cases = list(dict.fromkeys(record["case"] for record in timed))
    if not cases:
        return
    figure, axis = plt.subplots(figsize=(9.5, 1 + 0.28 * len(cases)))
    for record in timed:
        marker, color = _OPS[record["op"]]
        row = cases.index(record["case"])
        axis.plot(record["floor_us"] / record["ours_us"], row, marker, color=color)
        if "vllm" in record["peers"]:
            reached = record["floor_us"] / record["peers"]["vllm"]
            axis.plot(reached, row, marker, color=color, fillstyle="none", alpha=0.5)
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("share of the floor reached (hollow: vLLM)")
    axis.grid(alpha=0.3)
    used = {record["op"] for record in timed}
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=color, label=op)
        for op, (marker, color) in _OPS.items()
        if op in used
    ]
    axis.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axis.set_title(f"Floors over the ceilings measured in the same run, {timed[-1]['device']}")
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def main(
    files: Annotated[list[Path], typer.Argument(help="JSON files of records; later ones win.")],
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = (
        Path(__file__).parent / "results"
    ),
) -> None:
    """Draw time against context, and the share of the floor reached."""
    records: dict[tuple[str, str], Record] = {}
    for file in files:
        for record in json.loads(file.read_text()):
            records[record["case"], record["op"]] = record
    out.mkdir(parents=True, exist_ok=True)
    draw_time(list(records.values()), out / "time.png")
    draw_floor(list(records.values()), out / "floor.png")


if __name__ == "__main__":
    typer.run(main)
