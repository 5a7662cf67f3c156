"""The description of a step: its values, its padding, and what in-place updates accept."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import m3ops
from m3ops import BatchMetadata

BLOCK = 4
TENSORS = [
    "cu_seqlens_q",
    "seqused_k",
    "positions",
    "num_valid_blocks",
    "block_table",
    "slot_mapping",
]


def make(*args: Any, **options: Any) -> BatchMetadata:
    return BatchMetadata.from_lengths(*args, **{"block_size": BLOCK, **options})


def values(batch: BatchMetadata) -> dict[str, Any]:
    return {name: getattr(batch, name).tolist() for name in TENSORS}


def ints(batch: BatchMetadata) -> tuple[int, int, int]:
    return batch.max_seqlen_q, batch.num_decode_seqs, batch.num_decode_tokens


def test_a_mixed_step_padded_to_a_bucket() -> None:
    batch = make(
        [1, 1, 3],
        [7, 0, 2],
        [[9, 5], [2], [8, 7]],
        num_tokens=8,
        num_seqs=4,
        num_columns=3,
    )
    assert values(batch) == {
        "cu_seqlens_q": [0, 1, 2, 5, 5],
        "seqused_k": [8, 1, 5, 0],
        "positions": [7, 0, 2, 3, 4, 0, 0, 0],
        "num_valid_blocks": [2, 1, 1, 1, 2, 0, 0, 0],
        "block_table": [[9, 5, 0], [2, 0, 0], [8, 7, 0], [0, 0, 0]],
        "slot_mapping": [23, 8, 34, 35, 28, -1, -1, -1],
    }
    assert ints(batch) == (8, 2, 2)
    assert (batch.num_tokens, batch.num_seqs) == (8, 4)
    dtypes = {name: getattr(batch, name).dtype for name in TENSORS}
    assert {name for name, dtype in dtypes.items() if dtype == torch.int64} == {
        "positions",
        "slot_mapping",
    }
    assert set(dtypes.values()) == {torch.int32, torch.int64}


def test_valid_blocks_are_those_of_the_ops() -> None:
    lengths, contexts = [1, 1, 9, 0, 5], [30, 3, 0, 8, 12]
    tables = [list(range(10 * b, 10 * b + 10)) for b in range(5)]
    batch = make(lengths, contexts, tables, num_tokens=21, num_seqs=7)
    expected = m3ops.num_valid_blocks(batch.cu_seqlens_q, batch.seqused_k, 21, BLOCK)
    assert torch.equal(batch.num_valid_blocks, expected)


def test_sequences_and_columns_are_at_least_two() -> None:
    batch = make([1], [0], [[3]])
    assert batch.num_tokens == 1
    assert batch.num_seqs == 2
    assert batch.block_table is not None and batch.block_table.shape == (2, 2)
    assert ints(batch) == (1, 2, 1)
    empty = make([], [], [])
    assert (empty.num_tokens, empty.num_seqs) == (0, 2)
    assert empty.cu_seqlens_q.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("query_lens", "options", "expected"),
    [
        # All decode: the bucket's rows and sequences are, too.
        ([1, 1, 1], {"num_tokens": 8, "num_seqs": 8}, (1, 8, 8)),
        ([1, 0, 1], {"num_tokens": 4, "num_seqs": 4}, (1, 4, 4)),
        ([1, 1, 5], {}, (7, 2, 2)),
        ([5, 1, 1], {}, (7, 0, 0)),
        ([1, 1, 5], {"num_decode_seqs": 0}, (7, 0, 0)),
        ([3, 2, 3], {"num_decode_seqs": 3, "max_seqlen_q": 4}, (4, 3, 8)),
        ([3, 2, 9], {"num_decode_seqs": 2}, (14, 2, 5)),
    ],
)
def test_the_buckets_integers(
    query_lens: list[int], options: dict[str, int], expected: tuple[int, int, int]
) -> None:
    assert ints(make(query_lens, **options)) == expected


def test_a_table_may_be_a_tensor() -> None:
    listed = make([2, 1], [3, 4], [[5, 6], [1, 2]])
    for dtype in (torch.int32, torch.int64):
        tensor = make([2, 1], [3, 4], torch.tensor([[5, 6], [1, 2]], dtype=dtype))
        assert values(tensor) == values(listed)


def test_without_a_cache() -> None:
    batch = make([3, 5], num_tokens=10)
    assert batch.block_table is None and batch.slot_mapping is None
    assert batch.seqused_k.tolist() == [3, 5]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 0]
    keywords = batch.keywords()
    assert keywords["block_table"] is None
    assert keywords["cu_seqlens_k"] is batch.cu_seqlens_q


def test_update_overwrites_in_place() -> None:
    bucket: dict[str, Any] = {"num_tokens": 4, "num_seqs": 4, "num_columns": 3}
    batch = make([1, 1, 1], [7, 2, 0], [[0, 1], [2], [3]], **bucket)
    places = [getattr(batch, name).data_ptr() for name in TENSORS]
    before = ints(batch)
    # Grown, shrunk, pages swapped, and nothing at all.
    steps: list[tuple[Any, ...]] = [
        ([1, 1, 1, 1], [8, 3, 1, 11], [[0, 1, 5], [2], [3], [7, 8, 9]]),
        ([1, 1], [8, 3], [[9, 3, 4], [1]]),
        ([], [], []),
    ]
    for step in steps:
        assert batch.update_(*step) is batch
        assert values(batch) == values(make(*step, **bucket))
        assert [getattr(batch, name).data_ptr() for name in TENSORS] == places
        assert ints(batch) == before


def test_update_of_a_bucket_with_named_decode_sequences() -> None:
    table = [[b] for b in range(3)]
    batch = make([1, 1, 2], None, table, num_tokens=8)
    batch.update_([1, 1, 4], None, table)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 6]
    # Fewer decode rows, and none of other sequences behind them.
    batch.update_([1, 0], None, table[:2])
    assert batch.cu_seqlens_q.tolist() == [0, 1, 1, 1]
    before = values(batch)
    with pytest.raises(ValueError, match="must have 2 tokens in its first 2 sequences"):
        batch.update_([1, 2, 2], None, table)
    with pytest.raises(ValueError, match="must have 2 tokens in its first 2 sequences"):
        batch.update_([1, 0, 4], None, table)
    assert values(batch) == before


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (([-1],), {}, "`min.query_lens.` must be at least 0, got -1"),
        (([1], [-2]), {}, "`min.context_lens.` must be at least 0, got -2"),
        (([1, 2], [1]), {}, "`context_lens` must be as many as `query_lens`, 2, got 1"),
        (([1], [3]), {}, "`context_lens` must be 0 without `block_table`"),
        (([1, 1], None, [[0]]), {}, "must have a row for each of the 2 sequences, got 1"),
        (([1, 1], [1, 4], [[0], [1]]), {}, r"`block_table\[1\]` must have at least 2 pages"),
        (([5], [0], [[0, -1]]), {}, "must hold pages of at least 0"),
        (([1], None, torch.zeros(2, dtype=torch.int32)), {}, r"must be \[B, W\] on the CPU"),
        (([3],), {"num_tokens": 2}, "must have at most the 2 tokens of the bucket, got 3"),
        (([1] * 5,), {"num_seqs": 4}, "must have at most the 4 sequences of the bucket, got 5"),
        (([3],), {"max_seqlen_q": 2}, "at most the 2 tokens a sequence of the bucket, got 3"),
        (([1], None, [[0, 1, 2]]), {"num_columns": 2}, "at most the 2 columns of the bucket"),
        (([1],), {"num_decode_seqs": 2}, "`num_decode_seqs` must be at most the 1 sequences"),
        (([1],), {"block_size": 0}, "`block_size` must be at least 1"),
    ],
)
def test_bad_steps_are_refused(
    args: tuple[Any, ...], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(*args, **options)


def test_copies_between_buckets_are_refused() -> None:
    batch = make([1, 1], None, [[0], [1]], num_tokens=4)
    with pytest.raises(ValueError, match="`other` must be of the bucket max_seqlen_q=1"):
        batch.copy_(make([2, 2], None, [[0], [1]]))
    with pytest.raises(ValueError, match=r"`other.block_table` must be of size \[2, 2\]"):
        batch.copy_(make([1, 1], None, [[0, 1, 2], [1]], num_tokens=4))


def test_it_is_a_pytree() -> None:
    batch = make([1, 3], [4, 0], [[0, 1], [2]])
    leaves, spec = pytree.tree_flatten(batch)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == len(TENSORS)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, BatchMetadata)
    assert all(getattr(again, f.name) is getattr(batch, f.name) for f in fields(batch)[:6])
    assert ints(again) == ints(batch)


def test_copies_and_pickles_are_equal() -> None:
    batch = make([1, 3], [4, 0], [[0, 1], [2]])
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert values(other) == values(batch)
        assert ints(other) == ints(batch)


@pytest.mark.gpu
def test_building_and_updating_do_not_wait_for_the_device(device: torch.device) -> None:
    table = torch.arange(64, dtype=torch.int32).view(8, 8)
    bucket: dict[str, Any] = {"num_tokens": 8, "num_seqs": 8, "num_columns": 8}
    make([1], [1], table[:1], device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = make([1] * 8, range(8), table, device=device, **bucket)
        batch.update_([1] * 5, range(3, 8), table[:5])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert values(batch) == values(make([1] * 5, range(3, 8), table[:5], **bucket))
