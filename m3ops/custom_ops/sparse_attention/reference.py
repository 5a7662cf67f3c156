"""The meaning of ``sparse_attention`` and of its gradient, in plain PyTorch.

Nothing is read back from the device, so that the gradient serves every backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...batch import PACKED, PAGED, Batch, key_bounds, row_positions

# Small chunks stay in a CPU's caches.
_CPU_CHUNK_BYTES = 2**24


class _Chunk(NamedTuple):
    """Some rows and the keys they attend to.

    Attributes:
        rows: slice of the packed batch, ``C`` rows.
        at: what indexes a key tensor to ``[C, Hkv, K * N, D]``.
        seen: bool ``[C, Hkv, K * N]``, the keys that take part; the others may be anything.
    """

    rows: slice
    at: tuple[Tensor, ...]
    seen: Tensor


def sparse_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    batch: Batch,
    softmax_scale: float,
    num_splits: int,
    max_scratch_bytes: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """``softmax(scale * q k^T) v`` over the visible tokens of each row's blocks."""
    out.zero_()
    lse.fill_(-torch.inf)
    for chunk in _chunks(q, k, block_ids, batch, max_scratch_bytes):
        logits = _logits(q, k, chunk, softmax_scale)
        top = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - top.where(top > -torch.inf, 0))
        total = weights.sum(-1, keepdim=True)
        values = _gather(v, chunk, weights.dtype)
        # [C, Hkv, G, D]
        mean = weights @ values / total.where(total > 0, 1)
        out[chunk.rows] = mean.flatten(1, 2).to(out.dtype)
        lse[chunk.rows] = (top + total.log()).flatten(1)


def sparse_attention_backward_reference(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: Batch,
    softmax_scale: float,
    max_scratch_bytes: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Gradients in `q`, `k` and `v`; keys that no row attends to get exactly 0."""
    dtype, heads_kv = lse.dtype, block_ids.shape[1]
    dk_sum, dv_sum = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    dq.zero_()
    for chunk in _chunks(q, k, block_ids, batch, max_scratch_bytes):
        keys, values = _gather(k, chunk, dtype), _gather(v, chunk, dtype)
        queries = q[chunk.rows].to(dtype).unflatten(1, (heads_kv, -1))
        dmean = dout[chunk.rows].to(dtype).unflatten(1, (heads_kv, -1))
        mean = out[chunk.rows].to(dtype).unflatten(1, (heads_kv, -1))
        row_lse = lse[chunk.rows].unflatten(1, (heads_kv, -1))[..., None]
        # Rows that attend to nothing, padding among them, may hold NaN.
        queries, dmean = (x.where(row_lse > -torch.inf, 0) for x in (queries, dmean))
        logits = _logits(q, k, chunk, softmax_scale)
        weights = torch.exp(logits - row_lse.where(row_lse > -torch.inf, 0))
        dweights = dmean @ values.transpose(-1, -2)
        dlogits = weights * (dweights - (dmean * mean).sum(-1, keepdim=True)) * softmax_scale
        dq[chunk.rows] = (dlogits @ keys).flatten(1, 2).to(dq.dtype)
        dk_sum.index_put_(chunk.at, dlogits.transpose(-1, -2) @ queries, accumulate=True)
        dv_sum.index_put_(chunk.at, weights.transpose(-1, -2) @ dmean, accumulate=True)
    dk.copy_(dk_sum)
    dv.copy_(dv_sum)


def _chunks(
    q: Tensor, k: Tensor, block_ids: Tensor, batch: Batch, max_scratch_bytes: int
) -> Iterator[_Chunk]:
    """Walk the rows in chunks whose gathered keys stay under the bound."""
    heads_kv, topk = block_ids.shape[1:]
    table = batch.block_table
    nothing_stored = k.numel() == 0 or (table is not None and table.numel() == 0)
    if q.numel() == 0 or nothing_stored or batch.num_seqs == 0:
        return
    budget = min(max_scratch_bytes, _CPU_CHUNK_BYTES) if q.is_cpu else max_scratch_bytes
    # Keys, values, logits and their gradients, in float32 or wider.
    row_bytes = 4 * heads_kv * topk * batch.block_size * (2 * k.shape[-1] + 4 * q.shape[1])
    size = max(1, budget // row_bytes)
    seq, position, live = row_positions(batch.cu_seqlens_q, batch.seqused_k, q.shape[0])
    sequence = seq.clamp(max=batch.num_seqs - 1)
    first_key, num_keys = (bound[sequence] for bound in key_bounds(batch, k))
    position = position.minimum(num_keys - 1)
    offsets = torch.arange(batch.block_size, device=q.device)
    heads = torch.arange(heads_kv, device=q.device)[:, None]
    for start in range(0, q.shape[0], size):
        rows = slice(start, min(start + size, q.shape[0]))
        ids = block_ids[rows].long()
        # [C, Hkv, K, N] -> [C, Hkv, K * N]
        keys = (ids[..., None] * batch.block_size + offsets).flatten(2)
        seen = (ids >= 0)[..., None].expand(*ids.shape, batch.block_size).flatten(2)
        seen = seen & (keys <= position[rows, None, None]) & live[rows, None, None]
        keys = keys.where(seen, 0)
        at = sequence[rows, None, None]
        index: tuple[Tensor, ...]
        if batch.layout == PAGED:
            assert table is not None
            pages = table[at, keys // batch.block_size].long().clamp(0, k.shape[0] - 1)
            index = pages.where(seen, 0), heads, keys % batch.block_size
        else:
            tokens = (keys + first_key[rows, None, None]).where(seen, 0)
            index = (tokens, heads) if batch.layout == PACKED else (at, tokens, heads)
        yield _Chunk(rows, index, seen)


def _gather(tensor: Tensor, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
    """``[C, Hkv, K * N, D]``, zero where a key does not take part."""
    return tensor[chunk.at].masked_fill_(~chunk.seen[..., None], 0).to(dtype)


def _logits(q: Tensor, k: Tensor, chunk: _Chunk, softmax_scale: float) -> Tensor:
    """``[C, Hkv, G, K * N]``, -inf where a key does not take part."""
    keys = k[chunk.at].to(torch.promote_types(q.dtype, torch.float32))
    queries = q[chunk.rows].to(keys.dtype).unflatten(1, (keys.shape[1], -1))
    logits = queries @ keys.transpose(-1, -2) * softmax_scale
    return logits.masked_fill_(~chunk.seen[:, :, None], -torch.inf)
