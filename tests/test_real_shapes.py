"""MiniMax-M3's own geometry in bfloat16 on a GPU: sampled rows against a float64 computation."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import m3ops

HEADS_Q, HEADS_KV, DIM, BLOCK, TOPK = 64, 4, 128, 128, 16
GROUP = HEADS_Q // HEADS_KV

pytestmark = pytest.mark.gpu

# New tokens and context of each sequence.
BATCHES = {
    "prompt of 32k": [(32768, 0)],
    "8k after 120k": [(8192, 122880)],
    "prompts of odd lengths": [(1000, 0), (1, 0), (129, 0), (3000, 0), (17, 0)],
    "decode at 128k": [(1, 131071)] * 3,
    "four speculative tokens of many sequences": [(4, 9000 + 77 * i) for i in range(24)],
    "decode beside a chunk": [(1, 50000), (1, 130), (2048, 4096)],
}


def make(lengths: list[tuple[int, int]], device: torch.device) -> tuple[dict[str, Tensor], Any]:
    """Tensors and batch of a paged step; what no sequence owns is NaN."""
    new = [length for length, _ in lengths]
    used = [length + context for length, context in lengths]
    columns = -(-max(used) // BLOCK)
    pages = sum(-(-length // BLOCK) for length in used)
    order = torch.randperm(pages + 1, device=device).int()
    table = torch.full((len(lengths), columns), 2**31 - 1, dtype=torch.int32, device=device)
    first = 0
    for b, length in enumerate(used):
        blocks = -(-length // BLOCK)
        table[b, :blocks] = order[first : first + blocks]
        first += blocks

    def randn(*size: int) -> Tensor:
        return torch.randn(size, device=device).bfloat16()

    tensors = {
        "q": randn(sum(new), HEADS_Q, DIM),
        "index_q": randn(sum(new), HEADS_KV, DIM),
        "k": randn(pages + 1, HEADS_KV, BLOCK, DIM),
        "v": randn(pages + 1, HEADS_KV, BLOCK, DIM),
        "index_k": randn(pages + 1, BLOCK, DIM),
    }
    for name in ("k", "v", "index_k"):
        tensors[name][order[-1].long()] = torch.nan
        for b, length in enumerate(used):
            if length % BLOCK:
                page = int(table[b, length // BLOCK])
                tensors[name][page, ..., length % BLOCK :, :] = torch.nan
    batch = {
        "cu_seqlens_q": torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=device),
        "seqused_k": torch.tensor(used, dtype=torch.int32, device=device),
        "block_table": table,
        "max_seqlen_q": max(new),
    }
    return tensors, batch


def rows_of(lengths: list[tuple[int, int]], count: int) -> list[tuple[int, int, int]]:
    """Some rows as (row, sequence, position): first and last of each sequence and random ones."""
    everything, row = [], 0
    chosen = set()
    for b, (new, context) in enumerate(lengths):
        everything += [(row + i, b, context + i) for i in range(new)]
        chosen |= {row, row + new - 1}
        row += new
    chosen |= set(torch.randint(row, (count,)).tolist())
    return [everything[i] for i in sorted(chosen)]


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_sampled_rows_match_float64(device: torch.device, lengths: list[tuple[int, int]]) -> None:
    tensors, batch = make(lengths, device)
    q, k, v, index_q, index_k = (tensors[name] for name in ("q", "k", "v", "index_q", "index_k"))
    block_ids = m3ops.select_blocks(index_q, index_k, **batch)
    scores = m3ops.index_score(index_q, index_k, **batch)
    visible = m3ops.num_valid_blocks(batch["cu_seqlens_q"], batch["seqused_k"], len(q))
    assert torch.equal(m3ops.topk_select(scores, visible), block_ids)
    out, lse = m3ops.sparse_attention(q, k, v, block_ids, **batch, return_lse=True)
    assert out.isfinite().all()
    for row, b, position in rows_of(lengths, 24):
        blocks = position // BLOCK + 1
        pages = batch["block_table"][b, :blocks].long()
        keys = index_k[pages].flatten(0, 1)[: position + 1].double()
        dots = (index_q[row].double() @ keys.T).float().double()
        padded = torch.nn.functional.pad(dots, (0, blocks * BLOCK - len(keys)), value=-torch.inf)
        exact = padded.unflatten(1, (blocks, BLOCK)).amax(2)
        torch.testing.assert_close(scores[row, :, :blocks].double(), exact, rtol=1e-5, atol=1e-4)
        for h in range(HEADS_KV):
            ids = block_ids[row, h]
            ids = ids[ids >= 0].long()
            assert len(ids) == min(TOPK, blocks)
            assert blocks - 1 in ids
            others = exact[h, : blocks - 1]
            kept = ids[ids < blocks - 1]
            left_out = torch.ones(blocks - 1, dtype=torch.bool, device=device)
            left_out[kept] = False
            if left_out.any() and len(kept):
                assert others[kept].min() >= others[left_out].max() - 1e-4
            places = (ids[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()
            places = places[places <= position]
            at = (pages[places // BLOCK], torch.full_like(places, h), places % BLOCK)
            heads = slice(h * GROUP, (h + 1) * GROUP)
            logits = q[row, heads].double() @ k[at].double().T * DIM**-0.5
            exact_out = logits.softmax(-1) @ v[at].double()
            exact_lse = logits.logsumexp(-1)
            torch.testing.assert_close(lse[row, heads].double(), exact_lse, rtol=1e-5, atol=1e-4)
            error = (out[row, heads].double() - exact_out).abs()
            # Weights and outputs are rounded to bfloat16.
            assert error.max() <= 2**-7 * exact_out.abs().max()
            assert error.square().mean().sqrt() <= 2**-8 * exact_out.square().mean().sqrt()
