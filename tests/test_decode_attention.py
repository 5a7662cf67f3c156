"""Decode rows at MiniMax-M3's head geometry, where Hopper has a kernel of its own for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import m3ops
from m3ops.custom_ops.sparse_attention import launch
from m3ops.testing import (
    LAYOUTS,
    Geometry,
    Inputs,
    assert_attention,
    lay_out,
    make_inputs,
    poisoned,
    random_ids,
    random_sequences,
)

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(heads_q=32, heads_kv=2, dim=128, index_dim=16, block_size=128)
# Keys around the edges of blocks and of their halves, few and many, and none.
LENGTHS = (1, 0, 63, 64, 65, 127, 128, 129, 191, 193, 256, 257, 1000, 2049, 2500)
# Sequences without a row, with one, and with several.
COUNTS = (1, 2, 4, 0, 3, 1, 4, 2, 3, 4, 0, 4, 2, 1, 3)


def attend(inputs: Inputs, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True, **options
    )
    return out, lse


def needs_hopper(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("the kernel is Hopper's")


def rows_of(count: int, device: torch.device, **options: Any) -> Inputs:
    """`count` sequences of uneven lengths with a row each."""
    lengths = [(LENGTHS[b % len(LENGTHS)], 1) for b in range(count)]
    inputs = make_inputs(lengths, GEOMETRY, device=device, **options)
    inputs.batch["max_seqlen_q"] = 1
    return inputs


def drafts_of(counts: tuple[int, ...], most: int, device: torch.device, **options: Any) -> Inputs:
    """Sequences with some rows each, at most `most`; a few rows stand before the first key."""
    lengths = [(LENGTHS[b % len(LENGTHS)], count) for b, count in enumerate(counts)]
    inputs = make_inputs(lengths, GEOMETRY, device=device, **options)
    inputs.batch["max_seqlen_q"] = most
    return inputs


@pytest.fixture(params=["clusters", "no clusters"])
def joining(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits joined as on this GPU, and as on others."""
    needs_hopper(device)
    from m3ops.custom_ops.sparse_attention.hopper.decode import launch as decode

    if request.param == "no clusters":
        monkeypatch.setattr(decode, "CLUSTERS", {})
    elif not decode.has_clusters(device):
        pytest.skip("this device or this version of Triton has no clusters that join splits")


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 6, 15, 20, 40, 70])
def test_rows_of_uneven_sequences(
    device: torch.device, count: int, layout: str, dtype: torch.dtype
) -> None:
    inputs = rows_of(count, device, layout=layout, dtype=dtype, padding_rows=count % 4)
    ids = random_ids(inputs, 16)
    assert_attention(*attend(inputs, ids), inputs, ids)


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 8, 16, 31, 32, 50])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_number_of_splits(device: torch.device, layout: str, num_splits: int) -> None:
    inputs = rows_of(15, device, layout=layout, dtype=torch.bfloat16, padding_rows=2)
    ids = random_ids(inputs, 16)
    assert_attention(*attend(inputs, ids, num_splits=num_splits), inputs, ids)


@pytest.mark.parametrize("topk", [1, 2, 5, 16, 17, 33, 64])
@pytest.mark.parametrize("most", [1, 4])
def test_every_topk(device: torch.device, most: int, topk: int) -> None:
    counts = tuple(min(count, most) for count in COUNTS)
    inputs = drafts_of(counts, most, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, topk)
    assert_attention(*attend(inputs, ids), inputs, ids)


