"""Compile every Triton kernel for one GPU without one: ``python cross_compile.py ARCH DTYPE``.

The launchers run on CPU tensors with the launch itself replaced, so that what is compiled is what
they would launch, configurations included. Each kernel and configuration gives two lines: what it
is, before it is compiled, since a compiler may abort; and what came out, as JSON. The last line
tells which entries of the tables of configurations were used.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from m3ops import custom_ops
from m3ops.batch import Batch
from m3ops.custom_ops.index_score import launch as index_score
from m3ops.custom_ops.select_blocks import launch as select_blocks
from m3ops.custom_ops.sparse_attention import launch as sparse_attention
from m3ops.custom_ops.store_kv import launch as store_kv
from m3ops.custom_ops.topk_select import launch as topk_select

TABLES: dict[str, dict[str, Any]] = {
    "index_score": index_score._CONFIGS,
    "sparse_attention rows": sparse_attention._ROW_CONFIGS,
    "sparse_attention tiles": sparse_attention._TILE_CONFIGS,
}

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}
_PAGES = 160


class Geometry(NamedTuple):
    """Sizes at which the launchers run, and the layout of the keys."""

    layout: str
    heads_q: int
    heads_kv: int
    dim: int
    block_size: int
    topk: int


# MiniMax-M3's sizes, then the corners of what the kernels take: between them they use every entry
# of the tables.
GEOMETRIES = {
    "m3": Geometry("paged", 64, 4, 128, 128, 16),
    "large": Geometry("packed", 64, 1, 128, 256, 64),
    "huge": Geometry("batched", 64, 1, 256, 256, 64),
    "small": Geometry("packed", 32, 32, 64, 16, 4),
}


class Recorded(dict[str, Any]):
    """A table that knows which of its entries were looked up."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.used: set[str] = set()

    def __getitem__(self, case: str) -> Any:
        self.used.add(case)
        return super().__getitem__(case)


def parse_target(arch: str) -> GPUTarget:
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


def pretend(arch: str, record: Callable[..., None]) -> None:
    """Let every launcher believe that it runs on `arch`, and record what it would launch."""
    facts = {
        "device_kind": lambda device: arch,
        "max_warps": lambda device: 16 if arch == "gfx942" else 32,
        "num_multiprocessors": lambda device: 132,
        "run": record,
    }
    for info in pkgutil.walk_packages(custom_ops.__path__, "m3ops.custom_ops."):
        if info.name.endswith(".launch"):
            module = importlib.import_module(info.name)
            for fact, value in facts.items():
                if hasattr(module, fact):
                    setattr(module, fact, value)
    number = parse_target(arch).arch if arch.startswith("sm_") else 0
    torch.cuda.get_device_capability = lambda device=None: divmod(number, 10)


