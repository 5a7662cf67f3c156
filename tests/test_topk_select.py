"""``topk_select``: forced blocks first, then the highest scores, ties to the lower id."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import Target
from hypothesis import given
from hypothesis import strategies as st

import m3ops
from m3ops.testing import poisoned, select_oracle

NAN, INF = math.nan, math.inf
# At which a row of many is shared by 2 and by 4 threads.
SHARED_WIDTHS = (50, 300)


def select(
    scores: torch.Tensor, visible: list[int], target: Target, **options: Any
) -> torch.Tensor:
    num_valid_blocks = torch.tensor(visible, dtype=torch.int32, device=target.device)
    return m3ops.topk_select(scores.to(target.device), num_valid_blocks, **options)


def select_row(row: Any, target: Target, **options: Any) -> list[int]:
    """The live ids of a row that sees all of its blocks."""
    scores = torch.as_tensor(row, dtype=torch.float32)
    ids = select(scores.reshape(1, 1, -1), [len(scores)], target, **options)
    return [j for j in ids.flatten().tolist() if j >= 0]


def oracle(
    scores: torch.Tensor, visible: list[int], topk: int, init_blocks: int, local_blocks: int
) -> list[list[list[int]]]:
    return [
        [select_oracle(head, count, topk, init_blocks, local_blocks) for head in row]
        for row, count in zip(scores.tolist(), visible, strict=True)
    ]


@pytest.mark.parametrize("topk", [1, 2, 8, 15, 16, 17, 24, 32, 33, 64])
def test_every_topk(target: Target, topk: int) -> None:
    scores = torch.randn(3, 2, 80)
    visible = [80, 79, 20]
    local = min(1, topk - 1)
    ids = select(scores, visible, target, topk=topk, local_blocks=local)
    assert ids.tolist() == oracle(scores, visible, topk, 0, local)


@given(data=st.data())
def test_any_row_of_a_small_alphabet(target: Target, data: st.DataObject) -> None:
    """Few distinct values, so that ties, infinities and NaN meet at the cut in every way."""
    values = st.sampled_from([-1.0, -0.0, 0.0, 1.0, 2.5, INF, -INF, NAN, -NAN])
    width = data.draw(st.integers(1, 40), label="width")
    row = data.draw(st.lists(values, min_size=width, max_size=width), label="row")
    visible = data.draw(st.integers(0, width), label="visible")
    topk = data.draw(st.integers(1, 20), label="topk")
    init = data.draw(st.integers(0, topk), label="init")
    local = data.draw(st.integers(0, topk - init), label="local")
    options = {"topk": topk, "init_blocks": init, "local_blocks": local}
    ids = select(torch.tensor(row).reshape(1, 1, -1), [visible], target, **options)
    assert ids.flatten().tolist() == select_oracle(row, visible, topk, init, local)


@pytest.mark.parametrize("width", [4095, 4096, 4097, 8191, 8192, 8193, 16384, 16385])
def test_the_last_of_very_many_blocks_is_found(target: Target, width: int) -> None:
    row = torch.zeros(width)
    row[-1] = 5
    assert select_row(row, target, topk=1, local_blocks=0) == [width - 1]
    row[-1], row[width // 2] = 0, 5
    assert select_row(row, target, topk=2, local_blocks=1) == [width // 2, width - 1]


# Around every width at which an implementation may change its way.
AROUND_POWERS_OF_TWO = sorted(
    {1 << n for n in range(13)} | {(1 << n) + d for n in range(4, 13) for d in (-1, 1)}
)


@pytest.mark.parametrize("width", AROUND_POWERS_OF_TWO)
def test_ties_go_to_the_lower_id_at_every_width(target: Target, width: int) -> None:
    equal = select_row(torch.zeros(width), target, topk=16, local_blocks=0)
    assert equal == list(range(min(16, width)))
    row = torch.zeros(width)
    row[1::3] = 1
    expected = select_oracle(row.tolist(), width, 16, 0, 1)
    assert select_row(row, target, topk=16) == [j for j in expected if j >= 0]


@pytest.mark.parametrize(
    ("init_blocks", "local_blocks", "expected"),
    [(1, 1, [*range(15), 39]), (0, 1, [*range(15), 39]), (0, 0, [*range(16)])],
)
def test_forced_blocks_stand_inside_k(
    target: Target, init_blocks: int, local_blocks: int, expected: list[int]
) -> None:
    options = {"topk": 16, "init_blocks": init_blocks, "local_blocks": local_blocks}
    assert select_row(torch.zeros(40), target, **options) == expected


def test_forced_blocks_that_overlap_count_once(target: Target) -> None:
    options = {"topk": 16, "init_blocks": 1, "local_blocks": 2}
    for visible, expected in ((1, [0]), (2, [0, 1]), (3, [0, 1, 2])):
        ids = select(torch.randn(1, 1, 50), [visible], target, **options)
        assert ids.flatten().tolist() == expected + [-1] * (16 - len(expected))


def test_forced_blocks_beat_infinite_scores(target: Target) -> None:
    row = [INF] * 30
    row[0] = row[29] = -INF
    assert select_row(row, target, topk=3, init_blocks=1, local_blocks=1) == [0, 1, 29]
    row[0] = row[29] = NAN
    assert select_row(row, target, topk=3, init_blocks=1, local_blocks=1) == [0, 1, 29]


@pytest.mark.parametrize("tail", [1e30, INF, NAN, -NAN])
def test_nothing_past_the_visible_blocks_is_chosen(target: Target, tail: float) -> None:
    visible = [*range(18), -3]
    scores = torch.randn(19, 2, 64)
    for row, count in zip(scores, visible, strict=True):
        row[:, max(count, 0) :] = tail
    ids = select(scores, visible, target, topk=16)
    visible[-1] = 0
    assert ids.tolist() == oracle(scores, visible, 16, 0, 1)
    assert [int((row[0] >= 0).sum()) for row in ids] == [min(n, 16) for n in visible]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_ranks_below_every_number(target: Target, sign: float) -> None:
    nan = math.copysign(NAN, sign)
    assert select_row([nan] * 20, target, topk=4) == [0, 1, 2, 19]
    assert select_row([nan, 1, 2, nan, -INF, 3], target, topk=4, local_blocks=0) == [0, 1, 2, 5]
    lowest = torch.finfo(torch.float32).min
    assert select_row([nan, -INF, nan, lowest], target, topk=1, local_blocks=0) == [3]
    # NaN and -inf are one rank: the lower id wins.
    assert select_row([-INF, nan, -INF], target, topk=2, local_blocks=0) == [0, 1]
    assert select_row([nan, -INF, -INF], target, topk=2, local_blocks=0) == [0, 1]


def test_the_zeros_are_equal(target: Target) -> None:
    assert select_row([-0.0, 0.0, -0.0, 0.0], target, topk=2, local_blocks=0) == [0, 1]
    assert select_row([0.0, -0.0, 0.0, -0.0], target, topk=3, local_blocks=0) == [0, 1, 2]


def test_denormal_scores_are_not_zero(target: Target) -> None:
    tiny = 1e-42
    assert select_row([0, tiny, -tiny, 2 * tiny], target, topk=2, local_blocks=0) == [1, 3]


def test_fewer_columns_than_k(target: Target) -> None:
    scores = torch.randn(2, 2, 5)
    ids = select(scores, [5, 3], target, topk=16)
    assert ids.tolist() == oracle(scores, [5, 3], 16, 0, 1)


def test_a_row_keeps_its_ids_in_every_batch(target: Target) -> None:
    row = torch.zeros(510)
    row[torch.randperm(510)[:10]] = torch.arange(10) + 1.0
    expected = select_row(row, target, topk=16)
    assert expected == select_oracle(row.tolist(), 510, 16, 0, 1)
    for rows in target.scale((1, 3, 8), (1, 33, 64, 65, 257)):
        scores = torch.randn(rows, 1, 510)
        scores[rows // 2, 0] = row
        ids = select(scores, [510] * rows, target, topk=16)
        assert ids[rows // 2, 0].tolist() == expected
    wide = torch.randn(2, 1, 8000)
    wide[0, 0, :510] = row
    assert select(wide, [510, 8000], target, topk=16)[0, 0].tolist() == expected


@pytest.mark.gpu
def test_a_row_keeps_its_ids_beside_a_noisy_stream() -> None:
    device = torch.device("cuda", 0)
    row = torch.zeros(510)
    row[torch.randperm(510)[:10]] = torch.arange(10) + 1.0
    scores = torch.randn(257, 1, 510)
    scores[100, 0] = row
    expected = select_oracle(row.tolist(), 510, 16, 0, 1)
    scores, visible = scores.to(device), torch.full((257,), 510, device=device).int()
    noise, noisy = torch.randn(2048, 2048, device=device), torch.cuda.Stream()
    runs = []
    torch.cuda.synchronize()
    with m3ops.use_backend("triton"):
        for _ in range(100):
            with torch.cuda.stream(noisy):
                noise = (noise @ noise).tanh()
            runs.append(m3ops.topk_select(scores, visible, topk=16))
    assert runs[0][100, 0].tolist() == expected
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_strides_and_guard_rows(target: Target) -> None:
    scores = torch.randn(6, 3, 50)
    visible = [50, 1, 20, 0, 33, 17]
    expected = oracle(scores, visible, 8, 1, 2)
    options = {"topk": 8, "init_blocks": 1, "local_blocks": 2}
    heads_first = scores.to(target.device).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert select(heads_first, visible, target, **options).tolist() == expected
    guarded = poisoned(8, 5, 10, dtype=torch.int32, device=target.device)
    out = guarded[1:-1, 1:-1, 1:-1]
    assert select(scores, visible, target, **options, out=out) is out
    assert out.tolist() == expected
    assert (guarded == 2**30).sum() == guarded.numel() - out.numel()
    columns_first = poisoned(8, 3, 6, dtype=torch.int32, device=target.device).permute(2, 1, 0)
    select(scores, visible, target, **options, out=columns_first)
    assert columns_first.tolist() == expected


def test_sliced_counts(target: Target) -> None:
    """``num_valid_blocks`` may start anywhere and have any stride."""
    scores = torch.randn(5, 1, 40).to(target.device)
    visible = [40, 7, 30, 2, 25]
    expected = oracle(scores, visible, 4, 0, 1)
    base = torch.full((20,), 10**6, dtype=torch.int32, device=target.device)
    for offset, stride in ((1, 1), (2, 1), (3, 3)):
        counts = base[offset:][::stride][:5]
        counts.copy_(torch.tensor(visible))
        assert m3ops.topk_select(scores, counts, topk=4).tolist() == expected


def test_no_rows(target: Target) -> None:
    assert select(torch.empty(0, 2, 9), [], target, topk=4).shape == (0, 2, 4)
    assert select(torch.empty(2, 2, 0), [0, 0], target, topk=4).tolist() == [[[-1] * 4] * 2] * 2


def test_the_search_ends_between_the_smallest_numbers(target: Target) -> None:
    """Between -0 and the smallest negative number lies nothing, though their bits differ."""
    tiny = 2.0**-149
    scores = torch.tensor([[[1.0, -tiny, -tiny, -tiny, -5.0]]], device=target.device)
    visible = torch.tensor([5], dtype=torch.int32, device=target.device)
    ids = m3ops.topk_select(scores, visible, topk=2, local_blocks=0)
    assert ids.tolist() == [[[0, 1]]]
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, tiny, -tiny, 3e38])
    scores = values[torch.randint(len(values), (40, 2, 70))].to(target.device)
    visible = torch.full((40,), 70, dtype=torch.int32, device=target.device)
    ids = m3ops.topk_select(scores, visible, topk=16)
    rows = zip(scores.flatten(0, 1).tolist(), ids.flatten(0, 1).tolist(), strict=True)
    for row, actual in rows:
        assert actual == select_oracle(row, 70, 16, 0, 1)


# Searched whole, from a bound, and in few groups of their columns.
ROW_WIDTHS = (200, 700, 3000)
FEW_VISIBLE = [0, 1, 2, 3, 15, 16, 17, 18, 33, 255, 256, 257]


@pytest.mark.parametrize(
    ("topk", "init", "local"),
    [(16, 0, 1), (16, 1, 2), (16, 0, 0), (7, 2, 1), (3, 2, 1), (1, 0, 0), (40, 1, 1), (300, 0, 1)],
)
@pytest.mark.parametrize("width", ROW_WIDTHS)
def test_few_rows(target: Target, width: int, topk: int, init: int, local: int) -> None:
    visible = [width, width - 1, width // 2, *FEW_VISIBLE]
    scores = torch.randn(len(visible), 1, width)
    for row, count in zip(scores, visible, strict=True):
        row[:, count:] = (NAN, INF, 1e30)[count % 3]
    out = poisoned(len(visible), 1, topk, dtype=torch.int32, device=target.device)
    options = {"topk": topk, "init_blocks": init, "local_blocks": local}
    select(scores, visible, target, **options, out=out)
    visible = [min(count, width) for count in visible]
    assert out.tolist() == oracle(scores, visible, topk, init, local)


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as a test has are taken for many, by so few programs that each takes some."""
    launch = pytest.importorskip("m3ops.custom_ops.topk_select.launch")
    monkeypatch.setattr(launch, "many_rows", lambda *sizes: True)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda device: 1)
    monkeypatch.setattr(launch, "RESIDENT_WARPS", 8)
    monkeypatch.setattr(launch, "SORTING_WARPS", 1)