@pytest.mark.parametrize("most", [2, 4, 5, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copies", [1, 5])
def test_speculative_rows(device: torch.device, copies: int, layout: str, most: int) -> None:
    counts = tuple((count * most + 3) // 4 for count in COUNTS) * copies
    inputs = drafts_of(counts, most, device, layout=layout, dtype=torch.bfloat16, padding_rows=5)
    ids = random_ids(inputs, 16)
    assert_attention(*attend(inputs, ids), inputs, ids)


@pytest.mark.parametrize("counts", [(4,), (3, 4), (2,), (16,), (4,) * 70])
def test_speculative_rows_that_agree(device: torch.device, counts: tuple[int, ...]) -> None:
    """Neighbours that select the same blocks in orders of their own, and their own block."""
    inputs = drafts_of(counts, max(counts), device, dtype=torch.bfloat16)
    rows = []
    for sequence, count in zip(inputs.sequences, counts, strict=True):
        shared = torch.randperm(len(sequence.k) // 128 + 1)[:12]
        for i in range(count):
            own = max(0, (len(sequence.k) - count + i) // 128)
            row = torch.full((16,), -1)
            chosen = torch.cat([shared[shared != own], torch.tensor([own])])
            row[torch.randperm(16)[: len(chosen)]] = chosen
            rows.append(row)
    ids = torch.stack(rows).int().to(device)[:, None].repeat(1, 2, 1)
    ids[:, 1] = ids[:, 1].flip(1)
    assert_attention(*attend(inputs, ids), inputs, ids)


@pytest.mark.parametrize("most", [1, 4])
def test_wild_ids_and_pages_stay_inside(device: torch.device, most: int) -> None:
    counts = tuple(min(count, most) for count in COUNTS)
    inputs = drafts_of(counts, most, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    dead = (ids < 0) | (ids > 2**20)
    wild = torch.tensor([-(2**31), -2, 2**31 - 1, 2**30, 2**24, 10**6], dtype=torch.int32)
    picks = torch.randint(len(wild), ids.shape)
    ids = torch.where(dead, wild[picks].to(device), ids)
    expected = attend(inputs, ids)
    assert_attention(*expected, inputs, ids)
    # One sequence's table is wild too: its own rows are wrong, and no other is.
    b = len(counts) - 1
    inputs.batch["block_table"][b, ::2] = 2**31 - 1
    inputs.batch["block_table"][b, 1::2] = -(2**31)
    results = attend(inputs, ids)
    torch.cuda.synchronize()
    others = slice(0, inputs.span(b).start)
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result[others], right[others])


@pytest.mark.parametrize("most", [1, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_garbage_around_the_keys_changes_no_bit(
    device: torch.device, layout: str, most: int
) -> None:
    counts = tuple((count * most + 3) // 4 for count in COUNTS)
    lengths = [(LENGTHS[b], count) for b, count in enumerate(counts)]
    sequences = random_sequences(lengths, GEOMETRY, dtype=torch.bfloat16, device=device)
    runs = []
    for poison in (math.nan, 3e38, -math.inf, 0.0):
        inputs = lay_out(sequences, layout=layout, block_size=128, poison=poison, padding_rows=3)
        inputs.batch["max_seqlen_q"] = most
        ids = random_ids(inputs, 16)
        runs.append(attend(inputs, ids))
    assert runs[0][0].isfinite().all()
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize("most", [1, 4])
def test_strides_and_given_outputs(device: torch.device, most: int) -> None:
    counts = tuple(min(count, most) for count in COUNTS)
    lengths = [(LENGTHS[b], count) for b, count in enumerate(counts)]
    sequences = random_sequences(lengths, GEOMETRY, dtype=torch.bfloat16, device=device)
    for layout in LAYOUTS:
        plain = lay_out(sequences, layout=layout, block_size=128, padding_rows=2)
        plain.batch["max_seqlen_q"] = most
        ids = random_ids(plain, 16)
        expected = attend(plain, ids)
        buffer = poisoned(16, plain.total_q + 7, 4, dtype=torch.int32, device=device)
        sliced_ids = buffer.permute(1, 2, 0)[3 : 3 + plain.total_q, 1:3]
        sliced_ids.copy_(ids)
        rows, heads, dim = plain.q.shape
        for strides in ("transposed", "interleaved"):
            twin = lay_out(
                sequences, layout=layout, block_size=128, padding_rows=2, strides=strides
            )
            twin.batch["max_seqlen_q"] = most
            guarded = poisoned(rows + 2, heads + 1, dim + 8, dtype=torch.bfloat16, device=device)
            guarded_lse = poisoned(heads, rows + 2, dtype=torch.float32, device=device)
            out, lse = guarded[1:-1, 1:, 8:], guarded_lse[:, 1:-1].T
            for result, right in zip(
                attend(twin, sliced_ids, out=out, lse_out=lse), expected, strict=True
            ):
                assert torch.equal(result, right)
            assert guarded.isnan().sum() == guarded.numel() - out.numel()
            assert guarded_lse.isnan().sum() == guarded_lse.numel() - lse.numel()


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("most", [1, 4, 16])
def test_runs_repeat_bit_for_bit(device: torch.device, most: int) -> None:
    counts = tuple((count * most + 3) // 4 for count in COUNTS) * 4
    inputs = drafts_of(counts, most, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    first = attend(inputs, ids)
    for _ in range(50):
        assert all(map(torch.equal, attend(inputs, ids), first))


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("num_splits", [1, 2, 4, 8, 16, 32])
def test_fixed_splits_make_bits_independent_of_the_batch(
    device: torch.device, num_splits: int
) -> None:
    inputs = drafts_of(COUNTS, 4, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    batched = attend(inputs, ids, num_splits=num_splits)
    for b, count in enumerate(COUNTS):
        if count:
            rows = inputs.span(b)
            solo = attend(inputs.solo(b), ids[rows], num_splits=num_splits)
            assert torch.equal(batched[0][rows], solo[0])
            assert torch.equal(batched[1][rows], solo[1])


@pytest.mark.parametrize("num_splits", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_splits_joined_in_clusters(
    device: torch.device, dtype: torch.dtype, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many times over as one likes, with and without keys, and never by another kernel."""
    needs_hopper(device)
    from m3ops.custom_ops.sparse_attention.hopper.decode import launch as decode

    if not decode.has_clusters(device):
        pytest.skip("this device or this version of Triton has no clusters that join splits")
    monkeypatch.setattr(decode, "launch_merge", None)
    monkeypatch.setattr(decode, "allocate_parts", None)
    for count in (1, 15, 70):
        inputs = rows_of(count, device, dtype=dtype, padding_rows=3)
        ids = random_ids(inputs, 16)
        first = attend(inputs, ids, num_splits=num_splits)
        assert_attention(*first, inputs, ids)
        out, lse = poisoned(*inputs.q.shape, dtype=dtype, device=device), torch.empty_like(first[1])
        for _ in range(20):
            out.fill_(math.nan)
            lse.fill_(math.nan)
            attend(inputs, ids, num_splits=num_splits, out=out, lse_out=lse)
            assert torch.equal(out, first[0])
            assert torch.equal(lse, first[1])


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("most", [1, 4])
def test_a_tight_bound_on_scratch_changes_no_result(device: torch.device, most: int) -> None:
    counts = tuple(min(count, most) for count in COUNTS)
    inputs = drafts_of(counts, most, device, dtype=torch.bfloat16, padding_rows=3)
    ids = random_ids(inputs, 16)
    for bound in (1, 5 * 4 * 32 * 32 * 129):
        assert_attention(*attend(inputs, ids, max_scratch_bytes=bound), inputs, ids)


@pytest.mark.parametrize("softmax_scale", [1.0, -0.5, 1e3])
@pytest.mark.parametrize("most", [1, 4])
def test_softmax_scale(device: torch.device, most: int, softmax_scale: float) -> None:
    counts = tuple(min(count, most) for count in COUNTS)
    inputs = drafts_of(counts, most, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    results = attend(inputs, ids, softmax_scale=softmax_scale)
    assert_attention(*results, inputs, ids, softmax_scale=softmax_scale)


def test_a_bound_that_says_nothing(device: torch.device) -> None:
    """Without `max_seqlen_q`, and with a decode part that is only named."""
    for count in (3, 15):
        inputs = rows_of(count, device, dtype=torch.bfloat16)
        del inputs.batch["max_seqlen_q"]
        ids = random_ids(inputs, 16)
        assert_attention(*attend(inputs, ids), inputs, ids)
    lengths = [*((length, 1) for length in LENGTHS), (700, 3), (900, 40)]
    inputs = make_inputs(lengths, GEOMETRY, dtype=torch.bfloat16, device=device, num_decode_seqs=15)
    ids = random_ids(inputs, 16)
    assert_attention(*attend(inputs, ids), inputs, ids)


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("rows", [8, 24, 64])
def test_a_captured_step_follows_its_metadata(device: torch.device, rows: int, most: int) -> None:
    """Captured while all lengths are zero; replayed shrunk, grown, and with other pages."""
    seqs = rows // most
    longest, pages = max(LENGTHS) + 16, 400
    columns = -(-longest // 128)
    q = torch.zeros(rows, 32, 128, dtype=torch.bfloat16, device=device)
    k, v = (torch.zeros(pages, 2, 128, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    ids = torch.full((rows, 2, 16), -1, dtype=torch.int32, device=device)
    batch: dict[str, Any] = {
        "cu_seqlens_q": torch.zeros(seqs + 1, dtype=torch.int32, device=device),
        "seqused_k": torch.zeros(seqs, dtype=torch.int32, device=device),
        "block_table": torch.zeros(seqs, columns, dtype=torch.int32, device=device),
        "max_seqlen_q": most,
    }
    out, lse = torch.empty_like(q), torch.empty(rows, 32, device=device)

    def step() -> None:
        m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True, out=out, lse_out=lse)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, live in enumerate((seqs, 1, max(1, seqs // 2), seqs)):
        lengths = [
            (LENGTHS[(b + seed) % len(LENGTHS)], min(most, 1 + (b + seed) % 4)) for b in range(live)
        ]
        sequences = random_sequences(lengths, GEOMETRY, dtype=torch.bfloat16, device=device)
        used = sum(length for _, length in lengths)
        inputs = lay_out(
            sequences, block_size=128, padding_rows=rows - used, extra_blocks=0, seed=seed
        )
        now = random_ids(inputs, 16, seed=seed)
        q.copy_(inputs.q)
        k.fill_(math.nan)
        v.fill_(math.nan)
        k[: len(inputs.k)].copy_(inputs.k)
        v[: len(inputs.v)].copy_(inputs.v)
        ids.copy_(now)
        table = inputs.batch["block_table"]
        batch["block_table"].fill_(2**31 - 1)
        batch["block_table"][:live, : table.shape[1]].copy_(table)
        batch["seqused_k"].zero_()
        batch["seqused_k"][:live].copy_(inputs.batch["seqused_k"])
        batch["cu_seqlens_q"].fill_(used)
        batch["cu_seqlens_q"][: live + 1].copy_(inputs.batch["cu_seqlens_q"])
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        assert_attention(out, lse, inputs, now)
        replayed = out.clone(), lse.clone()
        out.fill_(math.nan)
        step()
        assert all(map(torch.equal, replayed, (out, lse)))


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize("count", [1, 15, 70])
def test_launches_back_to_back_keep_their_order(device: torch.device, count: int) -> None:
    """A kernel's prologue may run while its predecessor ends: it must not read too early."""
    inputs = rows_of(count, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    expected = attend(inputs, ids)
    late = torch.full_like(ids, -1)
    for _ in range(20):
        late.fill_(-1)
        late.copy_(ids)
        results = attend(inputs, late)
        late.fill_(-1)
        assert all(map(torch.equal, results, expected))


def test_hopper_takes_its_own_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_hopper(device)
    from m3ops.custom_ops.sparse_attention.hopper.decode import launch as decode

    taken: list[tuple[int, bool, bool]] = []
    clusters = decode.CLUSTERS if decode.has_clusters(device) else {}
    original = decode.launch_hopper_decode

    def record(*arguments: Any) -> None:
        num_splits, clustered, begin, end = arguments[6:10]
        taken.append((end - begin, clustered, len(arguments) > 12))
        assert num_splits in clusters or not clustered
        assert num_splits <= decode.MAX_JOINED_SPLITS or not taken[-1][2]
        original(*arguments)

    monkeypatch.setattr(decode, "launch_hopper_decode", record)
    monkeypatch.setattr(launch, "_launch_rows", None)
    for most in range(1, launch.MAX_LONE_QUERIES + 1):
        counts = tuple(min(count, most) for count in COUNTS)
        inputs = drafts_of(counts, most, device, dtype=torch.bfloat16)
        attend(inputs, random_ids(inputs, 16))
        assert taken.pop()[0] == sum(counts)
    # With fixed splits as many sequences as one likes, else those of several rows share blocks.
    inputs = drafts_of((4,) * 60, 4, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    attend(inputs, ids, num_splits=1)
    assert taken.pop() == (240, False, False)
    attend(inputs, ids)
    assert not taken
    inputs = rows_of(15, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    for num_splits in (1, 2, 4, 5, 8, 16, 32):
        attend(inputs, ids, num_splits=num_splits)
        clustered = num_splits in clusters
        by_last = 1 < num_splits <= decode.MAX_JOINED_SPLITS and not clustered
        assert taken.pop() == (15, clustered, by_last)
    # Drafts of more tokens share tiles, where there are sequences enough.
    inputs = drafts_of((5,) * 60, 5, device, dtype=torch.bfloat16)
    attend(inputs, random_ids(inputs, 16))
    assert not taken


def capture(call: Callable[[], Any], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


@pytest.mark.parametrize("most", [1, 2])
def test_splits_are_joined_beside_each_other(device: torch.device, most: int) -> None:
    """Graphs on streams of their own beside eager calls on others: all find their counters 0."""
    counts = tuple(min(count, most) for count in COUNTS)
    calls = []
    for seed in range(6):
        inputs = drafts_of(counts, most, device, dtype=torch.bfloat16, seed=seed)
        ids = random_ids(inputs, 16, seed=seed)
        out = torch.empty_like(inputs.q)
        lse = torch.empty(inputs.q.shape[:2], device=device)
        call = functools.partial(attend, inputs, ids, num_splits=3, out=out, lse_out=lse)
        call()
        calls.append((call, out, lse, out.clone(), lse.clone()))
        assert_attention(out, lse, inputs, ids)
    streams = [torch.cuda.Stream(device) for _ in calls]
    graphs = [capture(call, stream) for (call, *_), stream in zip(calls[:4], streams, strict=False)]
    for _ in range(25):
        for _, out, lse, *_ in calls:
            out.fill_(math.nan)
            lse.fill_(math.nan)
        torch.cuda.synchronize()
        for repeat in range(4):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    if i < len(graphs):
                        graphs[i].replay()
                    else:
                        calls[i][0]()
                if repeat == 0 and i % 2:
                    torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        for _, out, lse, right_out, right_lse in calls:
            assert torch.equal(out, right_out)
            assert torch.equal(lse, right_lse)


def test_captured_launches_have_counters_of_their_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_hopper(device)
    from m3ops.custom_ops.sparse_attention.hopper.decode import launch as decode
    from m3ops.custom_ops.sparse_attention.hopper.decode.join import counters

    taken: list[Tensor] = []

    def record(count: int, device: torch.device) -> Tensor:
        taken.append(counters.take_counters(count, device))
        return taken[-1]

    monkeypatch.setattr(decode, "take_counters", record)
    inputs = rows_of(15, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    out, lse = torch.empty_like(inputs.q), torch.empty(15, 32, device=device)

    def step() -> None:
        attend(inputs, ids, num_splits=3, out=out, lse_out=lse)

    step()
    right = out.clone()
    buffer = counters._buffers[device][-1]
    before = buffer.taken
    stream = torch.cuda.Stream(device)
    graphs = [capture(step, stream) for _ in range(3)]
    assert buffer.taken == before + 3 * 30
    starts = {slice.data_ptr() for slice in taken[1:]}
    assert len(starts) == 3
    # No room is left: the capture fills its own, and the next launch outside one makes room.
    monkeypatch.setattr(buffer, "taken", counters.SIZE)
    graphs.append(capture(step, stream))
    step()
    assert counters._buffers[device][-1] is not buffer
    for graph in graphs * 3:
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, right)
    assert not buffer.zeros.any()


def test_compiled_into_graphs(device: torch.device) -> None:
    """Inductor's CUDA graphs watch over all memory that is allocated while they are made."""
    inputs = rows_of(15, device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 16)
    right = attend(inputs, ids)
    compiled = torch.compile(lambda q: attend(replace(inputs, q=q), ids), mode="reduce-overhead")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert all(map(torch.equal, compiled(inputs.q), right))
