"""The packed batch: its description, its checks, and the position of every query row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PAGED, PACKED, BATCHED = "paged", "packed", "batched"

BATCH_SCHEMA = (
    "Tensor cu_seqlens_q, Tensor seqused_k, Tensor? block_table, Tensor? cu_seqlens_k, "
    "Tensor? leftpad_k, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt num_decode_seqs, "
    "SymInt num_decode_tokens, SymInt block_size"
)


class Batch(NamedTuple):
    """The batch description every op takes, in the order of ``BATCH_SCHEMA``.

    Query ``i`` of sequence ``b`` stands at position
    ``p = seqused_k[b] - (cu_seqlens_q[b + 1] - cu_seqlens_q[b]) + i`` and sees keys ``0..p``.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    block_table: Tensor | None
    cu_seqlens_k: Tensor | None
    leftpad_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    num_decode_seqs: int
    num_decode_tokens: int
    block_size: int

    @property
    def layout(self) -> str:
        """Where the keys lie: ``"paged"``, ``"packed"`` or ``"batched"``."""
        if self.block_table is not None:
            return PAGED
        return BATCHED if self.cu_seqlens_k is None else PACKED

    @property
    def num_seqs(self) -> int:
        """``B``, the number of sequences."""
        return self.seqused_k.shape[0]

    @property
    def num_block_columns(self) -> int:
        """The fewest block columns a score buffer of this batch may have."""
        return num_blocks(self.max_seqlen_k, self.block_size)


def num_blocks(num_keys: int, block_size: int) -> int:
    """``ceil(num_keys / block_size)``."""
    return (num_keys + block_size - 1) // block_size


def storage_tokens(batch: Batch, keys: Tensor) -> int:
    """Tokens that a sequence can have in its storage at most: no key is read behind them.

    Those of a row of the block table, all packed rows, or one batched sequence.
    """
    if batch.layout == PAGED:
        assert batch.block_table is not None
        pages = batch.block_table.shape[1] if keys.shape[0] else 0
        return min(pages * batch.block_size, 2**31 - 1)
    return keys.shape[0 if batch.layout == PACKED else 1]


def key_bounds(batch: Batch, keys: Tensor) -> tuple[Tensor, Tensor]:
    """First key of each sequence, and how many it can have, inside the storage in any case.

    Returns:
        Two int64 ``[B]`` (tokens), on the device of the batch.
    """
    tokens = storage_tokens(batch, keys)
    first = batch.cu_seqlens_k[:-1] if batch.cu_seqlens_k is not None else batch.leftpad_k
    first = torch.zeros_like(batch.seqused_k) if first is None else first
    first = first.long().clamp(0, tokens)
    return first, (tokens - first).clamp(max=batch.max_seqlen_k)