def check_many(
    rows: torch.Tensor, visible: list[int], target: Target, topk: int, init: int, local: int
) -> None:
    """``[T, Hi, NB]`` scores, columns first in memory as `select_blocks` has them."""
    scores = rows.to(target.device).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    options = {"topk": topk, "init_blocks": init, "local_blocks": local}
    out = poisoned(*rows.shape[:2], topk, dtype=torch.int32, device=target.device)
    select(scores, visible, target, **options, out=out)
    assert out.tolist() == oracle(rows, visible, topk, init, local)


def visible_blocks(rows: int, width: int) -> list[int]:
    """Rows of one program that see few blocks, none and all of them."""
    few = [0, 1, 2, 15, 16, 17, 18, 31, 32, 33, 34, -3]
    return [few[i] if i < len(few) else width - i % 3 for i in range(rows)]


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize(
    ("topk", "init", "local"), [(16, 0, 1), (16, 1, 2), (16, 0, 0), (7, 2, 1), (3, 2, 1), (1, 0, 0)]
)
@pytest.mark.parametrize("width", SHARED_WIDTHS)
def test_many_rows(target: Target, width: int, topk: int, init: int, local: int) -> None:
    rows = torch.randn(17, 2, width)
    check_many(rows, visible_blocks(17, width), target, topk, init, local)


