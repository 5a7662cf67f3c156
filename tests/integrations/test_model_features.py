"""Packed sequences, training, copies, files, devices, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers", minversion="5.17")

import transformers
from tiny_model import (
    CACHE,
    TWO_LAYERS,
    integration,
    make_config,
    make_ids,
    make_model,
    modeling,
)
from transformers import AutoModelForCausalLM, DynamicCache, MiniMaxM3VLForCausalLM, StaticCache
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLConfig

from m3ops.integrations.transformers import apply_m3ops, remove_m3ops

LENGTHS = (90, 1, 133, 76)


def patched(**options: Any) -> Any:
    model = make_model(**options)
    apply_m3ops(model)
    return model


def packed(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One row of several sequences, its positions, and the sequences."""
    sequences = [make_ids(1, length, seed=length) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return torch.cat(sequences, 1), positions, sequences


@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_packed_sequences_stay_apart(use_cache: bool) -> None:
    model = patched()
    ids, positions, sequences = packed()
    logits = model(ids, position_ids=positions, use_cache=use_cache).logits
    expected = torch.cat([model(sequence).logits for sequence in sequences], 1)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    # Two rows, packed differently.
    others, more, parts = packed((150, 150))
    both = torch.cat([ids, others]), torch.cat([positions, more])
    logits = model(both[0], position_ids=both[1], use_cache=use_cache).logits[1:]
    expected = torch.cat([model(sequence).logits for sequence in parts], 1)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_packed_sequences_compiled() -> None:
    model = patched(**TWO_LAYERS)
    ids, positions, sequences = packed((40, 1, 30))
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    expected = torch.cat([model(sequence).logits for sequence in sequences], 1)
    logits = compiled(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    # The same graph serves whatever the row holds.
    logits = compiled(ids, position_ids=torch.arange(71)[None], use_cache=False).logits
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("kind", ["static", "continued"])
@torch.no_grad()
def test_packed_sequences_in_other_caches_are_refused(kind: str) -> None:
    model = patched()
    ids, positions, _ = packed()
    cache = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=512)
    else:
        model(ids[:, :10], **{CACHE: cache})
    with pytest.raises(ValueError, match="must not restart"):
        model(ids, position_ids=positions, **{CACHE: cache})


def gradients(model: Any, ids: Tensor, **options: Any) -> dict[str, Tensor | None]:
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **options).loss.backward()
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def test_gradients_are_those_of_unpatched() -> None:
    model, ids = make_model().train(), make_ids(2, 300)
    expected = gradients(model, ids)
    apply_m3ops(model)
    actual = gradients(model, ids)
    assert {name for name, grad in actual.items() if grad is None} == {
        name for name in actual if ".indexer." in name
    }
    for name, grad in expected.items():
        if grad is not None:
            assert grad.abs().max() > 0
            torch.testing.assert_close(actual[name], grad, atol=1e-5, rtol=1e-3, msg=name)


def test_hooks_on_norms_run_and_may_bring_their_weights() -> None:
    """As offloading does, which also replaces the forward of an instance."""
    model, ids = patched(), make_ids(1, 200)
    with torch.no_grad():
        expected = model(ids).logits
        attention = model.model.layers[1].self_attn
        calls = []
        attention.indexer.k_norm.register_forward_hook(lambda *args: calls.append(1))
        norm = attention.q_norm
        weight, forward = norm.weight, norm.forward

        def with_weight(states: torch.Tensor) -> torch.Tensor:
            norm.weight = weight
            try:
                return forward(states)
            finally:
                norm.weight = nn.Parameter(weight.to("meta"))

        norm.weight = nn.Parameter(weight.to("meta"))
        norm.forward = with_weight
        torch.testing.assert_close(model(ids).logits, expected)
    assert calls == [1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, ids = patched().train(), make_ids(2, 150)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    expected = gradients(model, ids, attention_mask=mask)
    calls = []
    model.model.layers[1].self_attn.indexer.register_forward_hook(lambda *args: calls.append(1))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    # Reentrant checkpoints need an input with a gradient.
    model.enable_input_require_grads()
    actual = gradients(model, ids, attention_mask=mask)
    assert len(calls) == 2
    for name, grad in expected.items():
        if grad is not None:
            torch.testing.assert_close(actual[name], grad, msg=name)


def test_training_step_compiled() -> None:
    model, ids = patched(**TWO_LAYERS).train(), make_ids(2, 64)
    mask = torch.ones_like(ids)
    expected = gradients(model, ids, attention_mask=mask)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual = gradients(compiled, ids, attention_mask=mask)
    for name, grad in expected.items():
        if grad is not None:
            torch.testing.assert_close(
                actual["_orig_mod." + name], grad, atol=1e-5, rtol=1e-4, msg=name
            )


@pytest.mark.parametrize("training", [False, True])
def test_autocast(training: bool) -> None:
    model, ids = patched(), make_ids(1, 200)
    expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model.train(training)(ids, labels=ids)
    # Coarse: blocks may change too.
    difference = (out.logits.float() - expected).detach()
    assert 0 < difference.pow(2).mean().sqrt() < 0.2 * expected.std()
    if training:
        out.loss.backward()
        assert model.model.layers[1].self_attn.k_proj.weight.grad.abs().max() > 0


@torch.no_grad()
def test_copies_and_pickles() -> None:
    model, ids = patched(), make_ids(1, 200)
    expected = model(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.config._attn_implementation == "m3ops"
        assert torch.equal(other(ids).logits, expected)
        # A copy is switched alone.
        remove_m3ops(other)
        assert model.config._attn_implementation == "m3ops"


@torch.no_grad()
def test_files_are_the_same(tmp_path: Path) -> None:
    model, ids = make_model(), make_ids(1, 200)
    model.save_pretrained(tmp_path / "unpatched")
    apply_m3ops(model)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "patched")
    names = sorted(path.name for path in (tmp_path / "unpatched").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "patched").iterdir())
    for name in names:
        contents = [(tmp_path / kind / name).read_bytes() for kind in ("unpatched", "patched")]
        assert contents[0] == contents[1], name
    loaded = MiniMaxM3VLForCausalLM.from_pretrained(tmp_path / "patched")
    assert loaded.config._attn_implementation == "sdpa"
    for load in (MiniMaxM3VLForCausalLM, AutoModelForCausalLM):
        loaded = load.from_pretrained(tmp_path / "unpatched", attn_implementation="m3ops")
        assert loaded.config._attn_implementation == "m3ops"
        assert torch.equal(loaded(ids).logits, expected)


