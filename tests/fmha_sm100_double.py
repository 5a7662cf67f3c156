"""A double of MiniMax's library ``fmha_sm100``, in plain PyTorch on any device.

It has the library's names, arguments, layouts, dtypes and refusals, so that a wrong call fails
here as it would there. Where the library promises nothing it does the least welcome thing: ties go
to the higher block, a visible NaN or -inf is left out, rows without a block come back as NaN.

The standalone package has the functions in `STANDALONE`. vLLM's copy has them too, and the two
with an underscore in its module ``api``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

STANDALONE = (
    "build_k2q_csr",
    "fmha_sm100",
    "fmha_sm100_plan",
    "sparse_atten_func",
    "sparse_decode_atten_func",
    "sparse_topk_select",
)

# Set by a test that pretends to capture a CUDA graph.
capturing = False


class Call(NamedTuple):
    """A call that the library was given."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# What tests look at, oldest first.
calls: list[Call] = []

Result = TypeVar("Result")


def recorded(function: Callable[..., Result]) -> Callable[..., Result]:
    @functools.wraps(function)
    def record(*args: Any, **kwargs: Any) -> Result:
        calls.append(Call(function.__name__, args, kwargs))
        return function(*args, **kwargs)

    return record


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def expect_int32(name: str, tensor: Tensor, *sizes: int | None) -> None:
    fits = tensor.ndim == len(sizes) and all(
        want in (None, have) for have, want in zip(tensor.shape, sizes, strict=True)
    )
    expect(fits, f"{name} must be of size {sizes}, got {tuple(tensor.shape)}")
    expect(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@recorded
def sparse_topk_select(
    max_score: Tensor,
    topk: int,
    num_valid_pages: int | Tensor | None = None,
    output: Tensor | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    max_score_layout: str = "HKT",
    block_table: Tensor | None = None,
) -> Tensor:
    expect(max_score.dtype == torch.float32, f"max_score must be float32, got {max_score.dtype}")
    expect(max_score.ndim == 3, "max_score must be 3D")
    expect(max_score.is_contiguous(), "max_score must be contiguous")
    expect(topk == 16, f"topk must be 16, got {topk}")
    expect(max_score_layout in ("HKT", "THK"), f"no layout {max_score_layout}")
    scores = max_score if max_score_layout == "THK" else max_score.permute(2, 0, 1)
    rows, heads, tiles = scores.shape
    expect(0 < tiles < 12288, f"max_k_tiles must be less than 12288, got {tiles}")
    expect(min(force_begin_blocks, force_end_blocks) >= 0, "forced blocks must not be negative")
    expect(force_begin_blocks + force_end_blocks <= topk, "too many forced blocks")
    if isinstance(num_valid_pages, Tensor):
        expect_int32("num_valid_pages", num_valid_pages, rows)
        expect(num_valid_pages.is_contiguous(), "num_valid_pages must be contiguous")
        expect(num_valid_pages.device == scores.device, "num_valid_pages is on another device")
        counts = num_valid_pages.clamp(0, tiles).tolist()
    else:
        count = tiles if num_valid_pages is None else num_valid_pages
        expect(0 < count <= tiles, f"num_valid_pages must be in 1..{tiles}, got {count}")
        counts = [count] * rows
    if output is None:
        output = scores.new_empty((rows, heads, topk), dtype=torch.int32)
    expect_int32("output", output, rows, heads, topk)
    expect(output.device == scores.device, "output is on another device")
    for t, count in enumerate(counts):
        for h in range(heads):
            values = scores[t, h, :count].tolist()
            ids = _best(values, topk, force_begin_blocks, count - force_end_blocks)
            if block_table is not None:
                ids = [int(block_table[t, h, j]) for j in ids]
            ids += [-1] * (topk - len(ids))
            output[t, h] = torch.tensor(ids, dtype=torch.int32, device=output.device)
    return output


def _best(values: list[float], topk: int, begin: int, end: int) -> list[int]:
    if len(values) <= topk:
        return list(range(len(values)))
    forced = [j for j in range(len(values)) if j < begin or j >= end]
    # NaN is larger than nothing.
    others = [j for j, value in enumerate(values) if value > -torch.inf and j not in set(forced)]
    others.sort(key=lambda j: (-values[j], -j))
    return sorted(forced + others[: topk - len(forced)])


class Plan(dict[str, Any]):
    """What the planner returns of one kind of batch; opaque but for ``max_k_tiles``."""


@recorded
def _fmha_sm100_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    qo_offset: Tensor | None = None,
    num_kv_splits: int = -1,
    page_size: int = -1,
    output_maxscore: bool = False,
    kv_block_num: int = -1,
    usable_SM_count: int = -1,
    causal: bool = True,
) -> Plan:
    expect(qo_offset is not None, "'NoneType' object has no attribute 'tolist'")
    assert qo_offset is not None
    kind = (num_kv_heads, num_kv_splits, page_size, output_maxscore, kv_block_num, causal)
    return _make_plan(qo_segment_lens, kv_segment_lens, num_qo_heads, qo_offset, kind)


