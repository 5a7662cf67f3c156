"""``sparse_attention``: softmax over the visible tokens of the listed blocks, and its gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from conftest import Target
from torch.autograd import gradcheck

import m3ops
from m3ops.batch import Batch
from m3ops.testing import (
    LAYOUTS,
    MIXED,
    Geometry,
    Inputs,
    SequenceData,
    assert_attention,
    assert_gradients,
    dense_ids,
    lay_out,
    make_inputs,
    poisoned,
    random_ids,
    random_sequences,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TAGGED = Geometry(heads_q=1, heads_kv=1, dim=16, index_dim=16, block_size=128)


def attend(inputs: Inputs, ids: torch.Tensor, **options: Any) -> Any:
    return m3ops.sparse_attention(inputs.q, inputs.k, inputs.v, ids, **inputs.batch, **options)


def attend_lse(
    inputs: Inputs, ids: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(inputs, ids, return_lse=True, **options)


def tagged(num_keys: int, new: int, target: Target, geometry: Geometry = TAGGED) -> SequenceData:
    """Keys are zero and values of block j are j: a row's output is the mean of its tags."""
    sequence = random_sequences([(num_keys, new)], geometry, device=target.device)[0]
    sequence.k.zero_()
    tags = torch.arange(num_keys, device=target.device) // geometry.block_size
    sequence.v.copy_(tags[:, None, None].expand(sequence.v.shape))
    return sequence


def ids_of(rows: list[Any], target: Target) -> torch.Tensor:
    """``[T, 1, K]`` from ``T`` lists, or ``[T, Hkv, K]`` from nested ones."""
    ids = torch.tensor(rows, dtype=torch.int32, device=target.device)
    return ids[:, None] if ids.ndim == 2 else ids


