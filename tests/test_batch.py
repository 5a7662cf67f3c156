"""The packed batch: which blocks each row sees, and batches without rows, keys or sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DEVICES, Target
from hypothesis import given
from hypothesis import strategies as st

import m3ops
from m3ops.testing import Geometry, lay_out, make_inputs, poisoned, random_sequences

INF = float("inf")


def int32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def visible_by_hand(lengths: list[tuple[int, int]], padding: int, block_size: int) -> list[int]:
    visible = []
    for seqused_k, new in lengths:
        for i in range(new):
            position = seqused_k - new + i
            visible.append(position // block_size + 1 if position >= 0 else 0)
    return visible + [0] * padding


@pytest.mark.parametrize("device", DEVICES)
def test_visible_blocks_of_every_kind_of_row(device: torch.device) -> None:
    cu_seqlens_q = int32([0, 1, 1, 4, 8, 8, 9], device)
    seqused_k = int32([128, 55, 258, 2, 0, 0], device)
    visible = m3ops.num_valid_blocks(cu_seqlens_q, seqused_k, 12, 128)
    assert visible.dtype == torch.int32
    assert visible.device == device
    # One decode row at 127; rows 255 to 257; rows -2 to 1; a row of no keys; padding.
    assert visible.tolist() == [1, 2, 3, 3, 0, 0, 1, 1, 0, 0, 0, 0]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=6),
    padding=st.integers(0, 4),
    block_size=st.sampled_from([1, 7, 16, 128]),
)
def test_visible_blocks_of_any_batch(
    lengths: list[tuple[int, int]], padding: int, block_size: int
) -> None:
    starts = [0]
    for _, new in lengths:
        starts.append(starts[-1] + new)
    cpu = torch.device("cpu")
    visible = m3ops.num_valid_blocks(
        int32(starts, cpu),
        int32([seqused_k for seqused_k, _ in lengths], cpu),
        starts[-1] + padding,
        block_size,
    )
    assert visible.tolist() == visible_by_hand(lengths, padding, block_size)


@pytest.mark.parametrize("device", DEVICES)
def test_the_end_of_the_largest_context(device: torch.device) -> None:
    """1,048,576 tokens, and positions close to where int32 ends."""
    last = 2**31 - 1
    visible = m3ops.num_valid_blocks(
        int32([0, 2, 3], device), int32([2**20 + 1, last], device), 3, 128
    )
    assert visible.tolist() == [8192, 8193, (last - 1) // 128 + 1]


@pytest.mark.parametrize("device", DEVICES)
def test_metadata_sliced_from_larger_buffers(device: torch.device) -> None:
    for offset in (1, 2, 3):
        starts = int32([77] * offset + [0, 3, 4] + [99], device)[offset:-1]
        lengths = int32([[300, 1], [5, 2]], device).flatten()[offset - 1 :][:2]
        expected = visible_by_hand(list(zip(lengths.tolist(), (3, 1), strict=True)), 1, 16)
        assert m3ops.num_valid_blocks(starts, lengths, 5, 16).tolist() == expected


def empty_batches(device: torch.device) -> dict[str, dict[str, Any]]:
    """Batches that no key and no live row is in, by name: batch, T and the keys' leading sizes."""
    none, three = int32([], device), int32([0, 0, 0], device)
    flat = int32([0, 0, 0, 0], device)
    return {
        "no sequence, paged": {
            "cu_seqlens_q": int32([0], device),
            "seqused_k": none,
            "block_table": none.reshape(0, 5),
        },
        "no sequence, packed": {
            "cu_seqlens_q": int32([0], device),
            "seqused_k": none,
            "cu_seqlens_k": int32([0], device),
        },
        "no sequence, batched": {"cu_seqlens_q": int32([0], device), "seqused_k": none},
        "three sequences of nothing, paged": {
            "cu_seqlens_q": flat,
            "seqused_k": three,
            "block_table": int32([[-1] * 5] * 3, device),
        },
        "three sequences of nothing, a table of no column": {
            "cu_seqlens_q": flat,
            "seqused_k": three,
            "block_table": none.reshape(3, 0),
        },
        "three sequences of nothing, packed": {
            "cu_seqlens_q": flat,
            "seqused_k": three,
            "cu_seqlens_k": flat,
        },
        "three sequences of nothing, batched": {"cu_seqlens_q": flat, "seqused_k": three},
        "three contexts without queries": {
            "cu_seqlens_q": flat,
            "seqused_k": int32([30, 16, 1], device),
            "block_table": int32([[0, 1]] * 3, device),
        },
    }