def row_positions(
    cu_seqlens_q: Tensor, seqused_k: Tensor, total_q: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sequence, position and liveness of every query row, without a sync.

    Args:
        cu_seqlens_q: int32 ``[B + 1]``, where each sequence's query tokens start.
        seqused_k: int32 ``[B]``, keys of each sequence (tokens).
        total_q: ``T``, rows of the packed batch, padding included.

    Returns:
        ``(seq, position, live)``, each ``[T]``: int64, int64 and bool. Rows that see no key
        (padding from ``cu_seqlens_q[B]`` on, and negative positions) are not live; their ``seq``
        is ``B`` or the sequence they stand in.
    """
    rows = torch.arange(total_q, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)
    seq = torch.searchsorted(cu_seqlens_q[1:].contiguous(), rows, right=True)
    # Padding rows belong to a sequence past the last one, which ends where it starts.
    starts_ends = F.pad(cu_seqlens_q.long(), (0, 1))
    seqused = F.pad(seqused_k.long(), (0, 1))
    start, end = starts_ends[seq], starts_ends[seq + 1]
    position = seqused[seq] - (end - start) + rows - start
    live = (rows < cu_seqlens_q[-1]) & (position >= 0)
    return seq, position, live


def num_valid_blocks(
    cu_seqlens_q: Tensor, seqused_k: Tensor, total_q: int, block_size: int = 128
) -> Tensor:
    """Blocks each query row sees: ``p // block_size + 1``, and 0 where ``p < 0`` or in padding.

    Args:
        cu_seqlens_q: int32 ``[B + 1]``, where each sequence's query tokens start.
        seqused_k: int32 ``[B]``, keys of each sequence once this step's tokens are in (tokens).
        total_q: ``T``, rows of the packed batch, padding included.
        block_size: ``N``, tokens of a block.

    Returns:
        int32 ``[T]`` on the device of ``cu_seqlens_q`` (blocks). Nothing is read back.

    Raises:
        TypeError: an integer tensor is not int32.
        ValueError: shapes do not fit.
    """
    check_offsets(cu_seqlens_q, seqused_k)
    check_at_least("block_size", block_size, 1)
    check_at_least("total_q", total_q, 0)
    _, position, live = row_positions(cu_seqlens_q, seqused_k, total_q)
    return torch.where(live, position // block_size + 1, 0).int()


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"`{name}` must be a dense tensor, got layout {value.layout}")


def check_instance(name: str, value: Any, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(f"`{name}` must be a {expected.__name__}, got {type(value).__name__}")


def check_int(name: str, value: Any) -> None:
    """An int, a symbolic one, or what Python takes for an index; a tensor would have to be read."""
    known = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not known and (isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__")):
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}")


def check_number(name: str, value: Any) -> None:
    known = isinstance(value, (int, float, torch.SymInt, torch.SymFloat))
    if not known or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")


def check_at_least(name: str, value: int, minimum: int) -> None:
    check_int(name, value)
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}")


def check_shape(name: str, tensor: Tensor, shape: str, sizes: tuple[int | None, ...]) -> None:
    """Compare a tensor's sizes with the expected ones; None accepts any size."""
    check_tensor(name, tensor)
    fits = tensor.ndim == len(sizes) and all(
        want is None or have == want for have, want in zip(tensor.shape, sizes, strict=True)
    )
    if not fits:
        raise ValueError(
            f"`{name}` must be {shape} = "
            f"[{', '.join('*' if s is None else str(s) for s in sizes)}], "
            f"got {list(tensor.shape)}"
        )


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    check_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"`{name}` must be {expected}, got {tensor.dtype}")


def check_floating(name: str, tensor: Tensor) -> None:
    check_dtype(name, tensor, torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_rows(name: str, tensor: Tensor) -> None:
    """The last stride must be 1 (or the axis so short that it does not matter)."""
    if tensor.ndim > 0 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"`{name}` must have a last stride of 1, got strides {list(tensor.stride())}"
        )


