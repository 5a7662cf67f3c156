"""The meaning of ``index_score``, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...batch import PACKED, PAGED, Batch, key_bounds, num_blocks

# Every product has this many rows and keys, so that a dot product's bits do not depend on what
# else is in the batch.
_ROWS, _KEYS = 64, 2048


def index_score_reference(
    index_q: Tensor, index_k: Tensor, batch: Batch, num_splits: int, out: Tensor
) -> None:
    """Fill ``out[t, h, j]`` for every block `j` that row `t` sees; other columns stay."""
    starts = batch.cu_seqlens_q.clamp(0, index_q.shape[0]).tolist()
    first_key, num_keys = key_bounds(batch, index_k)
    seqlens_k = batch.seqused_k.minimum(num_keys).tolist()
    for b, (first_k, seqlen_k) in enumerate(zip(first_key.tolist(), seqlens_k, strict=True)):
        first, last = starts[b], starts[b + 1]
        if first >= last or seqlen_k <= 0:
            continue
        visible = num_blocks(seqlen_k, batch.block_size)
        keys = _sequence_keys(index_k, batch, b, first_k, seqlen_k)
        positions = torch.arange(seqlen_k - (last - first), seqlen_k, device=out.device)
        out[first:last, :, :visible] = _block_scores(
            index_q[first:last], keys, positions, batch.block_size
        )


def _block_scores(q: Tensor, keys: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """``[n, Hi, ceil(S / N)]`` scores of queries ``[n, Hi, Di]`` over keys ``[S, Di]``."""
    num_keys = keys.shape[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(dtype).flatten(0, 1)
    row_tiles = F.pad(rows, (0, 0, 0, -len(rows) % _ROWS)).split(_ROWS)
    key_tiles = F.pad(keys.to(dtype), (0, 0, 0, -num_keys % _KEYS)).split(_KEYS)
    row_positions = positions.repeat_interleave(q.shape[1])
    position_tiles = F.pad(row_positions, (0, -len(rows) % _ROWS)).split(_ROWS)
    blocks = num_blocks(num_keys, block_size)
    scores = []
    for row_tile, position_tile in zip(row_tiles, position_tiles, strict=True):
        # [_ROWS, S]
        dots = torch.cat([row_tile @ key_tile.T for key_tile in key_tiles], 1)[:, :num_keys]
        seen = torch.arange(num_keys, device=q.device) <= position_tile[:, None]
        dots = dots.masked_fill(~seen, -torch.inf)
        padded = F.pad(dots, (0, blocks * block_size - num_keys), value=-torch.inf)
        scores.append(padded.unflatten(1, (blocks, block_size)).amax(2))
    return torch.cat(scores)[: len(rows)].unflatten(0, (len(q), q.shape[1]))


def _sequence_keys(index_k: Tensor, batch: Batch, b: int, first_key: int, seqlen_k: int) -> Tensor:
    """The keys ``[seqlen_k, Di]`` of sequence `b`, in order."""
    if batch.layout == PAGED:
        assert batch.block_table is not None
        pages = batch.block_table[b, : num_blocks(seqlen_k, batch.block_size)]
        pages = pages.long().clamp(0, index_k.shape[0] - 1)
        return index_k[pages].flatten(0, 1)[:seqlen_k]
    keys = index_k if batch.layout == PACKED else index_k[b]
    return keys[first_key : first_key + seqlen_k]
