"""Patched and unpatched model side by side: the same blocks, logits and tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_model import (
    BLOCK,
    TOPK,
    block_scores,
    make_config,
    make_ids,
    make_model,
    modeling,
    near_ties,
)
from torch import Tensor

from m3ops import MiniMaxM3AttentionConfig, MiniMaxM3SparseAttention
from m3ops.integrations.transformers import apply_m3ops, remove_m3ops

LENGTH = 1520


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def patched(model: Any) -> Any:
    model = copy.deepcopy(model)
    apply_m3ops(model)
    return model


def indexers(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, modeling.MiniMaxM3VLIndexer)]


def as_sets(block_ids: Tensor) -> Tensor:
    """Every row in ascending order, -1 first, padded to TOPK."""
    padded = torch.nn.functional.pad(block_ids, (0, TOPK - block_ids.shape[-1]), value=-1)
    return padded.long().sort(-1).values


def record_selections(model: Any, chosen: list[Tensor], ties: list[Tensor]) -> None:
    """Let each indexer note its ids as sets ``[B, Hi, S, K]`` and which rows are near-ties."""

    def note(indexer: Any, args: Any, ids: Tensor) -> None:
        chosen.append(as_sets(ids))
        ties.append(near_ties(block_scores(indexer, *args[:2])))

    for indexer in indexers(model):
        indexer.register_forward_hook(note)


def impose_selections(model: Any, chosen: list[Tensor], ties: list[Tensor]) -> list[Tensor]:
    """Let each indexer answer with `chosen` where `ties`; returns where it would have differed."""
    differed: list[Tensor] = []

    def impose(layer: int) -> Callable[[Any, Any, Tensor], Tensor]:
        def hook(indexer: Any, args: Any, ids: Tensor) -> Tensor:
            differed.append((as_sets(ids) != chosen[layer]).any(-1))
            return torch.where(ties[layer][..., None], chosen[layer], ids).int()

        return hook

    for layer, indexer in enumerate(indexers(model)):
        indexer.register_forward_hook(impose(layer))
    return differed


@pytest.mark.parametrize("seed", range(5))
def test_logits(seed: int) -> None:
    model, ids = make_model(seed), make_ids(1, LENGTH, seed=seed)
    ours = patched(model)
    chosen: list[Tensor] = []
    ties: list[Tensor] = []
    record_selections(model, chosen, ties)
    expected = model(ids).logits
    differed = impose_selections(ours, chosen, ties)
    actual = ours(ids).logits
    assert len(differed) == 2
    for layer in range(2):
        assert not (differed[layer] & ~ties[layer]).any()
        assert ties[layer].float().mean() < 1e-3
        # Selection is at work: rows that see more than twelve blocks keep four of them.
        late = chosen[layer][0, :, 12 * BLOCK :]
        assert (late >= 0).all()
        assert len(late.unique()) > 12
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_logits_at_the_models_own_block_size() -> None:
    model = make_model(5, index_block_size=128)
    ids = make_ids(1, 12 * 128 + 5)
    expected = model(ids).logits
    torch.testing.assert_close(patched(model)(ids).logits, expected, atol=1e-4, rtol=0)


def test_selection_changes_the_logits() -> None:
    # Otherwise the tests above would compare two dense models.
    model, ids = make_model(), make_ids(1, LENGTH)
    dense = patched(model)
    for indexer in indexers(dense):
        indexer.topk_blocks = 100
    difference = (patched(model)(ids).logits - dense(ids).logits)[0, -100:]
    assert difference.abs().max() > 0.05


def test_ids_of_the_indexer() -> None:
    config = make_config()
    rotary = modeling.MiniMaxM3VLRotaryEmbedding(config)
    positions = torch.arange(LENGTH)[None]
    for seed in range(20):
        torch.manual_seed(seed)
        indexer = modeling.MiniMaxM3VLIndexer(config, 1)
        hidden = torch.randn(1, LENGTH, config.hidden_size)
        tables = rotary(hidden, positions)
        config._attn_implementation = "sdpa"
        expected = as_sets(indexer(hidden, tables, None, positions))
        config._attn_implementation = "m3ops"
        ids = indexer(hidden, tables, None, positions)
        assert ids.shape == (1, 2, LENGTH, TOPK)
        ties = near_ties(block_scores(indexer, hidden, tables))
        assert ties.float().mean() < 1e-3
        assert torch.equal(as_sets(ids)[~ties], expected[~ties]), seed


def test_greedy_continuations() -> None:
    model, ids = make_model(), make_ids(8, 700)
    options: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False}
    options["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **options)[:, ids.shape[1] :]
    assert torch.equal(patched(model).generate(ids, **options)[:, ids.shape[1] :], expected)
    assert expected.shape == (8, 64)
    assert len(expected.unique(dim=0)) == 8


def test_a_needle_changes_both_alike() -> None:
    # One sparse layer alone, so that nothing but its selection carries the needle to the end.
    one_layer: Any = {"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["sparse"]}
    model = make_model(3, num_hidden_layers=1, **one_layer)
    ours = patched(model)
    layer = model.model.layers[0]
    haystack = model.model.embed_tokens(make_ids(1, LENGTH))
    tables = model.model.rotary_emb(haystack, torch.arange(LENGTH)[None])

    def last_scores(embeddings: Tensor) -> Tensor:
        normed = layer.input_layernorm(embeddings)
        return block_scores(layer.self_attn.indexer, normed, tables)[0, :, -1]

    scores = last_scores(haystack)
    block = int(scores.amax(0).argmin())
    assert not (scores.topk(TOPK).indices == block).any()
    # A thousand tokens that do not exist, at one place of that block.
    place = block * BLOCK + 7
    candidates = torch.randn(2000, haystack.shape[-1])
    normed = layer.input_layernorm(candidates)[None]
    indexer = layer.self_attn.indexer
    index_k = indexer.k_norm(indexer.k_proj(normed)[:, :, None])
    cos, sin = (table[:, place : place + 1] for table in tables)
    index_k = modeling.apply_rotary_pos_emb(index_k, index_k, cos, sin, unsqueeze_dim=2)[0]
    index_q = indexer.q_norm(
        indexer.q_proj(layer.input_layernorm(haystack[:, -1:])).view(1, 1, 2, -1)
    )
    cos, sin = (table[:, -1:] for table in tables)
    index_q = modeling.apply_rotary_pos_emb(index_q, index_q, cos, sin, unsqueeze_dim=2)[0]
    found = torch.einsum("hd,td->ht", index_q[0, 0], index_k[0, :, 0]).amax(0).sort().indices

    def difference(model: Any, candidate: int) -> Tensor:
        embeddings = haystack.clone()
        embeddings[0, place] = candidates[candidate]
        plain = model(inputs_embeds=haystack).logits[0, -1]
        return model(inputs_embeds=embeddings).logits[0, -1] - plain

    needle, straw = int(found[-1]), int(found[0])
    embeddings = haystack.clone()
    embeddings[0, place] = candidates[needle]
    assert (last_scores(embeddings).topk(TOPK).indices == block).any()
    assert difference(ours, needle).abs().max() > 1e-2
    torch.testing.assert_close(
        difference(ours, needle), difference(model, needle), atol=1e-4, rtol=0
    )
    # Nobody looks at it, so not a bit changes.
    for either in (model, ours):
        assert difference(either, straw).abs().max() == 0


def test_a_layer_called_by_itself() -> None:
    config = make_config()
    layer = modeling.MiniMaxM3VLAttention(config, 1)
    for parameter in layer.parameters():
        parameter.normal_(std=0.3)
    hidden = torch.randn(2, 333, config.hidden_size)
    positions = torch.arange(333)[None]
    tables = modeling.MiniMaxM3VLRotaryEmbedding(config)(hidden, positions)
    config._attn_implementation = "sdpa"
    expected, _ = layer(hidden, tables, None)
    config._attn_implementation = "m3ops"
    for options in ({}, {"position_ids": positions}):
        actual, weights = layer(hidden, tables, None, **options)
        assert weights is None
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    # The layer of m3ops takes its parameters, and gives its own.
    own = MiniMaxM3SparseAttention(MiniMaxM3AttentionConfig.from_transformers(config))
    own.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(own(hidden), expected, atol=1e-5, rtol=1e-5)
    for parameter in own.parameters():
        parameter.normal_(std=0.3)
    layer.load_state_dict(own.state_dict(), strict=True)
    torch.testing.assert_close(own(hidden), layer(hidden, tables, None)[0], atol=1e-5, rtol=1e-5)


def test_unpatching() -> None:
    model, ids = make_model(), make_ids(1, 200)
    expected = model(ids).logits
    apply_m3ops(model)
    calls = []
    handle = indexers(model)[0].register_forward_hook(lambda m, a, ids: calls.append(ids.dtype))
    model(ids)
    remove_m3ops(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, expected)
    # Ours are int32.
    assert calls == [torch.int32, torch.int64]
    handle.remove()
    remove_m3ops(model, "eager")
    assert model.config._attn_implementation == "eager"
