"""The KV-major road of ``sparse_attention``: its lists on a CPU, the whole road on a Hopper GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import HAS_TRITON, INTERPRETED
from torch import Tensor

import m3ops
from m3ops.batch import Batch, make_batch
from m3ops.testing import (
    LAYOUTS,
    Geometry,
    Inputs,
    assert_attention,
    assert_within_budget,
    lay_out,
    make_inputs,
    poisoned,
    random_ids,
    random_sequences,
)

if not HAS_TRITON:
    pytest.skip("needs triton", allow_module_level=True)

from m3ops.custom_ops.sparse_attention import launch
from m3ops.custom_ops.sparse_attention.hopper import launch as hopper
from m3ops.custom_ops.sparse_attention.hopper.kv_major import launch as kv_major

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="kernels run on CPU tensors only under TRITON_INTERPRET=1"
)
# The one geometry of the Gluon kernels, with as few heads as show how groups are told apart.
GROUP, BLOCK, DIM = 16, 128, 128
HOPPER = Geometry(heads_q=2 * GROUP, heads_kv=2, dim=DIM, index_dim=16, block_size=BLOCK)
# A union never takes more steps than it has selections, each an eighth of 32.
KV_MAJOR, UNION = 0, 33


def batch_of(inputs: Inputs) -> Batch:
    keys = dict.fromkeys(("block_table", "cu_seqlens_k", "leftpad_k"))
    bounds = {"max_seqlen_q": None, "max_seqlen_k": None}
    named = {"num_decode_seqs": 0, "num_decode_tokens": 0}
    arguments: dict[str, Any] = {**keys, **bounds, **named, **inputs.batch}
    return make_batch(inputs.q, inputs.k, "k", num_head_axes=1, **arguments)


# Lists, and what they are joined to, on a CPU.


def multiply(inputs: Inputs, lists: kv_major.Lists, chunk: int, first: int, scale: float) -> None:
    """What the Gluon kernel does with the lists of one chunk."""
    lists.partial_out.fill_(math.nan)
    lists.partial_lse.fill_(math.nan)
    size, topk = inputs.block_size, lists.places.shape[2] // lists.chunk_rows
    group = inputs.q.shape[1] // lists.counts.shape[1]
    by_token = {"paged": lambda x: x.transpose(1, 2), "packed": lambda x: x[None]}
    k, v = (by_token.get(inputs.layout, lambda x: x)(x) for x in (inputs.k, inputs.v))
    for head in range(lists.counts.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        for tile in range(int(lists.num_tiles[chunk, head])):
            index = int(lists.tile_lists[chunk, head, tile])
            outer, token, num_keys = lists.lists[chunk, head, index, :3].tolist()
            for packed in lists.entries[chunk, head, tile].tolist():
                if packed < 0:
                    continue
                entry, last_key = divmod(packed, size)
                assert last_key < num_keys <= size
                at = slice(token, token + last_key + 1)
                queries = inputs.q[first + entry // topk, heads]
                logits = queries @ k[outer, at, head].T * scale
                lists.partial_out[head, entry] = logits.softmax(-1) @ v[outer, at, head]
                lists.partial_lse[head, entry] = logits.logsumexp(-1) / math.log(2)


@interpreted
@pytest.mark.parametrize(("layout", "chunk_rows"), [("paged", 11), ("packed", 30), ("batched", 13)])
def test_lists_lead_to_attention(layout: str, chunk_rows: int) -> None:
    lengths = [(3, 1), (70, 12), (0, 0), (0, 1), (33, 3), (2, 4), (20, 5)]
    inputs = make_inputs(lengths, layout=layout, padding_rows=3)
    ids = random_ids(inputs, 3)
    batch, begin, end = batch_of(inputs), 1, inputs.total_q
    chunks = -(-(end - begin) // chunk_rows)
    num_blocks = batch.num_seqs * batch.num_block_columns
    lists = kv_major.allocate(inputs.q, ids, batch, chunks, chunk_rows, num_blocks)
    for name in ("places", "starts", "lists", "num_tiles", "entries", "tile_lists"):
        getattr(lists, name).fill_(2**30)
    lists.balance.fill_(1)
    kv_major.build_lists(inputs.k, ids, batch, lists, begin, end)
    out = poisoned(*inputs.q.shape, dtype=torch.float32)
    lse = poisoned(*inputs.q.shape[:2], dtype=torch.float32)
    for chunk in range(chunks):
        first = begin + chunk * chunk_rows
        multiply(inputs, lists, chunk, first, 0.3)
        kv_major.merge(lists, chunk, first, min(first + chunk_rows, end), out, lse)
    assert out[:begin].isnan().all()
    rows = range(begin, end)
    assert_attention(out, lse, inputs, ids, rows=rows, softmax_scale=0.3)


@interpreted
def test_every_selection_has_one_place() -> None:
    inputs = make_inputs([(90, 37), (40, 20)], padding_rows=1)
    ids = random_ids(inputs, 4)
    ids[:, 1] = torch.tensor([0, -1, -1, -1])
    batch, rows = batch_of(inputs), inputs.total_q
    num_blocks = batch.num_seqs * batch.num_block_columns
    lists = kv_major.allocate(inputs.q, ids, batch, 1, rows, num_blocks)
    lists.balance.fill_(1)
    kv_major.build_lists(inputs.k, ids, batch, lists, 0, rows)
    visible = inputs.visible_blocks()
    for head in range(2):
        tiles = int(lists.num_tiles[0, head])
        entries = lists.entries[0, head, :tiles]
        found = sorted(entries[entries >= 0].tolist())
        live = [
            (row * 4 + slot, min(position - j * 16, 15))
            for row, (_, _, position) in enumerate(inputs.rows())
            for slot, j in enumerate(ids[row, head].tolist())
            if 0 <= j < visible[row]
        ]
        assert found == sorted(entry * 16 + last_key for entry, last_key in live)
        # A tile is of one list, and lists come one after the other.
        steps = lists.tile_lists[0, head, :tiles].diff()
        assert steps.min() >= 0
        assert steps.max() <= 1
    # Of the second head, two blocks were selected by all tokens of their sequences.
    assert lists.counts[0, 1].count_nonzero() == 2
    assert int(lists.num_tiles[0, 1]) == 10 + 5


@interpreted
def test_without_a_balance_nothing_is_written() -> None:
    inputs = make_inputs([(40, 20)])
    ids = random_ids(inputs, 3)
    batch = batch_of(inputs)
    lists = kv_major.allocate(inputs.q, ids, batch, 1, 20, batch.num_block_columns)
    for tensor in lists[3:]:
        tensor.fill_(7)
    lists.balance.fill_(0)
    kv_major.build_lists(inputs.k, ids, batch, lists, 0, 20)
    out, lse = torch.full_like(inputs.q, 7), torch.full(inputs.q.shape[:2], 7.0)
    kv_major.merge(lists, 0, 0, 20, out, lse)
    for tensor in (*lists[3:], out, lse):
        assert (tensor == 7).all()


@pytest.mark.parametrize("rows", [2048, 3000, 8192, 100_000])
@pytest.mark.parametrize("bound", [2**27, 2**30])
def test_scratch_is_bounded(rows: int, bound: int) -> None:
    q = torch.empty(rows, 64, 128, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(rows, 4, 16, dtype=torch.int32, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    batch = Batch(lengths, lengths[1:], None, lengths, None, rows, 131072, 0, 0, 128)
    lists = kv_major.allocate_lists(q, ids, batch, rows, bound)
    if lists is None:
        assert bound < 2**30
        return
    total = sum(x.numel() * x.element_size() for x in lists if isinstance(x, Tensor))
    assert total <= bound
    assert len(lists.num_tiles) * lists.chunk_rows >= rows


# The whole road on a Hopper GPU.


def needs_hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs compute capability 9.x")


@pytest.fixture
def road(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Takes either road at any size; returns which roads the calls took, as the sign of balance."""
    needs_hopper()
    taken: list[kv_major.Lists] = []

    def allocate(*arguments: Any) -> Any:
        lists = kv_major.allocate_lists(*arguments)
        if lists is not None:
            taken.append(lists)
        return lists

    monkeypatch.setattr(hopper, "allocate_lists", allocate)
    for name in ("MIN_ROWS", "MIN_CHUNK_ROWS", "MIN_SPREAD"):
        monkeypatch.setattr(kv_major, name, 1)

    def choose(cost: int | None = None, chunk_rows: int = 4096) -> list[kv_major.Lists]:
        if cost is not None:
            monkeypatch.setattr(launch, "KV_MAJOR_COST", cost)
        monkeypatch.setattr(kv_major, "CHUNK_ROWS", chunk_rows)
        taken.clear()
        return taken

    yield choose


