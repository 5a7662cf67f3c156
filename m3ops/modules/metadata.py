"""What a step's batch looks like, on the device and padded to a bucket."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch import check_at_least, check_instance, check_int, check_tensor

# torch.compile makes a graph of its own for every size or integer that is 0 or 1.
_FIRST_GENERIC = 2


@dataclass(eq=False)
class BatchMetadata:
    """The batch description of one step, shared by all layers; a pytree.

    Build it with :meth:`from_lengths` and refresh it in place with :meth:`update_`. Its host
    integers are those of the bucket it is padded to, not those of the step, so that one compiled
    or captured graph serves every step that fits the bucket.

    Attributes:
        cu_seqlens_q: int32 ``[B + 1]``, where each sequence's query tokens start; flat for the
            sequences that pad the bucket.
        seqused_k: int32 ``[B]``, keys of each sequence once this step's tokens are in (tokens);
            0 in padding.
        positions: int64 ``[T]``, position of each token in its sequence; 0 in padding.
        num_valid_blocks: int32 ``[T]``, blocks each token sees; 0 in padding.
        block_table: int32 ``[B, W]``, logical block -> page; None for a batch without a cache.
        slot_mapping: int64 ``[T]``, cache slot ``page * N + offset`` of each token; -1 in padding;
            None for a batch without a cache.
        generic_ints: ``max_seqlen_q``, ``num_decode_seqs`` and ``num_decode_tokens``, each two
            larger than it is, because torch.compile specialises 0 and 1; None for a batch
            :meth:`without_bounds`. Read them by name.
        block_size: ``N``, tokens of a block and of a page.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    positions: Tensor
    num_valid_blocks: Tensor
    block_table: Tensor | None
    slot_mapping: Tensor | None
    generic_ints: tuple[int, int, int] | None
    block_size: int

    @property
    def num_tokens(self) -> int:
        """``T``, rows of the bucket."""
        return self.positions.shape[0]

    @property
    def num_seqs(self) -> int:
        """``B``, sequences of the bucket."""
        return self.seqused_k.shape[0]

    @property
    def max_seqlen_q(self) -> int:
        """The bucket's bound on a sequence's query tokens."""
        if self.generic_ints is None:
            return self.num_tokens
        return self.generic_ints[0] - _FIRST_GENERIC

    @property
    def num_decode_seqs(self) -> int:
        """How many leading sequences of the bucket are decode sequences."""
        if self.generic_ints is None:
            return 0
        return self.generic_ints[1] - _FIRST_GENERIC

    @property
    def num_decode_tokens(self) -> int:
        """How many leading rows of the bucket are theirs."""
        if self.generic_ints is None:
            return 0
        return self.generic_ints[2] - _FIRST_GENERIC

    def without_bounds(self) -> BatchMetadata:
        """Describe the same step, in the same tensors, without host integers.

        ``T`` takes the place of `max_seqlen_q`, and no sequence is named as a decode sequence;
        results are equal. Export a batch like this for AOTInductor: packaging fails on integers
        that are dynamic, and builds in those that are not, so that every later step silently gets
        the first one's. The package runs any step, and passes over the integers of a batch that has
        them.
        """
        return replace(self, generic_ints=None)

    def dynamic_shapes(self) -> list[Any]:
        """This batch's entry in the `dynamic_shapes` of ``torch.export.export``: all sizes open.

        Only `block_size` stays what it is.
        """
        dynamic = torch.export.Dim.DYNAMIC
        open_sizes = [
            None if value is None else dict.fromkeys(range(value.ndim), dynamic)
            for value in (getattr(self, field.name) for field in fields(self)[:6])
        ]
        ints = None if self.generic_ints is None else (dynamic,) * 3
        # Fields that are None are no part of the pytree.
        return [*(entry for entry in (*open_sizes, ints) if entry is not None), None]

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int] | None = None,
        block_table: Tensor | Sequence[Sequence[int]] | None = None,
        *,
        num_tokens: int | None = None,
        num_seqs: int | None = None,
        num_columns: int | None = None,
        max_seqlen_q: int | None = None,
        num_decode_seqs: int | None = None,
        block_size: int = 128,
        device: torch.device | str | None = None,
    ) -> BatchMetadata:
        """Describe a step, padded to a bucket.

        Args:
            query_lens: new tokens of each sequence; decode sequences may come first.
            context_lens: tokens of each sequence that are in the cache already; None for 0.
            block_table: pages of each sequence, at least those of its context and its new tokens;
                lists, or an integer tensor on the CPU. None for a batch without a cache, whose
                sequences attend within the call and have no context.
            num_tokens: ``T`` of the bucket; None for the step's.
            num_seqs: ``B`` of the bucket; None for the step's. It becomes at least 2.
            num_columns: ``W`` of the bucket (pages); None for the step's. It becomes at least 2.
            max_seqlen_q: the bucket's bound on `query_lens`; None for 1 if all sequences are
                decode sequences of at most one token, and for ``T`` otherwise.
            num_decode_seqs: how many leading sequences are decode sequences; None for those of at
                most one new token. If it is all, so are the sequences that pad the bucket.
            block_size: ``N``, tokens of a block and of a page.
            device: where the tensors go, without a sync; the CPU if None.

        Raises:
            TypeError: lengths, pages or sizes are not ints.
            ValueError: lengths are negative or do not fit each other, the table or the bucket.
        """
        query_lens = _ints("query_lens", query_lens)
        sizes = {
            "num_tokens": num_tokens,
            "num_seqs": num_seqs,
            "num_columns": num_columns,
            "max_seqlen_q": max_seqlen_q,
        }
        for name, size in sizes.items():
            if size is not None:
                check_at_least(name, size, 0)
        count = len(query_lens)
        if num_decode_seqs is None:
            num_decode_seqs = next((i for i, n in enumerate(query_lens) if n > 1), count)
        check_int("num_decode_seqs", num_decode_seqs)
        if not 0 <= num_decode_seqs <= count:
            raise ValueError(
                f"`num_decode_seqs` must be at most the {count} sequences, got {num_decode_seqs}"
            )
        num_tokens = sum(query_lens) if num_tokens is None else num_tokens
        num_seqs = max(count if num_seqs is None else num_seqs, _FIRST_GENERIC)
        num_decode_tokens = sum(query_lens[:num_decode_seqs])
        if num_decode_seqs == count:
            num_decode_seqs, num_decode_tokens = num_seqs, num_tokens
        if max_seqlen_q is None:
            only_decode = num_decode_seqs == num_seqs and max(query_lens, default=0) <= 1
            max_seqlen_q = 1 if only_decode else num_tokens
        batch = cls._on_host(
            query_lens,
            context_lens,
            block_table,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_columns=num_columns,
            generic_ints=(
                max_seqlen_q + _FIRST_GENERIC,
                num_decode_seqs + _FIRST_GENERIC,
                num_decode_tokens + _FIRST_GENERIC,
            ),
            block_size=block_size,
        )
        return batch._to(torch.device("cpu" if device is None else device))

    @classmethod
    def _on_host(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int] | None,
        block_table: Tensor | Sequence[Sequence[int]] | None,
        *,
        num_tokens: int,
        num_seqs: int,
        num_columns: int | None,
        generic_ints: tuple[int, int, int] | None,
        block_size: int,
    ) -> BatchMetadata:
        """The bucket's batch on the CPU."""
        query, context = _lengths(query_lens, context_lens)
        check_at_least("block_size", block_size, 1)
        count, total = len(query_lens), sum(query_lens)
        max_seqlen_q = num_tokens if generic_ints is None else generic_ints[0] - _FIRST_GENERIC
        _check_fits("query_lens", "tokens", total, num_tokens)
        _check_fits("query_lens", "sequences", count, num_seqs)
        _check_fits("query_lens", "tokens a sequence", max(query_lens, default=0), max_seqlen_q)
        seqused = query + context
        cu_seqlens_q = F.pad(query.cumsum(0), (1, num_seqs - count))
        cu_seqlens_q[count + 1 :] = total
        sequence = torch.repeat_interleave(query)
        positions = context[sequence] + torch.arange(total, device="cpu") - cu_seqlens_q[sequence]
        padding = (0, num_tokens - total)
        table = slots = None
        if block_table is None:
            if context.any():
                raise ValueError(
                    f"`context_lens` must be 0 without `block_table`, got {context.tolist()}"
                )
        else:
            pages = _page_table(block_table, seqused, block_size)
            columns = max(pages.shape[1] if num_columns is None else num_columns, _FIRST_GENERIC)
            _check_fits("block_table", "columns", pages.shape[1], columns)
            page = pages[sequence, positions // block_size]
            slots = F.pad(page * block_size + positions % block_size, padding, value=-1)
            table = F.pad(pages, (0, columns - pages.shape[1], 0, num_seqs - count)).int()
        return cls(
            cu_seqlens_q=cu_seqlens_q.int(),
            seqused_k=F.pad(seqused, (0, num_seqs - count)).int(),
            positions=F.pad(positions, padding),
            num_valid_blocks=F.pad(positions // block_size + 1, padding).int(),
            block_table=table,
            slot_mapping=slots,
            generic_ints=generic_ints,
            block_size=block_size,
        )

    @classmethod
    def uniform(
        cls, num_seqs: int, seqlen: int, block_size: int, device: torch.device
    ) -> BatchMetadata:
        """Describe `num_seqs` whole sequences of `seqlen` tokens without a cache, unpadded.

        Everything is computed on `device`, so it may stand inside a compiled function.
        """
        positions = torch.arange(seqlen, device=device).repeat(num_seqs)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * seqlen
        return cls(
            cu_seqlens_q=starts,
            seqused_k=torch.full((num_seqs,), seqlen, dtype=torch.int32, device=device),
            positions=positions,
            num_valid_blocks=(positions // block_size + 1).int(),
            block_table=None,
            slot_mapping=None,
            generic_ints=(seqlen + _FIRST_GENERIC, _FIRST_GENERIC, _FIRST_GENERIC),
            block_size=block_size,
        )

    def update_(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int] | None = None,
        block_table: Tensor | Sequence[Sequence[int]] | None = None,
    ) -> BatchMetadata:
        """Overwrite the tensors in place with another step of the same bucket, without a sync.

        Args:
            query_lens, context_lens, block_table: as in :meth:`from_lengths`.

        Returns:
            self.

        Raises:
            TypeError: lengths or pages are not ints.
            ValueError: the step does not fit the bucket, or tokens of other sequences stand where
                the bucket has rows of decode sequences.
        """
        query_lens = _ints("query_lens", query_lens)
        decode, rest = query_lens[: self.num_decode_seqs], query_lens[self.num_decode_seqs :]
        if any(rest) and sum(decode) != self.num_decode_tokens:
            raise ValueError(
                f"`query_lens` must have {self.num_decode_tokens} tokens in its first "
                f"{self.num_decode_seqs} sequences, the bucket's decode sequences, or none after "
                f"them, got {sum(decode)} and {sum(rest)}"
            )
        step = self._on_host(
            query_lens,
            context_lens,
            block_table,
            num_tokens=self.num_tokens,
            num_seqs=self.num_seqs,
            num_columns=None if self.block_table is None else self.block_table.shape[1],
            generic_ints=self.generic_ints,
            block_size=self.block_size,
        )
        return self.copy_(step)

    def copy_(self, other: BatchMetadata) -> BatchMetadata:
        """Overwrite the tensors in place with those of another batch of the same bucket.

        Returns:
            self.

        Raises:
            ValueError: sizes or host integers differ.
        """
        check_instance("other", other, BatchMetadata)
        if (self.generic_ints, self.block_size) != (other.generic_ints, other.block_size):
            raise ValueError(
                f"`other` must be of the bucket {self._describe_ints()}, "
                f"got {other._describe_ints()}"
            )
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)[:6]]
        for name, target, source in pairs:
            sizes = [None if t is None else list(t.shape) for t in (target, source)]
            if sizes[0] != sizes[1]:
                raise ValueError(f"`other.{name}` must be of size {sizes[0]}, got {sizes[1]}")
        for _, target, source in pairs:
            if target is not None:
                target.copy_(_staged(source, target.device), non_blocking=True)
        return self

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments by which the ops of :mod:`m3ops` take the batch."""
        self._warn_of_frozen_bounds()
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "seqused_k": self.seqused_k,
            "block_table": self.block_table,
            # Without a cache, the keys are the rows of the call.
            "cu_seqlens_k": self.cu_seqlens_q if self.block_table is None else None,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_q if self.block_table is None else None,
            "num_decode_seqs": self.num_decode_seqs,
            "num_decode_tokens": self.num_decode_tokens,
            "block_size": self.block_size,
        }

    def _warn_of_frozen_bounds(self) -> None:
        """A program for every ``T`` with the bound of one step is right in that step alone."""
        if (
            torch.compiler.is_exporting()
            and self.generic_ints is not None
            and _is_symbolic(self.num_tokens)
            and not _is_symbolic(self.generic_ints[0])
        ):
            warnings.warn(
                f"`max_seqlen_q` = {self.max_seqlen_q} becomes a constant of the exported program "
                "although T is dynamic, and AOTInductor does not check it: export "
                "`batch.without_bounds()`, or with `batch.dynamic_shapes()`",
                stacklevel=2,
            )

    def _to(self, device: torch.device) -> BatchMetadata:
        """Move to `device` and let torch.compile treat every size as independent."""
        # Loading the compiler takes a second, which `import m3ops` must not.
        from torch._dynamo import maybe_mark_dynamic

        for field in fields(self):
            tensor = getattr(self, field.name)
            if isinstance(tensor, Tensor):
                tensor = _staged(tensor, device).to(device, non_blocking=True)
                # Sizes that happen to be equal when a graph is compiled would be tied for good.
                maybe_mark_dynamic(tensor, list(range(tensor.ndim)))
                setattr(self, field.name, tensor)
        return self

    def _describe_ints(self) -> str:
        return (
            f"max_seqlen_q={self.max_seqlen_q}, num_decode_seqs={self.num_decode_seqs}, "
            f"num_decode_tokens={self.num_decode_tokens}, block_size={self.block_size}"
        )


torch.export.register_dataclass(BatchMetadata, serialized_type_name="m3ops.BatchMetadata")
# Saved programs hold the inputs that they were exported with.
torch.serialization.add_safe_globals([BatchMetadata])


def _is_symbolic(value: object) -> bool:
    return isinstance(value, torch.SymInt)


def _lengths(
    query_lens: Sequence[int], context_lens: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Both lists as int64 ``[b]`` on the CPU, checked."""
    context_lens = [0] * len(query_lens) if context_lens is None else context_lens
    context_lens = _ints("context_lens", context_lens)
    if len(context_lens) != len(query_lens):
        raise ValueError(
            f"`context_lens` must be as many as `query_lens`, {len(query_lens)}, "
            f"got {len(context_lens)}"
        )
    for name, lens in (("query_lens", query_lens), ("context_lens", context_lens)):
        check_at_least(f"min({name})", min(lens, default=0), 0)
    # Not on the default device, which may be another one.
    query, context = (torch.tensor(lens, device="cpu") for lens in (query_lens, context_lens))
    return query.long(), context.long()


