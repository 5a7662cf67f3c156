"""``index_score`` with MiniMax's library ``fmha_sm100``: its dense attention, scores alone."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ...batch import Batch
from ..common.fmha_sm100 import (
    BLOCK_SIZE,
    DIM,
    IN_VLLM,
    Lengths,
    Rows,
    check_call,
    library,
    on_device,
    plannable,
)
from ..common.launch import decode_rows, fetchable
from .launch import launch_index_score, launch_index_score_rows

COLUMN_MULTIPLE = 128
"""The library's scores have a multiple of this many block columns."""

MAX_SCORES = 2**28
"""Scores of one call at most: its offsets are 32 bits wide, and a buffer of them is 1 GiB."""


def index_score_fmha_sm100(
    index_q: Tensor, index_k: Tensor, batch: Batch, num_splits: int, out: Tensor
) -> None:
    """Decode rows on Triton, the others with the library if it can plan them."""
    check_call("index_score", index_q.dtype, batch)
    lengths = score_lengths(index_q, index_k, batch)
    if lengths is None:
        launch_index_score(index_q, index_k, batch, num_splits, out)
        return
    rows, heads = index_q.shape[:2]
    chunk = max(1, MAX_SCORES // (heads * padded_columns(out.shape[2])))
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        score_rows(index_q, index_k, batch, num_splits, lengths, out[begin:end], begin, end)


def score_lengths(index_q: Tensor, index_k: Tensor, batch: Batch) -> Lengths | None:
    """What the library scores with; None if it takes none of the rows."""
    rows = index_q.shape[0]
    decode = decode_rows(batch, rows)
    if decode == rows or index_q.shape[2] != DIM or not fetchable(index_k):
        return None
    return plannable(batch, decode, index_q.device)


def padded_columns(columns: int) -> int:
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def score_rows(
    index_q: Tensor,
    index_k: Tensor,
    batch: Batch,
    num_splits: int,
    lengths: Lengths,
    scores: Tensor,
    begin: int,
    end: int,
) -> None:
    """Score rows ``begin .. end`` of the batch into `scores` ``[end - begin, Hi, NB]``."""
    split = min(max(decode_rows(batch, end), begin), end)
    if begin < split:
        part = scores[: split - begin]
        launch_index_score_rows(index_q, index_k, batch, num_splits, part, None, begin, split)
    rows = lengths.rows(split, end)
    if rows.seqs:
        part = scores[split - begin : rows.last - begin]
        with on_device(index_q.device):
            _score(index_q[rows.first : rows.last].contiguous(), index_k, batch, rows, part)


def _score(index_q: Tensor, index_k: Tensor, batch: Batch, rows: Rows, scores: Tensor) -> None:
    """Fill `scores` ``[n, Hi, NB]`` of the rows ``index_q [n, Hi, Di]``."""
    heads = index_q.shape[1]
    columns = padded_columns(max(rows.num_blocks))
    keys = index_k[:, None]
    table = batch.block_table
    assert table is not None
    pages = torch.cat([table[b, :n] for b, n in zip(rows.seqs, rows.num_blocks, strict=True)])
    options: dict[str, Any] = {
        "kv_indices": pages,
        "sm_scale": 1.0,
        "output_maxscore": True,
        "output_o": False,
    }
    plan = _plan(
        tuple(rows.query_lens),
        tuple(rows.key_lens),
        heads,
        index_q.device,
        torch.cuda.current_stream(index_q.device).cuda_stream if index_q.is_cuda else 0,
    )
    if library().__name__ == IN_VLLM:
        # This copy also writes token-major scores, as wide as the plan says.
        fits = scores.is_contiguous() and scores.shape[2] >= columns
        shape = (scores.shape[0], heads, columns)
        found = scores if fits else scores.new_full(shape, -torch.inf)
        plan["max_k_tiles"] = found.shape[2]
        _api()._fmha_sm100(index_q, keys, keys, plan, max_score=found, **options)
        if fits:
            return
    else:
        _, found = library().fmha_sm100(index_q, keys, keys, plan, **options)
        found = found.permute(2, 0, 1)
    columns = min(columns, scores.shape[2])
    scores[..., :columns] = found[..., :columns]


@functools.lru_cache(maxsize=1)
def _plan(
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    heads: int,
    device: torch.device,
    stream: int,
) -> Any:
    """The layers of a step share a plan: it depends on lengths alone, and was made on `stream`."""
    in_vllm = library().__name__ == IN_VLLM
    plan = _api()._fmha_sm100_plan if in_vllm else library().fmha_sm100_plan
    queries = torch.tensor(query_lens, dtype=torch.int32)
    keys = torch.tensor(key_lens, dtype=torch.int32)
    return plan(
        queries,
        keys,
        heads,
        num_kv_heads=1,
        qo_offset=keys - queries,
        num_kv_splits=1,
        page_size=BLOCK_SIZE,
        output_maxscore=True,
        causal=True,
    )


def _api() -> Any:
    return importlib.import_module(f"{IN_VLLM}.api")