def _make_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    heads: int,
    qo_offset: Tensor,
    kind: tuple[Any, ...],
) -> Plan:
    if capturing:
        raise RuntimeError("operation not permitted when stream is capturing")
    expect(kind == (1, 1, 128, True, -1, True), f"{kind} is no plan for scores of paged keys")
    queries, keys = qo_segment_lens.tolist(), kv_segment_lens.tolist()
    for name, lengths in (("qo", qo_segment_lens), ("kv", kv_segment_lens), ("offset", qo_offset)):
        expect_int32(name, lengths, len(queries))
    expect(len(queries) > 0 and min(queries) > 0, "a plan needs sequences with queries")
    offsets = [k - q for q, k in zip(queries, keys, strict=True)]
    expect(qo_offset.tolist() == offsets and min(offsets) >= 0, "queries must be the last keys")
    tiles = ceil_div(ceil_div(max(keys), 128), 128) * 128
    return Plan(queries=queries, keys=keys, heads=heads, max_k_tiles=tiles)


@recorded
def _fmha_sm100(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan_info: Plan,
    kv_indices: Tensor | None = None,
    kv_block_indexes: Tensor | None = None,
    q_offset_override: Tensor | None = None,
    out: Tensor | None = None,
    max_score: Tensor | None = None,
    sm_scale: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    o_scale: float | None = None,
    output_maxscore: bool = True,
    output_o: bool = True,
    check_input_valid: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """In vLLM's copy, which writes ``[T, heads, tiles]`` too."""
    expect(output_maxscore and not output_o and out is None, "only scores are doubled")
    return None, _write(q, k, v, plan_info, kv_indices, max_score, sm_scale)


def _write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    kv_indices: Tensor | None,
    max_score: Tensor | None,
    sm_scale: float | None,
) -> Tensor:
    scores = _scores(q, k, v, plan, kv_indices, sm_scale)
    heads, tiles = plan["heads"], plan["max_k_tiles"]
    if max_score is None:
        max_score = q.new_full((heads, tiles, len(q)), -torch.inf, dtype=torch.float32)
    expect(max_score.dtype == torch.float32, f"max_score must be float32, got {max_score.dtype}")
    expect(tiles >= scores.shape[2], f"{tiles} tiles, but {scores.shape[2]} are written")
    expect(max_score.numel() < 2**31, "offsets of max_score are 32 bits wide")
    if tuple(max_score.shape) == (len(q), heads, tiles):
        max_score[..., : scores.shape[2]] = scores
    else:
        expect(tuple(max_score.shape) == (heads, tiles, len(q)), "max_score must be THK or HKT")
        max_score[:, : scores.shape[2]] = scores.permute(1, 2, 0)
    return max_score


@recorded
def fmha_sm100_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    *,
    qo_offset: Tensor | None = None,
    num_kv_splits: int = -1,
    page_size: int = -1,
    output_maxscore: bool = False,
    kv_block_num: int = -1,
    causal: bool = True,
) -> tuple[Any, ...]:
    if qo_offset is None:
        qo_offset = kv_segment_lens - qo_segment_lens
    kind = (num_kv_heads, num_kv_splits, page_size, output_maxscore, kv_block_num, causal)
    plan = _make_plan(qo_segment_lens, kv_segment_lens, num_qo_heads, qo_offset, kind)
    return False, 0, len(qo_segment_lens), plan, None


