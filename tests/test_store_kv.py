"""``store_kv``: a step's tokens into three paged caches, and nothing else."""

from __future__ import annotations

import pytest
import torch
from conftest import Target

import m3ops
from m3ops.testing import interleave, poisoned, restride

PAGES, HEADS, SIZE, DIM, INDEX_DIM = 3, 2, 128, 16, 8


def caches(dtype: torch.dtype, target: Target, block_size: int = SIZE) -> list[torch.Tensor]:
    shapes = (
        (PAGES, HEADS, block_size, DIM),
        (PAGES, HEADS, block_size, DIM),
        (PAGES, block_size, INDEX_DIM),
    )
    return [poisoned(*shape, dtype=dtype, device=target.device) for shape in shapes]


def tokens(count: int, dtype: torch.dtype, target: Target) -> list[torch.Tensor]:
    shapes = ((count, HEADS, DIM), (count, HEADS, DIM), (count, INDEX_DIM))
    return [torch.randn(shape).to(target.device, dtype) for shape in shapes]


def store(new: list[torch.Tensor], slots: list[int], cache: list[torch.Tensor]) -> None:
    key, value, index_key = new
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=key.device)
    m3ops.store_kv(key, value, index_key, slot_mapping, *cache)


def assert_stored(
    new: list[torch.Tensor], slots: list[int], cache: list[torch.Tensor], block_size: int = SIZE
) -> None:
    """Slots inside the cache hold their tokens, all others are still NaN."""
    for tensor, token in zip(cache, new, strict=True):
        expected = torch.full_like(tensor, torch.nan)
        for t, slot in enumerate(slots):
            if 0 <= slot < PAGES * block_size:
                page, offset = divmod(slot, block_size)
                expected[page].select(-2, offset).copy_(token[t])
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_only_slots_inside_the_cache_change(target: Target, dtype: torch.dtype) -> None:
    slots = [5, -1, 130, -1, PAGES * SIZE, PAGES * SIZE - 1, -SIZE, 2**40, -(2**63), 2**63 - 1]
    new, cache = tokens(len(slots), dtype, target), caches(dtype, target)
    store(new, slots, cache)
    assert_stored(new, slots, cache)


def test_guards_around_the_caches_stay(target: Target) -> None:
    guarded = [
        poisoned(PAGES + 2, *tensor.shape[1:], dtype=torch.float32, device=target.device)
        for tensor in caches(torch.float32, target)
    ]
    slots = [-1, 0, PAGES * SIZE - 1, PAGES * SIZE, PAGES * SIZE + 7, -5]
    new, inside = tokens(len(slots), torch.float32, target), [x[1:-1] for x in guarded]
    store(new, slots, inside)
    assert_stored(new, slots, inside)
    assert all(x[[0, -1]].isnan().all() for x in guarded)


@pytest.mark.parametrize("strides", ["sliced", "transposed"])
def test_strides_of_tokens_and_caches(target: Target, strides: str) -> None:
    slots = [300, 2, 129, 3]
    new = tokens(4, torch.float32, target)
    cache = [
        restride(x, strides if i < 2 else "sliced")
        for i, x in enumerate(caches(torch.float32, target))
    ]
    store([restride(x, strides) for x in new], slots, cache)
    assert_stored(new, slots, cache)


def test_halves_of_one_cache_row_and_token_major_pages(target: Target) -> None:
    slots = [300, 2, 129, 3]
    new = tokens(4, torch.float32, target)
    k_cache, v_cache, index_cache = caches(torch.float32, target)
    halves = interleave(k_cache, v_cache)
    store(new, slots, [*halves, index_cache])
    assert_stored(new, slots, [*halves, index_cache])
    token_major = [
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches(torch.float32, target)[:2]
    ]
    index_cache.fill_(torch.nan)
    store(new, slots, [*token_major, index_cache])
    assert_stored(new, slots, [*token_major, index_cache])


@pytest.mark.parametrize("block_size", [16, 64])
def test_other_block_sizes(target: Target, block_size: int) -> None:
    slots = [block_size, 2, 3 * block_size - 1]
    new = tokens(3, torch.bfloat16, target)
    cache = caches(torch.bfloat16, target, block_size)
    store(new, slots, cache)
    assert_stored(new, slots, cache, block_size)


@pytest.mark.parametrize("slots", [[], [-1], [-1, PAGES * SIZE]])
def test_nothing_to_store(target: Target, slots: list[int]) -> None:
    new, cache = tokens(len(slots), torch.float32, target), caches(torch.float32, target)
    store(new, slots, cache)
    assert_stored(new, slots, cache)


def test_sliced_slots(target: Target) -> None:
    base = torch.tensor([0, 5, 0, 130, 0, 7], dtype=torch.int64, device=target.device)
    new, cache = tokens(3, torch.float32, target), caches(torch.float32, target)
    key, value, index_key = new
    m3ops.store_kv(key, value, index_key, base[1::2], *cache)
    assert_stored(new, [5, 130, 7], cache)


def test_the_tokens_are_not_written(target: Target) -> None:
    new, cache = tokens(3, torch.float32, target), caches(torch.float32, target)
    before = [x.clone() for x in new]
    store(new, [1, 2, 3], cache)
    assert all(map(torch.equal, new, before))
