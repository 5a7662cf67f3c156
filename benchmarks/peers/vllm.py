"""vLLM's Triton kernels for MiniMax-M3, which is what it runs on Hopper.

Its two kernel files come from `.peers/` (see ``fetch_peers.py``), loaded beside stand-ins for the
four vLLM modules that they import, or else from an installed vLLM.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import OPS, Inputs, Step
from benchmarks.fetch_peers import VLLM_FILES, VLLM_FOLDER, VLLM_VERSION
from benchmarks.peers.base import Implementation, Unavailable


class VllmPeer(Implementation):
    name = "vllm"
    ops = frozenset(OPS)

    def __init__(self) -> None:
        self.version, self.index, self.attend = _load()
        self.kv: Tensor | None = None
        self.scores: Tensor | None = None
        self.tuned_for: Inputs | None = None

    def prepare(self, op: str, inputs: Inputs) -> None:
        self.decode = self.marks_own_block = inputs.case.kind == "decode"
        self.context_lens = inputs.seqused_k - inputs.case.query_len
        # vLLM writes ids token-major and reads them through a transposed view.
        size = (inputs.case.total_q, inputs.shape.num_kv_heads, inputs.shape.topk)
        self.ids = [
            torch.empty(size, dtype=torch.int32, device=inputs.device)
            for _ in range(self.sets(op, inputs))
        ]
        self.outputs = [torch.empty_like(step.q) for step in inputs.steps[: len(self.ids)]]
        if op in ("sparse_attention", "layer") and self.kv is None:
            # Keys and values of a token lie side by side.
            self.kv = inputs.k.new_empty(*inputs.k.shape[:-1], 2 * inputs.k.shape[-1])
            self.kv[..., : inputs.k.shape[-1]] = inputs.k
            self.kv[..., inputs.k.shape[-1] :] = inputs.v
        if self.tuned_for is not inputs:
            self.tuned_for = inputs
            for kernel in vars(self.index).values():
                _forget_tuning(kernel, tune=inputs.device.type == "cuda")
        if op == "topk_select":
            self.scores = self._score(inputs, inputs.steps[0])

    def release(self) -> None:
        self.kv = self.scores = self.tuned_for = None
        self.ids, self.outputs = [], []

    def call(self, op: str, inputs: Inputs, index: int) -> Any:
        step = inputs.steps[index]
        ids, output = self.ids[index], self.outputs[index]
        if op == "index_score":
            return self._score(inputs, step).transpose(0, 1)
        if op == "topk_select":
            assert self.scores is not None
            self._topk(inputs, self.scores, ids)
            return ids
        if op in ("score_topk", "select_blocks"):
            self._select(inputs, step, ids)
            return ids
        if op == "sparse_attention":
            self._attend(inputs, step, step.block_ids, output)
            return output
        self._select(inputs, step, ids)
        self._attend(inputs, step, ids, output)
        return ids, output

    def _score(self, inputs: Inputs, step: Step) -> Tensor:
        case, shape = inputs.case, inputs.shape
        if self.decode:
            return self.index.minimax_m3_index_decode_score(
                step.index_q,
                inputs.index_k,
                step.block_table,
                inputs.seqused_k,
                step.batch["max_seqlen_k"],
                0,
                1,
                shape.num_kv_heads,
                case.query_len,
                case.query_len,
            )
        return self.index.minimax_m3_index_score(
            step.index_q,
            inputs.index_k,
            step.block_table,
            inputs.cu_seqlens_q,
            inputs.seqused_k,
            self.context_lens,
            case.query_len,
            step.batch["max_seqlen_k"],
            shape.num_kv_heads,
        )

    def _topk(self, inputs: Inputs, scores: Tensor, ids: Tensor) -> None:
        self.index.minimax_m3_index_topk(
            scores,
            inputs.cu_seqlens_q,
            self.context_lens,
            inputs.case.query_len,
            inputs.shape.topk,
            0,
            1,
            out=ids.transpose(0, 1),
        )

    def _select(self, inputs: Inputs, step: Step, ids: Tensor) -> None:
        case, shape = inputs.case, inputs.shape
        if not self.decode:
            self._topk(inputs, self._score(inputs, step), ids)
            return
        self.index.minimax_m3_index_decode(
            step.index_q,
            inputs.index_k,
            step.block_table,
            inputs.seqused_k,
            step.batch["max_seqlen_k"],
            shape.topk,
            0,
            1,
            shape.num_kv_heads,
            case.query_len,
            case.query_len,
            out=ids.transpose(0, 1),
        )

    def _attend(self, inputs: Inputs, step: Step, ids: Tensor, output: Tensor) -> None:
        case, shape = inputs.case, inputs.shape
        scale = shape.head_dim**-0.5
        if self.decode:
            self.attend.minimax_m3_sparse_attn_decode(
                step.q,
                self.kv,
                ids.transpose(0, 1),
                step.block_table,
                inputs.seqused_k,
                shape.num_kv_heads,
                scale,
                output,
                case.query_len,
            )
            return
        self.attend.minimax_m3_sparse_attn(
            step.q,
            self.kv,
            ids.transpose(0, 1),
            step.block_table,
            inputs.cu_seqlens_q,
            inputs.seqused_k,
            self.context_lens,
            case.query_len,
            shape.num_kv_heads,
            scale,
            output,
        )


def _load() -> tuple[str, ModuleType, ModuleType]:
    """Version, scoring module and attention module."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise Unavailable("vllm needs triton") from error
    if all((VLLM_FOLDER / Path(name).name).is_file() for name in VLLM_FILES):
        index, attend = _load_files()
        return VLLM_VERSION, index, attend
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable("vllm is neither fetched nor installed: run benchmarks/fetch_peers.py")
    package = "vllm.models.minimax_m3.common.ops"
    index = importlib.import_module(f"{package}.index_topk")
    return version("vllm"), index, importlib.import_module(f"{package}.sparse_attn")


def _load_files() -> tuple[ModuleType, ModuleType]:
    stand_ins = _stand_ins()
    saved = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        index, attend = (_load_file(VLLM_FOLDER / Path(name).name) for name in VLLM_FILES)
        return index, attend
    finally:
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"vllm_peer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _stand_ins() -> dict[str, ModuleType]:
    import triton
    import triton.language as tl

    def capability() -> tuple[int, int]:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

    platform = SimpleNamespace(
        is_cuda=lambda: torch.version.cuda is not None and torch.cuda.is_available(),
        is_device_capability=lambda wanted: capability() == wanted,
        is_arch_support_pdl=lambda: capability()[0] >= 9,
    )
    contents: dict[str, dict[str, object]] = {
        "vllm": {"__path__": []},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils": {"__path__": []},
        "vllm.utils.math_utils": {"round_up": lambda x, multiple: -(-x // multiple) * multiple},
    }
    modules = {}
    for name, attributes in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(attributes)
    return modules


def _forget_tuning(kernel: Any, tune: bool) -> None:
    """Let vLLM's autotuned kernels be tuned anew, so that every case gets its best.

    Without a GPU there is nothing to tune by: keep the first configuration.
    """
    while kernel is not None:
        if hasattr(kernel, "configs") and hasattr(kernel, "cache"):
            kernel.cache.clear()
            if not tune:
                kernel.configs = kernel.configs[:1]
        kernel = getattr(kernel, "fn", None)
