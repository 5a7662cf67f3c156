"""The ops in CUDA graphs, without waiting for the device, and on tensors beyond 2^31 elements."""

from __future__ import annotations

import gc
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import m3ops
from m3ops.testing import (
    GARBAGE_INTS,
    LAYOUTS,
    M3,
    MIXED,
    Geometry,
    Inputs,
    assert_attention,
    assert_block_ids,
    assert_scores,
    lay_out,
    make_inputs,
    poisoned,
    random_sequences,
)

pytestmark = pytest.mark.gpu


GEOMETRY = Geometry(heads_q=8, heads_kv=2, dim=64, index_dim=64, block_size=32)
TOPK = 4


def attend(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, batch: dict[str, Any]) -> Tensor:
    return m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True)[0]


@contextmanager
def no_sync() -> Iterator[None]:
    """Raises where a call waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Static:
    """Tensors of fixed size and place, as a captured graph needs them."""

    SEQS, ROWS, COLUMNS, PAGES = 8, 40, 20, 161

    def __init__(self, device: torch.device, offset: int = 0, functional: bool = False) -> None:
        g, self.functional = GEOMETRY, functional

        def half(*sizes: int) -> Tensor:
            return poisoned(*sizes, dtype=torch.bfloat16, device=device)

        def int32(*sizes: int) -> Tensor:
            """Zeros that start `offset` elements into their storage."""
            base = torch.zeros(math.prod(sizes) + offset, dtype=torch.int32, device=device)
            return base[offset:].view(sizes)

        self.q = half(self.ROWS, g.heads_q, g.dim)
        self.index_q = half(self.ROWS, g.heads_kv, g.index_dim)
        self.k = half(self.PAGES, g.heads_kv, g.block_size, g.dim)
        self.v = half(self.PAGES, g.heads_kv, g.block_size, g.dim)
        self.index_k = half(self.PAGES, g.block_size, g.index_dim)
        self.batch: dict[str, Any] = {
            "cu_seqlens_q": int32(self.SEQS + 1),
            "seqused_k": int32(self.SEQS),
            "block_table": int32(self.SEQS, 37 if offset else self.COLUMNS)[:, : self.COLUMNS],
            "block_size": g.block_size,
        }
        self.scores = poisoned(
            self.ROWS, g.heads_kv, self.COLUMNS + 3, dtype=torch.float32, device=device
        )
        self.visible = int32(self.ROWS)
        self.ids = poisoned(self.ROWS, g.heads_kv, TOPK, dtype=torch.int32, device=device)
        self.selected = self.ids.clone()
        self.out = half(*self.q.shape)
        self.lse = poisoned(*self.q.shape[:2], dtype=torch.float32, device=device)
        # New tokens of each row, and where they are stored.
        self.new = [half(self.ROWS, *x.shape[1::2]) for x in (self.k, self.v)]
        self.new.append(half(self.ROWS, g.index_dim))
        self.slots = torch.full((self.ROWS,), -1, dtype=torch.int64, device=device)

    def load(self, inputs: Inputs) -> None:
        """Puts a batch into the fixed tensors; the rest of them becomes garbage."""
        rows, seqs, pages = inputs.total_q, len(inputs.sequences), len(inputs.k)
        for mine, given in ((self.q, inputs.q), (self.index_q, inputs.index_q)):
            mine[:rows].copy_(given)
            mine[rows:].fill_(math.nan)
        for mine, given in (
            (self.k, inputs.k),
            (self.v, inputs.v),
            (self.index_k, inputs.index_k),
        ):
            mine[:pages].copy_(given)
            mine[pages:].fill_(math.nan)
        self.batch["cu_seqlens_q"][: seqs + 1].copy_(inputs.batch["cu_seqlens_q"])
        self.batch["cu_seqlens_q"][seqs + 1 :].fill_(rows)
        self.batch["seqused_k"].zero_()
        self.batch["seqused_k"][:seqs].copy_(inputs.batch["seqused_k"])
        self.batch["block_table"].fill_(GARBAGE_INTS[0])
        table = inputs.batch["block_table"]
        self.batch["block_table"][:seqs, : table.shape[1]].copy_(table)
        # The new tokens come through `store_kv`; until then their slots hold garbage.
        self.slots.fill_(-1)
        for b, sequence in enumerate(inputs.sequences):
            count = min(len(sequence.q), len(sequence.k))
            stop = inputs.span(b).stop
            at = slice(stop - count, stop)
            slots = inputs.slots[b][len(sequence.k) - count :]
            self.slots[at].copy_(slots)
            for mine, logical in zip(
                self.new, (sequence.k, sequence.v, sequence.index_k), strict=True
            ):
                mine[at].copy_(logical[len(logical) - count :])
            page, place = slots // GEOMETRY.block_size, slots % GEOMETRY.block_size
            self.k[page, :, place] = self.v[page, :, place] = math.nan
            self.index_k[page, place] = math.nan

    def step(self) -> None:
        """Every op once, into the fixed tensors."""
        batch = self.batch
        key, value, index_key = self.new
        m3ops.store_kv(key, value, index_key, self.slots, self.k, self.v, self.index_k)
        self.visible.copy_(
            m3ops.num_valid_blocks(
                batch["cu_seqlens_q"], batch["seqused_k"], self.ROWS, GEOMETRY.block_size
            )
        )
        if self.functional:
            scores = m3ops.index_score(self.index_q, self.index_k, **batch)
            self.scores[..., : self.COLUMNS].copy_(scores)
            self.ids.copy_(m3ops.topk_select(scores, self.visible, topk=TOPK))
            self.selected.copy_(m3ops.select_blocks(self.index_q, self.index_k, **batch, topk=TOPK))
            out, lse = m3ops.sparse_attention(
                self.q, self.k, self.v, self.ids, **batch, return_lse=True
            )
            self.out.copy_(out)
            self.lse.copy_(lse)
            return
        m3ops.index_score(self.index_q, self.index_k, **batch, out=self.scores)
        m3ops.topk_select(self.scores, self.visible, topk=TOPK, out=self.ids)
        m3ops.select_blocks(self.index_q, self.index_k, **batch, topk=TOPK, out=self.selected)
        m3ops.sparse_attention(
            self.q, self.k, self.v, self.ids, **batch, out=self.out, lse_out=self.lse
        )

    def results(self) -> list[Tensor]:
        return [self.visible, self.ids, self.selected, self.out, self.lse]

    def check(self, inputs: Inputs) -> None:
        rows = inputs.total_q
        assert_scores(self.scores[:rows], inputs)
        assert_block_ids(self.ids[:rows], inputs, topk=TOPK)
        assert torch.equal(self.selected, self.ids)
        assert (self.ids[rows:] == -1).all()
        assert_attention(self.out[:rows], self.lse[:rows], inputs, self.ids[:rows])
        assert self.out[rows:].count_nonzero() == 0
        assert (self.lse[rows:] == -math.inf).all()


# Grown, shrunk, empty, of other kinds: every batch fits into the tensors of `Static`.
STEPS = [
    [(600, 1), (33, 1), (500, 1), (32, 1), (1, 1), (64, 1), (333, 1), (640, 1)],
    [(601, 1), (34, 1), (501, 1)],
    [],
    [(200, 5), (0, 1), (77, 20), (9, 9)],
    [(639, 1)] * 8,
    [(40, 40)],
    [(5, 1), (0, 0), (96, 3)],
]


def batches(device: torch.device) -> Iterator[tuple[Inputs, int]]:
    """Each step on pages of its own choice."""
    for seed, lengths in enumerate(STEPS):
        sequences = random_sequences(
            lengths or [(0, 0)], GEOMETRY, dtype=torch.bfloat16, device=device
        )
        yield lay_out(sequences, block_size=32, extra_blocks=0, seed=seed), seed


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    # Kernels are compiled before, on a stream of its own as the documentation asks.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("bucket", ["any rows", "named decode rows", "decode rows alone"])
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_captured_step_follows_its_metadata(
    device: torch.device, offset: int, functional: bool, bucket: str
) -> None:
    """Captured while all lengths are zero; metadata at +0, +4 and +8 bytes."""
    static = Static(device, offset, functional)
    if bucket == "named decode rows":
        # Sequences that are not named may be decode sequences too.
        static.batch |= {"num_decode_seqs": 1, "num_decode_tokens": 1}
    if bucket == "decode rows alone":
        static.batch |= {"max_seqlen_q": 1}
    graph = capture(static.step)
    for inputs, seed in batches(device):
        new = [len(sequence.q) for sequence in inputs.sequences]
        if (bucket == "named decode rows" and new[0] != 1) or (
            bucket == "decode rows alone" and max(new) > 1
        ):
            continue
        static.load(inputs)
        for result in static.results():
            result.fill_(2**30 if result.dtype == torch.int32 else math.nan)
        graph.replay()
        replayed = [result.clone() for result in static.results()]
        static.check(inputs)
        static.load(inputs)
        static.step()
        assert all(map(torch.equal, static.results(), replayed)), f"step {seed}"


@pytest.mark.parametrize("layout", ["packed", "batched"])
def test_other_layouts_are_captured(device: torch.device, layout: str) -> None:
    """Same places, other lengths: the graph reads them from the device."""
    sequences = random_sequences([(600, 1), (90, 3), (40, 20)], GEOMETRY, device=device)
    inputs = lay_out(sequences, layout=layout, block_size=32, padding_rows=3)

    def step() -> tuple[Tensor, ...]:
        ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=TOPK)
        return ids, *m3ops.sparse_attention(
            inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for cut in (0, 7, 33):
        inputs.batch["seqused_k"].copy_(
            torch.tensor([600 - cut, 90 - cut, 40 - cut], dtype=torch.int32)
        )
        graph.replay()
        assert all(map(torch.equal, [x.clone() for x in results], step()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_call_waits_for_the_device_or_takes_memory_from_it(
    device: torch.device, layout: str
) -> None:
    inputs = make_inputs(MIXED, layout=layout, device=device, dtype=torch.bfloat16, padding_rows=3)
    index, batch = (inputs.index_q, inputs.index_k), inputs.batch
    qkv = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = qkv
    dout = torch.randn_like(inputs.q)
    slots = torch.arange(4, device=device)
    tokens = [torch.randn(4, *s, device=device).bfloat16() for s in ((2, 32), (2, 32), (16,))]
    caches = [
        torch.zeros(3, *s, device=device).bfloat16() for s in ((2, 16, 32), (2, 16, 32), (16, 16))
    ]
    key, value, index_key = tokens

    def everything() -> None:
        m3ops.store_kv(key, value, index_key, slots, *caches)
        visible = m3ops.num_valid_blocks(
            batch["cu_seqlens_q"], batch["seqused_k"], inputs.total_q, 16
        )
        scores = m3ops.index_score(*index, **batch)
        ids = m3ops.topk_select(scores, visible, topk=3)
        m3ops.select_blocks(*index, **batch, topk=3, max_scratch_bytes=4096)
        parts = [
            m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True, num_splits=num_splits)
            for num_splits in (0, 1, 3)
        ]
        m3ops.merge_attention(*zip(*parts, strict=True))
        torch.autograd.grad(parts[0][0], qkv, dout)

    for _ in range(2):
        everything()
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats(device)["num_device_alloc"]
    with no_sync():
        for _ in range(3):
            everything()
    assert torch.cuda.memory_stats(device)["num_device_alloc"] == allocations


def test_replays_take_no_memory(device: torch.device) -> None:
    static = Static(device, functional=True)
    graph = capture(static.step)
    graph.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(device)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats(device)
    for name in ("num_device_alloc", "allocated_bytes.all.current", "reserved_bytes.all.current"):
        assert after[name] == before[name]


def test_scratch_stays_under_its_bound_while_a_long_prompt_is_prefilled(
    device: torch.device,
) -> None:
    """131,072 tokens in chunks of 8192: scores of one whole chunk would be 128 MiB."""
    chunk, total, bound = 8192, 131072, 2**25
    pages = total // 128
    k, v = (torch.randn(pages, 4, 128, 128, device=device).bfloat16() for _ in range(2))
    index_k = torch.randn(pages, 128, 128, device=device).bfloat16()
    q = torch.randn(chunk, 64, 128, device=device).bfloat16()
    index_q = torch.randn(chunk, 4, 128, device=device).bfloat16()
    ids = poisoned(chunk, 4, 16, dtype=torch.int32, device=device)
    out, lse = torch.empty_like(q), torch.empty(chunk, 64, device=device)
    table = torch.randperm(pages, device=device).int()[None]
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=device)
    reserved = []
    for stop in range(chunk, total + 1, chunk):
        batch: dict[str, Any] = {
            "cu_seqlens_q": starts,
            "seqused_k": torch.tensor([stop], dtype=torch.int32, device=device),
            "block_table": table,
        }
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        m3ops.select_blocks(index_q, index_k, **batch, max_scratch_bytes=bound, out=ids)
        m3ops.sparse_attention(q, k, v, ids, **batch, max_scratch_bytes=bound, out=out, lse_out=lse)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated(device) - held <= bound + 2**20
        reserved.append(torch.cuda.memory_reserved(device))
        assert (ids[-1, :, -1] == (stop - 1) // 128).all()
    assert reserved[1:] == [reserved[1]] * (len(reserved) - 1)


# Offsets that 32 bits do not hold.

FAR = 2**20


def far(tensor: Tensor, axis: int = 0) -> Tensor:
    """A copy whose `axis` has a stride of 2^20 elements: the last of 2048 lie beyond 2^31."""
    strides = list(tensor.contiguous().stride())
    strides[axis] = FAR
    size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    twin = torch.empty(size, dtype=tensor.dtype, device=tensor.device).as_strided(
        tensor.shape, strides
    )
    return twin.copy_(tensor)


@pytest.fixture
def _empty_gpu() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_empty_gpu")
@pytest.mark.parametrize("new", [1, 300])
def test_far_pages(device: torch.device, new: int) -> None:
    geometry = Geometry(heads_q=4, heads_kv=2, dim=128, index_dim=128, block_size=128)
    sequence = random_sequences([(300, new)], geometry, dtype=torch.bfloat16, device=device)[0]
    near = lay_out([sequence], block_size=128, extra_blocks=0)
    pages = near.batch["block_table"][0].long()
    ids = m3ops.select_blocks(near.index_q, near.index_k, **near.batch, topk=2)
    expected = attend(near.q, near.k, near.v, ids, near.batch)
    scores = m3ops.index_score(near.index_q, near.index_k, **near.batch)
    order = torch.tensor([2050, 2047, 2048], device=device)
    batch = {**near.batch, "block_table": order.int()[None]}

    def place(keys: Tensor) -> Tensor:
        twin = far(keys.new_zeros(2051, *keys.shape[1:]))
        twin[order] = keys[pages]
        return twin

    index_k = place(near.index_k)
    assert torch.equal(m3ops.select_blocks(near.index_q, index_k, **batch, topk=2), ids)
    seen = torch.arange(3, device=device) < near.num_valid_blocks()[:, None, None]
    far_scores = m3ops.index_score(near.index_q, index_k, **batch)
    assert torch.equal(far_scores.where(seen, 0), scores.where(seen, 0))
    del index_k
    k, v = place(near.k), place(near.v)
    assert torch.equal(attend(near.q, k, v, ids, batch), expected)


@pytest.mark.usefixtures("_empty_gpu")
@pytest.mark.parametrize("layout", ["packed", "batched"])
def test_far_tokens(device: torch.device, layout: str) -> None:
    geometry = Geometry(heads_q=4, heads_kv=2, dim=128, index_dim=128, block_size=128)
    inputs = make_inputs([(2300, 3)], geometry, layout=layout, dtype=torch.bfloat16, device=device)
    axis = LAYOUTS.index(layout) - 1
    ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=4)
    assert_block_ids(ids, inputs, topk=4)
    index_k = far(inputs.index_k, axis)
    assert torch.equal(m3ops.select_blocks(inputs.index_q, index_k, **inputs.batch, topk=4), ids)
    del index_k
    expected = attend(inputs.q, inputs.k, inputs.v, ids, inputs.batch)
    k, v = far(inputs.k, axis), far(inputs.v, axis)
    assert torch.equal(attend(inputs.q, k, v, ids, inputs.batch), expected)


@pytest.mark.usefixtures("_empty_gpu")
def test_far_rows(device: torch.device) -> None:
    """Queries, scores, ids and outputs of 2100 rows, each 2^20 elements after the one before."""
    geometry = Geometry(heads_q=4, heads_kv=2, dim=128, index_dim=128, block_size=128)
    inputs = make_inputs([(2100, 2100)], geometry, dtype=torch.bfloat16, device=device)
    batch, visible = inputs.batch, inputs.num_valid_blocks()
    ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **batch, topk=4)
    expected, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **batch, return_lse=True
    )
    scores = far(torch.zeros(2100, 2, 19, device=device))
    m3ops.index_score(far(inputs.index_q), inputs.index_k, **batch, out=scores)
    far_ids = far(torch.zeros_like(ids))
    m3ops.topk_select(scores, visible, topk=4, out=far_ids)
    assert torch.equal(far_ids, ids)
    del scores
    out, far_lse = far(torch.zeros_like(inputs.q)), far(torch.zeros_like(lse))
    m3ops.sparse_attention(
        far(inputs.q), inputs.k, inputs.v, far_ids, **batch, out=out, lse_out=far_lse
    )
    assert torch.equal(out, expected)
    assert torch.equal(far_lse, lse)


def test_page_ids_that_16_bits_do_not_hold(device: torch.device) -> None:
    k = torch.zeros(65537, 1, 16, 16, device=device)
    v, index_k = torch.zeros_like(k), torch.zeros(65537, 16, 16, device=device)
    v[65536], v[0] = 7, 1
    index_k[65536], index_k[0] = 7, 1
    batch: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "seqused_k": torch.tensor([16], dtype=torch.int32, device=device),
        "block_table": torch.tensor([[65536]], dtype=torch.int32, device=device),
        "block_size": 16,
    }
    q = torch.ones(1, 1, 16, device=device)
    ids = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
    out, _ = m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True)
    assert out.unique().tolist() == [7]
    assert m3ops.index_score(q, index_k, **batch).tolist() == [[[7 * 16]]]


@pytest.mark.usefixtures("_empty_gpu")
def test_a_large_cache_of_which_low_pages_are_used(device: torch.device) -> None:
    inputs = make_inputs([(300, 1)], M3, dtype=torch.bfloat16, device=device)
    ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=2)
    assert_block_ids(ids, inputs, topk=2)
    expected = attend(inputs.q, inputs.k, inputs.v, ids, inputs.batch)

    def enlarge(keys: Tensor) -> Tensor:
        pages = 2**31 // keys[0].numel() + 8
        large = keys.new_empty(pages, *keys.shape[1:])
        large[: len(keys)] = keys
        return large

    index_k = enlarge(inputs.index_k)
    assert torch.equal(m3ops.select_blocks(inputs.index_q, index_k, **inputs.batch, topk=2), ids)
    del index_k
    k, v = enlarge(inputs.k), enlarge(inputs.v)
    assert torch.equal(attend(inputs.q, k, v, ids, inputs.batch), expected)


@pytest.mark.usefixtures("_empty_gpu")
def test_tokens_are_stored_into_far_pages(device: torch.device) -> None:
    caches = [
        far(torch.zeros(2051, *shape, device=device).bfloat16())
        for shape in ((2, 16, 32), (2, 16, 32), (16, 16))
    ]
    tokens = [torch.randn(3, *s, device=device).bfloat16() for s in ((2, 32), (2, 32), (16,))]
    key, value, index_key = tokens
    slots = torch.tensor([2050 * 16 + 15, 3, 2048 * 16], device=device)
    m3ops.store_kv(key, value, index_key, slots, *caches)
    for cache, token in zip(caches, tokens, strict=True):
        for t, (page, place) in enumerate(((2050, 15), (0, 3), (2048, 0))):
            assert torch.equal(cache[page].select(-2, place), token[t])
        assert cache.count_nonzero() == token.count_nonzero()


# Compiled variants.


def variants() -> dict[str, int]:
    """How many variants of each of our kernels this process has compiled."""
    from triton.runtime import JITFunction

    kernels = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("m3ops.custom_ops.")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    return {
        kernel.__name__: sum(len(caches[0]) for caches in kernel.device_caches.values())
        for kernel in kernels.values()
    }


def test_sizes_that_change_from_step_to_step_compile_nothing(device: torch.device) -> None:
    """After three sizes of each kind, no other number of sequences, rows or columns does."""

    def step(seqs: int, rows: int, columns: int) -> None:
        new = [rows // seqs + (b < rows % seqs) for b in range(seqs)]
        seqused = [max(count, min(300, columns * 32 - b % 7)) for b, count in enumerate(new)]
        starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
        batch: dict[str, Any] = {
            "cu_seqlens_q": starts.to(device),
            "seqused_k": torch.tensor(seqused, dtype=torch.int32, device=device),
            "block_table": torch.zeros(seqs, columns, dtype=torch.int32, device=device),
            "max_seqlen_q": max(new),
            "block_size": 32,
        }
        q = torch.randn(rows, 8, 64, device=device).bfloat16()
        index_q = torch.randn(rows, 2, 64, device=device).bfloat16()
        index_k = torch.randn(5, 32, 64, device=device).bfloat16()
        k = torch.randn(5, 2, 32, 64, device=device).bfloat16()
        scores = m3ops.index_score(index_q, index_k, **batch)
        visible = m3ops.num_valid_blocks(batch["cu_seqlens_q"], batch["seqused_k"], rows, 32)
        m3ops.topk_select(scores, visible, topk=TOPK)
        ids = m3ops.select_blocks(index_q, index_k, **batch, topk=TOPK)
        m3ops.sparse_attention(q, k, k, ids, **batch)
        slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        m3ops.store_kv(q[:, :2], q[:, 2:4], index_q[:, 0], slots, k, k.clone(), index_k)

    for sizes in itertools.product((1, 3, 37), repeat=3):
        step(*sizes)
    before = variants()
    assert any(before.values())
    for sizes in itertools.product((1, 3, 16, 17, 37), repeat=3):
        step(*sizes)
    assert variants() == before


def test_ids_that_a_buffer_held_before_are_never_followed(device: torch.device) -> None:
    """2^30 in every place of the ids that selection does not reach would be far out of bounds."""
    inputs = make_inputs(
        [(3 * 128, 1), (40, 1), (0, 1)], M3, dtype=torch.bfloat16, device=device, padding_rows=5
    )
    ids = poisoned(inputs.total_q, 4, 16, dtype=torch.int32, device=device)
    m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, out=ids)
    out, lse = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True
    )
    assert_attention(out, lse, inputs, ids)
    wild = ids.where(ids >= 0, 2**30)
    again = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, wild, **inputs.batch, return_lse=True
    )
    assert torch.equal(again[0], out)
