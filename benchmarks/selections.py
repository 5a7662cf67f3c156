"""Block selections with a chosen overlap between neighbouring tokens.

Random ids are the worst case of an attend kernel that shares reads between tokens, and equal ids
the best; a served model lies between. Here selections drift: a token keeps each of its
predecessor's non-local blocks with probability ``r`` and redraws the rest from the visible ones.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

# Mean union of four consecutive tokens over the blocks of one: four tokens of a served
# MiniMax-M3 select 22 different blocks of 64 possible.
TARGET_UNION = {"real": 22 / 16, "high": 17 / 16}
WINDOW = 4


def expected_union(num_others: np.ndarray, r: float, topk: int, block_size: int) -> float:
    """Mean union of `WINDOW` consecutive drifting selections, exactly.

    Args:
        num_others: visible non-local blocks of each window; all at least ``topk - 1``.
        r: probability that a block is kept.
        topk: blocks of a selection, the local one included.
        block_size: tokens of a block.
    """
    slots = topk - 1
    n = num_others.astype(np.float64)
    kept = np.arange(slots + 1)
    # Binomial(slots, r); a block outside one selection stays outside the next with
    # probability (n - slots) / (n - kept).
    log_choose = np.array([_log_choose(slots, int(x)) for x in kept])
    with np.errstate(divide="ignore", invalid="ignore"):
        log_p = kept * np.log(r) + (slots - kept) * np.log1p(-r)
    log_p = np.where(np.isnan(log_p), 0.0, log_p)
    p_kept = np.exp(log_choose + log_p)
    left = np.maximum(n[:, None] - kept, 1)
    stays_out = (p_kept * (n[:, None] - slots) / left).sum(axis=1)
    outside = (1 - slots / n) * stays_out ** (WINDOW - 1)
    local = 1 + (WINDOW - 1) / block_size
    return float((local + n * (1 - outside)).mean())


def _log_choose(n: int, k: int) -> float:
    return float(np.log(np.arange(k + 1, n + 1)).sum() - np.log(np.arange(1, n - k + 1)).sum())


def calibrate_r(num_others: np.ndarray, target: float, topk: int, block_size: int) -> float:
    """The ``r`` whose expected union is `target`, by bisection; 0 where nothing is wide enough."""
    low, high = 0.0, 1.0
    if expected_union(num_others, low, topk, block_size) <= target:
        return low
    for _ in range(40):
        middle = (low + high) / 2
        if expected_union(num_others, middle, topk, block_size) > target:
            low = middle
        else:
            high = middle
    return high


def windows_with_choice(query_len: int, seq_len: int, topk: int, block_size: int) -> np.ndarray:
    """Visible non-local blocks at the start of every window that sees more than `topk` blocks."""
    starts = np.arange(max(query_len - WINDOW + 1, 0)) + seq_len - query_len
    others = starts // block_size
    return others[others >= topk]


def drifting_ids(
    query_len: int, seq_len: int, heads: int, topk: int, block_size: int, r: float, seed: int
) -> np.ndarray:
    """Ids int32 ``[query_len, heads, topk]`` of one sequence, ascending, -1 behind the last."""
    rng = np.random.default_rng(seed)
    own = (np.arange(query_len) + seq_len - query_len) // block_size
    ids = np.full((query_len, heads, topk), -1, np.int32)
    everything = np.arange(topk)
    few = own < topk
    ids[few] = np.where(everything <= own[few, None], everything, -1)[:, None, :]
    first = int(few.sum())
    if first < query_len:
        for head in range(heads):
            ids[first:, head, :-1] = _drift(own[first:], topk - 1, r, rng)
        ids[first:, :, -1] = own[first:, None]
        ids[first:] = np.sort(ids[first:], axis=-1)
    return ids


def _drift(own: np.ndarray, slots: int, r: float, rng: np.random.Generator) -> np.ndarray:
    """One head's non-local blocks ``[tokens, slots]``: a loop over redraws, not over tokens."""
    redraw = rng.random((len(own), slots)) >= r
    redraw[0] = True
    token, slot = (index.tolist() for index in np.nonzero(redraw))
    uniform = rng.random(len(token)).tolist()
    redo = random.Random(int(rng.integers(2**63))).random
    drawn = [0] * len(token)
    held = [-1] * slots
    taken: set[int] = set()
    visible = own.tolist()
    start = 0
    while start < len(token):
        end = start
        while end < len(token) and token[end] == token[start]:
            taken.discard(held[slot[end]])
            end += 1
        count = visible[token[start]]
        for event in range(start, end):
            block = int(uniform[event] * count)
            while block in taken:
                block = int(redo() * count)
            taken.add(block)
            held[slot[event]] = block
            drawn[event] = block
        start = end
    last_event = np.zeros(redraw.shape, np.int64)
    last_event[redraw] = np.arange(len(token))
    np.maximum.accumulate(last_event, axis=0, out=last_event)
    return np.asarray(drawn, np.int32)[last_event]


