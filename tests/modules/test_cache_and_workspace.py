"""The cache moves as three lanes; the workspace is scratch that keeps its dtypes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_oracle import SMALL, PagedSequences, make_layer
from torch import Tensor

from m3ops import BatchMetadata, MiniMaxM3SparseAttention, PagedKVCache, Workspace

# Four of twenty blocks: with all blocks kept, a lost index lane would show in nothing.
FEW = replace(SMALL, index_topk_blocks=4)
BLOCK = FEW.index_block_size
LENGTH = 20 * BLOCK - 3


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Filled:
    """A cache of twenty blocks, and what the next token keeps and gives."""

    def __init__(self) -> None:
        self.layer: MiniMaxM3SparseAttention = make_layer(FEW)
        sequences = PagedSequences(FEW, [LENGTH + 1])
        hidden = torch.randn(LENGTH, FEW.hidden_size)
        self.layer(hidden, sequences.step({0: LENGTH}), sequences.cache)
        self.cache = sequences.cache
        self.table = sequences.tables[0]
        self.token = torch.randn(1, FEW.hidden_size)
        self.out, self.ids = self.decode(copy.deepcopy(self.cache), self.table)
        assert set(self.ids.flatten().tolist()) != set(range(16, 20))

    def decode(
        self, cache: PagedKVCache, table: list[int], context: int = LENGTH
    ) -> tuple[Tensor, Tensor]:
        batch = BatchMetadata.from_lengths([1], [context], [table], block_size=BLOCK)
        return self.layer(self.token, batch, cache, return_block_ids=True)

    def check(self, cache: PagedKVCache, table: list[int]) -> None:
        out, ids = self.decode(cache, table)
        assert torch.equal(ids, self.ids)
        assert torch.equal(out, self.out)


def through_state_dict(cache: PagedKVCache) -> PagedKVCache:
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    other = PagedKVCache(FEW, cache.num_pages)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize(
    "move",
    [through_state_dict, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["state_dict", "deepcopy", "pickle"],
)
def test_a_moved_cache_decodes_the_same(move: Any) -> None:
    filled = Filled()
    moved = move(filled.cache)
    for mine, theirs in zip(filled.cache.buffers(), moved.buffers(), strict=True):
        assert mine.data_ptr() != theirs.data_ptr()
        mine.fill_(torch.nan)
    filled.check(moved, filled.table)


def test_pages_move_with_keys_values_and_index_keys() -> None:
    """A sequence whose pages are reordered among each other, overlapping."""
    filled = Filled()
    target = filled.table[1:] + filled.table[:1]
    filled.cache.copy_pages_(torch.tensor(filled.table), torch.tensor(target))
    filled.check(filled.cache, target)


def test_a_cropped_sequence_decodes_as_if_it_had_never_been_longer() -> None:
    filled = Filled()
    context = 11 * BLOCK + 5
    short = PagedSequences(FEW, [context + 1])
    hidden = torch.randn(context, FEW.hidden_size)
    long = torch.cat((hidden, torch.randn(LENGTH - context, FEW.hidden_size)))
    filled.layer(hidden, short.step({0: context}), short.cache)
    batch = BatchMetadata.from_lengths([LENGTH], None, [filled.table], block_size=BLOCK)
    filled.layer(long, batch, filled.cache)
    expected_out, expected_ids = filled.decode(short.cache, short.tables[0], context)
    out, ids = filled.decode(filled.cache, filled.table, context)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(out, expected_out)


def test_two_sequences_share_the_pages_of_a_prefix() -> None:
    filled = Filled()
    prefix, spare = filled.table[:-1], [p for p in range(25) if p not in filled.table]
    last = torch.tensor([filled.table[-1]])
    filled.cache.copy_pages_(last.expand(2), torch.tensor(spare[:2]))
    batch = BatchMetadata.from_lengths(
        [1, 1], [LENGTH, LENGTH], [[*prefix, spare[0]], [*prefix, spare[1]]], block_size=BLOCK
    )
    out, ids = filled.layer(filled.token.expand(2, -1), batch, filled.cache, return_block_ids=True)
    assert torch.equal(ids, filled.ids.expand(2, -1, -1))
    torch.testing.assert_close(out, filled.out.expand(2, -1))


def test_three_buffers_allocated_apart() -> None:
    cache = PagedKVCache(SMALL, 7, dtype=torch.bfloat16)
    assert {name: list(buffer.shape) for name, buffer in cache.named_buffers()} == {
        "k_cache": [7, 2, 16, 16],
        "v_cache": [7, 2, 16, 16],
        "index_k_cache": [7, 16, 32],
    }
    assert len({buffer.untyped_storage().data_ptr() for buffer in cache.buffers()}) == 3
    assert all(buffer.dtype == torch.bfloat16 for buffer in cache.buffers())
    assert set(cache.state_dict()) == {"k_cache", "v_cache", "index_k_cache"}
    assert not list(cache.parameters())
    assert (cache.num_pages, cache.block_size) == (7, 16)
    assert {buffer.dtype for buffer in cache.float().buffers()} == {torch.float32}
    with pytest.raises(ValueError, match="`num_pages` must be at least 1, got 0"):
        PagedKVCache(SMALL, 0)


def test_a_workspace_is_scratch() -> None:
    workspace = Workspace(SMALL, 10, 5 * 16 + 1)
    assert workspace.scores.shape == (11, 2, 8)
    assert workspace.block_ids.shape == (11, 2, 3)
    assert not workspace.state_dict()
    for cast in (workspace.to(torch.bfloat16), copy.deepcopy(workspace).half()):
        assert cast.scores.dtype == torch.float32
        assert cast.block_ids.dtype == torch.int32
        assert cast.scores.shape == (11, 2, 8)
    model = torch.nn.ModuleDict({"layer": make_layer(), "workspace": workspace})
    assert set(model.state_dict()) == {f"layer.{name}" for name in make_layer().state_dict()}
    with pytest.raises(ValueError, match="`max_tokens` must be at least 0, got -1"):
        Workspace(SMALL, -1, 16)
