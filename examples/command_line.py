"""What the examples that run from a command line share: options, the text they read, progress."""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

import torch
import typer
from tqdm import tqdm

T = TypeVar("T")


class Device(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Clock:
    """Seconds since the last lap, with the device's work done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = time.perf_counter()

    def lap(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before, self.last = self.last, time.perf_counter()
        return self.last - before


def check_device(device: Device) -> None:
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter(
            f"torch {torch.__version__} finds no CUDA device here", param_hint="--device"
        )


def check_writable(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}", param_hint=option)
    if suffixes and path.suffix.lower() not in suffixes:
        raise typer.BadParameter(
            f"{path.name} must end in one of {', '.join(suffixes)}", param_hint=option
        )


def default_dtype(device: Device) -> Dtype:
    return Dtype.float32 if device is Device.cpu else Dtype.bfloat16


def read_text(path: Path | None) -> tuple[str, bytes]:
    """Where the text is from, and the text; without a path, one that Python comes with."""
    try:
        return default_text() if path is None else (str(path), path.read_bytes())
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="TEXT_FILE") from error


def default_text() -> tuple[str, bytes]:
    """Python's own help texts, or source code if some packager left those out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return "the source of argparse", inspect.getsource(argparse).encode()
    return "the help texts of pydoc", "\n".join(topics.values()).encode()


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """A bar, on a terminal, that goes away at the end."""
    return tqdm(items, what, leave=False, disable=None)
