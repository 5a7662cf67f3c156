"""Trace a decode step with its kernels visible, without a GPU: ``python visible_graph.py ARCH``.

Tensors lie on the CPU and the launchers believe that they run on `ARCH`. Prints JSON: the ops of
the exported step, then what it is without them: each kernel with the arguments that PyTorch takes
it to write, and the other ops. The last entries are the kernels that select for the rows of a
prompt, and how a step of dynamic sizes is refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from cross_compile import parse_target, pretend
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

sys.path.insert(0, str(Path(__file__).parent / "modules"))
from bucket import FIXED, Bucket, bucket_tensors

import m3ops
from m3ops import BatchMetadata, MiniMaxM3AttentionConfig, MiniMaxM3SparseAttention, PagedKVCache
from m3ops.custom_ops.common.launch import run


class Driver(NamedTuple):
    """As much of Triton's driver as analysing a kernel asks for."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target


def pretend_tracing(arch: str) -> None:
    pretend(arch, run)
    triton.runtime.driver.set_active(Driver(parse_target(arch)))
    for module in ("m3ops.backends", "m3ops.visible"):
        sys.modules[module].active_backend = lambda device: "triton"  # type: ignore[attr-defined]


def exported_bucket(shapes: Any = FIXED) -> torch.export.ExportedProgram:
    """Four decode rows over tables of 64 pages, exported on the CPU in bfloat16."""
    config = MiniMaxM3AttentionConfig(hidden_size=64)
    layer = MiniMaxM3SparseAttention(config, dtype=torch.bfloat16)
    cache = PagedKVCache(config, 10, dtype=torch.bfloat16)
    tables = [[0], [1, 2], [3, 4, 5], [6]]
    batch = BatchMetadata.from_lengths([1] * 4, [100, 200, 300, 33], tables, num_columns=64)
    hidden = torch.zeros(4, config.hidden_size, dtype=torch.bfloat16)
    inputs = (hidden, tuple(cache.buffers()), bucket_tensors(batch))
    return torch.export.export(Bucket(layer, batch), inputs, dynamic_shapes=shapes, strict=False)


def calls(program: torch.export.ExportedProgram) -> list[Any]:
    return [node for node in program.graph.nodes if node.op == "call_function"]


def kernel_name(node: Any) -> str:
    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    # A launch that sets the number of warps is that of an autotuner with one choice.
    return getattr(kernel, "fn", kernel).__name__


class Selection(torch.nn.Module):
    def forward(self, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        return m3ops.topk_select(scores, visible)


def selection_of_many_rows() -> list[str]:
    """The kernels that select for the rows of a prompt."""
    inputs = (torch.zeros(4096, 4, 64), torch.zeros(4096, dtype=torch.int32))
    exported = torch.export.export(Selection(), inputs, strict=False)
    with m3ops.visible_kernels():
        visible = exported.run_decompositions(decompose_custom_triton_ops=True)
    found = [node for node in calls(visible) if "triton_kernel_wrapper" in str(node.target)]
    return [kernel_name(node) for node in found]


def refusal() -> str:
    # Where nothing is said, the sizes of a batch are dynamic.
    exported = exported_bucket(None)
    try:
        with m3ops.visible_kernels():
            exported.run_decompositions(decompose_custom_triton_ops=True)
    except NotImplementedError as error:
        return str(error)
    return ""


@torch.no_grad()
def main(arch: str) -> None:
    pretend_tracing(arch)
    exported = exported_bucket()
    with m3ops.visible_kernels():
        visible = exported.run_decompositions(decompose_custom_triton_ops=True)
    kernels = []
    others = set()
    for node in calls(visible):
        if "triton_kernel_wrapper" in str(node.target):
            kernels.append((kernel_name(node), sorted(node.kwargs["tensors_to_clone"])))
        else:
            others.add(str(node.target))
    summary = {
        "exported": [str(node.target) for node in calls(exported) if "m3ops" in str(node.target)],
        "kernels": kernels,
        "others": sorted(others),
        "many rows": selection_of_many_rows(),
        "dynamic": refusal(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv[1])