@pytest.mark.parametrize("name", empty_batches(torch.device("cpu")))
@pytest.mark.parametrize("rows", [0, 3])
def test_batches_of_nothing_or_of_padding(target: Target, name: str, rows: int) -> None:
    batch = {**empty_batches(target.device)[name], "block_size": 16}
    if "block_table" in batch:
        size: tuple[int, ...] = (2, 2, 16)
        index_size: tuple[int, ...] = (2, 16)
    elif "cu_seqlens_k" in batch:
        size, index_size = (0, 2), (0,)
    else:
        size, index_size = (len(batch["seqused_k"]), 0, 2), (len(batch["seqused_k"]), 0)
    shapes = ((rows, 4, 16), (*size, 16), (*size, 16), (rows, 2, 8), (*index_size, 8))
    q, k, v, index_q, index_k = (
        poisoned(*shape, dtype=torch.float32, device=target.device) for shape in shapes
    )

    scores = m3ops.index_score(index_q, index_k, **batch)
    assert scores.shape[:2] == (rows, 2)
    visible = m3ops.num_valid_blocks(batch["cu_seqlens_q"], batch["seqused_k"], rows, 16)
    assert visible.tolist() == [0] * rows
    ids = m3ops.topk_select(scores, visible, topk=4)
    assert ids.tolist() == [[[-1] * 4] * 2] * rows
    assert torch.equal(m3ops.select_blocks(index_q, index_k, **batch, topk=4), ids)
    for num_splits in (0, 1, 3):
        out, lse = m3ops.sparse_attention(
            q, k, v, ids, **batch, num_splits=num_splits, return_lse=True
        )
        assert out.shape == (rows, 4, 16)
        assert out.count_nonzero() == 0
        assert lse.tolist() == [[-INF] * 4] * rows
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out, _ = m3ops.sparse_attention(q, k, v, ids, **batch, return_lse=True)
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all(grad.count_nonzero() == 0 for grad in grads)
    assert [grad.shape for grad in grads] == [x.shape for x in tensors]


def test_an_empty_sequence_in_the_middle(target: Target) -> None:
    lengths = [(30, 4), (0, 0), (41, 5)]
    inputs = make_inputs(lengths, device=target.device)
    assert inputs.batch["cu_seqlens_q"].tolist() == [0, 4, 4, 9]
    ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=2)
    out = m3ops.sparse_attention(inputs.q, inputs.k, inputs.v, ids, **inputs.batch)
    for b in (0, 2):
        solo, rows = inputs.solo(b), inputs.span(b)
        solo_ids = m3ops.select_blocks(solo.index_q, solo.index_k, **solo.batch, topk=2)
        assert torch.equal(ids[rows], solo_ids)
        solo_out = m3ops.sparse_attention(solo.q, solo.k, solo.v, solo_ids, **solo.batch)
        torch.testing.assert_close(out[rows], solo_out, rtol=1e-5, atol=2e-6)


