"""``index_score``: the largest dot product of an index query in every block it sees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Target

import m3ops
from m3ops.testing import (
    LAYOUTS,
    MIXED,
    Geometry,
    Inputs,
    SequenceData,
    assert_block_ids,
    assert_scores,
    lay_out,
    make_inputs,
    poisoned,
    random_sequences,
    score_oracle,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# What the kernel for Hopper takes, and a batch for it: prompts, chunks, a decode row, rows before
# the first key, a sequence without queries. No length is that of a tile.
HOPPER = Geometry(heads_q=4, heads_kv=4, index_dim=128, block_size=128)
CHUNKS = ((300, 300), (1000, 70), (129, 1), (0, 0), (40, 64), (2100, 131), (5, 0), (17, 17))


def score(inputs: Inputs, **options: Any) -> torch.Tensor:
    return m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch, **options)


def select(inputs: Inputs, **options: Any) -> torch.Tensor:
    return m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, **options)


def visible_scores(scores: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The specified scores, flat."""
    columns = torch.arange(scores.shape[2], device=scores.device)
    seen = columns < inputs.num_valid_blocks()[:, None, None]
    return scores[seen.expand(scores.shape)]


def one_query(num_keys: int, target: Target, *, heads: int = 1) -> SequenceData:
    """A query and keys that are all zero, at block size 128."""
    geometry = Geometry(heads_q=heads, heads_kv=heads, dim=16, index_dim=16, block_size=128)
    sequence = random_sequences([(num_keys, 1)], geometry, device=target.device)[0]
    sequence.index_q.zero_()
    sequence.index_k.zero_()
    return sequence


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_matches_the_oracle(target: Target, layout: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(MIXED, layout=layout, dtype=dtype, device=target.device, padding_rows=3)
    assert_scores(score(inputs), inputs)
    wide = poisoned(inputs.total_q, 2, 40, dtype=torch.float32, device=target.device)
    assert score(inputs, out=wide) is wide
    assert_scores(wide, inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_inputs_are_scored_in_float64(layout: str) -> None:
    inputs = make_inputs(MIXED, layout=layout, dtype=torch.float64)
    scores = score(inputs)
    assert scores.dtype == torch.float32
    oracle = score_oracle(inputs)
    specified = ~oracle.isnan()
    torch.testing.assert_close(
        scores[..., : oracle.shape[2]][specified], oracle[specified].float(), rtol=0, atol=0
    )


@pytest.mark.parametrize("index_dim", [8, 24, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_every_index_dim(target: Target, index_dim: int, heads: int) -> None:
    geometry = Geometry(heads_q=heads, heads_kv=heads, index_dim=index_dim)
    inputs = make_inputs([(40, 1), (23, 5)], geometry, device=target.device)
    assert_scores(score(inputs), inputs)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_block_size(target: Target, block_size: int) -> None:
    geometry = Geometry(block_size=block_size)
    lengths = [(2 * block_size + 3, 1), (block_size + 1, 4)]
    inputs = make_inputs(lengths, geometry, device=target.device)
    assert_scores(score(inputs), inputs)


@pytest.mark.parametrize("strides", ["sliced", "transposed", "interleaved"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_bit(target: Target, layout: str, strides: str) -> None:
    sequences = random_sequences(MIXED, device=target.device)
    plain = lay_out(sequences, layout=layout, padding_rows=2)
    twin = lay_out(sequences, layout=layout, padding_rows=2, strides=strides)
    expected = visible_scores(score(plain), plain)
    assert torch.equal(visible_scores(score(twin), twin), expected)
    columns = score(plain).shape[2]
    buffer = poisoned(2, columns + 5, plain.total_q, dtype=torch.float32, device=target.device)
    heads_first = buffer.permute(2, 0, 1)
    score(twin, out=heads_first)
    assert torch.equal(visible_scores(heads_first, twin), expected)


@pytest.mark.parametrize(
    ("layout", "named"), [("paged", 1), ("paged", 3), ("paged", 4), ("packed", 4), ("batched", 3)]
)
def test_naming_the_decode_part_changes_no_result(target: Target, layout: str, named: int) -> None:
    inputs = make_inputs(
        MIXED, layout=layout, device=target.device, num_decode_seqs=named, padding_rows=2
    )
    assert_scores(score(inputs), inputs)
    assert_block_ids(select(inputs, topk=3), inputs, topk=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sequence_scores_as_if_alone(target: Target, layout: str) -> None:
    inputs = make_inputs(MIXED, layout=layout, device=target.device, host_bounds=True)
    batched = select(inputs, topk=3)
    for b, (_, new) in enumerate(MIXED):
        if new:
            assert torch.equal(batched[inputs.span(b)], select(inputs.solo(b), topk=3))


def test_garbage_around_the_keys_is_never_read(target: Target) -> None:
    sequences = random_sequences([(300, 1), (1, 1)], Geometry(block_size=128))
    sequences = [
        SequenceData(*(tensor.to(target.device) for tensor in vars(s).values())) for s in sequences
    ]
    runs = []
    for seed in range(20):
        poison = (math.nan, 1e30, -math.inf)[seed % 3]
        inputs = lay_out(sequences, block_size=128, extra_blocks=0, poison=poison, seed=seed)
        assert inputs.batch["block_table"].shape == (2, 3)
        wide = poisoned(2, 2, 8, dtype=torch.float32, device=target.device)
        runs.append(visible_scores(score(inputs, out=wide), inputs))
    assert runs[0].isfinite().all()
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert_scores(wide, inputs)


def test_each_index_head_selects_for_itself(target: Target) -> None:
    sequence = one_query(640, target, heads=2)
    sequence.index_q[0, 0, 0] = sequence.index_q[0, 1, 1] = 1
    sequence.index_k[130, 0] = sequence.index_k[400, 1] = 5
    ids = select(lay_out([sequence], block_size=128), topk=1, local_blocks=0)
    assert ids.tolist() == [[[1], [3]]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_key_of_a_visible_block_does_not_count(target: Target, layout: str) -> None:
    sequence = one_query(256, target)
    sequence.index_q[0, 0, 0] = 1
    for position, value in ((5, 2), (129, 1), (200, 100)):
        sequence.index_k[position, 0] = value
    inputs = lay_out([sequence], layout=layout, block_size=128, extra_blocks=0, leftpad=False)
    # The keys from 131 on stay in the cache, as after a rejected draft.
    inputs.batch["seqused_k"].fill_(131)
    assert score(inputs)[0, 0, :2].tolist() == [2, 1]
    assert select(inputs, topk=1, local_blocks=0).tolist() == [[[0]]]


@pytest.mark.parametrize("heads", [1, 3, 4, 5, 6, 7])
def test_heads_together_equal_each_head_alone(target: Target, heads: int) -> None:
    geometry = Geometry(heads_q=heads, heads_kv=heads)
    lengths = target.scale([(560, 1), (70, 1)], [(640, 1), (70, 1), (500, 1)])
    inputs = make_inputs(lengths, geometry, device=target.device)
    options: dict[str, Any] = {"topk": 32, "init_blocks": 1, "local_blocks": 2}
    rows = inputs.total_q + 2
    scores = poisoned(rows, heads, 42, dtype=torch.float32, device=target.device)
    ids = poisoned(rows, heads, 32, dtype=torch.int32, device=target.device)
    score(inputs, out=scores[1:-1])
    select(inputs, **options, out=ids[1:-1])
    assert scores[[0, -1]].isnan().all()
    assert (ids[[0, -1]] == 2**30).all()
    assert_block_ids(ids[1:-1], inputs, **options)
    for h in target.scale({0, heads - 1}, range(heads)):
        one = inputs.index_q[:, h : h + 1]
        alone = m3ops.index_score(one, inputs.index_k, **inputs.batch)
        together = scores[1:-1, h : h + 1]
        assert torch.equal(visible_scores(together, inputs), visible_scores(alone, inputs))
        ids_alone = m3ops.select_blocks(one, inputs.index_k, **inputs.batch, **options)
        assert torch.equal(ids[1:-1, h : h + 1], ids_alone)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("more", [-1, 1])
def test_rows_around_a_tile_of_rows(target: Target, tile: int, more: int) -> None:
    rows = tile + more
    inputs = make_inputs([(rows + 20, rows)], device=target.device)
    guarded = poisoned(rows + 1, 2, 16, dtype=torch.float32, device=target.device)
    score(inputs, out=guarded[:rows])
    assert_scores(guarded[:rows], inputs)
    assert guarded[rows].isnan().all()
    last = lay_out(
        [SequenceData(s.q[-1:], s.index_q[-1:], s.k, s.v, s.index_k) for s in inputs.sequences]
    )
    alone = visible_scores(score(last), last)
    together = guarded[rows - 1, :, : last.visible_blocks()[0]].flatten()
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("num_keys", [1025, 8193])
def test_scores_are_bit_equal_for_every_number_of_splits(target: Target, num_keys: int) -> None:
    geometry = Geometry(heads_q=1, heads_kv=1, block_size=128)
    inputs = make_inputs([(num_keys, 1), (300, 1)], geometry, device=target.device)
    scores = score(inputs, num_splits=1)
    assert_scores(scores, inputs)
    for num_splits in target.scale((0, 3, 100), (0, 2, 3, 16, 100)):
        split = score(inputs, num_splits=num_splits)
        assert torch.equal(visible_scores(split, inputs), visible_scores(scores, inputs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_highest_score_of_many_blocks_may_be_low(target: Target, layout: str) -> None:
    """More blocks than are kept, a needle among negative scores, and the own block forced."""
    sequence = one_query(128 * 20, target)
    sequence.index_q[0, 0, 0] = 1
    sequence.index_k[:, 0] = -10 - torch.arange(128 * 20) // 128
    sequence.index_k[7 * 128 + 77, 0] = -3
    inputs = lay_out([sequence], layout=layout, block_size=128)
    assert select(inputs, topk=4).tolist() == [[[0, 1, 7, 19]]]


def test_runs_repeat_bit_for_bit(target: Target) -> None:
    inputs = make_inputs(MIXED, device=target.device, dtype=torch.bfloat16)
    first = visible_scores(score(inputs), inputs)
    for _ in range(target.scale(1, 10)):
        assert torch.equal(visible_scores(score(inputs), inputs), first)


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The launcher for Hopper, which must have launched when the test ends."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs compute capability 9.x")
    from m3ops.custom_ops.index_score.hopper import launch as launcher

    launched = []

    def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
        launched.append(grid)
        plain(kernel, grid, device, **arguments)

    plain = launcher.launch  # type: ignore[attr-defined]
    monkeypatch.setattr(launcher, "launch", launch)
    yield launcher
    assert launched


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [2, 4, 8, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("hopper")
def test_chunks_on_hopper_match_the_oracle(
    device: torch.device, layout: str, heads: int, dtype: torch.dtype
) -> None:
    geometry = replace(HOPPER, heads_q=heads, heads_kv=heads)
    inputs = make_inputs(
        CHUNKS, geometry, layout=layout, dtype=dtype, device=device, padding_rows=70
    )
    assert_scores(score(inputs), inputs)
    rows, columns = inputs.total_q, score(inputs).shape[2]
    guarded = poisoned(rows + 2, heads, columns + 3, dtype=torch.float32, device=device)
    inside = guarded[1:-1, :, :columns]
    score(inputs, out=inside)
    assert_scores(inside, inputs)
    inside.fill_(math.nan)
    assert guarded.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, 3, 131, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_on_hopper_change_no_bit(
    device: torch.device,
    hopper: Any,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    programs: int,
) -> None:
    sequences = random_sequences(CHUNKS, HOPPER, device=device, dtype=torch.bfloat16)
    inputs = lay_out(sequences, layout=layout, block_size=128, padding_rows=3)
    together = score(inputs)
    expected = visible_scores(together, inputs)
    for b, (_, new) in enumerate(CHUNKS):
        if new > 16:
            alone = inputs.solo(b)
            assert torch.equal(
                visible_scores(score(alone), alone),
                visible_scores(together[inputs.span(b)], alone),
            )
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda device: programs)
    for strides in ("contiguous", "sliced", "transposed", "interleaved"):
        twin = lay_out(sequences, layout=layout, block_size=128, padding_rows=3, strides=strides)
        rows_first = poisoned(*together.shape, dtype=torch.float32, device=device)
        score(twin, out=rows_first)
        assert torch.equal(visible_scores(rows_first, twin), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("hopper")
def test_chunks_of_rows_on_hopper_select_the_same(device: torch.device, layout: str) -> None:
    inputs = make_inputs(
        CHUNKS, HOPPER, layout=layout, dtype=torch.bfloat16, device=device, padding_rows=70
    )
    ids = select(inputs, topk=4)
    assert_block_ids(ids, inputs, topk=4)
    row_bytes = score(inputs)[0].numel() * 4
    for rows in (1, 100, 257):
        assert torch.equal(select(inputs, topk=4, max_scratch_bytes=rows * row_bytes), ids)


@pytest.mark.gpu
@pytest.mark.parametrize(("wild", "page"), [(2**31 - 1, -1), (-(2**31), 0)])
@pytest.mark.usefixtures("hopper")
def test_wild_pages_on_hopper_are_bounded(device: torch.device, wild: int, page: int) -> None:
    inputs = make_inputs([(700, 150)], HOPPER, dtype=torch.bfloat16, device=device, poison=0.0)
    table = inputs.batch["block_table"]
    scores = []
    for entry in (wild, page % len(inputs.index_k)):
        table.fill_(entry)
        scores.append(visible_scores(score(inputs), inputs))
    assert torch.equal(*scores)


# Decode sequences around the edges of blocks, as keys and rows: without keys or rows, with rows
# before the first key, and drafts of several lengths.
DECODE = ((129, 1), (0, 0), (1, 1), (1000, 4), (128, 1), (0, 1), (2, 4), (2500, 3), (300, 2))


@pytest.fixture
def hopper_decode(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The launcher for Hopper's decode rows, which must have launched when the test ends."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs compute capability 9.x")
    from m3ops.custom_ops.index_score.hopper.decode import launch as launcher

    launched = []

    def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any) -> None:
        launched.append(grid)
        plain(kernel, grid, device, **arguments)

    plain = launcher.launch  # type: ignore[attr-defined]
    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(launcher, "MIN_BLOCKS", 0)
    yield launcher
    assert launched


def decode_lengths(most: int, copies: int = 1) -> list[tuple[int, int]]:
    """`DECODE` with at most `most` rows a sequence, or more where that is more than 4."""
    return [(keys, min(new * max(1, most // 4), most)) for keys, new in DECODE] * copies


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [1, 2, 4, 16])
@pytest.mark.parametrize("heads", [1, 4, 8, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("hopper_decode")
def test_decode_rows_on_hopper_match_the_oracle(
    device: torch.device, layout: str, heads: int, most: int, dtype: torch.dtype
) -> None:
    inputs = make_inputs(
        decode_lengths(most),
        replace(HOPPER, heads_q=heads, heads_kv=heads),
        layout=layout,
        dtype=dtype,
        device=device,
        padding_rows=5,
    )
    inputs.batch["max_seqlen_q"] = most
    assert_scores(score(inputs), inputs)
    rows, columns = inputs.total_q, score(inputs).shape[2]
    guarded = poisoned(rows + 2, heads, columns + 3, dtype=torch.float32, device=device)
    inside = guarded[1:-1, :, :columns]
    score(inputs, out=inside)
    assert_scores(inside, inputs)
    inside.fill_(math.nan)
    assert guarded.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 2, "programs": 1},
        {"prefetch": 0},
        {"prefetch": 4, "programs": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("programs", [1, 3, 131])
@pytest.mark.parametrize("most", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_shares_on_hopper_change_no_bit(
    device: torch.device,
    hopper_decode: Any,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    most: int,
    programs: int,
    changes: dict[str, int],
) -> None:
    lengths = decode_lengths(most)
    sequences = random_sequences(lengths, HOPPER, device=device, dtype=torch.bfloat16)
    inputs = lay_out(sequences, layout=layout, block_size=128, padding_rows=3)
    inputs.batch["max_seqlen_q"] = most
    together = score(inputs)
    expected = visible_scores(together, inputs)
    for b, (_, new) in enumerate(lengths):
        if new > 0:
            alone = inputs.solo(b)
            assert torch.equal(
                visible_scores(score(alone), alone),
                visible_scores(together[inputs.span(b)], alone),
            )
    monkeypatch.setattr(hopper_decode, "num_multiprocessors", lambda device: programs)
    monkeypatch.setattr(hopper_decode, "CONFIG", replace(hopper_decode.CONFIG, **changes))
    for strides in ("contiguous", "sliced", "transposed", "interleaved"):
        twin = lay_out(sequences, layout=layout, block_size=128, padding_rows=3, strides=strides)
        twin.batch["max_seqlen_q"] = most
        rows_first = poisoned(*together.shape, dtype=torch.float32, device=device)
        score(twin, out=rows_first)
        assert torch.equal(visible_scores(rows_first, twin), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("hopper_decode")
def test_decode_rows_of_many_sequences_on_hopper(device: torch.device, layout: str) -> None:
    """More sequences than one step of the search for a share looks at, and chunks of their rows."""
    inputs = make_inputs(
        decode_lengths(4, copies=40),
        HOPPER,
        layout=layout,
        dtype=torch.bfloat16,
        device=device,
        padding_rows=300,
    )
    inputs.batch["max_seqlen_q"] = 4
    assert_scores(score(inputs), inputs)
    ids = select(inputs, topk=4)
    assert_block_ids(ids, inputs, topk=4)
    row_bytes = score(inputs)[0].numel() * 4
    for rows in (1, 100, 257):
        assert torch.equal(select(inputs, topk=4, max_scratch_bytes=rows * row_bytes), ids)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_decode")
def test_named_decode_rows_on_hopper_beside_a_chunk(device: torch.device) -> None:
    lengths = [*decode_lengths(4), (700, 300)]
    inputs = make_inputs(lengths, HOPPER, dtype=torch.bfloat16, device=device, padding_rows=3)
    expected = score(inputs)
    inputs.batch["num_decode_seqs"] = len(DECODE)
    inputs.batch["num_decode_tokens"] = sum(new for _, new in DECODE)
    assert_scores(score(inputs), inputs)
    assert_scores(expected, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("wild", "page"), [(2**31 - 1, -1), (-(2**31), 0)])
@pytest.mark.usefixtures("hopper_decode")
def test_wild_pages_of_decode_rows_on_hopper_are_bounded(
    device: torch.device, wild: int, page: int
) -> None:
    inputs = make_inputs([(700, 1)], HOPPER, dtype=torch.bfloat16, device=device, poison=0.0)
    table = inputs.batch["block_table"]
    scores = []
    for entry in (wild, page % len(inputs.index_k)):
        table.fill_(entry)
        scores.append(visible_scores(score(inputs), inputs))
    assert torch.equal(*scores)


@pytest.mark.gpu
def test_few_decode_rows_and_fixed_splits_give_the_same_bits_on_hopper(
    device: torch.device, hopper_decode: Any
) -> None:
    inputs = make_inputs(decode_lengths(4), HOPPER, dtype=torch.bfloat16, device=device)
    inputs.batch["max_seqlen_q"] = 4
    streamed = visible_scores(score(inputs), inputs)
    for num_splits in (1, 3):
        assert torch.equal(visible_scores(score(inputs, num_splits=num_splits), inputs), streamed)
    hopper_decode.MIN_BLOCKS = 10**6
    assert torch.equal(visible_scores(score(inputs), inputs), streamed)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_decode")
def test_decode_scores_on_hopper_wait_for_what_they_guess(device: torch.device) -> None:
    """Lengths, pages and keys change right before each call, whose first reads are a guess."""
    steps = 30
    inputs = make_inputs([(5000, 1)] * 3, HOPPER, dtype=torch.bfloat16, device=device, poison=0.0)
    batch = inputs.batch
    generator = torch.Generator().manual_seed(0)
    tables = [batch["block_table"].clone() for _ in range(steps)]
    lengths = torch.randint(1, 5001, (steps, 3), generator=generator).int().to(device)
    for table in tables:
        table.copy_(table[:, torch.randperm(table.shape[1], generator=generator).to(device)])
    new = torch.randn(steps, 3, 128, device=device).mul(100).bfloat16()
    wide = torch.zeros(3, 1, 128, device=device, dtype=torch.bfloat16)
    plain = torch.empty_like(wide)
    cache = torch.zeros(len(inputs.index_k), 1, 128, 128, device=device, dtype=torch.bfloat16)
    slots = []
    for step in range(steps):
        last = lengths[step].long() - 1
        pages = tables[step].gather(1, (last // 128)[:, None])[:, 0].long()
        slots.append(pages * 128 + last % 128)
    first_keys = inputs.index_k.clone()

    def run(wait: bool) -> list[torch.Tensor]:
        inputs.index_k.copy_(first_keys)
        results = []
        for step in range(steps):
            batch["seqused_k"].copy_(lengths[step])
            batch["block_table"].copy_(tables[step])
            m3ops.store_kv(
                wide, plain, new[step], slots[step], cache, cache.clone(), inputs.index_k
            )
            if wait:
                torch.cuda.synchronize()
            results.append(score(inputs))
        return results

    for step, (chained, alone) in enumerate(zip(run(False), run(True), strict=True)):
        seen = torch.arange(alone.shape[2], device=device) < (lengths[step, :, None] + 127) // 128
        seen = seen[:, None].expand(alone.shape)
        assert torch.equal(chained[seen], alone[seen])