def compile_launch(kernel: Any, arguments: dict[str, Any], target: GPUTarget) -> Any:
    """Compile `kernel` as specialised for the arguments of one launch."""
    options = {name: value for name, value in arguments.items() if name in _OPTIONS}
    params = {param.name: param for param in kernel.params}
    signature, constexprs, attrs = {}, {}, {}
    for i, (name, param) in enumerate(params.items()):
        value = arguments[name]
        if param.is_constexpr or value is None:
            signature[name], constexprs[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            if not param.do_not_specialize_on_alignment:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = _TYPES[value.base.dtype][1:]
            signature[name] = f"tensordesc<{element}{value.block_shape}>"
        elif isinstance(value, GluonTensorDescriptor):
            element = _TYPES[value.base.dtype][1:]
            signature[name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[name], constexprs[(i,)] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and threads of a program."""
    metadata = compiled.metadata
    threads = metadata.num_warps * metadata.target.warp_size
    if "amdgcn" in compiled.asm:
        found = dict(re.findall(r"\.(\w+): +(\d+)$", compiled.asm["amdgcn"], re.MULTILINE))
        registers = int(found["vgpr_count"])
        return {
            "registers": registers,
            "spilled": int(found["private_segment_fixed_size"]),
            "threads": threads,
        }
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(tool), "--dump-resource-usage", cubin.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", output))
    # A specialised partition's threads get more registers than the kernel starts with.
    return {"registers": int(found["REG"]), "spilled": int(found["STACK"]), "threads": threads}


def launches(geometry: Geometry, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every launcher that depends on a geometry: decode rows, drafts and a prompt."""
    layout, heads_q, heads_kv, dim, block_size, topk = geometry
    keys = _PAGES * block_size
    for what, tokens, seqs, longest, splits in (
        ("decode", 64, 64, 1, 0),
        ("decode alone", 1, 1, 1, 8),
        ("decode in splits", 16, 16, 1, 0),
        ("drafts", 64, 16, 4, 0),
        ("prefill", 4096, 1, 4096, 0),
    ):
        sizes = {"paged": (_PAGES,), "packed": (keys,), "batched": (seqs, keys)}[layout]
        index_sizes = (*sizes, block_size) if layout == "paged" else sizes
        sizes = (*sizes, heads_kv, block_size) if layout == "paged" else (*sizes, heads_kv)
        batch = Batch(
            torch.zeros(seqs + 1, dtype=torch.int32),
            torch.zeros(seqs, dtype=torch.int32),
            torch.zeros(seqs, _PAGES, dtype=torch.int32) if layout == "paged" else None,
            torch.zeros(seqs + 1, dtype=torch.int32) if layout == "packed" else None,
            torch.zeros(seqs, dtype=torch.int32) if layout == "batched" else None,
            longest,
            keys,
            0,
            0,
            block_size,
        )
        q = torch.empty(tokens, heads_q, dim, dtype=dtype)
        k, v = (torch.empty(*sizes, dim, dtype=dtype) for _ in range(2))
        index_q = torch.empty(tokens, heads_kv, dim, dtype=dtype)
        index_k = torch.empty(*index_sizes, dim, dtype=dtype)
        scores = torch.empty(tokens, heads_kv, _PAGES)
        ids = torch.empty(tokens, heads_kv, topk, dtype=torch.int32)
        out, lse = torch.empty_like(q), torch.empty(tokens, heads_q)
        yield (
            f"sparse_attention {what}",
            partial(
                sparse_attention.launch_sparse_attention,
                *(q, k, v, ids, batch, dim**-0.5, splits, 2**30, out, lse),
            ),
        )
        if what == "drafts":
            # Rows like any others to the rest.
            continue
        if layout == "paged":
            yield (
                f"index_score {what}",
                partial(index_score.launch_index_score, index_q, index_k, batch, 0, scores),
            )
        yield (
            f"select_blocks {what}",
            partial(
                select_blocks.launch_select_blocks,
                *(index_q, index_k, batch, topk, 0, 1, 0, 2**30, ids),
            ),
        )
        if layout == "paged":
            slots = torch.empty(tokens, dtype=torch.int64)
            new = q[:, :heads_kv]
            yield (
                f"store_kv {what}",
                partial(store_kv.launch_store_kv, new, new, index_q[:, 0], slots, k, v, index_k),
            )


def selections() -> Iterator[tuple[str, Callable[[], None]]]:
    """The launcher of `topk_select`, which no dtype changes, for few and many rows."""
    for rows, columns, topk, init_blocks in (
        (4, 64, 16, 0),
        (4, 1024, 16, 0),
        (4, 8192, 16, 0),
        (4, 65536, 16, 0),
        (4, 512, 100, 0),
        (4096, 64, 16, 2),
        (4096, 512, 16, 0),
        (4096, 64, 64, 0),
    ):
        scores = torch.empty(()).expand(rows, 4, columns)
        visible = torch.empty(rows, dtype=torch.int32)
        ids = torch.empty(rows, 4, topk, dtype=torch.int32)
        yield (
            f"topk_select {topk} of {columns}, {rows} rows",
            partial(topk_select.launch_topk_select, scores, visible, topk, init_blocks, 1, ids),
        )


def all_launches(arch: str, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    # float32 compiles for long, and has the same configurations on all kinds.
    names = GEOMETRIES if dtype != torch.float32 or arch == "sm_90" else ("m3", "small")
    for name in names:
        geometry = GEOMETRIES[name]
        for what, call in launches(geometry, dtype):
            yield f"{what}, {name}", call
    if dtype == torch.bfloat16:
        yield from selections()


def main(arch: str, dtype: str) -> None:
    target = parse_target(arch)
    recorded: list[tuple[Any, dict[str, Any]]] = []
    pretend(arch, lambda kernel, grid, device, arguments: recorded.append((kernel, arguments)))
    tables = {}
    for name, table in TABLES.items():
        tables[name] = table[arch] = Recorded(table[arch])
    done = set()
    for what, call in all_launches(arch, getattr(torch, dtype)):
        recorded.clear()
        call()
        for kernel, arguments in recorded:
            print(f"compiling {kernel.__name__} of {what}", flush=True)
            compiled = compile_launch(kernel, arguments, target)
            if compiled.hash in done:
                continue
            done.add(compiled.hash)
            assembly = compiled.asm.get("ptx") or compiled.asm.get("amdgcn")
            products = re.findall(r"tt\.dot [^\n]*-> tensor<(\d+)x", compiled.asm.get("ttir", ""))
            record = {
                "kernel": kernel.__name__,
                "what": what,
                "shared": compiled.metadata.shared,
                "tensor_memory": getattr(compiled.metadata, "tmem_size", 0) or 0,
                **resources(compiled),
                # Rows of each product; a Gluon kernel's are its own affair.
                "product_rows": sorted(set(map(int, products))),
                "wgmma": assembly.count("wgmma.mma_async"),
                "tcgen05": assembly.count("tcgen05.mma"),
                "mma": assembly.count("mma.sync"),
                "mfma": assembly.count("v_mfma"),
            }
            print(json.dumps(record), flush=True)
    used = {name: {case: case in table.used for case in table} for name, table in tables.items()}
    print(json.dumps(used))


if __name__ == "__main__":
    main(*sys.argv[1:])
