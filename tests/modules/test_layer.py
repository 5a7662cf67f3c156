"""The layer in eager mode: against the oracle, and against itself in other batches."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Target
from layer_oracle import (
    SMALL,
    PagedSequences,
    assert_selection,
    dense_layer,
    make_layer,
    position_tables,
    rotary_angles,
)
from torch import Tensor

from m3ops import BatchMetadata, MiniMaxM3SparseAttention, PagedKVCache, Workspace
from m3ops.modules.rotary import apply_rotary

BLOCK = SMALL.index_block_size

# Interpreted kernels are slow and have tests of their own; the first test here runs them too.
quick_targets = pytest.mark.parametrize(
    "target",
    ["reference", pytest.param("triton", id="triton-gpu", marks=pytest.mark.gpu)],
    indirect=True,
)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance
    )


def with_needle(layer: MiniMaxM3SparseAttention, hidden: Tensor) -> tuple[Tensor, int]:
    """Give huge values to one block that no head of the last token keeps.

    The last channel of `hidden` feeds the values alone, so no score changes with it.
    """
    for name, parameter in layer.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter[:, -1] = 0
    # Of six blocks or more, both heads drop at least one.
    others = dense_layer(layer, hidden).scores[-1, :, :-1]
    kept = others.topk(SMALL.index_topk_blocks - 1).indices.flatten().tolist()
    needle = next(j for j in range(others.shape[1]) if j not in kept)
    hidden = hidden.clone()
    hidden[needle * BLOCK : (needle + 1) * BLOCK, -1] = 300.0
    return hidden, needle


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
        ("triton", torch.float32),
        pytest.param("triton", torch.float32, marks=pytest.mark.gpu),
        pytest.param("triton", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    indirect=["target"],
)
def test_paged_prefill_matches_a_dense_oracle(target: Target, dtype: torch.dtype) -> None:
    length = target.scale(5 * BLOCK + 2, 10 * BLOCK + 3)
    layer = make_layer(dtype=dtype)
    hidden, needle = with_needle(layer, torch.randn(length, SMALL.hidden_size).to(dtype))
    layer, hidden = layer.to(target.device), hidden.to(target.device)
    sequences = PagedSequences(SMALL, [length], dtype, target.device)
    out, ids = layer(hidden, sequences.step({0: length}), sequences.cache, return_block_ids=True)
    oracle = dense_layer(layer, hidden, ids)
    low = dtype == torch.bfloat16
    assert_selection(ids, oracle.scores, BLOCK, slack=0.3 if low else 1e-4)
    assert out.dtype == dtype
    # The needle's values are 300 times the others', and rounded like them.
    kept = (ids == needle).any(2).any(1).cpu()
    scale = 300 * kept + 1.0
    error = (out.cpu().double() - oracle.out).abs().amax(1) / scale
    assert float(error.max()) < (0.05 if low else 2e-5)
    assert not kept[-1] and kept.any()
    # Attention to everything would have seen it.
    everything = torch.arange(length // BLOCK + 1).expand(length, 2, -1)
    assert (dense_layer(layer, hidden, everything).out[-1] - oracle.out[-1]).abs().max() > 1


def test_selection_without_given_ids_is_the_oracles() -> None:
    layer, hidden = make_layer(), torch.randn(6 * BLOCK, SMALL.hidden_size)
    assert_near(layer(hidden[None])[0], dense_layer(layer, hidden).out)


@quick_targets
def test_decoding_token_by_token_equals_one_prefill(target: Target) -> None:
    start, length = 5, 4 * BLOCK + 6
    layer = make_layer(device=target.device)
    hidden = torch.randn(length, SMALL.hidden_size, device=target.device)
    whole = PagedSequences(SMALL, [length], device=target.device)
    expected, expected_ids = layer(
        hidden, whole.step({0: length}), whole.cache, return_block_ids=True
    )
    stepped = PagedSequences(SMALL, [length], device=target.device)
    layer(hidden[:start], stepped.step({0: start}), stepped.cache)
    for t in range(start, length):
        out, ids = layer(
            hidden[t : t + 1], stepped.step({0: 1}), stepped.cache, return_block_ids=True
        )
        assert torch.equal(ids[0], expected_ids[t])
        assert_near(out[0], expected[t])


@quick_targets
@pytest.mark.parametrize("chunks", [[40, 30], [32, 32, 6], [1, 69], [3, 1, 1, 64, 1]])
def test_prefill_in_chunks_equals_one_prefill(target: Target, chunks: list[int]) -> None:
    layer = make_layer(device=target.device)
    hidden = torch.randn(sum(chunks), SMALL.hidden_size, device=target.device)
    whole = PagedSequences(SMALL, [len(hidden)], device=target.device)
    expected = layer(hidden, whole.step({0: len(hidden)}), whole.cache)
    chunked = PagedSequences(SMALL, [len(hidden)], device=target.device)
    parts = [
        layer(part, chunked.step({0: len(part)}), chunked.cache) for part in hidden.split(chunks)
    ]
    assert_near(torch.cat(parts), expected)


@quick_targets
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("with_workspace", [True, False])
def test_a_mixed_batch_equals_its_solo_runs(
    target: Target, named: bool, with_workspace: bool
) -> None:
    """Two decodes, a later chunk and a whole prompt, padded to a larger bucket."""
    contexts, queries = [70, 49, 60, 0], [1, 1, 20, 33]
    lengths = [a + b for a, b in zip(contexts, queries, strict=True)]
    layer = make_layer(device=target.device)
    hidden = [torch.randn(n, SMALL.hidden_size, device=target.device) for n in lengths]
    workspace = Workspace(SMALL, 64, 10 * BLOCK, device=target.device) if with_workspace else None

    expected = []
    for x, context in zip(hidden, contexts, strict=True):
        solo = PagedSequences(SMALL, [len(x)], device=target.device)
        if context:
            layer(x[:context], solo.step({0: context}), solo.cache)
        expected.append(layer(x[context:], solo.step({0: len(x) - context}), solo.cache))

    together = PagedSequences(SMALL, lengths, device=target.device)
    started = {i: context for i, context in enumerate(contexts) if context}
    layer(
        torch.cat([x[:context] for x, context in zip(hidden, contexts, strict=True)]),
        together.step(started),
        together.cache,
    )
    batch = together.step(
        dict(enumerate(queries)),
        num_tokens=64,
        num_seqs=6,
        num_columns=9,
        num_decode_seqs=2 if named else 0,
    )
    rows = [x[context:] for x, context in zip(hidden, contexts, strict=True)]
    padding = torch.full((64 - sum(queries), SMALL.hidden_size), torch.nan, device=target.device)
    stored = copy.deepcopy(together.cache)
    out = layer(torch.cat([*rows, padding]), batch, together.cache, workspace=workspace)
    assert_near(out[: sum(queries)], torch.cat(expected))
    assert torch.equal(out[sum(queries) :], torch.zeros_like(padding))
    # Only this step's slots were written.
    for before, after in zip(stored.buffers(), together.cache.buffers(), strict=True):
        changed = (before.nan_to_num(7) != after.nan_to_num(7)).flatten(2).any(-1)
        written = changed.any(1) if changed.ndim == 3 else changed
        assert int(written.sum()) <= sum(queries)


def test_a_workspace_changes_no_bit() -> None:
    layer, hidden = make_layer(), torch.randn(100, SMALL.hidden_size)
    workspace = Workspace(SMALL, 120, 7 * BLOCK)
    workspace.scores.fill_(torch.nan)
    workspace.block_ids.fill_(2**30)
    sequences = PagedSequences(SMALL, [60, 40])
    batch = sequences.step({0: 60, 1: 40})
    out, ids = layer(hidden, batch, sequences.cache, return_block_ids=True)
    shared, shared_ids = layer(
        hidden, batch, sequences.cache, workspace=workspace, return_block_ids=True
    )
    assert torch.equal(out, shared)
    assert torch.equal(ids, shared_ids)
    assert shared_ids.data_ptr() == workspace.block_ids.data_ptr()
    assert (workspace.block_ids[100:] == 2**30).all()


@pytest.mark.parametrize("paged", [True, False])
def test_given_ids_skip_the_indexer(paged: bool) -> None:
    layer, hidden = make_layer(), torch.randn(80, SMALL.hidden_size)
    sequences = PagedSequences(SMALL, [80])
    batch = sequences.step({0: 80})
    args = (hidden, batch, sequences.cache) if paged else (hidden[None],)
    out, ids = layer(*args, return_block_ids=True)
    index_keys = sequences.cache.index_k_cache.clone()
    layer.indexer.q_proj.weight.fill_(torch.nan)
    if not paged:
        layer.indexer.k_proj.weight.fill_(torch.nan)
    sequences.cache.index_k_cache.fill_(torch.nan)
    assert torch.equal(layer(*args, block_ids=ids), out)
    # Other ids, another result: each token's own block alone.
    own = torch.arange(80) // BLOCK
    ids = torch.full((80, 2, 3), -1, dtype=torch.int32)
    ids[:, :, 1] = own[:, None]
    out = layer(*args, block_ids=ids if paged else ids[None]).view(80, -1)
    assert_near(out, dense_layer(layer, hidden, ids).out)
    # A later step may select by itself, so the index keys are in the cache all the same.
    if paged:
        assert torch.equal(sequences.cache.index_k_cache.nan_to_num(), index_keys.nan_to_num())


def test_position_embeddings_replace_the_layers_own() -> None:
    layer, hidden = make_layer(), torch.randn(2, 60, SMALL.hidden_size)
    cos, sin = layer.rotary_emb(hidden, torch.arange(60))
    expected = layer(hidden)
    assert torch.equal(layer(hidden, position_embeddings=(cos[None], sin[None])), expected)
    batched = cos.expand(2, -1, -1), sin.expand(2, -1, -1)
    assert torch.equal(layer(hidden, position_embeddings=batched), expected)
    stretched = position_tables(rotary_angles(SMALL, 60) * 3)
    out = layer.double()(hidden[:1].double(), position_embeddings=stretched)
    oracle = dense_layer(layer, hidden[0], angles=rotary_angles(SMALL, 60) * 3)
    assert_near(out[0], oracle.out, 1e-9)


def test_packed_sequences_equal_batched_ones() -> None:
    layer, hidden = make_layer(), torch.randn(2, 70, SMALL.hidden_size)
    batch = BatchMetadata.from_lengths([70, 70], block_size=BLOCK)
    expected, expected_ids = layer(hidden, return_block_ids=True)
    out, ids = layer(hidden.flatten(0, 1), batch, return_block_ids=True)
    assert_near(out, expected.flatten(0, 1))
    assert torch.equal(ids, expected_ids.flatten(0, 1))


def test_state_dict_keys_are_those_of_transformers() -> None:
    layer = MiniMaxM3SparseAttention(SMALL)
    assert {name: list(value.shape) for name, value in layer.state_dict().items()} == {
        "q_proj.weight": [64, 24],
        "k_proj.weight": [32, 24],
        "v_proj.weight": [32, 24],
        "o_proj.weight": [24, 64],
        "q_norm.weight": [16],
        "k_norm.weight": [16],
        "indexer.q_proj.weight": [64, 24],
        "indexer.k_proj.weight": [32, 24],
        "indexer.q_norm.weight": [32],
        "indexer.k_norm.weight": [32],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("index_head_dim", [32, 8])
def test_equals_the_layer_of_transformers(
    dtype: torch.dtype, factor: float | None, index_head_dim: int
) -> None:
    pytest.importorskip("transformers")
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as configuration
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    rope = {"rope_type": "default", "rope_theta": 1e4}
    if factor is not None:
        rope["partial_rotary_factor"] = factor
    sizes = dataclasses.asdict(SMALL) | {"index_head_dim": index_head_dim}
    for ours in ("rope_theta", "partial_rotary_factor", "index_init_blocks"):
        del sizes[ours]
    theirs = configuration.MiniMaxM3VLTextConfig(
        num_hidden_layers=1, layer_types=["minimax_m3_sparse"], rope_parameters=rope, **sizes
    )
    theirs._attn_implementation = "eager"
    reference = modeling.MiniMaxM3VLAttention(theirs, 0).to(dtype)
    for parameter in reference.parameters():
        parameter.normal_(std=0.3)
    config = type(SMALL).from_transformers(theirs)
    layer = MiniMaxM3SparseAttention(config, dtype=dtype)
    layer.load_state_dict(reference.state_dict())
    reference.load_state_dict(layer.state_dict())

    hidden = torch.randn(2, 100, SMALL.hidden_size, dtype=dtype)
    positions = torch.arange(100)[None]
    tables = modeling.MiniMaxM3VLRotaryEmbedding(theirs)(hidden, positions)
    expected, _ = reference(hidden, tables, None)
    expected_ids = reference.indexer(hidden, tables, None, positions.expand(2, -1))
    out, ids = layer(hidden, return_block_ids=True)
    # Theirs are not sorted: compare as sets.
    expected_ids = expected_ids.transpose(1, 2).masked_fill(expected_ids.transpose(1, 2) < 0, 99)
    expected_ids = expected_ids.sort(-1).values.masked_fill_(expected_ids.sort(-1).values == 99, -1)
    assert torch.equal(ids, expected_ids.int())
    # In bfloat16 theirs rounds the attention weights, ours does not.
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < (1e-6 if dtype == torch.float32 else 0.01)


def test_what_hooks_on_norms_keep_is_not_overwritten() -> None:
    layer, kept = MiniMaxM3SparseAttention(SMALL), []
    layer.q_norm.register_forward_hook(lambda module, args, out: kept.append((out, out.clone())))
    with torch.no_grad():
        layer(torch.randn(1, 40, SMALL.hidden_size))
    ((out, as_it_was),) = kept
    assert torch.equal(out, as_it_was)


@pytest.mark.parametrize("grad", [False, True])
def test_rotary_channels_beyond_the_head_and_before_its_end(grad: bool) -> None:
    """With and without gradients, which take different ways, the same bits."""
    cos, sin = torch.randn(2, 5, 12).unbind()
    for dim in (8, 12, 20):
        x = torch.randn(5, 3, dim)
        before = x.clone()
        half = min(dim, 12) // 2
        expected = x.double()
        for t in range(5):
            for i in range(half):
                j, a, b = i + half, before[t, :, i].double(), before[t, :, i + half].double()
                expected[t, :, i] = a * cos[t, i] - b * sin[t, i]
                expected[t, :, j] = b * cos[t, j] + a * sin[t, j]
        with torch.set_grad_enabled(grad):
            actual = apply_rotary(x, cos, sin)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(x, before)


def test_casting_the_layer_keeps_the_rotary_frequencies() -> None:
    layer = make_layer()
    frequencies = layer.rotary_emb.inv_freq.clone()
    layer.to(torch.bfloat16)
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(layer.rotary_emb.inv_freq, frequencies)
    # A layer made without storage gets them when it is given some.
    with torch.device("meta"):
        empty = MiniMaxM3SparseAttention(SMALL)
    assert torch.equal(empty.to_empty(device="cpu").rotary_emb.inv_freq, frequencies)


def test_copies_and_pickles_compute_the_same() -> None:
    layer, hidden = make_layer(), torch.randn(1, 60, SMALL.hidden_size)
    expected = layer(hidden)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(hidden), expected)
        assert other.q_proj.weight.data_ptr() != layer.q_proj.weight.data_ptr()


def bad_calls() -> dict[str, tuple[Callable[[MiniMaxM3SparseAttention], Any], str]]:
    cache, workspace = PagedKVCache(SMALL, 4), Workspace(SMALL, 8, 64)
    others_cache = PagedKVCache(dataclasses.replace(SMALL, head_dim=32), 4)
    x, long_x = torch.zeros(8, SMALL.hidden_size), torch.zeros(9, SMALL.hidden_size)
    tables = torch.zeros(8, 6), torch.zeros(8, 6)
    ids = torch.zeros(8, 3, 3, dtype=torch.int32)

    def batch(tokens: int = 8, block_size: int = BLOCK, **options: Any) -> BatchMetadata:
        return BatchMetadata.from_lengths([tokens], block_size=block_size, **options)

    def paged(tokens: int = 8, **options: Any) -> BatchMetadata:
        return batch(tokens, block_table=[[0, 1]], **options)

    return {
        "no batch": (lambda m: m(x, None, cache), "`batch` must come with `cache`"),
        "two axes": (lambda m: m(x), r"`hidden` must be \[B, S, hidden_size\] without a batch"),
        "hidden size": (lambda m: m(x[:, 1:], batch()), r"= \[8, 24\], got \[8, 23\]"),
        "rows": (lambda m: m(x, batch(7)), r"= \[7, 24\], got \[8, 24\]"),
        "block size": (
            lambda m: m(x, batch(block_size=32)),
            "`batch` must be of block size 16, got 32",
        ),
        "a table": (lambda m: m(x, paged()), "got one without a cache"),
        "no table": (lambda m: m(x, batch(), cache), "got none with a cache"),
        "workspace": (
            lambda m: m(x, batch(), workspace=workspace),
            "`workspace` must come with `cache`",
        ),
        "short workspace": (
            lambda m: m(long_x, paged(9), cache, workspace=workspace),
            "`workspace` must have at least T = 9 rows, got 8",
        ),
        "narrow workspace": (
            lambda m: m(x, paged(num_columns=5), cache, workspace=workspace),
            "`workspace` must have at least W = 5 block columns, got 4",
        ),
        "another layer's cache": (
            lambda m: m(x, paged(), others_cache),
            r"`cache.k_cache` must be .* of the layer = \[\*, 2, 16, 16\], got \[4, 2, 16, 32\]",
        ),
        "rotary": (
            lambda m: m(x, batch(), position_embeddings=tables),
            r"`cos` must be \[T, rotary_dim\] = \[8, 8\], got \[8, 6\]",
        ),
        "ids": (lambda m: m(x, batch(), block_ids=ids), "`block_ids` must be"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_calls_are_refused(name: str) -> None:
    call, message = bad_calls()[name]
    with pytest.raises(ValueError, match=message):
        call(make_layer())


def test_a_cache_of_another_dtype_is_refused() -> None:
    batch = BatchMetadata.from_lengths([8], block_table=[[0]], block_size=BLOCK)
    cache = PagedKVCache(SMALL, 2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"`k_cache` must be float32, got torch\.bfloat16"):
        make_layer()(torch.zeros(8, SMALL.hidden_size), batch, cache)


def test_a_gradient_that_the_cache_would_lose_is_refused() -> None:
    batch = BatchMetadata.from_lengths([8], block_table=[[0]], block_size=BLOCK)
    with torch.enable_grad(), pytest.raises(ValueError, match="must not require grad"):
        make_layer()(torch.zeros(8, SMALL.hidden_size), batch, PagedKVCache(SMALL, 2))