# What an order, ties or clusters do to the bound, to the number of candidates and to their lists.
PATTERNS = {
    "ascending": lambda width: torch.arange(width),
    "descending": lambda width: -torch.arange(width),
    "equal": lambda width: torch.zeros(width),
    "two zeros": lambda width: torch.tensor([0.0, -0.0]).repeat(width)[:width],
    "runs of equals": lambda width: torch.randn(width).repeat_interleave(9)[:width],
    "few values": lambda width: torch.randint(3, (width,)),
    "a high end": lambda width: torch.randn(width) + 9 * (torch.arange(width) > width - 30),
    "a high start": lambda width: torch.randn(width) + 9 * (torch.arange(width) < 40),
    "classes that tie": lambda width: torch.arange(width) % 64 < 20,
    "high classes": lambda width: torch.randn(width) + 9 * (torch.arange(width) % 16 < 2),
    "odd columns are high": lambda width: torch.randn(width) + 9 * (torch.arange(width) % 2),
    "odd columns tie": lambda width: torch.arange(width) % 2,
    "even columns tie": lambda width: torch.arange(width) % 2 == 0,
    "32 equals on top": lambda width: (torch.randperm(width) < 32).float(),
    "33 equals on top": lambda width: (torch.randperm(width) < 33).float(),
    "64 equals on top": lambda width: (torch.randperm(width) < 64).float(),
    "65 equals on top": lambda width: (torch.randperm(width) < 65).float(),
    "10 on top of equals": lambda width: (torch.randperm(width) < 10).float(),
    "mostly NaN": lambda width: torch.randn(width).where(torch.rand(width) < 0.03, NAN),
    "mostly -inf": lambda width: torch.randn(width).where(torch.rand(width) < 0.03, -INF),
    "mostly inf": lambda width: torch.randn(width).where(torch.rand(width) < 0.03, INF),
    "-inf and NaN": lambda width: torch.tensor([-INF, NAN, -NAN])[torch.randint(3, (width,))],
    "denormal": lambda width: torch.randint(-9, 9, (width,)) * 2.0**-149,
}


