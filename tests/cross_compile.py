"""Compile every Triton kernel for one target without a GPU: ``python cross_compile.py ARCH``.

The launchers run on CPU tensors with the launch itself replaced, so that what is compiled is what
they would launch, configurations included. Prints one JSON line per kernel and configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from m3ops.batch import Batch
from m3ops.custom_ops.common import launch as common
from m3ops.custom_ops.index_score import launch as index_score
from m3ops.custom_ops.index_score.hopper import launch as index_score_hopper
from m3ops.custom_ops.select_blocks import launch as select_blocks
from m3ops.custom_ops.sparse_attention import launch as sparse_attention
from m3ops.custom_ops.sparse_attention.hopper import launch as hopper
from m3ops.custom_ops.store_kv import launch as store_kv
from m3ops.custom_ops.topk_select import launch as topk_select

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}


def parse_target(arch: str) -> GPUTarget:
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


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


def launches(dtype: torch.dtype, paged: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every launcher at M3's geometry, decode and prefill, in one layout."""
    heads_q, heads_kv, dim, block, topk, pages = 64, 4, 128, 128, 16, 64
    for what, tokens, seqs, longest, splits in (
        ("decode", 4, 4, 1, 8),
        ("speculative", 16, 4, 4, 0),
        ("prefill", 4096, 1, 4096, 0),
    ):
        batch = Batch(
            torch.zeros(seqs + 1, dtype=torch.int32),
            torch.zeros(seqs, dtype=torch.int32),
            torch.zeros(seqs, pages, dtype=torch.int32) if paged else None,
            None if paged else torch.zeros(seqs + 1, dtype=torch.int32),
            None,
            longest,
            pages * block,
            0,
            0,
            block,
        )
        shape = (pages, heads_kv, block, dim) if paged else (pages * block, heads_kv, dim)
        index_shape = (pages, block, dim) if paged else (pages * block, dim)
        q = torch.zeros(tokens, heads_q, dim, dtype=dtype)
        k, v = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        index_q = torch.zeros(tokens, heads_kv, dim, dtype=dtype)
        index_k = torch.zeros(index_shape, dtype=dtype)
        scores = torch.zeros(tokens, heads_kv, pages)
        visible = torch.zeros(tokens, dtype=torch.int32)
        ids = torch.zeros(tokens, heads_kv, topk, dtype=torch.int32)
        out, lse = torch.zeros_like(q), torch.zeros(tokens, heads_q)
        bound = 2**30
        yield (
            f"index_score {what}",
            partial(index_score.launch_index_score, index_q, index_k, batch, 0, scores),
        )
        yield (
            f"select_blocks {what}",
            partial(
                select_blocks.launch_select_blocks,
                index_q,
                index_k,
                batch,
                topk,
                0,
                1,
                0,
                bound,
                ids,
            ),
        )
        for columns in (pages, 8192, 65536):
            wide = scores.new_zeros(()).expand(tokens, heads_kv, columns)
            yield (
                f"topk_select {what} {columns}",
                partial(topk_select.launch_topk_select, wide, visible, topk, 0, 1, ids),
            )
        yield (
            f"sparse_attention {what}",
            partial(
                sparse_attention.launch_sparse_attention,
                q,
                k,
                v,
                ids,
                batch,
                dim**-0.5,
                splits,
                bound,
                out,
                lse,
            ),
        )
        if paged:
            slots = torch.zeros(tokens, dtype=torch.int64)
            yield (
                f"store_kv {what}",
                partial(
                    store_kv.launch_store_kv,
                    q[:, :heads_kv],
                    q[:, :heads_kv],
                    index_q[:, 0],
                    slots,
                    k,
                    v,
                    index_k,
                ),
            )


def main(arch: str, dtype: str, layout: str) -> None:
    target = parse_target(arch)
    recorded: list[tuple[Any, dict[str, Any]]] = []

    def record(
        kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: dict[str, Any]
    ) -> None:
        recorded.append((kernel, arguments))

    common.run = record
    hopper.run = record  # type: ignore[attr-defined]
    copies = target.backend == "cuda" and target.arch >= 90
    for module in (common, index_score, sparse_attention):
        module.supports_hopper = lambda device: copies  # type: ignore[attr-defined]
    wgmma = target.backend == "cuda" and target.arch == 90 and dtype != "float32"
    sparse_attention._hopper = lambda inputs: hopper if wgmma else None
    index_score._hopper = lambda *inputs: index_score_hopper if wgmma else None
    done = set()
    for what, call in launches(getattr(torch, dtype), layout == "paged"):
        recorded.clear()
        call()
        for kernel, arguments in recorded:
            compiled = compile_launch(kernel, arguments, target)
            assembly = compiled.asm.get("ptx") or compiled.asm.get("amdgcn")
            key = (kernel.__name__, compiled.hash)
            if key in done:
                continue
            done.add(key)
            print(
                json.dumps(
                    {
                        "kernel": kernel.__name__,
                        "what": what,
                        "shared": compiled.metadata.shared,
                        "wgmma": assembly.count("wgmma.mma_async"),
                        "tcgen05": assembly.count("tcgen05.mma"),
                        "mma": assembly.count("mma.sync"),
                        "cp_async": assembly.count("cp.async.cg") + assembly.count("cp.async.bulk"),
                        "tile_m": arguments.get("BLOCK_M"),
                        "dot": not {"BLOCK_M", "GROUP", "STAGES"}.isdisjoint(arguments),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
