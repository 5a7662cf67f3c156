"""Row by row results computed apart from every implementation, and comparisons with them.

Plain float32 PyTorch over the keys of a sample of rows, so that a million keys fit. It shares no
code with m3ops.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.cases import Inputs, Step

# Float32 sums of 128 products of about 1, in another order.
SCORE_TOLERANCE = 1e-3
# Outputs rounded to bfloat16, probabilities too: 2**-9 relative each.
ROW_TOLERANCE = 3e-2
RMS_TOLERANCE = 1e-2


class Mismatch(Exception):
    """A result that is not the reference's, so that its time means nothing."""


def sample_rows(inputs: Inputs, count: int) -> Tensor:
    """Rows to check: both ends, rows on either side of a block edge, and random ones."""
    total = inputs.case.total_q
    if total <= count:
        return torch.arange(total, device=inputs.device)
    edge = inputs.shape.block_size
    fixed = {0, 1, edge - 1, edge, inputs.case.query_len - 1, total - 1}
    generator = torch.Generator().manual_seed(inputs.seed)
    fixed |= set(torch.randint(total, (count,), generator=generator).tolist()[: count - len(fixed)])
    return torch.tensor(sorted(row for row in fixed if row < total), device=inputs.device)


def last_rows(inputs: Inputs, count: int) -> Tensor:
    """The last token of some sequences."""
    ends = inputs.cu_seqlens_q[1:].long() - 1
    return ends[:: max(1, len(ends) // count)][:count]


def score_rows(inputs: Inputs, step: Step, rows: Tensor) -> Tensor:
    """Block scores ``[R, Hi, blocks]`` of some rows, -inf where nothing is visible."""
    scores = []
    for sequence, members in _by_sequence(inputs, rows):
        pages = step.block_table[sequence, : inputs.num_blocks].long()
        keys = inputs.index_k[pages].flatten(0, 1).float()
        products = step.index_q[members].float() @ keys.T
        hidden = torch.arange(len(keys), device=rows.device) > inputs.positions[members][:, None]
        products.masked_fill_(hidden[:, None], -math.inf)
        scores.append(products.unflatten(-1, (inputs.num_blocks, -1)).amax(-1))
    return torch.cat(scores)


def attend_rows(inputs: Inputs, step: Step, rows: Tensor, ids: Tensor) -> Tensor:
    """Outputs float32 ``[R, Hq, D]`` of some rows over the blocks `ids` ``[R, Hkv, K]``."""
    shape = inputs.shape
    outputs = []
    for row, blocks in zip(rows.split(16), ids.long().split(16), strict=True):
        live = blocks >= 0
        tables = step.block_table[row // inputs.case.query_len].long()
        pages = tables.gather(1, blocks.clamp(min=0).flatten(1)).view_as(blocks)
        heads = torch.arange(shape.num_kv_heads, device=row.device)[:, None]
        k = inputs.k[pages, heads].flatten(2, 3).float()
        v = inputs.v[pages, heads].flatten(2, 3).float()
        token = blocks[..., None] * shape.block_size
        token = token + torch.arange(shape.block_size, device=row.device)
        visible = live[..., None] & (token <= inputs.positions[row][:, None, None, None])
        outputs.append(_attend(step.q[row], k, v, visible.flatten(2)))
    return torch.cat(outputs)


def dense_rows(inputs: Inputs, step: Step, rows: Tensor) -> Tensor:
    """Outputs float32 ``[R, Hq, D]`` of some rows over all visible keys."""
    outputs = []
    for row in rows:
        pages = step.block_table[row // inputs.case.query_len, : inputs.num_blocks].long()
        visible = torch.arange(inputs.case.seq_len, device=row.device) <= inputs.positions[row]
        group = inputs.shape.group
        heads = []
        for head in range(inputs.shape.num_kv_heads):
            k, v = (
                cache[pages, head].flatten(0, 1)[: inputs.case.seq_len].float()[None, None]
                for cache in (inputs.k, inputs.v)
            )
            q = step.q[row, head * group : (head + 1) * group][None]
            heads.append(_attend(q, k, v, visible[None, None]))
        outputs.append(torch.cat(heads, dim=1))
    return torch.cat(outputs)


def check_scores(got: Tensor, want: Tensor, ignored: Tensor | None = None) -> None:
    """Compare sampled score rows ``[R, Hi, NB]`` on the visible columns that are not `ignored`."""
    columns = want.shape[-1]
    compared = want > -math.inf
    if ignored is not None:
        compared &= ~ignored
    error = torch.where(compared, (got[..., :columns] - want).abs(), 0.0).max().item()
    if not error <= SCORE_TOLERANCE:
        raise Mismatch(f"scores differ by {error:.3g}")


def check_ids(
    ids: Tensor, scores: Tensor, num_valid: Tensor, tolerance: float, ascending: bool
) -> None:
    """Check sampled selections ``[R, Hi, K]`` against block scores.

    Args:
        scores: ``[R, Hi, blocks]``, -inf where nothing is visible.
        num_valid: ``[R]``, visible blocks.
        tolerance: how far apart two scores may lie and still swap places.
        ascending: whether ids must be sorted with every -1 last.
    """
    topk, columns = ids.shape[-1], scores.shape[-1]
    ids = ids.long()
    live = ids >= 0
    wanted = num_valid.clamp(max=topk)[:, None]
    if not bool((live.sum(-1) == wanted).all()):
        raise Mismatch("a row has too few or too many ids")
    if not bool((ids < num_valid[:, None, None]).all()):
        raise Mismatch("an id lies past the visible blocks")
    if ascending and not bool(((ids[..., 1:] > ids[..., :-1]) | ~live[..., 1:]).all()):
        raise Mismatch("ids are not ascending")
    chosen = torch.zeros(*scores.shape[:2], columns + 1, dtype=torch.bool, device=ids.device)
    chosen.scatter_(-1, torch.where(live, ids, columns), True)
    chosen = chosen[..., :columns]
    if not bool((chosen.sum(-1) == wanted).all()):
        raise Mismatch("a row repeats an id")
    own = (torch.arange(columns, device=ids.device) == num_valid[:, None] - 1)[:, None]
    if not bool((chosen & own).any(-1).all()):
        raise Mismatch("a row lacks its own block")
    ranked = scores.masked_fill(own, math.inf)
    place = (wanted - 1).clamp(min=0)[..., None].expand(*ids.shape[:2], 1)
    last = ranked.sort(dim=-1, descending=True).values.gather(-1, place)
    wrong = chosen & (ranked < last - tolerance) | ~chosen & (ranked > last + tolerance)
    bad = wrong.any(-1)
    if bool(bad.any()):
        raise Mismatch(f"{int(bad.sum())} of {bad.numel()} selections are wrong")


def check_outputs(got: Tensor, want: Tensor) -> None:
    """Compare sampled outputs ``[R, Hq, D]``."""
    if not bool(got.isfinite().all()):
        raise Mismatch("outputs are not finite")
    error = (got.float() - want).norm(dim=-1)
    size = want.norm(dim=-1)
    row = (error / size).max().item()
    rms = (error.norm() / size.norm()).item()
    if not (row <= ROW_TOLERANCE and rms <= RMS_TOLERANCE):
        raise Mismatch(f"outputs differ by {row:.3g} (one head's row), {rms:.3g} (RMS), relative")


def own_blocks(scores: Tensor, num_valid: Tensor) -> Tensor:
    """Which columns of sampled score rows are a row's own block."""
    columns = torch.arange(scores.shape[-1], device=scores.device)
    return (columns == num_valid[:, None] - 1)[:, None].expand_as(scores)


def _by_sequence(inputs: Inputs, rows: Tensor) -> list[tuple[int, Tensor]]:
    sequence = rows // inputs.case.query_len
    return [(int(b), rows[sequence == b]) for b in sequence.unique()]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention of q ``[R, H * G, D]`` over k, v ``[R, H, S, D]``, in float32."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    logits = grouped @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    logits.masked_fill_(~visible[..., None, :], -math.inf)
    return (logits.softmax(-1) @ v).flatten(1, 2)