def attend(inputs: Inputs, ids: Tensor, **options: Any) -> Any:
    return m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True, **options
    )


def both_roads(road: Any, inputs: Inputs, ids: Tensor, chunk_rows: int = 4096) -> Any:
    """Results of the KV-major road, which agree with those of the other within rounding."""
    taken = road(UNION)
    union = attend(inputs, ids)
    assert [int(lists.balance) > 0 for lists in taken] == [False]
    taken = road(KV_MAJOR, chunk_rows)
    results = attend(inputs, ids)
    assert [int(lists.balance) > 0 for lists in taken] == [True]
    assert_within_budget("out", results[0], union[0].double(), union[0])
    torch.testing.assert_close(results[1], union[1], rtol=0, atol=1e-5)
    return results


def some_rows(inputs: Inputs, count: int = 60) -> list[int]:
    """First and last rows of every sequence, padding, and random ones."""
    rows = {inputs.total_q - 1, *torch.randint(inputs.total_q, (count,)).tolist()}
    for b in range(len(inputs.sequences)):
        span = inputs.span(b)
        rows |= {span.start, span.stop - 1} if span.stop > span.start else set()
    return sorted(rows)


RAGGED = [(900, 333), (700, 1), (0, 1), (0, 0), (129, 129), (2050, 3), (40, 60), (3001, 501)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_batches(road: Any, device: torch.device, layout: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(RAGGED, HOPPER, layout=layout, dtype=dtype, device=device, padding_rows=5)
    ids = random_ids(inputs, 5)
    out, lse = both_roads(road, inputs, ids)
    assert_attention(out, lse, inputs, ids, rows=some_rows(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_rows", [64, 100, 333, 1027])
def test_chunks(road: Any, device: torch.device, chunk_rows: int) -> None:
    inputs = make_inputs(RAGGED, HOPPER, dtype=torch.bfloat16, device=device, padding_rows=3)
    ids = random_ids(inputs, 7)
    out, lse = both_roads(road, inputs, ids, chunk_rows)
    assert_attention(out, lse, inputs, ids, rows=some_rows(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [1, 3, 16, 20])
def test_every_topk(road: Any, device: torch.device, topk: int) -> None:
    lengths = [(BLOCK * 24 + 5, 700)]
    inputs = make_inputs(lengths, HOPPER, dtype=torch.bfloat16, device=device)
    ids = random_ids(inputs, topk)
    out, lse = both_roads(road, inputs, ids, 200)
    assert_attention(out, lse, inputs, ids, rows=some_rows(inputs, 30))


@pytest.mark.gpu
@pytest.mark.parametrize("ordered", [True, False])
def test_a_block_that_all_tokens_select(road: Any, device: torch.device, ordered: bool) -> None:
    """Its list is most of the work; other blocks are selected by nobody or by one token."""
    inputs = make_inputs([(9000, 3000)], HOPPER, dtype=torch.bfloat16, device=device)
    ids = torch.full((3000, 2, 4), -1, dtype=torch.int32, device=device)
    own = (torch.arange(6000, 9000, device=device) // BLOCK).int()
    ids[:, :, 2 if ordered else 0] = 0
    ids[:, 0, 3 if ordered else 1] = own
    ids[1234, 1, 1] = 17
    out, lse = both_roads(road, inputs, ids, 1700)
    assert_attention(out, lse, inputs, ids, rows=[*some_rows(inputs), 1234])


@pytest.mark.gpu
@pytest.mark.parametrize("named", [None, 3])
def test_decode_rows_beside_a_chunk(road: Any, device: torch.device, named: int | None) -> None:
    lengths = [(1500, 1), (0, 1), (300, 1), (2500, 900)]
    inputs = make_inputs(
        lengths,
        HOPPER,
        dtype=torch.bfloat16,
        device=device,
        padding_rows=40,
        num_decode_seqs=named,
        host_bounds=True,
    )
    ids = random_ids(inputs, 6)
    out, lse = both_roads(road, inputs, ids)
    assert_attention(out, lse, inputs, ids, rows=some_rows(inputs))


@pytest.mark.gpu
def test_poison_and_strides_change_no_bit(road: Any, device: torch.device) -> None:
    sequences = random_sequences(RAGGED, HOPPER, dtype=torch.bfloat16, device=device)
    plain = lay_out(sequences, block_size=BLOCK, padding_rows=2)
    ids = random_ids(plain, 5)
    road(KV_MAJOR)
    expected = attend(plain, ids)
    kinds: list[dict[str, Any]] = [
        {"poison": 3e38},
        {"poison": -math.inf},
        {"strides": "sliced"},
        {"strides": "interleaved"},
    ]
    twins = [
        lay_out(sequences, block_size=BLOCK, padding_rows=2, seed=seed, **kind)
        for seed, kind in enumerate(kinds)
    ]
    sliced = poisoned(3, 50 + len(ids), 8, dtype=torch.int32, device=device)
    sliced = sliced[:2, 3 : 3 + len(ids), 1:6].transpose(0, 1)
    sliced.copy_(ids)
    for twin in twins:
        taken = road(KV_MAJOR)
        results = attend(twin, sliced)
        assert [int(lists.balance) > 0 for lists in taken] == [True]
        assert all(map(torch.equal, results, expected))


@pytest.mark.gpu
def test_outputs_are_written_in_full(road: Any, device: torch.device) -> None:
    inputs = make_inputs(RAGGED, HOPPER, dtype=torch.bfloat16, device=device, padding_rows=3)
    ids = random_ids(inputs, 5)
    rows, heads, dim = inputs.q.shape
    guarded = poisoned(rows + 2, heads + 1, dim + 8, dtype=torch.bfloat16, device=device)
    guarded_lse = poisoned(heads, rows + 2, dtype=torch.float32, device=device)
    out, lse = guarded[1:-1, 1:, 8:], guarded_lse[:, 1:-1].T
    road(KV_MAJOR, 100)
    with torch.no_grad():
        attend(inputs, ids, out=out, lse_out=lse)
    assert_attention(out, lse, inputs, ids, rows=some_rows(inputs))
    assert guarded.isnan().sum() == guarded.numel() - out.numel()
    assert guarded_lse.isnan().sum() == guarded_lse.numel() - lse.numel()
    road(KV_MAJOR)
    expected = attend(inputs, ids)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("cost", [KV_MAJOR, UNION])
def test_runs_repeat_bit_for_bit(road: Any, device: torch.device, cost: int) -> None:
    inputs = make_inputs([(20000, 3000)], HOPPER, dtype=torch.bfloat16, device=device)
    ids = random_ids(inputs, 16)
    road(cost)
    first = attend(inputs, ids)
    for _ in range(10):
        assert all(map(torch.equal, attend(inputs, ids), first))


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_neighbours(road: Any, device: torch.device) -> None:
    """The bits are the same in whatever list, tile and chunk the row stands."""
    inputs = make_inputs([(3000, 700), (2000, 300)], HOPPER, dtype=torch.bfloat16, device=device)
    ids = random_ids(inputs, 6)
    road(KV_MAJOR)
    expected = attend(inputs, ids)
    for b in range(2):
        road(KV_MAJOR, 97)
        rows = inputs.span(b)
        solo = attend(inputs.solo(b), ids[rows].contiguous())
        assert torch.equal(solo[0], expected[0][rows])
        assert torch.equal(solo[1], expected[1][rows])


@pytest.mark.gpu
def test_wild_ids_and_pages_stay_inside(road: Any, device: torch.device) -> None:
    inputs = make_inputs([(2000, 800), (1500, 400)], HOPPER, dtype=torch.bfloat16, device=device)
    ids = random_ids(inputs, 5)
    wild = torch.randint(-(2**31), 2**31 - 1, ids.shape, device=device).int()
    ids = torch.where(torch.rand(ids.shape, device=device) < 0.5, wild, ids)
    out, lse = both_roads(road, inputs, ids)
    assert_attention(out, lse, inputs, ids, rows=some_rows(inputs))
    table = inputs.batch["block_table"].clone()
    table[0] = torch.tensor([2**31 - 1, -(2**31)], device=device).repeat(len(table[0]))[
        : len(table[0])
    ]
    twin = dataclasses.replace(inputs, batch={**inputs.batch, "block_table": table})
    road(KV_MAJOR)
    results = attend(twin, ids)
    assert torch.equal(results[0][inputs.span(1)], out[inputs.span(1)])


@pytest.mark.gpu
def test_large_logits(road: Any, device: torch.device) -> None:
    inputs = make_inputs([(2000, 500)], HOPPER, dtype=torch.bfloat16, device=device)
    ids = random_ids(inputs, 5)
    for scale in (30.0, 1e-3):
        road(KV_MAJOR)
        out, lse = attend(inputs, ids, softmax_scale=scale)
        rows = some_rows(inputs)
        assert_attention(out, lse, inputs, ids, softmax_scale=scale, rows=rows)


def drifting(rows: int, columns: int, topk: int, device: torch.device, same: int) -> Tensor:
    """Ids int32 ``[rows, 2, topk]`` that `same` consecutive tokens share."""
    draws = torch.rand(-(-rows // same), 2, columns, device=device)
    ids = draws.topk(topk).indices.repeat_interleave(same, 0)[:rows]
    return ids.sort(-1).values.int()


@pytest.mark.gpu
@pytest.mark.parametrize(("same", "kv_major_wins"), [(1, True), (4096, False)])
def test_the_device_chooses(
    road: Any, device: torch.device, same: int, kv_major_wins: bool
) -> None:
    """At the cost that the launcher has: by how much neighbours agree."""
    context, rows = 16384, 4096
    inputs = make_inputs([(context + rows, rows)], HOPPER, dtype=torch.bfloat16, device=device)
    ids = drifting(rows, context // BLOCK, 16, device, same)
    taken = road()
    out, lse = attend(inputs, ids)
    assert [int(lists.balance) > 0 for lists in taken] == [kv_major_wins]
    assert_attention(out, lse, inputs, ids, rows=some_rows(inputs, 20))
    both_roads(road, inputs, ids)


@pytest.mark.gpu
def test_a_graph_changes_roads(road: Any, device: torch.device) -> None:
    """Captured with ids that agree, replayed with ids that do not, and back."""
    context, rows = 16384, 2500
    inputs = make_inputs([(context + rows, rows)], HOPPER, dtype=torch.bfloat16, device=device)
    alike, apart = (drifting(rows, context // BLOCK, 16, device, same) for same in (4096, 1))
    ids, out = alike.clone(), torch.empty_like(inputs.q)
    lse = torch.empty(inputs.q.shape[:2], device=device)
    with torch.no_grad():
        taken = road()
        attend(inputs, ids, out=out, lse_out=lse)
        expected = [[x.clone() for x in attend(inputs, given)] for given in (alike, apart)]
        assert [int(lists.balance) > 0 for lists in taken] == [False, False, True]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(inputs, ids, out=out, lse_out=lse)
    for given, results in zip((alike, apart, alike), (*expected, expected[0]), strict=True):
        ids.copy_(given)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, results[0])
        assert torch.equal(lse, results[1])


@pytest.mark.gpu
def test_scratch_on_the_device_is_bounded(road: Any, device: torch.device) -> None:
    inputs = make_inputs([(20000, 6000)], HOPPER, dtype=torch.bfloat16, device=device)
    ids = drifting(6000, 100, 16, device, 1)
    bound = 2**26
    road()
    expected = attend(inputs, ids)
    taken = road()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = attend(inputs, ids, max_scratch_bytes=bound)
    assert [int(lists.balance) > 0 for lists in taken] == [True]
    written = sum(x.numel() * x.element_size() for x in results)
    # Every allocation is rounded up by less than 2 MiB.
    assert torch.cuda.max_memory_allocated() - before <= written + bound + 2**25
    assert all(map(torch.equal, results, expected))
