"""Inputs, float64 oracles and error budgets for testing a backend.

A test draws the *logical* contents of some sequences, lays them out as one packed batch among
garbage, runs an op, and compares with an oracle that reads the logical contents in a plain loop::

    inputs = make_inputs([(513, 1), (300, 100)], layout="paged", dtype=torch.bfloat16)
    ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=2)
    assert_block_ids(ids, inputs, topk=2)
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True
    )
    assert_attention(out, lse, inputs, ids)

The oracles share no code with the reference. The budget of an output is the error that the same
computation makes in the dtype under test, times a small factor, plus rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("paged", "packed", "batched")

# What a backend must not read: table entries past a sequence's end, ids in an unwritten buffer.
GARBAGE_INTS = (2**31 - 1, -1, -(2**31), 2**30)

# Every kind of sequence at block size 16, as `(seqused_k, new)`: decode, its block just full,
# decode without a key, speculative rows, a chunk, rows before the first key, nothing, a prompt.
MIXED = ((70, 1), (16, 1), (0, 1), (33, 3), (40, 6), (1, 2), (0, 0), (5, 5))


@dataclass(frozen=True)
class Geometry:
    """Sizes of the heads, defaulting to something small.

    Attributes:
        heads_q: ``Hq``.
        heads_kv: ``Hkv``, and ``Hi``.
        dim: ``D``.
        index_dim: ``Di``.
        block_size: ``N``.
    """

    heads_q: int = 4
    heads_kv: int = 2
    dim: int = 32
    index_dim: int = 16
    block_size: int = 16


# MiniMax-M3's sparse layers.
M3 = Geometry(heads_q=64, heads_kv=4, dim=128, index_dim=128, block_size=128)


@dataclass(frozen=True)
class SequenceData:
    """The logical contents of one sequence, wherever its keys are stored.

    Query ``i`` of ``n`` stands at position ``S - n + i`` of its ``S`` keys.

    Attributes:
        q: ``[n, Hq, D]``.
        index_q: ``[n, Hi, Di]``.
        k: ``[S, Hkv, D]``.
        v: ``[S, Hkv, D]``.
        index_k: ``[S, Di]``.
    """

    q: Tensor
    index_q: Tensor
    k: Tensor
    v: Tensor
    index_k: Tensor


@dataclass(frozen=True)
class Inputs:
    """One batch as the ops take it, beside the logical contents that it was laid out from.

    Attributes:
        sequences: the logical contents.
        q, index_q: queries of the packed batch, padding rows included.
        k, v, index_k: keys in the batch's layout.
        batch: keyword arguments of the public functions.
        block_size: ``N``.
        slots: for every sequence int64 ``[S]``, where its keys are: ``page * N + offset``, a row
            of the packed keys, or ``b * size + offset`` of the batched ones.
    """

    sequences: list[SequenceData]
    q: Tensor
    index_q: Tensor
    k: Tensor
    v: Tensor
    index_k: Tensor
    batch: dict[str, Any]
    block_size: int
    slots: list[Tensor]

    @property
    def total_q(self) -> int:
        """``T``, padding included."""
        return self.q.shape[0]

    @property
    def layout(self) -> str:
        if "block_table" in self.batch:
            return "paged"
        return "packed" if "cu_seqlens_k" in self.batch else "batched"

    def rows(self) -> Iterator[tuple[SequenceData, int, int]]:
        """Sequence, its query and the position of every row but the padding."""
        for sequence in self.sequences:
            num_queries, num_keys = len(sequence.q), len(sequence.k)
            for i in range(num_queries):
                yield sequence, i, num_keys - num_queries + i

    def visible_blocks(self) -> list[int]:
        """Blocks that each row sees, 0 in padding; a loop over the contract's definition."""
        visible = [
            position // self.block_size + 1 if position >= 0 else 0
            for _, _, position in self.rows()
        ]
        return visible + [0] * (self.total_q - len(visible))

    def num_valid_blocks(self) -> Tensor:
        """:meth:`visible_blocks` as int32 ``[T]``."""
        return torch.tensor(self.visible_blocks(), dtype=torch.int32, device=self.q.device)

    def solo(self, b: int, **options: Any) -> Inputs:
        """Sequence `b` as a batch of its own, in this batch's layout."""
        options = {"layout": self.layout, "block_size": self.block_size, **options}
        return lay_out([self.sequences[b]], **options)

    def span(self, b: int) -> slice:
        """The rows of sequence `b`."""
        first = sum(len(sequence.q) for sequence in self.sequences[:b])
        return slice(first, first + len(self.sequences[b].q))

    def unstore(self, keys: Tensor, b: int) -> Tensor:
        """Rows ``[S, ...]`` of sequence `b` in a tensor shaped like `k`, `v` or `index_k`."""
        return _slots_first(keys, self.layout, keys.ndim - _storage_axes(self.layout) == 2)[
            self.slots[b]
        ]


