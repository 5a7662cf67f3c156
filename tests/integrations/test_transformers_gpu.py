"""Patched models on a GPU: bfloat16 errors, decoding in captured graphs, memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.17")

from tiny_model import CACHE, make_ids, make_model, modeling
from transformers import StaticCache

from m3ops.integrations.transformers import apply_m3ops

pytestmark = pytest.mark.gpu

# MiniMax-M3's heads and blocks on a narrow residual stream.
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 8,
    "intermediate_size": 256,
    "dense_intermediate_size": 512,
    "shared_intermediate_size": 256,
    "initializer_range": 0.05,
    "max_position_embeddings": 2**17,
}
# In the tests whose model is compiled or captured.
NO_EXPERTS: dict[str, Any] = {"mlp_layer_types": ["dense"] * 3}
GIB = 2**30


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def with_implementation(model: Any, name: str, dtype: torch.dtype) -> Any:
    model = copy.deepcopy(model).to(dtype)
    model.set_attn_implementation(name)
    return model


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def test_bfloat16_error_is_that_of_unpatched(device: torch.device) -> None:
    ours, theirs, size = [], [], []
    for seed in range(5):
        model = make_model(seed, **SIZES).to(device)
        ids = make_ids(1, 4096, seed=seed).to(device)
        expected = with_implementation(model, "eager", torch.float32)(ids).logits
        low = {
            name: with_implementation(model, name, torch.bfloat16)(ids).logits.float()
            for name in ("sdpa", "m3ops")
        }
        ours.append(rms(low["m3ops"] - expected))
        theirs.append(rms(low["sdpa"] - expected))
        size.append(rms(expected))
    print(f"RMS error over RMS of logits: ours {ours}, unpatched {theirs}, logits {size}")
    assert rms(torch.tensor(theirs)) < 0.5 * rms(torch.tensor(size))
    assert rms(torch.tensor(ours)) <= 1.1 * rms(torch.tensor(theirs))


def test_float32_logits_and_tokens(device: torch.device) -> None:
    model = make_model(0, **SIZES, **NO_EXPERTS).to(device)
    ours = with_implementation(model, "m3ops", torch.float32)
    ids = make_ids(2, 2100).to(device)
    errors = (ours(ids).logits - model(ids).logits).abs().amax(-1)
    # A block may be another one where two scores are within rounding of each other.
    assert (errors < 1e-3).float().mean() > 0.995
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"max_new_tokens": 32, "do_sample": False}
    tokens = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    padding = torch.zeros_like(ids[:, :77])
    padded, padded_mask = torch.cat([padding, ids], 1), torch.cat([padding, mask], 1)
    # With a static cache the steps are compiled and captured in CUDA graphs.
    for cache in ({}, {"cache_implementation": "static"}):
        for prompt, its_mask in ((ids, mask), (padded, padded_mask)):
            out = ours.generate(prompt, attention_mask=its_mask, **options, **cache)
            assert torch.equal(out[:, prompt.shape[1] :], tokens)


def test_decode_step_in_a_cuda_graph(device: torch.device) -> None:
    model = make_model(0, **(SIZES | NO_EXPERTS | {"index_topk_blocks": 4})).to(device)
    apply_m3ops(model)
    ids = make_ids(2, 700).to(device)
    expected = model(ids).logits
    cache = StaticCache(config=model.config, max_cache_len=1024)
    model(ids[:, :690], **{CACHE: cache})
    token, position = ids[:, 690:691].clone(), torch.full((1, 1), 690, device=device)
    names = ("cumulative_length", "idx_cumulative_length")
    lengths = [getattr(layer, name, None) for layer in cache.layers for name in names]

    def step() -> Tensor:
        return model(token, position_ids=position, **{CACHE: cache}).logits

    def rewind() -> None:
        for length in lengths:
            if length is not None:
                length.fill_(690)

    step()
    rewind()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    rewind()
    for t in range(690, 700):
        token.copy_(ids[:, t : t + 1])
        position.fill_(t)
        graph.replay()
        assert rms(logits[:, 0] - expected[:, t]) < 1e-3 * rms(expected[:, t])


def test_memory_of_a_sparse_layer(device: torch.device) -> None:
    # The scores of all pairs would be 4 GiB; what the ops take is bounded by one.
    length = 16384
    model = make_model(0, **SIZES).to(device, torch.bfloat16)
    apply_m3ops(model)
    layer = model.model.layers[1].self_attn
    assert isinstance(layer, modeling.MiniMaxM3VLAttention)
    hidden = torch.randn(1, length, 512, device=device, dtype=torch.bfloat16)
    tables = model.model.rotary_emb(hidden, torch.arange(length, device=device)[None])
    layer(hidden, tables, None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(hidden, tables, None)
    assert torch.cuda.max_memory_allocated() - before < 2 * GIB