def test_a_batch_that_shrinks_inside_its_capacity(target: Target) -> None:
    """Eight places, three used: the rest of ``cu_seqlens_q`` is flat, its rows are padding."""
    sequences = random_sequences([(70, 1), (33, 1), (50, 1)], device=target.device)
    small = lay_out(sequences)
    table = small.batch["block_table"]
    garbage = int32([[2**31 - 1] * table.shape[1]] * 5, target.device)
    batch: dict[str, Any] = {
        "cu_seqlens_q": int32([0, 1, 2, 3, 3, 3, 3, 3, 3], target.device),
        "seqused_k": int32([70, 33, 50, 0, 0, 0, 0, 0], target.device),
        "block_table": torch.cat([table, garbage]),
        "num_decode_seqs": 8,
        "num_decode_tokens": 8,
        "block_size": 16,
    }
    q, index_q = poisoned(8, 4, 32, dtype=torch.float32), poisoned(8, 2, 16, dtype=torch.float32)
    q, index_q = q.to(target.device), index_q.to(target.device)
    q[:3], index_q[:3] = small.q, small.index_q
    ids = m3ops.select_blocks(index_q, small.index_k, **batch, topk=2)
    expected = m3ops.select_blocks(small.index_q, small.index_k, **small.batch, topk=2)
    assert torch.equal(ids[:3], expected)
    assert (ids[3:] == -1).all()
    out, lse = m3ops.sparse_attention(q, small.k, small.v, ids, **batch, return_lse=True)
    wanted = m3ops.sparse_attention(small.q, small.k, small.v, expected, **small.batch)
    torch.testing.assert_close(out[:3], wanted, rtol=1e-5, atol=2e-6)
    assert out[3:].count_nonzero() == 0
    assert (lse[3:] == -INF).all()


def run(batch: dict[str, Any], inputs: Any) -> tuple[torch.Tensor, ...]:
    ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **batch, topk=2)
    return ids, *m3ops.sparse_attention(inputs.q, inputs.k, inputs.v, ids, **batch, return_lse=True)


@pytest.mark.parametrize("layout", ["paged", "packed", "batched"])
def test_metadata_may_start_anywhere(target: Target, layout: str) -> None:
    """Aligned first, then at +4 and +8 bytes with a wide table: the same bits."""
    inputs = make_inputs([(70, 1), (33, 3), (30, 2)], layout=layout, device=target.device)
    expected = run(inputs.batch, inputs)
    for offset in (1, 2):
        batch = dict(inputs.batch)
        for name, tensor in inputs.batch.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.ndim == 1:
                base = poisoned(len(tensor) + 4, dtype=torch.int32, device=target.device)
                batch[name] = base[offset:][: len(tensor)]
            else:
                rows, columns = tensor.shape
                base = poisoned(rows * 37 + 4, dtype=torch.int32, device=target.device)
                wide = base[offset:][: rows * 37].unflatten(0, (rows, 37))
                batch[name] = wide[:, :columns]
            batch[name].copy_(tensor)
            assert batch[name].storage_offset() == offset
        assert all(map(torch.equal, run(batch, inputs), expected))


@pytest.mark.parametrize("layout", ["paged", "packed", "batched"])
def test_one_token_at_a_time_equals_all_at_once(target: Target, layout: str) -> None:
    """The last tokens of a sequence as one chunk, and each as a decode step of its own."""
    steps = target.scale(3, 6)
    sequence = random_sequences([(70, steps)], device=target.device)[0]
    ids, out, lse = run((shot := lay_out([sequence], layout=layout)).batch, shot)
    for i in range(steps):
        seen = 70 - steps + i + 1
        one = type(sequence)(
            sequence.q[i : i + 1],
            sequence.index_q[i : i + 1],
            sequence.k[:seen],
            sequence.v[:seen],
            sequence.index_k[:seen],
        )
        inputs = lay_out([one], layout=layout, num_decode_seqs=1)
        ids_one, out_one, lse_one = run(inputs.batch, inputs)
        assert torch.equal(ids_one[0], ids[i])
        torch.testing.assert_close(out_one[0], out[i], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse_one[0], lse[i], rtol=1e-5, atol=2e-6)


def test_bounds_of_the_host_may_be_loose(target: Target) -> None:
    """``max_seqlen_q`` and ``max_seqlen_k`` bound, they do not describe."""
    geometry = Geometry(block_size=16)
    inputs = make_inputs([(70, 1), (33, 3)], geometry, device=target.device)
    expected = run(inputs.batch, inputs)
    for max_seqlen_q, max_seqlen_k in ((3, 70), (4, 71), (100, 5000)):
        bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        # Another bound may choose another kernel, whose ids are the same and whose sums round anew.
        torch.testing.assert_close(run({**inputs.batch, **bounds}, inputs), expected)
    scores = m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch, max_seqlen_k=1000)
    assert scores.shape == (4, 2, 63)