def check_device(name: str, tensor: Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise ValueError(f"`{name}` must be on {expected}, got {tensor.device}")


def check_written(name: str, out: Tensor, **inputs: Tensor) -> None:
    """Refuse to write where one element stands for several, or where an input certainly lies."""
    if torch.compiler.is_compiling():
        return
    strides = out.stride()
    if 0 in strides and any(n > 1 and not s for n, s in zip(out.shape, strides, strict=True)):
        raise ValueError(
            f"`{name}` must have an element of memory for each of its own, got strides "
            f"{list(strides)} for {list(out.shape)}"
        )
    for other, tensor in inputs.items():
        if _certainly_overlap(out, tensor):
            raise ValueError(f"`{name}` must not overlap `{other}`, got memory that both share")


def _certainly_overlap(a: Tensor, b: Tensor) -> bool:
    """Slices of one storage may interleave without overlap: only plain cases are decided."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or not (a.numel() and b.numel()):
        return False
    starts = [t.storage_offset() * t.element_size() for t in (a, b)]
    ends = [start + t.numel() * t.element_size() for start, t in zip(starts, (a, b), strict=True)]
    dense = a.is_contiguous() and b.is_contiguous()
    return starts[0] == starts[1] or (dense and max(starts) < min(ends))


def check_no_grad(**tensors: Tensor) -> None:
    """Ops that write in place have no gradient: refuse inputs that would lose one silently."""
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise ValueError(
                    f"`{name}` must not require grad where results are written in place, got "
                    "requires_grad=True: call under torch.no_grad()"
                )


def check_offsets(cu_seqlens_q: Tensor, seqused_k: Tensor) -> None:
    check_dtype("cu_seqlens_q", cu_seqlens_q, torch.int32)
    check_dtype("seqused_k", seqused_k, torch.int32)
    check_shape("seqused_k", seqused_k, "[B]", (None,))
    check_shape("cu_seqlens_q", cu_seqlens_q, "[B+1]", (seqused_k.shape[0] + 1,))
    check_rows("cu_seqlens_q", cu_seqlens_q)
    check_rows("seqused_k", seqused_k)
    check_device("seqused_k", seqused_k, cu_seqlens_q.device)


def make_batch(
    q: Tensor,
    keys: Tensor,
    keys_name: str,
    *,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    leftpad_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_decode_seqs: int,
    num_decode_tokens: int,
    block_size: int,
    num_head_axes: int,
) -> Batch:
    """Check a batch description against its queries and keys, and resolve its bounds.

    Args:
        q: queries ``[T, ...]``; its device is the one all tensors must be on.
        keys: the key tensor whose leading axes the layout describes.
        keys_name: its name in messages.
        num_head_axes: 1 if ``keys`` has an axis of KV heads, 0 for index keys.
        others: as in the public functions.

    Raises:
        TypeError, ValueError: see the public functions.
    """
    check_offsets(cu_seqlens_q, seqused_k)
    check_at_least("block_size", block_size, 1)
    num_seqs, total_q = seqused_k.shape[0], q.shape[0]
    if block_table is not None and cu_seqlens_k is not None:
        raise ValueError(
            "keys must lie in exactly one layout, got both `block_table` and `cu_seqlens_k`"
        )
    if leftpad_k is not None and (block_table is not None or cu_seqlens_k is not None):
        raise ValueError(
            "`leftpad_k` must come with batched keys alone, got it beside "
            f"`{'block_table' if block_table is not None else 'cu_seqlens_k'}`"
        )
    heads = ["Hkv"] * num_head_axes
    if block_table is not None:
        check_dtype("block_table", block_table, torch.int32)
        check_shape("block_table", block_table, "[B, W]", (num_seqs, None))
        check_rows("block_table", block_table)
        names = ["P", *heads, "N", "D"]
        sizes = [None] * num_head_axes
        check_shape(
            keys_name, keys, f"[{', '.join(names)}] (paged)", (None, *sizes, block_size, None)
        )
        bound = block_table.shape[1] * block_size
    elif cu_seqlens_k is not None:
        check_dtype("cu_seqlens_k", cu_seqlens_k, torch.int32)
        check_shape("cu_seqlens_k", cu_seqlens_k, "[B+1]", (num_seqs + 1,))
        check_rows("cu_seqlens_k", cu_seqlens_k)
        names = ["Tk", *heads, "D"]
        check_shape(
            keys_name, keys, f"[{', '.join(names)}] (packed)", (None,) * (2 + num_head_axes)
        )
        bound = keys.shape[0]
    else:
        names = ["B", "S", *heads, "D"]
        if keys.ndim != 3 + num_head_axes:
            raise ValueError(
                f"`{keys_name}` must be [{', '.join(names)}] (batched) when neither `block_table` "
                f"nor `cu_seqlens_k` is given, got {list(keys.shape)}"
            )
        check_shape(
            keys_name,
            keys,
            f"[{', '.join(names)}] (batched)",
            (num_seqs, *(None,) * (2 + num_head_axes)),
        )
        if leftpad_k is not None:
            check_dtype("leftpad_k", leftpad_k, torch.int32)
            check_shape("leftpad_k", leftpad_k, "[B]", (num_seqs,))
            check_rows("leftpad_k", leftpad_k)
        bound = keys.shape[1]
    for name, tensor in (
        (keys_name, keys),
        ("cu_seqlens_q", cu_seqlens_q),
        ("block_table", block_table),
        ("cu_seqlens_k", cu_seqlens_k),
        ("leftpad_k", leftpad_k),
    ):
        if tensor is not None:
            check_device(name, tensor, q.device)
    max_seqlen_q = total_q if max_seqlen_q is None else max_seqlen_q
    max_seqlen_k = bound if max_seqlen_k is None else max_seqlen_k
    check_at_least("max_seqlen_q", max_seqlen_q, 0)
    check_at_least("max_seqlen_k", max_seqlen_k, 0)
    check_at_least("num_decode_seqs", num_decode_seqs, 0)
    check_at_least("num_decode_tokens", num_decode_tokens, 0)
    if num_decode_seqs > num_seqs:
        raise ValueError(f"`num_decode_seqs` must be at most B = {num_seqs}, got {num_decode_seqs}")
    if num_decode_tokens > total_q:
        raise ValueError(
            f"`num_decode_tokens` must be at most T = {total_q}, got {num_decode_tokens}"
        )
    return Batch(
        cu_seqlens_q,
        seqused_k,
        block_table,
        cu_seqlens_k,
        leftpad_k,
        max_seqlen_q,
        max_seqlen_k,
        num_decode_seqs,
        num_decode_tokens,
        block_size,
    )
