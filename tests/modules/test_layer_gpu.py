"""The layer on a GPU: captured graphs, memory, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_oracle import make_layer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from m3ops import (
    BatchMetadata,
    MiniMaxM3AttentionConfig,
    MiniMaxM3SparseAttention,
    PagedKVCache,
    Workspace,
    use_backend,
)

pytestmark = pytest.mark.gpu

# MiniMax-M3's heads and blocks on a narrow residual stream.
CONFIG = MiniMaxM3AttentionConfig(hidden_size=512)
BLOCK = CONFIG.index_block_size
MIB = 2**20


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Decoder(nn.Module):
    """A layer over a filled cache, and decode steps of a bucket of eight sequences."""

    SEQS, COLUMNS = 8, 40

    def __init__(
        self,
        device: torch.device,
        with_workspace: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        num_pages: int = SEQS * COLUMNS,
    ) -> None:
        super().__init__()
        self.layer = make_layer(CONFIG, dtype, device)
        self.cache = PagedKVCache(CONFIG, num_pages, dtype=dtype, device=device)
        for buffer in self.cache.buffers():
            buffer.normal_()
        self.workspace = (
            Workspace(CONFIG, 64, self.COLUMNS * BLOCK, device=device) if with_workspace else None
        )
        self.pages = torch.randperm(num_pages)[: self.SEQS * self.COLUMNS].int()
        self.device = device

    def forward(self, hidden: Tensor, batch: BatchMetadata) -> Tensor:
        return self.layer(hidden, batch, self.cache, workspace=self.workspace)

    def tables(self, count: int, shift: int = 0) -> Tensor:
        """Pages of `count` sequences; another `shift`, other pages."""
        return self.pages.roll(shift).view(self.SEQS, self.COLUMNS)[:count]

    def batch(self, contexts: Sequence[int], shift: int = 0) -> BatchMetadata:
        count = len(contexts)
        return BatchMetadata.from_lengths(
            [1] * count,
            contexts,
            self.tables(count, shift),
            num_tokens=self.SEQS,
            num_seqs=self.SEQS,
            num_columns=self.COLUMNS,
            device=self.device,
        )

    def hidden(self) -> Tensor:
        weight = self.layer.q_proj.weight
        return torch.randn(self.SEQS, CONFIG.hidden_size, dtype=weight.dtype, device=self.device)


# Contexts of each sequence and which pages they use: grown, shrunk, fewer, empty, swapped.
STEPS: list[tuple[list[int], int]] = [
    ([5000, 1, 127, 128, 2300, 4000, 700, 0], 0),
    ([5001, 2, 128, 129, 2301, 4001, 701, 1], 0),
    ([3, 4999, 2175], 0),
    ([3, 4999, 2175], 80),
    ([], 0),
    ([5118] * 8, 200),
    ([0], 0),
]


def graph_launches(run: Callable[[], Any]) -> int:
    """How many CUDA graphs `run` launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in trace.key_averages() if "GraphLaunch" in event.key)


@pytest.mark.parametrize("with_workspace", [False, True])
def test_cuda_graph_trees_replay(device: torch.device, with_workspace: bool) -> None:
    # In float32, where what a compiler fuses does not change which blocks are best.
    decoder = Decoder(device, with_workspace, torch.float32)
    compiled = torch.compile(decoder, mode="reduce-overhead", fullgraph=True, dynamic=True)
    batch = decoder.batch(STEPS[0][0])
    counters.clear()
    # The first calls compile, warm up and record.
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(decoder.hidden(), batch)
    assert counters["inductor"]["cudagraph_skips"] == 0
    steps = [*STEPS, *STEPS]

    def replay() -> None:
        for contexts, shift in steps:
            batch.copy_(decoder.batch(contexts, shift))
            torch.compiler.cudagraph_mark_step_begin()
            compiled(decoder.hidden(), batch)

    assert graph_launches(replay) == len(steps)
    for contexts, shift in STEPS:
        batch.copy_(decoder.batch(contexts, shift))
        hidden = decoder.hidden()
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(hidden, batch).clone()
        torch.testing.assert_close(out, decoder(hidden, batch), rtol=1e-4, atol=1e-4)
        assert not out[len(contexts) :].any()
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_a_kept_output_is_that_of_its_own_step(device: torch.device) -> None:
    decoder = Decoder(device, dtype=torch.float32)
    compiled = torch.compile(decoder, mode="reduce-overhead", fullgraph=True, dynamic=True)
    batch = decoder.batch(STEPS[0][0])
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        compiled(decoder.hidden(), batch)
    first, second = decoder.hidden(), decoder.hidden()
    expected = decoder(first, batch)
    torch.compiler.cudagraph_mark_step_begin()
    kept = compiled(first, batch).clone()
    torch.compiler.cudagraph_mark_step_begin()
    following = compiled(second, batch).clone()
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(following, decoder(second, batch), rtol=1e-4, atol=1e-4)
    assert not torch.equal(kept, following)