@recorded
def fmha_sm100(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: tuple[Any, ...],
    kv_indices: Tensor | None = None,
    kv_block_indexes: Tensor | None = None,
    out: Tensor | None = None,
    max_score: Tensor | None = None,
    sm_scale: float | None = None,
    output_maxscore: bool = True,
    output_o: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """The standalone package writes ``[heads, tiles, T]`` and does not look at what it is given."""
    expect(isinstance(plan, tuple) and len(plan) == 5, "plan must come from fmha_sm100_plan")
    heads, tiles = plan[3]["heads"], plan[3]["max_k_tiles"]
    if max_score is not None:
        expect(tuple(max_score.shape) == (heads, tiles, len(q)), "max_score must be HKT")
    expect(output_maxscore and not output_o and out is None, "only scores are doubled")
    return None, _write(q, k, v, plan[3], kv_indices, max_score, sm_scale)


def _scores(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, kv_indices: Tensor | None, sm_scale: float | None
) -> Tensor:
    """``[T, heads, tiles]``, -inf where nothing is visible."""
    expect(isinstance(plan, Plan), "plan must come from _fmha_sm100_plan")
    queries, keys, heads = plan["queries"], plan["keys"], plan["heads"]
    blocks = [ceil_div(length, 128) for length in keys]
    expect(q.dtype == torch.bfloat16 and k.dtype == q.dtype, f"q must be bfloat16, got {q.dtype}")
    expect(tuple(q.shape) == (sum(queries), heads, 128), f"q is {tuple(q.shape)}")
    expect(k.ndim == 4 and tuple(k.shape[1:]) == (1, 128, 128), f"k is {tuple(k.shape)}")
    expect(v.data_ptr() == k.data_ptr() and v.shape == k.shape, "K must be passed for V too")
    expect(k.stride(3) == 1 and k.data_ptr() % 16 == 0, "k cannot be fetched")
    expect(k.stride(0) % 8 == 0 and k.stride(2) % 8 == 0, "k cannot be fetched")
    expect(kv_indices is not None, "paged keys need kv_indices")
    assert kv_indices is not None
    expect_int32("kv_indices", kv_indices, sum(blocks))
    expect(kv_indices.is_contiguous(), "kv_indices must be contiguous")
    expect(int(kv_indices.min()) >= 0 and int(kv_indices.max()) < len(k), "no such page")
    scale = 128**-0.5 if sm_scale is None else sm_scale
    tiles = ceil_div(max(blocks), 128) * 128
    scores = q.new_full((len(q), heads, tiles), -torch.inf, dtype=torch.float32)
    row = page = 0
    for count, length, pages in zip(queries, keys, blocks, strict=True):
        seen = k[kv_indices[page : page + pages].long(), 0].flatten(0, 1)[:length].float()
        for i in range(count):
            dots = q[row].float() @ seen[: length - count + i + 1].T * scale
            for j in range(ceil_div(dots.shape[1], 128)):
                scores[row, :, j] = dots[:, j * 128 : (j + 1) * 128].amax(1)
            row += 1
        page += pages
    return scores


class Schedule(NamedTuple):
    """Belongs to the CSR that it was built with."""

    row_ptr: Tensor
    q_indices: Tensor
    max_seqlen_q: int


@recorded
def build_k2q_csr(
    q2k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_kv: int,
    *,
    total_k: int,
    max_seqlen_k: int | None = None,
    max_seqlen_q: int | None = None,
    total_rows: int | None = None,
    qhead_per_kv: int = 1,
    return_schedule: bool = False,
) -> tuple[Any, ...]:
    """Row pointers ``[Hkv, rows + 1]`` and the queries ``[Hkv, T * K]`` that chose each row."""
    expect(block_kv == 128, f"blk_kv must be 128, got {block_kv}")
    expect_int32("q2k", q2k, None, None, None)
    heads, total_q, topk = q2k.shape
    expect(topk in (4, 8, 16, 32), f"topK must be 4, 8, 16 or 32, got {topk}")
    aligned = q2k.stride(0) % 4 == q2k.stride(1) % 4 == q2k.data_ptr() % 16 == 0
    expect(q2k.stride(2) == 1 and aligned, f"q2k has strides {q2k.stride()}")
    starts_q, starts_k = _starts(cu_seqlens_q, cu_seqlens_k)
    expect(starts_q[-1] == total_q, f"q2k has {total_q} queries of {starts_q[-1]}")
    expect(total_k in (0, starts_k[-1]), f"total_k must be {starts_k[-1]}, got {total_k}")
    blocks = [ceil_div(b - a, 128) for a, b in pairwise(starts_k)]
    rows = sum(blocks)
    expect(total_rows in (None, rows), f"total_rows must be {rows}, got {total_rows}")
    if return_schedule:
        expect(max_seqlen_k is not None and max_seqlen_q is not None, "schedules need both bounds")
    if max_seqlen_k is not None:
        expect(max(blocks) <= ceil_div(max_seqlen_k, 128), "max_seqlen_k is too small")
    chosen: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in range(heads)]
    first_row = 0
    for b, count in enumerate(blocks):
        for t in range(starts_q[b], starts_q[b + 1]):
            for h in range(heads):
                ids = q2k[h, t].tolist()
                live = [j for j in ids if j >= 0]
                ascend = live == sorted(set(live)) and ids == live + [-1] * (topk - len(live))
                expect(ascend, f"ids must ascend and end in -1, got {ids}")
                expect(all(j < count for j in live), f"{ids} of {count} blocks")
                for j in live:
                    chosen[h][first_row + j].append(t - starts_q[b])
        first_row += count
    row_ptr = q2k.new_zeros((heads, rows + 1))
    q_indices = q2k.new_full((heads, total_q * topk), -1)
    for h in range(heads):
        lengths = torch.tensor([len(row) for row in chosen[h]], dtype=torch.int32)
        row_ptr[h, 1:] = lengths.cumsum(0)
        flat = [i for row in chosen[h] for i in row]
        q_indices[h, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
    if not return_schedule:
        return row_ptr, q_indices
    assert max_seqlen_q is not None
    return row_ptr, q_indices, Schedule(row_ptr, q_indices, max_seqlen_q)


@recorded
def sparse_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_ptr: Tensor,
    q_idx: Tensor,
    topK: int,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    schedule: Schedule | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Any:
    expect(q.dtype == torch.bfloat16 and q.dtype == k.dtype == v.dtype, "q, k, v must be bfloat16")
    expect(q.ndim == 3 and q.shape[2] == 128 and q.is_contiguous(), f"q is {tuple(q.shape)}")
    expect(k.ndim == 4 and k.shape == v.shape, f"k is {tuple(k.shape)}, v {tuple(v.shape)}")
    heads = k.shape[1]
    expect(tuple(k.shape[2:]) == (128, 128) and blk_kv == 128, f"k is {tuple(k.shape)}")
    for tensor in (k, v):
        aligned = all(stride % 8 == 0 for stride in tensor.stride()[:3])
        expect(tensor.stride(3) == 1 and aligned, f"strides {tensor.stride()} cannot be fetched")
    group = q.shape[1] // heads
    expect(group in (1, 2, 4, 8, 16), f"groups of {group} heads are not supported")
    expect(topK in (4, 8, 16, 32), f"topK must be 4, 8, 16 or 32, got {topK}")
    expect(causal is True, "causal must be True")
    starts_q, starts_k = _starts(cu_seqlens_q, cu_seqlens_k)
    sequences = len(starts_q) - 1
    expect(starts_q[-1] == len(q), f"q has {len(q)} rows of {starts_q[-1]}")
    lengths = [b - a for a, b in pairwise(starts_k)]
    counts = [b - a for a, b in pairwise(starts_q)]
    expect(max(lengths) <= max_seqlen_k and max(counts) <= max_seqlen_q, "a bound is too small")
    blocks = [ceil_div(length, 128) for length in lengths]
    expect_int32("row_ptr", row_ptr, heads, sum(blocks) + 1)
    expect_int32("q_idx", q_idx, heads, len(q) * topK)
    assert page_table is not None and seqused_k is not None, "only paged keys are doubled"
    expect_int32("page_table", page_table, sequences, None)
    expect(page_table.stride(1) == 1, "page_table must be contiguous in the last dimension")
    expect_int32("seqused_k", seqused_k, sequences)
    expect(seqused_k.is_contiguous() and seqused_k.tolist() == lengths, "seqused_k is wrong")
    if schedule is not None:
        fits = schedule.row_ptr is row_ptr and schedule.q_indices is q_idx
        expect(fits and schedule.max_seqlen_q >= max(counts), "the schedule is of another CSR")
    scale = 128**-0.5 if softmax_scale is None else softmax_scale
    found = q.new_full(q.shape, torch.nan) if out is None else out
    expect(found.shape == q.shape and found.dtype == q.dtype, "out must be like q")
    lse = q.new_full(q.shape[:2], torch.nan, dtype=torch.float32)
    first_row = 0
    for b in range(sequences):
        for h in range(heads):
            pointers = row_ptr[h, first_row:].tolist()
            chosen: dict[int, list[int]] = {}
            for j in range(blocks[b]):
                for i in q_idx[h, pointers[j] : pointers[j + 1]].tolist():
                    chosen.setdefault(i, []).append(j)
            for i, ids in chosen.items():
                t, position = starts_q[b] + i, lengths[b] - counts[b] + i
                expect(ids[-1] * 128 <= position, f"block {ids[-1]} holds no key up to {position}")
                pages = page_table[b, ids].long()
                slots = (torch.tensor(ids)[:, None] * 128 + torch.arange(128)).flatten()
                seen = (slots <= position).to(q.device)
                of_group = slice(h * group, (h + 1) * group)
                keys, values = (x[pages, h].flatten(0, 1)[seen].float() for x in (k, v))
                logits = q[t, of_group].float() @ keys.T * scale
                found[t, of_group] = (logits.softmax(1) @ values).to(q.dtype)
                lse[t, of_group] = logits.logsumexp(1)
        first_row += blocks[b]
    return (found, lse) if return_softmax_lse else found


@recorded
def sparse_decode_atten_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_indices: Tensor,
    *,
    page_table: Tensor,
    seqused_k: Tensor,
    seqlen_q: int,
    max_seqlen_k: int,
    blk_kv: int = 128,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    raise TypeError(f"q, k and v must be float8_e4m3fn, got {q.dtype}")


def _starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[list[int], list[int]]:
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        expect_int32(name, starts, len(cu_seqlens_q))
        expect(starts.is_contiguous() and int(starts[0]) == 0, f"{name} is {starts.tolist()}")
    return cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