@torch.no_grad()
def test_set_attn_implementation() -> None:
    model, ids = make_model(), make_ids(1, 200)
    outputs = {}
    for name in ("sdpa", "m3ops", "eager", "m3ops"):
        model.set_attn_implementation(name)
        outputs[name] = model(ids).logits
    assert len({float(logits.double().sum()) for logits in outputs.values()}) > 1
    for name in ("m3ops", "eager"):
        torch.testing.assert_close(outputs[name], outputs["sdpa"], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_multimodal_model() -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
    }
    config = MiniMaxM3VLConfig(
        text_config=make_config().to_dict(),
        vision_config=vision,
        projector_hidden_size=16,
        image_token_index=95,
        video_token_index=96,
    )
    torch.manual_seed(0)
    model = modeling.MiniMaxM3SparseForConditionalGeneration(config).eval()
    ids = make_ids(1, 300) % 95
    mask = torch.ones_like(ids)
    # One image of 2 x 2 merged patches.
    ids[0, 10:14] = 95
    image = {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    expected = model(ids, attention_mask=mask, **image).logits
    apply_m3ops(model)
    assert config.vision_config._attn_implementation == "sdpa"
    actual = model(ids, attention_mask=mask, **image).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(ids, **options, **image)
    # For the whole model at once, the vision tower included.
    model.set_attn_implementation("m3ops")
    assert config.vision_config._attn_implementation == "m3ops"
    torch.testing.assert_close(model(ids, attention_mask=mask, **image).logits, actual)
    remove_m3ops(model)
    assert torch.equal(model.generate(ids, **options, **image), tokens)


@torch.no_grad()
def test_layers_moved_by_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, ids = patched(), make_ids(2, 200)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    expected = model(ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path / "model")
    on_cpu = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    devices = {f"model.{name}": "cpu" for name in on_cpu}
    devices |= {"model.layers.2": "disk", "lm_head": "disk"}
    loaded = MiniMaxM3VLForCausalLM.from_pretrained(
        tmp_path / "model",
        attn_implementation="m3ops",
        device_map=devices,
        offload_folder=tmp_path / "offload",
    )
    assert loaded.lm_head.weight.device.type == "meta"
    assert torch.equal(loaded(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])


@pytest.mark.gpu
@torch.no_grad()
def test_layers_on_two_devices(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model, ids = patched(), make_ids(2, 200)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    expected = model(ids, attention_mask=mask).logits
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    model.save_pretrained(tmp_path)
    devices = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    devices |= {f"model.layers.{layer}": int(layer > 0) for layer in range(3)}
    loaded = MiniMaxM3VLForCausalLM.from_pretrained(
        tmp_path, attn_implementation="m3ops", device_map=devices
    )
    ids, mask = ids.cuda(0), mask.cuda(0)
    logits = loaded(ids, attention_mask=mask).logits.cpu()
    kept = mask.bool().cpu()
    torch.testing.assert_close(logits[kept], expected[kept], atol=1e-4, rtol=1e-4)
    generated = loaded.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(generated.cpu(), tokens)


def weights_by_config(model: Any, ids: Tensor) -> None:
    model.config._output_attentions = True
    model(ids)


def dropout(model: Any, ids: Tensor) -> None:
    for module in model.modules():
        if isinstance(module, modeling.MiniMaxM3VLAttention):
            module.attention_dropout = 0.1
    model.eval()(ids)
    model.train()(ids)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], type[Exception], str]] = {
    "weights": (
        lambda model, ids: model(ids, output_attentions=True),
        NotImplementedError,
        "`output_attentions` must be False",
    ),
    "weights in generate": (
        lambda model, ids: model.generate(
            ids, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2
        ),
        NotImplementedError,
        "`output_attentions` must be False",
    ),
    "weights by config": (weights_by_config, NotImplementedError, "`output_attentions` must be"),
    "mask of four axes": (
        lambda model, ids: model(ids, attention_mask=torch.ones(1, 1, 40, 40).bool().tril()),
        NotImplementedError,
        r"`attention_mask` must be a padding mask \[B, slots\] or None .* got \[1, 1, 40, 40\]",
    ),
    "dropout": (dropout, NotImplementedError, r"`attention_dropout` must be 0 .* got 0\.1"),
    "another model": (
        lambda model, ids: apply_m3ops(nn.Linear(2, 2)),
        TypeError,
        "must be or hold a MiniMaxM3VLTextModel, got Linear",
    ),
    "no model to unpatch": (
        lambda model, ids: remove_m3ops(nn.Linear(2, 2)),
        TypeError,
        "must be or hold a MiniMaxM3VLTextModel, got Linear",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(patched(), make_ids(1, 40))


def test_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.16.2")
    spec = importlib.util.spec_from_file_location("again", integration.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"5\.17 or newer, got 5\.16\.2"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
