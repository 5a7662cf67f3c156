"""One MiniMax-M3 attention layer over one sequence, with a dense mask and nothing else.

Written from the definition (arXiv 2606.13392) for one sequence, without cache, pages or packing,
and sharing no code with m3ops. In float64 it is what the quickstart compares with; in the layer's
own dtype it shows how far rounding alone takes a plain implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Sizes of the layer; the defaults are MiniMax-M3's."""

    heads_q: int = 64
    heads_kv: int = 4
    head_dim: int = 128
    rotary_dim: int = 64
    rope_theta: float = 5e6
    norm_eps: float = 1e-6
    block_size: int = 128
    topk: int = 16


class Keys(NamedTuple):
    """Keys of the whole sequence: `k`, `v` ``[Hkv, S, D]`` and `index_k` ``[S, Di]``."""

    k: Tensor
    v: Tensor
    index_k: Tensor


class DenseLayer:
    """The layer in one dtype.

    Args:
        weights: parameters by the names of transformers' ``MiniMaxM3VLAttention``.
        hidden: ``[S, hidden]``, the inputs of all tokens of the sequence.
        dtype: of every product; norms, angles, scores and softmax are in float32 or wider.
        geometry: sizes of the layer.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        hidden: Tensor,
        dtype: torch.dtype,
        geometry: Geometry,
    ) -> None:
        self.geometry = geometry
        self.wide = torch.promote_types(dtype, torch.float32)
        self.weights = {name: weight.detach().to(dtype) for name, weight in weights.items()}
        self.hidden = hidden.to(dtype)
        self.cos, self.sin = self._rotation(dtype)
        everything = slice(0, len(hidden))
        self.keys = Keys(
            k=self._heads("k_proj", "k_norm", everything),
            v=self._heads("v_proj", None, everything),
            index_k=self._heads("indexer.k_proj", "indexer.k_norm", everything)[0],
        )

    def block_scores(self, rows: slice) -> Tensor:
        """``[C, Hi, NB]``: largest visible dot product of each block, -inf for unseen blocks."""
        size = self.geometry.block_size
        queries = self._heads("indexer.q_proj", "indexer.q_norm", rows).to(self.wide)
        dots = queries @ self.keys.index_k[: rows.stop].to(self.wide).T
        dots.masked_fill_(_future(rows, dots.device), -torch.inf)
        blocks = dots.split(size, dim=-1)
        return torch.stack([block.amax(-1) for block in blocks], -1).transpose(0, 1)

    def attend(self, rows: slice, block_ids: Tensor) -> Tensor:
        """``[C, hidden]``: the layer's outputs if every row keeps `block_ids` ``[C, Hkv, K]``."""
        queries = self._heads("q_proj", "q_norm", rows)
        hidden_keys = ~keys_kept(block_ids, rows, self.geometry.block_size)
        groups = queries.split(self.geometry.heads_q // self.geometry.heads_kv)
        outputs = [
            self._attend_group(group_queries, group, hidden_keys[:, group])
            for group, group_queries in enumerate(groups)
        ]
        # [Hq, C, D] -> [C, Hq * D]
        joined = torch.cat(outputs).transpose(0, 1).flatten(1)
        return joined @ self.weights["o_proj.weight"].T

    def _attend_group(self, queries: Tensor, group: int, hidden_keys: Tensor) -> Tensor:
        k, v = (lane[group, : hidden_keys.shape[-1]] for lane in (self.keys.k, self.keys.v))
        # One product over heads and rows: [G * C, S]
        logits = (queries.flatten(0, 1) @ k.T).to(self.wide) * self.geometry.head_dim**-0.5
        logits.unflatten(0, queries.shape[:2]).masked_fill_(hidden_keys, -torch.inf)
        return (logits.softmax(-1).to(v.dtype) @ v).unflatten(0, queries.shape[:2])

    def _heads(self, projection: str, norm: str | None, rows: slice) -> Tensor:
        """``[H, C, D]``: the projected `rows`, normalised and rotated if there is a norm."""
        flat = self.hidden[rows] @ self.weights[f"{projection}.weight"].T
        heads = flat.unflatten(1, (-1, self.geometry.head_dim)).transpose(0, 1)
        if norm is None:
            return heads
        wide = heads.to(self.wide)
        mean_square = wide.square().mean(-1, keepdim=True)
        wide = wide / (mean_square + self.geometry.norm_eps).sqrt()
        normed = wide * (1 + self.weights[f"{norm}.weight"].to(self.wide))
        return self._rotate(normed.to(heads.dtype), rows)

    def _rotate(self, heads: Tensor, rows: slice) -> Tensor:
        half = self.geometry.rotary_dim // 2
        cos, sin = self.cos[rows], self.sin[rows]
        left, right, rest = heads.split([half, half, heads.shape[-1] - 2 * half], -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], -1)

    def _rotation(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dim, device = self.geometry.rotary_dim, self.hidden.device
        exponents = torch.arange(0, dim, 2, dtype=self.wide, device=device) / dim
        positions = torch.arange(len(self.hidden), dtype=self.wide, device=device)
        angles = positions[:, None] * self.geometry.rope_theta**-exponents
        return angles.cos().to(dtype), angles.sin().to(dtype)


def force_own_block(scores: Tensor, rows: slice, block_size: int) -> Tensor:
    """`scores` ``[C, Hi, NB]`` with +inf at each row's own block."""
    own = torch.arange(rows.start, rows.stop, device=scores.device) // block_size
    return scores.scatter(2, own[:, None, None].expand(*scores.shape[:2], 1), torch.inf)


def best_blocks(scores: Tensor, topk: int) -> Tensor:
    """Ids ``[C, Hi, topk]`` of the best scores above -inf, low id first: ascending, then -1."""
    order = scores.sort(dim=2, descending=True, stable=True)
    best = order.indices[..., :topk].masked_fill(order.values[..., :topk] == -torch.inf, -1)
    kept = blocks_kept(best, scores.shape[2])
    return listed(kept, topk)


def listed(kept: Tensor, topk: int) -> Tensor:
    """Ids ``[C, Hkv, topk]`` of the blocks in `kept` ``[C, Hkv, NB]``: ascending, then -1."""
    never = max(kept.shape[2], topk)
    ids = torch.arange(never, device=kept.device).expand(*kept.shape[:2], never)
    outside = torch.nn.functional.pad(~kept, (0, never - kept.shape[2]), value=True)
    ids = ids.masked_fill(outside, never).sort(dim=2).values[..., :topk]
    return ids.masked_fill(ids == never, -1)


def blocks_kept(block_ids: Tensor, num_blocks: int) -> Tensor:
    """Bool ``[C, Hkv, num_blocks]``; ids outside ``0 .. num_blocks - 1`` count for nothing."""
    ids = block_ids.long()
    ids = ids.masked_fill((ids < 0) | (ids >= num_blocks), num_blocks)
    kept = torch.zeros(*ids.shape[:2], num_blocks + 1, dtype=torch.bool, device=ids.device)
    return kept.scatter_(2, ids, True)[..., :num_blocks]


def keys_kept(block_ids: Tensor, rows: slice, block_size: int) -> Tensor:
    """Bool ``[C, Hkv, rows.stop]``: the keys of the listed blocks that each row sees."""
    kept = blocks_kept(block_ids, -(-rows.stop // block_size))
    keys = kept.repeat_interleave(block_size, dim=2)[..., : rows.stop]
    return keys & ~_future(rows, keys.device)[:, None]


def row_chunks(total: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` rows."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def selection_gap(block_ids: Tensor, scores: Tensor) -> Tensor:
    """By how much the blocks left out beat those kept, ``[C, Hi]``.

    0 where `block_ids` ``[C, Hi, K]`` are the best by `scores`, to the id; a positive difference of
    two scores where they are not; inf where a row's ids are not ascending, distinct, visible and
    as many as they should be, or lack a block whose score is inf.
    """
    num_blocks, topk = scores.shape[2], block_ids.shape[2]
    best = best_blocks(scores, topk)
    kept, kept_best = blocks_kept(block_ids, num_blocks), blocks_kept(best, num_blocks)
    missed = scores.masked_fill(~kept_best | kept, -torch.inf).amax(2)
    worst = scores.masked_fill(~kept | kept_best, torch.inf).amin(2)
    malformed = (block_ids != listed(kept, topk)).any(2) | (kept.sum(2) != kept_best.sum(2))
    # Two blocks whose scores are equal to the bit have one right order as well.
    gap = (missed - worst).clamp(min=torch.finfo(scores.dtype).tiny)
    gap = gap.masked_fill((block_ids == best).all(2), 0)
    return gap.masked_fill(malformed, torch.inf)


def _future(rows: slice, device: torch.device) -> Tensor:
    """Bool ``[C, rows.stop]``: keys that come after the row."""
    keys = torch.arange(rows.stop, device=device)
    return keys > keys[rows, None]
