"""Check mode: metadata on the device are read back and verified before every launch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, key_bounds, num_valid_blocks, storage_tokens

_enabled: ContextVar[bool] = ContextVar(
    "m3ops_check", default=os.environ.get("M3OPS_CHECK", "0") not in ("", "0")
)


@contextmanager
def check_mode(enabled: bool = True) -> Iterator[None]:
    """Verify metadata on the device before every launch inside the block, in this thread or task.

    Outside, the ops verify what the host knows and trust the rest: page and block ids out of range
    give wrong numbers for their sequence, without a word. Here they raise. Each launch then waits
    for the device several times. The environment variable ``M3OPS_CHECK=1``, read when m3ops is
    imported, does the same for a whole process; ``check_mode(False)`` makes an exception.

    Verified are, for every op that has them: `cu_seqlens_q` starts at 0, does not decrease and ends
    within ``T``, no sequence has more query tokens than `max_seqlen_q`, and the named decode rows
    are those of the first `num_decode_seqs` sequences; `seqused_k` is within ``0 .. max_seqlen_k``
    and within the keys that the layout holds; the pages of visible blocks are in ``0 .. P - 1``;
    `cu_seqlens_k` does not decrease and ends within ``Tk``; `leftpad_k` is within ``0 .. S``;
    `block_ids` are -1 or visible, and a row's are distinct (the op itself would skip ids past the
    visible ones); `num_valid_blocks` is within the columns of `scores`; slots of `slot_mapping` are
    negative or distinct and inside the cache.

    A compiled function is checked too if its call stands inside the block. While a CUDA graph is
    captured nothing can be read back: these launches and the replays are not checked, and a
    RuntimeWarning says so. Autograd runs the backward pass of a GPU in a thread of its own, where
    only the environment variable counts.

    Args:
        enabled: False to switch the checks off.

    Raises:
        RuntimeError: the block stands inside a compiled function, where the choice would not hold
            when the graph runs.
        ValueError: by an op inside the block, with the op, the argument and the first bad place.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("check_mode must surround the compiled call, not stand inside it")
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def checking() -> bool:
    """Whether check mode is on."""
    return _enabled.get()