def random_sequences(
    lengths: Sequence[tuple[int, int]],
    geometry: Geometry = Geometry(),
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[SequenceData]:
    """Draw sequences from the standard normal distribution, in the dtype under test.

    Args:
        lengths: ``(seqused_k, new)`` of each sequence: its keys and how many of its tokens are
            queries. ``(n, n)`` is a prompt, ``(n, 1)`` a decode step, ``(0, 0)`` nothing.
        geometry: sizes of the heads.
        dtype, device: of every tensor.
    """

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    g = geometry
    return [
        SequenceData(
            q=draw(new, g.heads_q, g.dim),
            index_q=draw(new, g.heads_kv, g.index_dim),
            k=draw(seqlen, g.heads_kv, g.dim),
            v=draw(seqlen, g.heads_kv, g.dim),
            index_k=draw(seqlen, g.index_dim),
        )
        for seqlen, new in lengths
    ]


def make_inputs(
    lengths: Sequence[tuple[int, int]],
    geometry: Geometry = Geometry(),
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Inputs:
    """:func:`random_sequences`, then :func:`lay_out` with the other options."""
    sequences = random_sequences(lengths, geometry, dtype=dtype, device=device)
    return lay_out(sequences, block_size=geometry.block_size, **options)


def lay_out(
    sequences: Sequence[SequenceData],
    *,
    layout: str = "paged",
    block_size: int = 16,
    padding_rows: int = 0,
    extra_blocks: int = 2,
    num_decode_seqs: int | None = None,
    host_bounds: bool = False,
    leftpad: bool = True,
    strides: str = "contiguous",
    poison: float = math.nan,
    seed: int = 0,
) -> Inputs:
    """Store sequences as one packed batch whose unused places hold garbage.

    Args:
        sequences: at least one, for the sizes of the heads.
        layout: ``"paged"``, ``"packed"`` or ``"batched"``.
        block_size: ``N``.
        padding_rows: rows after the last sequence.
        extra_blocks: block columns, and pages nobody owns, beyond what the sequences need.
        num_decode_seqs: how many leading sequences to name as decode sequences; None for no name.
        host_bounds: pass ``max_seqlen_q`` and ``max_seqlen_k``, exact ones.
        leftpad: for batched keys, whether sequences start at slots of their own.
        strides: a kind that :func:`restride` knows, applied to queries and keys, or
            ``"interleaved"`` for keys and values that are halves of one cache row.
        poison: what unused slots and padding rows hold.
        seed: decides the order of pages, the starts of sequences and the garbage integers.
    """
    rng = random.Random(seed)
    template = sequences[0]
    device = template.q.device
    lengths = [len(sequence.k) for sequence in sequences]
    blocks = [-(-length // block_size) for length in lengths]

    def int32(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch: dict[str, Any] = {
        "cu_seqlens_q": int32(_cumulated(len(sequence.q) for sequence in sequences)),
        "seqused_k": int32(lengths),
    }
    if layout == "paged":
        num_pages = sum(blocks) + extra_blocks
        order = rng.sample(range(num_pages), num_pages)
        table = []
        for count in blocks:
            owned = [order.pop() for _ in range(count)]
            past = max(blocks) + extra_blocks - count
            table.append(owned + [rng.choice(GARBAGE_INTS) for _ in range(past)])
        size: tuple[int, ...] = (num_pages, block_size)
        batch["block_table"] = int32(table).reshape(len(sequences), max(blocks) + extra_blocks)
        starts = [[page * block_size for page in row] for row in table]
    elif layout == "packed":
        gaps = [rng.randrange(1, 2 * block_size) for _ in range(len(sequences) + 1)]
        offsets = _cumulated(length + gap for length, gap in zip(lengths, gaps[1:], strict=True))
        size = (offsets[-1],)
        batch["cu_seqlens_k"] = int32(offsets)
        starts = [
            [first + j * block_size for j in range(count)]
            for first, count in zip(offsets[:-1], blocks, strict=True)
        ]
    elif layout == "batched":
        pads = [rng.randrange(1, 2 * block_size) if leftpad else 0 for _ in sequences]
        size = (len(sequences), max(lengths) + max(pads) + extra_blocks * block_size)
        if leftpad:
            batch["leftpad_k"] = int32(pads)
        starts = [
            [b * size[1] + pad + j * block_size for j in range(count)]
            for b, (pad, count) in enumerate(zip(pads, blocks, strict=True))
        ]
    else:
        raise ValueError(f"`layout` must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    offsets_in_block = torch.arange(block_size, device=device)
    slots = [
        (
            torch.tensor(row[:count], dtype=torch.int64, device=device)[:, None] + offsets_in_block
        ).flatten()[:length]
        for row, count, length in zip(starts, blocks, lengths, strict=True)
    ]
    if num_decode_seqs is not None:
        batch["num_decode_seqs"] = num_decode_seqs
        batch["num_decode_tokens"] = sum(len(s.q) for s in sequences[:num_decode_seqs])
    if host_bounds:
        batch["max_seqlen_q"] = max(len(sequence.q) for sequence in sequences)
        batch["max_seqlen_k"] = max(lengths)
    batch["block_size"] = block_size

    def pack(tensors: list[Tensor]) -> Tensor:
        padding = tensors[0].new_full((padding_rows, *tensors[0].shape[1:]), poison)
        return torch.cat([*tensors, padding])

    def store(tensors: list[Tensor]) -> Tensor:
        """Slots first, then the axes of one token; heads go before the page's slots at the end."""
        flat = tensors[0].new_full((math.prod(size), *tensors[0].shape[1:]), poison)
        for slot, tensor in zip(slots, tensors, strict=True):
            flat[slot] = tensor
        stored = flat.unflatten(0, size)
        if layout == "paged" and stored.ndim == 4:
            stored = stored.transpose(1, 2).contiguous()
        return stored

    q, index_q = pack([s.q for s in sequences]), pack([s.index_q for s in sequences])
    k, v = store([s.k for s in sequences]), store([s.v for s in sequences])
    index_k = store([s.index_k for s in sequences])
    if strides == "interleaved":
        k, v = interleave(k, v)
        index_k = interleave(index_k, torch.full_like(index_k, poison))[0]
    elif strides != "contiguous":
        q, index_q, k, v, index_k = (
            restride(tensor, strides, poison) for tensor in (q, index_q, k, v, index_k)
        )
    return Inputs(list(sequences), q, index_q, k, v, index_k, batch, block_size, slots)


def restride(tensor: Tensor, kind: str, poison: float = math.nan) -> Tensor:
    """The same values behind other strides, the last one still 1.

    Args:
        tensor: at least two axes.
        kind: ``"sliced"``: every row is the inside of a longer row. ``"transposed"``: the two
            first axes are swapped in memory; a tensor of two axes is sliced instead. A dense
            permutation.
        poison: what lies between the rows.
    """
    if kind == "transposed" and tensor.ndim > 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if kind not in ("sliced", "transposed"):
        raise ValueError(f"`kind` must be sliced or transposed, got {kind!r}")
    *axes, last = tensor.shape
    wide = tensor.new_full((*axes[:-1], axes[-1] + 1, last + 16), poison)
    twin = wide[..., : axes[-1], 8 : 8 + last]
    twin.copy_(tensor)
    return twin


def interleave(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as the two halves of every row of one tensor."""
    both = torch.cat([k, v], -1)
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


def score_oracle(
    inputs: Inputs, *, rows: Iterable[int] | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Block scores by their definition, block after block.

    Args:
        inputs: the batch; only its logical contents are read.
        rows: the rows to compute; None for all.
        dtype: to compute in.

    Returns:
        ``[len(rows), Hi, NB]``, NaN where a score is unspecified.
    """
    size = inputs.block_size
    columns = max([1, *(-(-len(s.k) // size) for s in inputs.sequences)])
    table = list(inputs.rows())
    chosen = list(range(inputs.total_q) if rows is None else rows)
    heads = inputs.index_q.shape[1]
    scores = inputs.index_q.new_full((len(chosen), heads, columns), math.nan, dtype=dtype)
    for scored, row in zip(scores, chosen, strict=True):
        if row >= len(table) or table[row][2] < 0:
            continue
        sequence, i, position = table[row]
        dots = sequence.index_q[i].to(dtype) @ sequence.index_k[: position + 1].to(dtype).T
        for j in range(position // size + 1):
            scored[:, j] = dots[:, j * size : (j + 1) * size].amax(1)
    return scores


def select_oracle(
    scores: Sequence[float], visible: int, topk: int, init_blocks: int, local_blocks: int
) -> list[int]:
    """The ids of one row, by sorting its visible blocks.

    Args:
        scores: at least `visible` of them.
        visible: blocks the row sees.
        topk, init_blocks, local_blocks: as in :func:`m3ops.topk_select`.

    Returns:
        ``topk`` ids, ascending, then -1.
    """

    def order(j: int) -> tuple[bool, float, int]:
        forced = j < init_blocks or j >= visible - local_blocks
        score = -math.inf if math.isnan(scores[j]) else scores[j]
        return not forced, -score, j

    kept = sorted(sorted(range(visible), key=order)[:topk])
    return kept + [-1] * (topk - len(kept))


def attention_oracle(
    inputs: Inputs,
    block_ids: Tensor,
    *,
    softmax_scale: float | None = None,
    rows: Iterable[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, row after row, in float64.

    Args:
        inputs: the batch; only its logical contents are read. The result is differentiable in
            those of them that require grad.
        block_ids: ``[T, Hkv, K]``.
        softmax_scale: None for ``D ** -0.5``.
        rows: the rows to compute; None for all.

    Returns:
        ``out [len(rows), Hq, D]`` and ``lse [len(rows), Hq]``; 0 and -inf where a row attends to
        nothing.
    """
    return _attend(inputs, block_ids, softmax_scale, rows, torch.float64, None)


def attention_eager(
    inputs: Inputs,
    block_ids: Tensor,
    *,
    softmax_scale: float | None = None,
    rows: Iterable[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The same loop as kernels run it: float32, with weights and output in the inputs' dtype."""
    low = inputs.q.dtype
    wide = torch.promote_types(low, torch.float32)
    out, lse = _attend(inputs, block_ids, softmax_scale, rows, wide, low)
    return out.to(low), lse


def _attend(
    inputs: Inputs,
    block_ids: Tensor,
    softmax_scale: float | None,
    rows: Iterable[int] | None,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    size, (heads_q, dim) = inputs.block_size, inputs.q.shape[1:]
    heads_kv = block_ids.shape[1]
    group = heads_q // heads_kv
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    table = list(inputs.rows())
    chosen = list(range(inputs.total_q) if rows is None else rows)
    # The empty parts give a batch without rows its shape.
    outs = [inputs.q.new_zeros((0, dim), dtype=dtype)]
    lses = [inputs.q.new_zeros((0,), dtype=dtype)]
    for row in chosen:
        sequence, i, position = table[row] if row < len(table) else (None, 0, -1)
        for g in range(heads_kv):
            seen = [j for j in block_ids[row, g].tolist() if 0 <= j <= position // size]
            if sequence is None or not seen:
                outs.append(inputs.q.new_zeros((group, dim), dtype=dtype))
                lses.append(inputs.q.new_full((group,), -math.inf, dtype=dtype))
                continue
            spans = [slice(j * size, min((j + 1) * size, position + 1)) for j in seen]
            keys = torch.cat([sequence.k[span, g] for span in spans]).to(dtype)
            values = torch.cat([sequence.v[span, g] for span in spans]).to(dtype)
            queries = sequence.q[i, g * group : (g + 1) * group].to(dtype)
            logits = scale * (queries @ keys.T)
            weights = torch.softmax(logits, 1)
            if weights_dtype is not None:
                weights = weights.to(weights_dtype).to(dtype)
            outs.append(weights @ values)
            lses.append(torch.logsumexp(logits, 1))
    return (
        torch.cat(outs).reshape(len(chosen), heads_q, dim),
        torch.cat(lses).reshape(len(chosen), heads_q),
    )


def gradient_oracle(
    inputs: Inputs, block_ids: Tensor, dout: Tensor, *, softmax_scale: float | None = None
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients of :func:`attention_oracle` by autograd, in float64.

    Args:
        inputs: the batch.
        block_ids: ``[T, Hkv, K]``.
        dout: ``[T, Hq, D]``.
        softmax_scale: None for ``D ** -0.5``.

    Returns:
        ``dq [T, Hq, D]``, and for every sequence ``(dk, dv)``, each ``[S, Hkv, D]``.
    """
    return _gradients(inputs, block_ids, dout, softmax_scale, torch.float64)


def gradient_eager(
    inputs: Inputs, block_ids: Tensor, dout: Tensor, *, softmax_scale: float | None = None
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The same by autograd through :func:`attention_eager`, in the inputs' dtype."""
    return _gradients(inputs, block_ids, dout, softmax_scale, None)


def _gradients(
    inputs: Inputs,
    block_ids: Tensor,
    dout: Tensor,
    softmax_scale: float | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype or tensor.dtype).requires_grad_()

    sequences = [
        SequenceData(leaf(s.q), s.index_q, leaf(s.k), leaf(s.v), s.index_k)
        for s in inputs.sequences
    ]
    twin = Inputs(**{**vars(inputs), "sequences": sequences})
    attend = attention_oracle if dtype == torch.float64 else attention_eager
    out, _ = attend(twin, block_ids, softmax_scale=softmax_scale)
    if out.requires_grad:
        out.backward(dout.to(out.dtype))

    def grad(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    padding = inputs.q.new_zeros(
        (inputs.total_q - sum(len(s.q) for s in sequences), *inputs.q.shape[1:])
    )
    dq = torch.cat([*(grad(s.q) for s in sequences), padding.to(out.dtype)])
    return dq, [(grad(s.k), grad(s.v)) for s in sequences]


def assert_within_budget(
    name: str,
    actual: Tensor,
    oracle: Tensor,
    eager: Tensor,
    *,
    factor: float = 3.0,
    ulps: float = 4.0,
) -> None:
    """Compare with an oracle, allowing a small multiple of the error that `eager` makes.

    Both the largest and the RMS error must stay within ``factor`` times that of `eager` plus
    ``ulps`` roundings of the oracle's largest and RMS value, and infinities must be where the
    oracle has them. NaN is never right.

    Args:
        name: what to call `actual` in messages.
        actual: the result under test.
        oracle: float64, of the same shape.
        eager: the same computation in the dtype under test.
        factor: of the error of `eager`.
        ulps: of the dtype of `actual`.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(
            f"`{name}` has shape {list(actual.shape)}, expected {list(oracle.shape)}"
        )
    if actual.isnan().any():
        where = actual.isnan().nonzero()[0].tolist()
        raise AssertionError(f"`{name}` is NaN at {where} and elsewhere: expected no NaN")
    infinite = oracle.isinf()
    if not torch.equal(actual.isinf(), infinite) or not torch.equal(
        actual[infinite].double(), oracle[infinite].double()
    ):
        raise AssertionError(f"`{name}` has infinities where the oracle has none, or the reverse")
    if infinite.all():
        return
    finite = oracle[~infinite].double()
    error = (actual[~infinite].double() - finite).abs()
    allowed = (eager[~infinite].double() - finite).abs()
    if actual.dtype == torch.float64:
        # The oracle is no more exact than the result.
        ulps *= 16
    rounding = ulps * torch.finfo(actual.dtype).eps
    for measure, of in (("largest", torch.amax), ("RMS", _rms)):
        reached = of(error).item()
        budget = factor * of(allowed).item() + rounding * of(finite.abs()).item()
        if not reached <= budget:
            raise AssertionError(
                f"`{name}`: the {measure} error is {reached:.3e}, expected at most {budget:.3e}"
            )


def assert_scores(scores: Tensor, inputs: Inputs, *, rows: Iterable[int] | None = None) -> None:
    """Check the visible columns of block scores ``[T, Hi, >= NB]`` against the oracle.

    Args:
        scores: the scores under test.
        inputs: the batch.
        rows: the rows to check; None for all.
    """
    chosen = list(range(inputs.total_q) if rows is None else rows)
    oracle = score_oracle(inputs, rows=chosen)
    eager = score_oracle(inputs, rows=chosen, dtype=_score_dtype(inputs))
    specified = ~oracle.isnan()
    if specified.any():
        assert_within_budget(
            "scores",
            scores[chosen, :, : oracle.shape[2]][specified],
            oracle[specified],
            eager[specified],
            factor=4.0,
        )


def assert_block_ids(
    block_ids: Tensor,
    inputs: Inputs,
    *,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    rows: Iterable[int] | None = None,
) -> None:
    """Check ids ``[T, Hi, K]`` against a selection from the oracle's scores.

    They must be the same, except that blocks whose oracle scores lie within rounding of each
    other may stand for one another. Forced blocks must be there by identity.

    Args:
        block_ids: the ids under test.
        inputs: the batch.
        topk, init_blocks, local_blocks: as in :func:`m3ops.topk_select`.
        rows: the rows to check; None for all, padding included.
    """
    if block_ids.shape != (inputs.total_q, inputs.index_q.shape[1], topk):
        raise AssertionError(f"`block_ids` has shape {list(block_ids.shape)}")
    chosen = list(range(inputs.total_q) if rows is None else rows)
    oracle = score_oracle(inputs, rows=chosen)
    eager = score_oracle(inputs, rows=chosen, dtype=_score_dtype(inputs))
    specified = ~oracle.isnan()
    tolerance = 0.0
    if specified.any():
        exact = oracle[specified]
        error = (eager[specified] - exact).abs().amax().item()
        # Two scores, each off by what `assert_scores` allows.
        tolerance = 8 * (error + torch.finfo(torch.float32).eps * exact.abs().amax().item())
    visible = inputs.visible_blocks()
    for row, scores, heads in zip(chosen, oracle.tolist(), block_ids[chosen].tolist(), strict=True):
        count = visible[row]
        forced = {j for j in range(count) if j < init_blocks or j >= count - local_blocks}
        for h, found in enumerate(heads):
            expected = select_oracle(scores[h], count, topk, init_blocks, local_blocks)
            if found != expected:
                _check_near_tie(
                    f"row {row}, head {h}", found, expected, scores[h], forced, tolerance
                )


def _check_near_tie(
    where: str,
    found: list[int],
    expected: list[int],
    scores: list[float],
    forced: set[int],
    tolerance: float,
) -> None:
    live = [j for j in expected if j >= 0]
    message = f"{where}: ids are {found}, expected {expected}"
    head, tail = found[: len(live)], found[len(live) :]
    if head != sorted(set(head)) or any(j != -1 for j in tail) or not forced <= set(head):
        raise AssertionError(message)
    columns = len(scores)
    if any(not 0 <= j < columns or math.isnan(scores[j]) for j in head):
        raise AssertionError(message)
    swapped_in = sorted(scores[j] for j in set(head) - set(live))
    swapped_out = sorted(scores[j] for j in set(live) - set(head))
    if any(abs(a - b) > tolerance for a, b in zip(swapped_in, swapped_out, strict=True)):
        raise AssertionError(f"{message}, and their scores differ by more than {tolerance:.1e}")


def assert_attention(
    out: Tensor,
    lse: Tensor | None,
    inputs: Inputs,
    block_ids: Tensor,
    *,
    softmax_scale: float | None = None,
    rows: Iterable[int] | None = None,
    factor: float = 3.0,
) -> None:
    """Check `out` ``[T, Hq, D]`` and `lse` ``[T, Hq]`` against the oracle.

    Args:
        out, lse: the results under test; a `lse` of None is not checked.
        inputs: the batch.
        block_ids: ``[T, Hkv, K]``.
        softmax_scale: None for ``D ** -0.5``.
        rows: the rows to check; None for all, padding included.
        factor: see :func:`assert_within_budget`.
    """
    chosen = list(range(inputs.total_q) if rows is None else rows)
    oracle = attention_oracle(inputs, block_ids, softmax_scale=softmax_scale, rows=chosen)
    eager = attention_eager(inputs, block_ids, softmax_scale=softmax_scale, rows=chosen)
    for name, actual, exact, rounded in zip(("out", "lse"), (out, lse), oracle, eager, strict=True):
        if actual is not None and chosen:
            assert_within_budget(name, actual[chosen], exact, rounded, factor=factor)


def assert_gradients(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    inputs: Inputs,
    block_ids: Tensor,
    dout: Tensor,
    *,
    softmax_scale: float | None = None,
    factor: float = 3.0,
) -> None:
    """Check gradients in `q`, `k` and `v` against the oracle; slots of no sequence must get 0.

    Args:
        dq, dk, dv: the gradients under test, shaped like the inputs.
        inputs: the batch; its sequences share no slot.
        block_ids: ``[T, Hkv, K]``.
        dout: ``[T, Hq, D]``.
        softmax_scale: None for ``D ** -0.5``.
        factor: see :func:`assert_within_budget`.
    """
    exact_dq, exact_keys = gradient_oracle(inputs, block_ids, dout, softmax_scale=softmax_scale)
    eager_dq, eager_keys = gradient_eager(inputs, block_ids, dout, softmax_scale=softmax_scale)
    assert_within_budget("dq", dq, exact_dq, eager_dq, factor=factor)
    for name, grad, which in (("dk", dk, 0), ("dv", dv, 1)):
        assert_within_budget(
            name,
            torch.cat([inputs.unstore(grad, b) for b in range(len(inputs.sequences))]),
            torch.cat([pair[which] for pair in exact_keys]),
            torch.cat([pair[which] for pair in eager_keys]),
            factor=factor,
        )
        by_slot = _slots_first(grad, inputs.layout, True)
        unowned = torch.ones(len(by_slot), dtype=torch.bool, device=grad.device)
        for slots in inputs.slots:
            unowned[slots] = False
        if by_slot[unowned].count_nonzero():
            raise AssertionError(f"`{name}` is not 0 in slots of no sequence")


def dense_ids(inputs: Inputs) -> Tensor:
    """Ids ``[T, Hkv, NB]`` of every visible block, -1 after them: attention becomes dense."""
    visible = inputs.visible_blocks()
    columns = max([1, *visible])
    ids = [[j if j < count else -1 for j in range(columns)] for count in visible]
    table = torch.tensor(ids, dtype=torch.int32, device=inputs.q.device)
    return table.reshape(-1, 1, columns).repeat(1, inputs.index_q.shape[1], 1)


def random_ids(inputs: Inputs, topk: int, *, seed: int = 0, ordered: bool = False) -> Tensor:
    """Ids ``[T, Hkv, K]`` of some visible blocks, always one fewer than `topk` where it can be.

    Args:
        inputs: the batch.
        topk: ``K``.
        seed: of the draw.
        ordered: ascending with -1 at the end, as selection gives them; otherwise in any order,
            with -1 and ids past the row's own block in between.
    """
    rng = random.Random(seed)
    rows = []
    for visible in inputs.visible_blocks():
        heads = []
        for _ in range(inputs.index_q.shape[1]):
            live = rng.sample(range(visible), min(visible, max(1, topk - 1)))
            dead = topk - len(live)
            if ordered:
                heads.append(sorted(live) + [-1] * dead)
            else:
                past = [rng.choice((-1, visible, visible + 7, 2**31 - 1)) for _ in range(dead)]
                heads.append(rng.sample(live + past, topk))
        rows.append(heads)
    table = torch.tensor(rows, dtype=torch.int32, device=inputs.q.device)
    return table.reshape(inputs.total_q, inputs.index_q.shape[1], topk)


def poisoned(*sizes: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A buffer to pass as `out`: NaN, or an id that no block has."""
    fill = math.nan if dtype.is_floating_point else 2**30
    return torch.full(sizes, fill, dtype=dtype, device=device)


def _score_dtype(inputs: Inputs) -> torch.dtype:
    return torch.float32 if inputs.index_q.dtype != torch.float64 else torch.float64


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _cumulated(lengths: Iterable[int]) -> list[int]:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return total


def _storage_axes(layout: str) -> int:
    return 1 if layout == "packed" else 2


def _slots_first(keys: Tensor, layout: str, has_heads: bool) -> Tensor:
    """Keys of any layout as ``[slots, ...]``."""
    if layout == "paged" and has_heads:
        keys = keys.transpose(1, 2)
    return keys.flatten(0, _storage_axes(layout) - 1)