def random_ids(own: Tensor, heads: int, topk: int, generator: torch.Generator) -> Tensor:
    """Independent uniform selections int32 ``[T, heads, topk]`` for local blocks `own` ``[T]``."""
    width = max(int(own.max()) + 1, topk)
    columns = torch.arange(width, device=own.device)
    rows_at_once = max(1, 2**26 // (heads * width))
    parts = []
    for part in own.split(rows_at_once):
        keys = torch.rand(len(part), heads, width, device=own.device, generator=generator)
        beyond = columns - part[:, None, None]
        keys.masked_fill_(beyond == 0, 2.0).masked_fill_(beyond > 0, -1.0)
        best, ids = keys.topk(topk)
        ids = ids.masked_fill(best < 0, width).sort().values
        parts.append(ids.masked_fill(ids == width, -1).int())
    return torch.cat(parts)


def mean_union(ids: Tensor, num_valid: Tensor, query_len: int) -> tuple[float, float]:
    """Mean blocks in the union of `WINDOW` consecutive tokens, over every start.

    Args:
        ids: ``[T, H, K]``, sequences of `query_len` tokens each.
        num_valid: ``[T]``, visible blocks.

    Returns:
        The mean over windows whose first token sees more than K blocks (NaN if there is none),
        and over all windows.
    """
    topk = ids.shape[-1]
    if query_len < WINDOW:
        return float("nan"), float("nan")
    windows = ids.unflatten(0, (-1, query_len)).unfold(1, WINDOW, 1).flatten(-2)
    first_valid = num_valid.unflatten(0, (-1, query_len))[:, : windows.shape[1]]
    counts = []
    for part in windows.split(16384, dim=1):
        ordered = part.sort(dim=-1).values
        new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        counts.append(new.sum(-1) + (ordered[..., 0] >= 0))
    count = torch.cat(counts, dim=1).double().mean(-1)
    return float(count[first_valid > topk].mean()), float(count.mean())


def drifting_queries(
    total: int, heads: int, dim: int, rho: float, generator: torch.Generator
) -> Tensor:
    """Index queries float32 ``[total, heads, dim]`` whose neighbours correlate by `rho`.

    ``x[t] = rho * x[t - 1] + sqrt(1 - rho**2) * noise[t]``, so that selections made from real
    scores drift too.
    """
    device = generator.device
    noise = torch.randn(total, heads * dim, device=device, generator=generator)
    if rho > 0:
        carry = torch.randn(heads * dim, device=device, generator=generator)
        step = min(256, total)
        power = torch.arange(step, device=device, dtype=torch.float64)
        decay = rho ** (power[:, None] - power).clamp(min=0)
        mix = (decay.tril() * (1 - rho**2) ** 0.5).float()
        fade = (rho ** (power + 1)).float()
        for part in noise.split(step):
            n = len(part)
            part.copy_(mix[:n, :n] @ part + fade[:n, None] * carry)
            carry = part[-1].clone()
    return noise.unflatten(1, (heads, dim))