def check_arguments(op: str, args: tuple[Any, ...]) -> None:
    """Verify what an implementation is about to get.

    Args:
        op: name of the op.
        args: its arguments, the batch in one piece.

    Raises:
        ValueError: something on the device is not as the op's contract has it.
    """
    if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
        warnings.warn(
            f"m3ops::{op} is not checked: check mode cannot read metadata back while a CUDA graph "
            "is captured, nor when it is replayed",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    try:
        _CHECKS[op](*args)
    except _Violation as violation:
        raise ValueError(f"m3ops::{op} in check mode: {violation}") from None


class _Violation(Exception):
    """What is wrong, without the op."""


def _require(good: Tensor, name: str, tensor: Tensor, expected: str, offset: int = 0) -> None:
    """Raise for the first place of a tensor that is not good; `offset` is added to its index."""
    if good.all():
        return
    first, *rest = (~good).nonzero()[0].tolist()
    place = [first + offset, *rest]
    index = ", ".join(map(str, place))
    raise _Violation(
        f"`{name}` must {expected}, got {name}[{index}] = {tensor[tuple(place)].item()}"
    )


def _check_batch(batch: Batch, rows: int, keys: Tensor) -> None:
    _check_queries(batch, rows)
    starts, seqused, tokens = batch.cu_seqlens_k, batch.seqused_k, storage_tokens(batch, keys)
    if starts is not None:
        expected = f"not decrease and stay within 0 .. Tk = {tokens}"
        _require((starts >= 0) & (starts <= tokens), "cu_seqlens_k", starts, expected)
        _require(starts[1:] >= starts[:-1], "cu_seqlens_k", starts, expected, 1)
    if batch.leftpad_k is not None:
        good = (batch.leftpad_k >= 0) & (batch.leftpad_k <= tokens)
        _require(good, "leftpad_k", batch.leftpad_k, f"stay within 0 .. S = {tokens}")
    room = key_bounds(batch, keys)[1]
    if starts is not None:
        room = room.minimum((starts[1:] - starts[:-1]).long())
    good = (seqused >= 0) & (seqused <= room)
    if not good.all():
        b = int((~good).nonzero()[0])
        _require(
            good,
            "seqused_k",
            seqused,
            f"stay within 0 .. {int(room[b])}, what the {batch.layout} layout and max_seqlen_k = "
            f"{batch.max_seqlen_k} leave this sequence",
        )
    table = batch.block_table
    if table is not None:
        columns = torch.arange(table.shape[1], device=table.device)
        used = columns < -(-seqused.long() // batch.block_size)[:, None]
        pages = keys.shape[0]
        _require(
            ~used | ((table >= 0) & (table < pages)),
            "block_table",
            table,
            f"hold pages 0 .. {pages - 1} for the keys of a sequence",
        )


def _check_queries(batch: Batch, rows: int) -> None:
    starts = batch.cu_seqlens_q
    expected = f"start at 0, not decrease and end within T = {rows}"
    _require(starts[:1] == 0, "cu_seqlens_q", starts, expected)
    _require(starts[1:] >= starts[:-1], "cu_seqlens_q", starts, expected, 1)
    _require(starts <= rows, "cu_seqlens_q", starts, expected)
    _require(
        starts[1:] - starts[:-1] <= batch.max_seqlen_q,
        "cu_seqlens_q",
        starts,
        f"give no sequence more than max_seqlen_q = {batch.max_seqlen_q} tokens",
        1,
    )
    named, tokens = int(starts[batch.num_decode_seqs]), batch.num_decode_tokens
    # A bucket of decode rows may be partly padding, but then nothing else stands behind them.
    if named != tokens and (named > tokens or int(starts[-1]) > named):
        raise _Violation(
            f"`num_decode_tokens` must be the {named} tokens of the first {batch.num_decode_seqs} "
            f"sequences, got {tokens}"
        )


def _check_ids(block_ids: Tensor, batch: Batch) -> None:
    visible = num_valid_blocks(
        batch.cu_seqlens_q, batch.seqused_k, block_ids.shape[0], batch.block_size
    )
    good = (block_ids == -1) | ((block_ids >= 0) & (block_ids < visible[:, None, None]))
    _require(good, "block_ids", block_ids, "hold -1 or blocks that the row sees")
    ordered, order = block_ids.sort(dim=2, stable=True)
    repeats = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    good = torch.ones_like(block_ids, dtype=torch.bool)
    good.scatter_(2, order[..., 1:], ~repeats)
    _require(good, "block_ids", block_ids, "hold each block of a row once")


def _check_index_score(index_q: Tensor, index_k: Tensor, batch: Batch, *_: Any) -> None:
    _check_batch(batch, index_q.shape[0], index_k)


def _check_topk_select(scores: Tensor, num_valid_blocks: Tensor, *_: Any) -> None:
    columns = scores.shape[2]
    _require(
        num_valid_blocks <= columns,
        "num_valid_blocks",
        num_valid_blocks,
        f"be at most the {columns} columns of `scores`",
    )


def _check_attention(
    q: Tensor, k: Tensor, v: Tensor, block_ids: Tensor, batch: Batch, *_: Any
) -> None:
    _check_batch(batch, q.shape[0], k)
    _check_ids(block_ids, batch)


def _check_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_ids: Tensor,
    out: Tensor,
    lse: Tensor,
    batch: Batch,
    *_: Any,
) -> None:
    _check_attention(q, k, v, block_ids, batch)


def _check_store_kv(
    key: Tensor, value: Tensor, index_key: Tensor, slot_mapping: Tensor, k_cache: Tensor, *_: Any
) -> None:
    slots = k_cache.shape[0] * k_cache.shape[2]
    _require(
        slot_mapping < slots, "slot_mapping", slot_mapping, f"hold slots below P * N = {slots}"
    )
    ordered, order = slot_mapping.sort(stable=True)
    good = torch.ones_like(slot_mapping, dtype=torch.bool)
    good[order[1:]] = (ordered[1:] != ordered[:-1]) | (ordered[1:] < 0)
    _require(good, "slot_mapping", slot_mapping, "hold each slot once")


_CHECKS: dict[str, Callable[..., None]] = {
    "index_score": _check_index_score,
    "select_blocks": _check_index_score,
    "topk_select": _check_topk_select,
    "sparse_attention": _check_attention,
    "sparse_attention_backward": _check_attention_backward,
    "store_kv": _check_store_kv,
}