def _ints(name: str, values: Any) -> list[int]:
    """A list of Python ints; a tensor is refused, for it might have to be waited for."""
    if isinstance(values, Tensor) or not hasattr(values, "__iter__"):
        raise TypeError(f"`{name}` must be a list of ints, got {type(values).__name__}")
    values = list(values)
    for i, value in enumerate(values):
        check_int(f"{name}[{i}]", value)
    return [int(value) for value in values]


def _page_table(
    block_table: Tensor | Sequence[Sequence[int]], seqused: Tensor, block_size: int
) -> Tensor:
    """The pages as int64 ``[b, w]`` on the CPU, checked; 0 behind the end of a row."""
    if isinstance(block_table, Tensor):
        check_tensor("block_table", block_table)
        if block_table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`block_table` must be int32 or int64, got {block_table.dtype}")
        if block_table.ndim != 2 or not block_table.is_cpu:
            raise ValueError(
                "`block_table` must be [B, W] on the CPU, where slots are computed, "
                f"got {list(block_table.shape)} on {block_table.device}"
            )
        pages = block_table.long()
        widths = torch.full((len(pages),), pages.shape[1], device="cpu")
    else:
        try:
            widths = torch.tensor([len(row) for row in block_table], device="cpu").long()
            longest = max(map(len, block_table), default=0)
            rows = [[*row, *[0] * (longest - len(row))] for row in block_table]
            pages = torch.tensor(rows, device="cpu").reshape(len(rows), longest)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"`block_table` must be a list of pages for each sequence, got {block_table!r}"
            ) from error
        if pages.numel() and pages.dtype != torch.int64:
            raise TypeError(f"`block_table` must hold ints, got {block_table!r}")
        pages = pages.long()
    if len(pages) != len(seqused):
        raise ValueError(
            f"`block_table` must have a row for each of the {len(seqused)} sequences, "
            f"got {len(pages)}"
        )
    needed = (seqused + block_size - 1) // block_size
    if (widths < needed).any():
        b = int((widths < needed).nonzero()[0])
        raise ValueError(
            f"`block_table[{b}]` must have at least {int(needed[b])} pages for "
            f"{int(seqused[b])} tokens, got {int(widths[b])}"
        )
    used = torch.arange(pages.shape[1], device="cpu") < needed[:, None]
    if (pages.where(used, 0) < 0).any():
        raise ValueError(f"`block_table` must hold pages of at least 0, got {pages.tolist()}")
    return pages


def _staged(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, in pinned memory if it has to travel: other copies wait for the device."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.is_cpu else tensor


def _check_fits(name: str, unit: str, have: int, room: int) -> None:
    if have > room:
        raise ValueError(f"`{name}` must have at most the {room} {unit} of the bucket, got {have}")