def means(inputs: Inputs, ids: torch.Tensor, **options: Any) -> list[float]:
    """The first channel of every row of the only head; the others must equal it."""
    out = attend(inputs, ids, **options)
    assert torch.equal(out, out[:, :, :1].expand(out.shape))
    return out[:, 0, 0].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_matches_the_oracle(target: Target, layout: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(MIXED, layout=layout, dtype=dtype, device=target.device, padding_rows=3)
    ids = random_ids(inputs, 3)
    assert_attention(*attend_lse(inputs, ids), inputs, ids)


@pytest.mark.parametrize("max_seqlen_q", [1, 3, 4, 64])
def test_rows_of_no_sequence_are_written(target: Target, max_seqlen_q: int) -> None:
    """Without sequences all rows are padding; the sizes are those of Hopper's kernels."""
    q = torch.randn(64, 64, 128, device=target.device).bfloat16()
    cache = torch.randn(2, 4, 128, 128, device=target.device).bfloat16()
    out, lse = poisoned(64, 64, 128, dtype=q.dtype), poisoned(64, 64, dtype=torch.float32)
    out, lse = m3ops.sparse_attention(
        q,
        cache,
        cache,
        torch.zeros(64, 4, 16, dtype=torch.int32, device=target.device),
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=target.device),
        seqused_k=torch.zeros(0, dtype=torch.int32, device=target.device),
        block_table=torch.zeros(0, 2, dtype=torch.int32, device=target.device),
        max_seqlen_q=max_seqlen_q,
        return_lse=True,
        out=out.to(target.device),
        lse_out=lse.to(target.device),
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize(("num_seqs", "fill"), [(0, False), (1, True), (16, True)])
def test_rows_go_by_sequence_only_where_there_are_some(num_seqs: int, fill: bool) -> None:
    """Where `drafts_fill` says so, programs are those of sequences, and no other writes a row."""
    drafts = pytest.importorskip("m3ops.custom_ops.sparse_attention.hopper.drafts.launch")
    offsets = torch.zeros(num_seqs + 1, dtype=torch.int32)
    table = torch.zeros(num_seqs, 2, dtype=torch.int32)
    batch = Batch(offsets, offsets[1:], table, None, None, 4, 256, 0, 0, 128)
    ids = torch.zeros(64, 4, 16, dtype=torch.int32)
    assert drafts.drafts_fill(torch.zeros(64, 64, 128), ids, batch) is fill


def test_a_mixed_batch_in_float64() -> None:
    inputs = make_inputs(MIXED, dtype=torch.float64, padding_rows=3)
    ids = random_ids(inputs, 3)
    out, lse = attend_lse(inputs, ids)
    assert out.dtype == lse.dtype == torch.float64
    assert_attention(out, lse, inputs, ids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_blocks_are_dense_causal_attention(target: Target, layout: str) -> None:
    lengths = target.scale([(70, 1), (40, 3), (5, 5)], [(70, 1), (40, 9), (21, 21)])
    inputs = make_inputs(lengths, layout=layout, device=target.device)
    out = attend(inputs, dense_ids(inputs))
    for b, sequence in enumerate(inputs.sequences):
        n, s = len(sequence.q), len(sequence.k)
        causal = torch.ones(n, s, dtype=torch.bool, device=target.device).tril(s - n)
        q, k, v = (x.double().transpose(0, 1)[None] for x in (sequence.q, sequence.k, sequence.v))
        dense = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=causal, enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(out[inputs.span(b)].double(), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_given_outputs_are_written_in_full(target: Target, dtype: torch.dtype) -> None:
    lengths = target.scale([(70, 1), (33, 3), (0, 1)], MIXED)
    inputs = make_inputs(lengths, dtype=dtype, device=target.device, padding_rows=3)
    ids = random_ids(inputs, 3)
    rows, heads, dim = inputs.q.shape
    guarded = poisoned(rows + 2, heads + 1, dim + 8, dtype=dtype, device=target.device)
    guarded_lse = poisoned(heads, rows + 2, dtype=torch.float32, device=target.device)
    out, lse = guarded[1:-1, 1:, 8:], guarded_lse[:, 1:-1].T
    results = attend_lse(inputs, ids, out=out, lse_out=lse)
    assert results[0] is out
    assert results[1] is lse
    assert_attention(out, lse, inputs, ids)
    assert guarded.isnan().sum() == guarded.numel() - out.numel()
    assert guarded_lse.isnan().sum() == guarded_lse.numel() - lse.numel()
    assert torch.equal(attend(inputs, ids), out)


@pytest.mark.parametrize("strides", ["sliced", "transposed", "interleaved"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_bit(target: Target, layout: str, strides: str) -> None:
    lengths = target.scale([(70, 1), (33, 3)], [(70, 1), (33, 3), (30, 9)])
    sequences = random_sequences(lengths, device=target.device)
    plain = lay_out(sequences, layout=layout, padding_rows=2)
    twin = lay_out(sequences, layout=layout, padding_rows=2, strides=strides)
    ids = random_ids(plain, 3)
    buffer = poisoned(3, 50, 4, dtype=torch.int32, device=target.device)
    sliced_ids = buffer.permute(1, 2, 0)[3 : 3 + plain.total_q, 1:3]
    sliced_ids.copy_(ids)
    for expected, result in zip(attend_lse(plain, ids), attend_lse(twin, sliced_ids), strict=True):
        assert torch.equal(result, expected)


def test_garbage_around_the_keys_is_never_read(target: Target) -> None:
    sequences = random_sequences([(70, 1), (33, 3), (1, 1)], device=target.device)
    ids = random_ids(lay_out(sequences), 3)
    for layout in LAYOUTS:
        runs = [
            attend_lse(lay_out(sequences, layout=layout, poison=poison, seed=seed), ids)
            for seed, poison in enumerate(
                target.scale((math.nan, 3e38), (math.nan, 3e38, -math.inf))
            )
        ]
        for run in runs:
            assert torch.equal(run[0], runs[0][0])
            assert torch.equal(run[1], runs[0][1])
        assert runs[0][0].isfinite().all()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 12, 16, 20])
def test_every_group_size(target: Target, group: int) -> None:
    geometry = Geometry(heads_q=2 * group, heads_kv=2)
    inputs = make_inputs([(50, 1), (35, 3)], geometry, device=target.device, padding_rows=1)
    ids = random_ids(inputs, 3)
    out = poisoned(*inputs.q.shape, dtype=torch.float32, device=target.device)
    assert_attention(*attend_lse(inputs, ids, out=out), inputs, ids)


def test_heads_use_the_ids_of_their_group(target: Target) -> None:
    geometry = Geometry(heads_q=28, heads_kv=4, dim=16, index_dim=16, block_size=128)
    inputs = lay_out([tagged(640, 1, target, geometry)], block_size=128)
    out = attend(inputs, ids_of([[[1], [3], [0], [2]]], target))
    assert out[0, :, 0].tolist() == [1.0] * 7 + [3.0] * 7 + [0.0] * 7 + [2.0] * 7


def test_ids_are_token_major_where_rows_are_as_many_as_groups(target: Target) -> None:
    geometry = Geometry(heads_q=4, heads_kv=4, dim=16, index_dim=16, block_size=16)
    inputs = lay_out([tagged(16 * 20, 4, target, geometry)])
    tags = torch.arange(16, dtype=torch.int32, device=target.device).reshape(4, 4)
    buffer = poisoned(9, 7, 3, dtype=torch.int32, device=target.device)
    ids = buffer[2:6, 1:5, 1:2]
    ids[..., 0] = tags
    assert torch.equal(attend(inputs, ids)[:, :, 0], tags.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim(target: Target, dim: int, dtype: torch.dtype) -> None:
    lengths = target.scale([(50, 1), (35, 3)], [(50, 1), (60, 20)])
    inputs = make_inputs(lengths, Geometry(dim=dim), dtype=dtype, device=target.device)
    ids = random_ids(inputs, 3)
    assert_attention(*attend_lse(inputs, ids), inputs, ids)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_block_size(target: Target, block_size: int) -> None:
    lengths = [(3 * block_size + 3, 1), (block_size + 1, 3)]
    inputs = make_inputs(lengths, Geometry(block_size=block_size), device=target.device)
    ids = random_ids(inputs, 3)
    assert_attention(*attend_lse(inputs, ids), inputs, ids)


@pytest.mark.parametrize("topk", [1, 2, 5, 16, 17])
def test_every_topk(target: Target, topk: int) -> None:
    inputs = make_inputs([(16 * 19, 1), (40, 2)], device=target.device)
    ids = random_ids(inputs, topk)
    assert_attention(*attend_lse(inputs, ids), inputs, ids)


@pytest.mark.parametrize("softmax_scale", [1.0, -0.5, 3.0])
def test_softmax_scale(target: Target, softmax_scale: float) -> None:
    inputs = make_inputs([(70, 1), (33, 3)], device=target.device)
    ids = random_ids(inputs, 3)
    results = attend_lse(inputs, ids, softmax_scale=softmax_scale)
    assert_attention(*results, inputs, ids, softmax_scale=softmax_scale)


def test_large_logits_do_not_overflow(target: Target) -> None:
    inputs = make_inputs([(70, 1), (33, 3)], device=target.device)
    ids = random_ids(inputs, 3)
    results = attend_lse(inputs, ids, softmax_scale=1e3)
    assert_attention(*results, inputs, ids, softmax_scale=1e3)


@pytest.mark.parametrize(
    ("layout", "num_splits"),
    [*(("paged", n) for n in (0, 1, 2, 3, 8, 50)), ("packed", 3), ("batched", 8)],
)
def test_every_number_of_splits(target: Target, layout: str, num_splits: int) -> None:
    inputs = make_inputs([(150, 1), (0, 1), (33, 3)], layout=layout, device=target.device)
    ids = random_ids(inputs, 7)
    assert_attention(*attend_lse(inputs, ids, num_splits=num_splits), inputs, ids)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_fixed_splits_make_bits_independent_of_the_batch(target: Target, num_splits: int) -> None:
    lengths = [(150, 1), (33, 3), (50, 4)]
    inputs = make_inputs(lengths, device=target.device, dtype=torch.bfloat16)
    ids = random_ids(inputs, 5)
    batched = attend_lse(inputs, ids, num_splits=num_splits)
    for b in range(len(lengths)):
        rows = inputs.span(b)
        solo = attend_lse(inputs.solo(b), ids[rows], num_splits=num_splits)
        assert torch.equal(batched[0][rows], solo[0])
        assert torch.equal(batched[1][rows], solo[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tight_bound_on_scratch_changes_no_result(target: Target, layout: str) -> None:
    lengths = target.scale([(70, 1), (33, 3), (0, 1)], MIXED)
    inputs = make_inputs(lengths, layout=layout, device=target.device, padding_rows=2)
    ids = random_ids(inputs, 5)
    for num_splits in (0, 4):
        results = attend_lse(inputs, ids, max_scratch_bytes=1, num_splits=num_splits)
        assert_attention(*results, inputs, ids)


@pytest.mark.parametrize(
    ("layout", "named", "host_bounds"),
    [
        ("paged", 1, False),
        ("paged", 3, True),
        ("paged", 4, True),
        ("packed", 4, False),
        ("batched", 3, True),
    ],
)
def test_naming_the_decode_part_changes_no_result(
    target: Target, layout: str, named: int, host_bounds: bool
) -> None:
    inputs = make_inputs(
        MIXED,
        layout=layout,
        device=target.device,
        num_decode_seqs=named,
        host_bounds=host_bounds,
        padding_rows=2,
    )
    ids = random_ids(inputs, 3)
    assert_attention(*attend_lse(inputs, ids), inputs, ids)


def test_runs_repeat_bit_for_bit(target: Target) -> None:
    lengths = target.scale([(70, 1), (33, 3), (40, 6)], MIXED)
    inputs = make_inputs(lengths, dtype=torch.bfloat16, device=target.device)
    ids = random_ids(inputs, 3)
    first = attend_lse(inputs, ids)
    for _ in range(target.scale(1, 10)):
        assert all(map(torch.equal, attend_lse(inputs, ids), first))


# What a row attends to.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_sees_its_own_block_only_up_to_itself(target: Target, layout: str) -> None:
    sequence = tagged(131, 1, target)
    sequence.v.copy_(torch.arange(131, device=target.device)[:, None, None].expand(131, 1, 16))
    inputs = lay_out([sequence], layout=layout, block_size=128)
    assert means(inputs, ids_of([[1]], target)) == pytest.approx([129.0])


def test_a_row_inside_a_chunk_sees_its_own_block_only_up_to_itself(target: Target) -> None:
    """Position 130 inside a chunk of 100 tokens after 128."""
    new = target.scale(5, 100)
    sequence = tagged(128 + new, new, target)
    positions = torch.arange(128 + new, device=target.device)
    sequence.v.copy_(positions[:, None, None].expand(sequence.v.shape))
    inputs = lay_out([sequence], block_size=128)
    out = means(inputs, ids_of([[1]] * new, target))
    assert out == pytest.approx([(128 + p) / 2 for p in range(128, 128 + new)])
    assert out[2] == pytest.approx(129.0)


def test_ids_in_any_order_cut_at_the_row(target: Target) -> None:
    geometry = Geometry(heads_q=1, heads_kv=1, dim=16, block_size=16)
    sequence = tagged(64, 64, target, geometry)
    sequence.v.copy_(torch.arange(64, device=target.device)[:, None, None].expand(64, 1, 16))
    out = means(lay_out([sequence]), ids_of([[0, -1, -1]] + [[3, 0, 2]] * 63, target))
    assert out[:16] == pytest.approx([p / 2 for p in range(16)])
    # Rows of block 1 do not list it; those of block 2 do.
    assert out[16:32] == pytest.approx([7.5] * 16)
    assert out[40] == pytest.approx((sum(range(16)) + sum(range(32, 41))) / 25)


def test_dead_ids_are_skipped_wherever_they_stand(target: Target) -> None:
    one = lay_out([tagged(100, 1, target)], block_size=128)
    values = one.sequences[0].v
    values.copy_(torch.randn_like(values[:, :, :1]).expand(values.shape))
    one = lay_out(one.sequences, block_size=128)
    mean = pytest.approx([values.mean().item()], abs=1e-6)
    assert means(one, ids_of([[-1] * 15 + [0]], target)) == mean
    assert means(one, ids_of([[5, 6, 0]], target)) == mean
    assert means(one, ids_of([[2**31 - 1, 0, -(2**31)]], target)) == mean
    sequence = tagged(300, 1, target)
    sequence.v.add_(1)
    three = lay_out([sequence], block_size=128)
    for order in ([0, -1, 2], [-1, 0, 2], [2, 0, -1], [2, -1, 0], [3, 2, 0]):
        assert means(three, ids_of([order], target)) == pytest.approx([65 / 43])


@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_without_keys(target: Target, layout: str, num_splits: int) -> None:
    geometry = Geometry(block_size=128)
    lengths = [(300, 1), (0, 1), (129, 1), (0, 1)]
    inputs = make_inputs(lengths, geometry, layout=layout, device=target.device)
    ids = dense_ids(inputs)
    assert (ids[[1, 3]] == -1).all()
    out, lse = attend_lse(inputs, ids, num_splits=num_splits)
    assert out[[1, 3]].count_nonzero() == 0
    assert (lse[[1, 3]] == -math.inf).all()
    assert_attention(out, lse, inputs, ids)
    for b in (0, 2):
        solo = attend_lse(inputs.solo(b), ids[b : b + 1], num_splits=num_splits)
        assert torch.equal(out[b : b + 1], solo[0])
        assert torch.equal(lse[b : b + 1], solo[1])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tail_of_a_page_is_no_zero_logit(target: Target, layout: str, sign: int) -> None:
    sequence = tagged(129, 1, target)
    for tensor, value in ((sequence.k, 1), (sequence.q, sign), (sequence.v, 1)):
        tensor.fill_(value)
    inputs = lay_out([sequence], layout=layout, block_size=128)
    assert means(inputs, ids_of([[0, 1]], target)) == pytest.approx([1.0])
    assert means(inputs, ids_of([[1, 0]], target)) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("num_keys", "mean"),
    [(127, 0), (128, 0), (129, 1 / 129), (256, 1 / 2), (257, 130 / 257)],
)
def test_lengths_around_a_block(target: Target, num_keys: int, mean: float) -> None:
    inputs = lay_out([tagged(num_keys, 1, target)], block_size=128)
    assert means(inputs, dense_ids(inputs)) == pytest.approx([mean])


def test_speculative_rows_share_no_ids(target: Target) -> None:
    inputs = lay_out([tagged(258, 4, target)], block_size=128, num_decode_seqs=1)
    expected = [127 / 255, 1 / 2, 130 / 257, 22 / 43]
    assert means(inputs, dense_ids(inputs)) == pytest.approx(expected)
    ids = ids_of([[0, -1], [1, -1], [2, -1], [0, 2]], target)
    assert means(inputs, ids) == pytest.approx([0, 1, 2, 2 / 65])


def test_page_order_does_not_matter_and_pages_can_be_shared(target: Target) -> None:
    sequence = random_sequences([(300, 1)], Geometry(block_size=128), device=target.device)[0]
    inputs = lay_out([sequence], block_size=128, extra_blocks=7)
    ids, pages = dense_ids(inputs), inputs.batch["block_table"][0, :3].tolist()
    expected, swapped = attend(inputs, ids), [7, 2, 9]
    k, v = torch.full_like(inputs.k, math.nan), torch.full_like(inputs.v, math.nan)
    k[swapped], v[swapped] = inputs.k[pages], inputs.v[pages]
    table = torch.tensor([swapped], dtype=torch.int32, device=target.device)
    batch = {**inputs.batch, "block_table": table}
    twin = dataclasses.replace(inputs, k=k, v=v, batch=batch)
    assert torch.equal(attend(twin, ids), expected)
    # Two sequences with the same first pages; the second one's query stands at 255.
    shared = {
        "block_table": table.repeat(2, 1),
        "cu_seqlens_q": torch.arange(3, dtype=torch.int32, device=target.device),
        "seqused_k": torch.tensor([300, 256], dtype=torch.int32, device=target.device),
    }
    out, lse = m3ops.sparse_attention(
        inputs.q.repeat(2, 1, 1), k, v, ids.repeat(2, 1, 1), **{**batch, **shared}, return_lse=True
    )
    short = SequenceData(
        sequence.q, sequence.index_q, sequence.k[:256], sequence.v[:256], sequence.index_k[:256]
    )
    alone = lay_out([short], block_size=128)
    assert_attention(out[:1], lse[:1], inputs, ids)
    assert_attention(out[1:], lse[1:], alone, ids)


def test_unselected_values_do_not_leak(target: Target) -> None:
    sequence = random_sequences([(300, 8)], dtype=torch.bfloat16, device=target.device)[0]
    blocks = torch.arange(300, device=target.device) // 16
    sequence.v.copy_(torch.where(blocks % 2 == 0, 0, 1e4)[:, None, None].expand(300, 2, 32))
    inputs = lay_out([sequence])
    ids = ids_of([[[0, 4, 16], [2, -1, 12]]] * 8, target)
    assert attend(inputs, ids).count_nonzero() == 0
    dv = inputs.unstore(gradients(inputs, ids, torch.randn_like(inputs.q))[2], 0)
    selected = torch.zeros(300, 2, dtype=torch.bool, device=target.device)
    for g, blocks_of_group in enumerate(((0, 4, 16), (2, 12))):
        for j in blocks_of_group:
            selected[j * 16 : (j + 1) * 16, g] = True
    assert dv[~selected].count_nonzero() == 0
    assert dv[selected].count_nonzero() > 0


# Prompts in pieces.


@pytest.mark.parametrize(
    ("layout", "pieces"),
    [("paged", (200, 100)), ("packed", (128, 128, 44)), ("batched", (1, 299)), ("paged", (1, 299))],
)
def test_a_prompt_in_chunks_equals_one_shot(
    target: Target, layout: str, pieces: tuple[int, ...]
) -> None:
    """Selected and attended chunk by chunk; slots that are not yet written hold NaN."""
    pieces = target.scale(tuple(max(1, piece // 8) for piece in pieces), pieces)
    block_size, total = target.scale(16, 128), sum(pieces)
    geometry = Geometry(heads_q=2, heads_kv=1, block_size=block_size)
    whole = random_sequences([(total, total)], geometry, device=target.device)[0]
    shot = lay_out([whole], layout=layout, block_size=block_size)
    ids, out, lse = run(shot)
    start = 0
    for piece in pieces:
        stop = start + piece
        chunk = SequenceData(
            whole.q[start:stop],
            whole.index_q[start:stop],
            whole.k[:stop],
            whole.v[:stop],
            whole.index_k[:stop],
        )
        inputs = lay_out([chunk], layout=layout, block_size=block_size)
        ids_chunk, out_chunk, lse_chunk = run(inputs)
        assert torch.equal(ids_chunk, ids[start:stop])
        torch.testing.assert_close(out_chunk, out[start:stop], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse_chunk, lse[start:stop], rtol=1e-5, atol=2e-6)
        start = stop
    assert_attention(out, lse, shot, ids)


def run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, outputs and lse with two blocks kept."""
    ids = m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, topk=2)
    return ids, *attend_lse(inputs, ids)


@pytest.mark.parametrize("named", [None, 2])
def test_a_mixed_batch_equals_its_solo_runs(target: Target, named: int | None) -> None:
    lengths = target.scale(
        [(65, 1), (16, 1), (33, 5), (7, 7)], [(513, 1), (128, 1), (300, 100), (70, 70)]
    )
    block_size = target.scale(16, 128)
    inputs = make_inputs(
        lengths, Geometry(block_size=block_size), device=target.device, num_decode_seqs=named
    )
    ids, out, lse = run(inputs)
    for b in range(len(lengths)):
        solo_ids, solo_out, solo_lse = run(inputs.solo(b))
        rows = inputs.span(b)
        assert torch.equal(ids[rows], solo_ids)
        torch.testing.assert_close(out[rows], solo_out, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(lse[rows], solo_lse, rtol=1e-5, atol=2e-6)


# Gradients.


def with_grad(inputs: Inputs) -> Inputs:
    """The same batch with queries, keys and values that require grad."""
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v)


def gradients(
    inputs: Inputs, ids: torch.Tensor, dout: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    inputs = with_grad(inputs)
    out = attend(inputs, ids, **options)
    return torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), dout)


@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck(layout: str, strides: str) -> None:
    geometry = Geometry(heads_q=4, heads_kv=2, dim=3, block_size=4)
    inputs = make_inputs(
        [(9, 1), (0, 1), (6, 2), (1, 2)],
        geometry,
        layout=layout,
        strides=strides,
        dtype=torch.float64,
        padding_rows=1,
        poison=7.0,
        extra_blocks=1,
    )
    ids = random_ids(inputs, 2)

    inputs = with_grad(inputs)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return m3ops.sparse_attention(q, k, v, ids, **inputs.batch, softmax_scale=0.7)

    with m3ops.use_backend("reference"):
        assert gradcheck(function, (inputs.q, inputs.k, inputs.v))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_match_the_oracle(target: Target, layout: str, dtype: torch.dtype) -> None:
    lengths = [(70, 1), (0, 1), (33, 3), (30, target.scale(2, 9)), (2, 4), (0, 0)]
    inputs = make_inputs(lengths, layout=layout, dtype=dtype, device=target.device, padding_rows=2)
    ids = random_ids(inputs, 3)
    dout = torch.randn_like(inputs.q)
    dq, dk, dv = gradients(inputs, ids, dout, softmax_scale=0.3)
    assert_gradients(dq, dk, dv, inputs, ids, dout, softmax_scale=0.3)


def test_gradients_under_a_tight_bound_on_scratch(target: Target) -> None:
    inputs = make_inputs([(70, 1), (33, 9)], device=target.device)
    ids = random_ids(inputs, 3)
    dout = torch.randn_like(inputs.q)
    dq, dk, dv = gradients(inputs, ids, dout, max_scratch_bytes=1)
    assert_gradients(dq, dk, dv, inputs, ids, dout)


def test_gradients_of_shared_pages_add_up(target: Target) -> None:
    inputs = make_inputs([(40, 3)], device=target.device)
    ids = random_ids(inputs, 3)
    double = {
        **inputs.batch,
        "cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32, device=target.device),
        "seqused_k": inputs.batch["seqused_k"].repeat(2),
        "block_table": inputs.batch["block_table"].repeat(2, 1),
    }
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, _ = m3ops.sparse_attention(
        q.repeat(2, 1, 1), k, v, ids.repeat(2, 1, 1), **double, return_lse=True
    )
    dout = torch.randn(3, *out.shape[1:], device=target.device)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.cat([dout, 2 * dout]))
    assert_gradients(dq, dk, dv, inputs, ids, 3 * dout)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_only_one_input_requires_grad(target: Target, name: str) -> None:
    inputs = make_inputs([(40, 3)], device=target.device)
    ids, dout = random_ids(inputs, 3), torch.randn_like(inputs.q)
    expected = gradients(inputs, ids, dout)["qkv".index(name)]
    leaf = getattr(inputs, name).requires_grad_()
    assert torch.equal(torch.autograd.grad(attend(inputs, ids), leaf, dout)[0], expected)


def test_lse_and_ids_carry_no_gradient(target: Target) -> None:
    inputs = make_inputs([(40, 3)], device=target.device)
    out, lse = attend_lse(with_grad(inputs), random_ids(inputs, 3))
    assert out.requires_grad
    assert not lse.requires_grad
    index_q = inputs.index_q.requires_grad_()
    assert not m3ops.select_blocks(index_q, inputs.index_k, **inputs.batch).requires_grad


def test_backward_through_scores_says_that_there_is_none(target: Target) -> None:
    inputs = make_inputs([(16, 3)], device=target.device, extra_blocks=0)
    index_q = inputs.index_q.requires_grad_()
    scores = m3ops.index_score(index_q, inputs.index_k, **inputs.batch)
    with pytest.raises(NotImplementedError, match="index_score has no gradient"):
        scores.sum().backward()


def test_written_outputs_spoil_a_saved_graph(target: Target) -> None:
    """Autograd notices when a tensor that it saved is overwritten by an out-variant."""
    inputs = make_inputs([(40, 3)], device=target.device)
    weight = torch.ones_like(inputs.q).requires_grad_()
    out = torch.empty_like(inputs.q)
    product = weight * out
    attend(inputs, random_ids(inputs, 3), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
