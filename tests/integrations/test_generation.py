"""What a user of `generate` expects: caches, padding, beams, chunks, assistants, compiled steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", minversion="5.17")

import transformers
from packaging.version import Version
from tiny_model import CACHE, TWO_LAYERS, make_ids, make_model
from transformers import CompileConfig, DynamicCache, StaticCache

from m3ops.integrations.transformers import apply_m3ops

# Its static caches cannot be cropped, its dynamic ones keep index keys when they are reset.
OLD = Version(transformers.__version__) < Version("5.18")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def unpatched() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def model(unpatched: Any) -> Any:
    ours = copy.deepcopy(unpatched)
    apply_m3ops(ours)
    return ours


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The new tokens, greedily, 12 of them unless told otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 12, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]


def call(model: Any, ids: Tensor, cache: Any = None, **options: Any) -> Tensor:
    return model(ids, **{CACHE: cache}, use_cache=cache is not None, **options).logits


def padded(prompts: list[Tensor], side: str, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths as one batch, and its mask."""
    length = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), length), filler)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        part = slice(length - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[row, part], mask[row, part] = prompt, 1
    return ids, mask


PROMPTS = [make_ids(length, seed=length) for length in (257, 300, 64, 11, 290)]


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"prefill_chunk_size": 100}])
def test_generate_as_unpatched(model: Any, unpatched: Any, options: dict[str, Any]) -> None:
    ids = make_ids(3, 300)
    expected = generate(unpatched, ids)
    assert torch.equal(generate(model, ids, **options), expected)
    assert len(expected.unique(dim=0)) == 3


def test_beams_are_those_of_unpatched(model: Any, unpatched: Any) -> None:
    ids = make_ids(2, 200)
    for num_beams, returned in ((3, 1), (4, 2)):
        options: Any = {"num_beams": num_beams, "num_return_sequences": returned}
        assert torch.equal(generate(model, ids, **options), generate(unpatched, ids, **options))


def test_reordered_rows_continue_as_themselves(model: Any) -> None:
    ids, order = make_ids(3, 150), torch.tensor([2, 0, 2])
    cache = DynamicCache(config=model.config)
    call(model, ids[:, :140], cache)
    cache.reorder_cache(order)
    expected = call(model, ids[order])[:, 140:]
    actual = call(model, ids[order, 140:], cache)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_left_padding_changes_nothing(model: Any) -> None:
    ids, mask = padded(PROMPTS, "left")
    logits = call(model, ids, attention_mask=mask)
    tokens = generate(model, ids, mask)
    for row, prompt in enumerate(PROMPTS):
        alone = call(model, prompt[None])[0]
        torch.testing.assert_close(logits[row, -len(prompt) :], alone, atol=1e-5, rtol=1e-5)
        assert torch.equal(tokens[row], generate(model, prompt[None])[0])
    # Whatever the padding is, not a bit of the rest depends on it.
    other = call(model, padded(PROMPTS, "left", filler=7)[0], attention_mask=mask)
    assert torch.equal(other[mask.bool()], logits[mask.bool()])


def test_right_padding_changes_nothing(model: Any, unpatched: Any) -> None:
    ids, mask = padded(PROMPTS, "right")
    logits = call(model, ids, attention_mask=mask)
    for row, prompt in enumerate(PROMPTS):
        alone = call(unpatched, prompt[None])[0]
        torch.testing.assert_close(logits[row, : len(prompt)], alone, atol=1e-5, rtol=1e-5)
    other = call(model, padded(PROMPTS, "right", filler=7)[0], attention_mask=mask)
    assert torch.equal(other[mask.bool()], logits[mask.bool()])


def test_padding_between_tokens_is_refused(model: Any) -> None:
    ids, mask = padded(PROMPTS, "right")
    with pytest.raises(ValueError, match=r"side by side.*pad prompts on the left"):
        generate(model, ids, mask)
    with pytest.raises(ValueError, match="side by side"):
        generate(model, ids, mask, cache_implementation="static", disable_compile=True)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("chunk", [1, 37])
def test_chunks_of_padded_prompts(model: Any, kind: str, chunk: int) -> None:
    # The first chunks of the short rows are padding alone.
    ids, mask = padded([prompt[:70] for prompt in PROMPTS], "left")
    expected = call(model, ids, attention_mask=mask)
    cache = make_cache(model, kind, 80)
    parts = [
        call(model, part, cache, attention_mask=mask[:, : start + part.shape[1]])
        for start, part in zip(range(0, 70, chunk), ids.split(chunk, 1), strict=True)
    ]
    actual = torch.cat(parts, 1)[mask.bool()]
    torch.testing.assert_close(actual, expected[mask.bool()], atol=1e-5, rtol=1e-5)