@pytest.mark.parametrize("with_workspace", [False, True])
def test_a_captured_decode_step_survives_other_batches(
    device: torch.device, with_workspace: bool
) -> None:
    """Captured over no keys at all, replayed over every kind of step: equal to eager."""
    decoder = Decoder(device, with_workspace)
    batch, hidden = decoder.batch([]), decoder.hidden()
    assert not batch.seqused_k.any()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            decoder(hidden, batch)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder(hidden, batch)
    for contexts, shift in [*STEPS, *STEPS[::-1]]:
        if decoder.workspace is not None:
            decoder.workspace.scores.fill_(torch.nan)
            decoder.workspace.block_ids.fill_(2**30)
        hidden.copy_(decoder.hidden())
        count = len(contexts)
        batch.update_([1] * count, contexts, decoder.tables(count, shift))
        graph.replay()
        replayed = out.clone()
        expected = decoder(hidden, batch)
        torch.testing.assert_close(replayed, expected, rtol=1e-3, atol=1e-3)
        assert not replayed[count:].any()
        assert count == 0 or replayed[:count].abs().amax(1).min() > 0


@pytest.mark.parametrize("with_workspace", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_do_not_wait_for_the_device(
    device: torch.device, with_workspace: bool, compiled: bool
) -> None:
    decoder = Decoder(device, with_workspace)
    run = torch.compile(decoder, fullgraph=True, dynamic=True) if compiled else decoder
    batch, hidden = decoder.batch([100] * 8), decoder.hidden()
    mixed_hidden = torch.cat([hidden] * 5)
    mixed = BatchMetadata.from_lengths(
        [1, 1, 38], [5000, 77, 300], decoder.tables(3), num_columns=40, device=device
    )
    for _ in range(2):
        run(hidden, batch)
        run(mixed_hidden, mixed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for contexts, shift in STEPS:
            batch.update_([1] * len(contexts), contexts, decoder.tables(len(contexts), shift))
            out = run(hidden, batch)
        mixed_out = run(mixed_hidden, mixed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.isfinite().all() and mixed_out.isfinite().all()


@pytest.mark.parametrize("with_workspace", [False, True])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_copies_no_cache(
    device: torch.device, with_workspace: bool, mode: str
) -> None:
    num_pages = 3800
    decoder = Decoder(device, with_workspace, num_pages=num_pages)
    assert sum(buffer.nbytes for buffer in decoder.cache.buffers()) > 2**30
    run = torch.compile(decoder, mode=mode, fullgraph=True, dynamic=True)
    batch, hidden = decoder.batch([5000] * 8), decoder.hidden()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        if step:
            # Compiling and recording may try things out; steps may not.
            torch.cuda.reset_peak_memory_stats(device)
        run(hidden, batch)
        torch.cuda.synchronize()
        assert step == 0 or torch.cuda.max_memory_allocated(device) - before < 64 * MIB


def test_compiled_bfloat16_is_near_eager(device: torch.device) -> None:
    decoder = Decoder(device)
    batch, hidden = decoder.batch(STEPS[0][0]), decoder.hidden()
    compiled = torch.compile(decoder.layer, fullgraph=True, dynamic=True)
    # The same ids: fused arithmetic rounds less often, which can decide between near ties.
    expected, ids = decoder.layer(hidden, batch, decoder.cache, return_block_ids=True)
    out = compiled(hidden, batch, decoder.cache, block_ids=ids)
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert float(error) < 0.01


def test_equals_the_reference_on_the_cpu(device: torch.device) -> None:
    """Prefill in chunks and decode in float32, more blocks than are kept."""
    # Smaller than the others, for the CPU's sake.
    config = replace(CONFIG, hidden_size=256, num_attention_heads=16, index_block_size=32)
    layer = make_layer(config)
    length, columns = 24 * 32 + 7, 26
    hidden = torch.randn(length, config.hidden_size)
    table = torch.randperm(columns + 3)[None, :columns].int()
    results = []
    for place, backend in ((torch.device("cpu"), "reference"), (device, "triton")):
        here: MiniMaxM3SparseAttention = layer.to(place)
        cache = PagedKVCache(config, columns + 3, device=place)
        outs, ids, context = [], [], 0
        with use_backend(backend):
            for part in hidden.split([500, length - 503, 1, 1, 1]):
                batch = BatchMetadata.from_lengths(
                    [len(part)], [context], table, block_size=32, device=place
                )
                out, kept = here(part.to(place), batch, cache, return_block_ids=True)
                outs.append(out.cpu())
                ids.append(kept.cpu())
                context += len(part)
        results.append((torch.cat(outs), torch.cat(ids)))
    (expected, expected_ids), (actual, actual_ids) = results
    same = (actual_ids == expected_ids).flatten(1).all(1)
    # Rounding decides between blocks whose scores are as good as equal, in a few rows.
    assert float(same.float().mean()) > 0.99
    torch.testing.assert_close(actual[same], expected[same], rtol=1e-4, atol=1e-4)
