"""Dense attention on the same heads: PyTorch's SDPA over contiguous keys and values.

Every variant is tried and the fastest one counts. Decode rows attend to all keys of their
sequence without a mask, which for several rows of one sequence is up to three keys too many.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases import Inputs
from benchmarks.peers.base import Implementation, Unavailable

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class Dense(Implementation):
    """One backend; `folded` puts the query heads of a group into the rows of their KV head."""

    version = torch.__version__
    ops = frozenset({"sparse_attention", "layer"})
    dense = True
    # Contiguous copies, shared by the variants: they are the largest tensors of a case.
    _caches: tuple[Inputs, Tensor, Tensor] | None = None

    def __init__(self, backend: str, folded: bool) -> None:
        self.backend, self.folded = backend, folded
        self.name = f"dense/{backend}{'_folded' if folded else ''}"

    def prepare(self, op: str, inputs: Inputs) -> None:
        case = inputs.case
        chunk = case.kind == "prefill" and case.query_len < case.seq_len
        if self.folded and case.kind != "decode":
            raise Unavailable("folding needs rows without a mask")
        if self.backend == "cudnn" and chunk:
            raise Unavailable("no mask for a chunk after a context")
        if Dense._caches is None or Dense._caches[0] is not inputs:
            Dense._caches = None
            k, v = (_gather(cache, inputs, self.sets(op, inputs)) for cache in (inputs.k, inputs.v))
            Dense._caches = (inputs, k, v)

    def release(self) -> None:
        Dense._caches = None

    def sets(self, op: str, inputs: Inputs) -> int:
        shape = inputs.shape
        return math.ceil(
            inputs.num_tables * shape.index_dim / (2 * shape.num_kv_heads * shape.head_dim)
        )

    def call(self, op: str, inputs: Inputs, index: int) -> Tensor:
        assert Dense._caches is not None
        _, keys, values = Dense._caches
        k, v = keys[index], values[index]
        case, shape = inputs.case, inputs.shape
        q = inputs.steps[index].q.unflatten(0, (case.num_seqs, case.query_len))
        if self.folded:
            q = q.unflatten(2, (shape.num_kv_heads, shape.group)).permute(0, 2, 3, 1, 4)
            out = self._sdpa(q.flatten(2, 3), k, v, causal=False)
            out = out.unflatten(2, (shape.group, case.query_len)).permute(0, 3, 1, 2, 4)
            return out.flatten(2, 3).flatten(0, 1)
        out = self._sdpa(q.transpose(1, 2), k, v, causal=case.kind == "prefill")
        return out.transpose(1, 2).flatten(0, 1)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if causal and self.backend == "flash" and q.shape[2] < k.shape[2]:
            # This op aligns its causal mask to the last key; is_causal=True does to the first.
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        mask = None
        if causal and q.shape[2] < k.shape[2]:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = mask.tril(k.shape[2] - q.shape[2])
        with sdpa_kernel(_BACKENDS[self.backend]):
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal and mask is None, enable_gqa=True
            )


def dense_variants() -> list[Implementation]:
    if not torch.cuda.is_available():
        return [Dense("math", False)]
    return [Dense(backend, folded) for backend in ("flash", "cudnn") for folded in (False, True)]


def _gather(cache: Tensor, inputs: Inputs, tables: int) -> Tensor:
    """Pages ``[P, Hkv, N, D]`` as contiguous ``[tables, B, Hkv, S, D]``."""
    case, shape = inputs.case, inputs.shape
    heads = (shape.num_kv_heads, case.seq_len, shape.head_dim)
    out = cache.new_empty(tables, case.num_seqs, *heads)
    for table in range(tables):
        for sequence in range(case.num_seqs):
            pages = inputs.steps[table].block_table[sequence, : inputs.num_blocks].long()
            rows = cache[pages].transpose(0, 1).flatten(1, 2)
            out[table, sequence] = rows[:, : case.seq_len]
    return out