def make_cache(model: Any, kind: str, length: int) -> Any:
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cropped_caches_continue(model: Any, kind: str) -> None:
    if OLD and kind == "static":
        pytest.skip("static caches of transformers 5.17 cannot be cropped")
    ids = make_ids(2, 120)
    cache = make_cache(model, kind, 200)
    call(model, ids[:, :100], cache)
    call(model, make_ids(2, 30, seed=1), cache)
    cache.crop(-35)
    actual = call(model, ids[:, 95:], cache)
    torch.testing.assert_close(actual, call(model, ids)[:, 95:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_reset_caches_start_anew(model: Any, kind: str) -> None:
    if OLD and kind == "dynamic":
        pytest.skip("dynamic caches of transformers 5.17 keep index keys when they are reset")
    cache = make_cache(model, kind, 200)
    call(model, make_ids(2, 150, seed=1), cache)
    cache.reset()
    ids = make_ids(2, 120)
    actual = call(model, ids, cache)
    torch.testing.assert_close(actual, call(model, ids), atol=1e-5, rtol=1e-5)


def test_assisted_decoding(model: Any) -> None:
    # The first assistant is mostly wrong, the second always right.
    ids = make_ids(1, 300)
    expected = generate(model, ids, max_new_tokens=24)
    assistants = make_model(1), copy.deepcopy(model)
    apply_m3ops(assistants[0])
    for assistant in assistants:
        tokens = generate(model, ids, max_new_tokens=24, assistant_model=assistant)
        assert torch.equal(tokens, expected)
    tokens = generate(model, ids, max_new_tokens=24, prompt_lookup_num_tokens=4)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("side", [None, "left"])
def test_static_cache_compiled(side: str | None) -> None:
    model = make_model(**TWO_LAYERS)
    apply_m3ops(model)
    prompts = PROMPTS if side else [prompt[:250] for prompt in PROMPTS[:2]]
    ids, mask = padded(prompts, "left")
    expected = generate(model, ids, mask)
    static: dict[str, Any] = {"cache_implementation": "static"}
    assert torch.equal(generate(model, ids, mask, disable_compile=True, **static), expected)
    graphs = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    static["compile_config"] = CompileConfig(fullgraph=True, mode=None, backend=backend)
    static["compile_config"]._compile_all_devices = True
    # One graph, which every decode step replays.
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(generate(model, ids, mask, **static), expected)
    assert len(graphs) == 1


def test_a_step_compiled_by_hand() -> None:
    model = make_model(**TWO_LAYERS)
    apply_m3ops(model)
    ids, mask = padded([prompt[:70] for prompt in PROMPTS], "left")
    expected = call(model, ids, attention_mask=mask)
    cache = make_cache(model, "static", 128)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    call(model, ids[:, :67], cache, attention_mask=mask[:, :67], position_ids=positions[:, :67])
    # Of one size in every step; what lies ahead does not count.
    whole = torch.nn.functional.pad(mask, (0, 128 - mask.shape[1]), value=1)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for t in range(67, 70):
        token, position = ids[:, t : t + 1], positions[:, t : t + 1]
        with torch._dynamo.config.patch(error_on_recompile=t > 67):
            logits = call(step, token, cache, attention_mask=whole, position_ids=position)
        torch.testing.assert_close(logits[:, 0], expected[:, t], atol=1e-5, rtol=1e-5)


class Watch(TorchDispatchMode):
    """Notes the largest tensor that an op makes, and the keys that our ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.read: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "m3ops":
            keys = args[1:3] if "sparse_attention" in func.name() else args[1:2]
            self.read |= {key.data_ptr() for key in keys}
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in old:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_a_decode_step_reads_the_cache_in_place() -> None:
    # Sparse layers alone: what dense ones do is transformers' affair.
    sparse, dense = ["minimax_m3_sparse"] * 2, ["dense"] * 2
    model = make_model(num_hidden_layers=2, layer_types=sparse, mlp_layer_types=dense)
    apply_m3ops(model)
    ids, mask = padded(PROMPTS, "left")
    cache = make_cache(model, "static", 2048)
    call(model, ids, cache, attention_mask=mask)
    mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    with Watch() as watch:
        call(model, ids[:, -1:], cache, attention_mask=mask)
    expected = {x.data_ptr() for layer in cache.layers for x in (layer.keys, layer.values)}
    assert watch.read == expected | {layer.idx_keys.data_ptr() for layer in cache.layers}
    # Nothing of a cache's size was made: the mask is the largest thing.
    assert watch.largest < cache.layers[0].idx_keys.numel()


def test_a_sparse_layer_makes_nothing_of_all_pairs(model: Any) -> None:
    layer, length = model.model.layers[1].self_attn, 2048
    hidden = torch.randn(1, length, model.config.hidden_size)
    tables = model.model.rotary_emb(hidden, torch.arange(length)[None])
    with Watch() as watch:
        layer(hidden, tables, None)
    assert watch.largest == length * 4 * 16