@pytest.mark.parametrize("width", ROW_WIDTHS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_few_rows_of_a_pattern(target: Target, pattern: str, width: int) -> None:
    rows = torch.stack([PATTERNS[pattern](width).float() for _ in range(3)])[:, None]
    visible = [width, width - 1, width // 2]
    ids = select(rows, visible, target, topk=16)
    assert ids.tolist() == oracle(rows, visible, 16, 0, 1)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("width", SHARED_WIDTHS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_many_rows_of_a_pattern(target: Target, pattern: str, width: int) -> None:
    rows = torch.stack([PATTERNS[pattern](width).float() for _ in range(8)]).reshape(4, 2, width)
    check_many(rows, [width, width - 1, width // 2, 20], target, 16, 0, 1)


@pytest.mark.usefixtures("many_rows")
def test_one_odd_row_among_many(target: Target) -> None:
    """Whether a program ranks all blocks or candidates only, its rows get the same ids."""
    rows = torch.randn(40, 2, 300)
    rows[5, 1] = 0
    rows[30, 0, 10:] = NAN
    check_many(rows, [300] * 40, target, 16, 0, 1)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("pattern", ["a high end", "few values", "mostly NaN"])
def test_programs_all_of_whose_rows_are_wide(target: Target, pattern: str) -> None:
    """All shares have whole batches of columns, and some more."""
    width = 1025
    rows = torch.stack([PATTERNS[pattern](width).float() for _ in range(32)]).reshape(16, 2, width)
    check_many(rows, [width - i % 3 for i in range(16)], target, 16, 0, 1)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("after", [[], [NAN] * 20, [-INF] * 60, [0.0] * 60], ids=len)
def test_a_row_of_many_is_the_same_alone_and_in_company(target: Target, after: list[float]) -> None:
    """Few numbers, so that of NaN and -inf, which tie, the lower ids fill up."""
    row = torch.tensor([NAN] * 4 + [1.0, 2.0] + [-INF] * 20 + after)
    others = torch.stack([row, torch.zeros_like(row), torch.randn_like(row)])
    for rows in (row[None], others, others.flip(0)):
        check_many(rows[:, None], [len(row)] * len(rows), target, 16, 0, 1)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("width", [1, 15, 16, 17, 33, 255, 256, 257, 511, 512, 513, 1025])
def test_widths_of_many_rows(target: Target, width: int) -> None:
    rows = torch.randn(2, 1, width)
    check_many(rows, [width, width // 2], target, 16, 0, 1)
    heads_first = rows.to(target.device)
    ids = select(heads_first, [width, width // 2], target)
    assert ids.tolist() == oracle(rows, [width, width // 2], 16, 0, 1)
