"""The ceilings of the device, and the least time a case can take under them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.timing import median_seconds


@dataclass(frozen=True)
class Ceilings:
    """Rates measured in this run: bytes per second, and operations per second."""

    copy: float
    read: float
    matmul: float

    def report(self) -> dict[str, float]:
        """TB/s and TFLOP/s."""
        return {name: round(rate / 1e12, 4) for name, rate in asdict(self).items()}


def measure_ceilings(device: torch.device, dtype: torch.dtype, quick: bool) -> Ceilings:
    on_gpu = device.type == "cuda"
    repeats = 10 if quick or not on_gpu else 30
    copy, read = _memory_rates(device, 2**30 if on_gpu else 2**20, repeats)
    return Ceilings(copy, read, _matmul_rate(device, dtype, 8192 if on_gpu else 256, repeats))


def _memory_rates(device: torch.device, size: int, repeats: int) -> tuple[float, float]:
    source = torch.randn(size, device=device)
    target = torch.empty_like(source)
    size_bytes = source.numel() * source.itemsize
    copy = 2 * size_bytes / median_seconds(partial(target.copy_, source), device, repeats)
    # How a reduction is tiled decides how near it comes to the memory's rate.
    reductions = [source.amax] + [
        partial(source.view(-1, columns).sum, 1) for columns in (2**10, 2**14, 2**18)
    ]
    read = max(size_bytes / median_seconds(reduce, device, repeats) for reduce in reductions)
    return copy, max(copy, read)


def _matmul_rate(device: torch.device, dtype: torch.dtype, side: int, repeats: int) -> float:
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / median_seconds(partial(torch.matmul, a, b), device, repeats)


@dataclass(frozen=True)
class Work:
    """What a call must do at least: operations, and bytes through device memory.

    Only visible keys, visible score columns and selected blocks count, each once.
    """

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.read + other.read, self.written + other.written)

    @property
    def bytes(self) -> float:
        return self.read + self.written

    def floor(self, ceilings: Ceilings) -> tuple[float, str]:
        """Seconds, and whether bytes or operations set them."""
        moving = self.read / ceilings.read + self.written / ceilings.copy
        computing = self.flops / ceilings.matmul
        return max(moving, computing), "bytes" if moving >= computing else "flops"


def work(op: str, inputs: Inputs, ids: Tensor) -> Work:
    """The work of one call of `op`, which attends to the blocks `ids` if it attends."""
    case, shape = inputs.case, inputs.shape
    rows = case.total_q * shape.num_kv_heads
    itemsize = shape.dtype.itemsize
    score_bytes = float(inputs.num_valid.sum()) * shape.num_kv_heads * 4
    id_bytes = rows * shape.topk * 4
    index_bytes = (rows + case.num_seqs * case.seq_len) * shape.index_dim * itemsize
    score_flops = 2.0 * shape.index_dim * shape.num_kv_heads * float((inputs.positions + 1).sum())
    if op == "index_score":
        return Work(score_flops, index_bytes, score_bytes)
    if op == "topk_select":
        return Work(read=score_bytes, written=id_bytes)
    if op == "select_blocks":
        return Work(score_flops, index_bytes, id_bytes)
    if op == "sparse_attention":
        tokens, unique = selected_tokens(inputs, ids)
        width = shape.head_dim * itemsize
        rows_bytes = case.total_q * shape.num_heads * width
        flops = 4.0 * shape.head_dim * shape.group * tokens
        return Work(flops, 2.0 * unique * width + rows_bytes + id_bytes, rows_bytes)
    return work("select_blocks", inputs, ids) + work("sparse_attention", inputs, ids)


def selected_tokens(inputs: Inputs, ids: Tensor) -> tuple[float, float]:
    """Visible tokens in the selected blocks: over all rows, and each once."""
    case, shape = inputs.case, inputs.shape
    ids = ids.long()
    live = ids >= 0
    start = ids.clamp(min=0) * shape.block_size
    tokens = (inputs.positions[:, None, None] + 1 - start).clamp(max=shape.block_size)
    total = float(torch.where(live, tokens, 0).sum())
    chosen = torch.zeros(
        case.num_seqs, shape.num_kv_heads, inputs.num_blocks + 1, device=ids.device
    )
    columns = torch.where(live, ids, inputs.num_blocks)
    by_sequence = columns.unflatten(0, (case.num_seqs, -1)).transpose(1, 2).flatten(2)
    chosen.scatter_(-1, by_sequence, 1.0)
    block = torch.arange(inputs.num_blocks, device=ids.device)
    width = (case.seq_len - block * shape.block_size).clamp(max=shape.block_size)
    return total, float((chosen[..., :-1] * width).sum())
