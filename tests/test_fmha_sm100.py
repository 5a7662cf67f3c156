"""The backend of MiniMax's library, run against a double of it.

The double is plain PyTorch, so everything here runs without such a GPU. Where the library itself
and a GPU of compute capability 10.x are, the same tests run on them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fmha_sm100_double as double
import pytest
import torch
from conftest import HAS_TRITON, INTERPRETED
from torch import Tensor

import m3ops
from m3ops.custom_ops.common import fmha_sm100
from m3ops.testing import (
    Geometry,
    Inputs,
    assert_attention,
    assert_block_ids,
    assert_gradients,
    assert_scores,
    assert_within_budget,
    make_inputs,
    poisoned,
    random_ids,
)

# Where the library itself is installed, before any test hides it.
REAL = fmha_sm100.installed_name()

UNFIT = fmha_sm100.unfit

# The smallest that the library takes.
GEOMETRY = Geometry(heads_q=4, heads_kv=2, dim=128, index_dim=128, block_size=128)

# Decode with more than 16 blocks, decode without a key, a chunk whose rows see 18 and 19 blocks,
# nothing, a prompt.
MIXED = ((2180, 1), (0, 1), (2306, 3), (0, 0), (4, 4))
CHUNK = ((2306, 3),)

LAZY = """
import fmha_sm100_double as double
def __getattr__(name):
    if name in {names}:
        return getattr(double, name)
    raise AttributeError(name)
"""
PUBLIC = LAZY.format(names=double.STANDALONE)
INTERNAL = LAZY.format(names=("_fmha_sm100", "_fmha_sm100_plan"))


def install(folder: Path, name: str, source: str = PUBLIC) -> None:
    """Write an importable package; the double's names resolve when they are used."""
    package = folder
    for part in name.split("."):
        package /= part
        package.mkdir()
        (package / "__init__.py").touch()
    (package / "__init__.py").write_text(source)
    (package / "api.py").write_text(INTERNAL)
    distribution = name.split(".")[0]
    metadata = folder / f"{distribution}-1.2.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.2.3\n")
    forget()


def forget() -> None:
    """Drop what is remembered of the library that is installed."""
    for function in (fmha_sm100.installed_name, fmha_sm100.library, fmha_sm100.unusable):
        function.cache_clear()
    if scoring := sys.modules.get("m3ops.custom_ops.index_score.fmha_sm100"):
        scoring._plan.cache_clear()
    for name in [*sys.modules]:
        if name.split(".")[0] in ("fmha_sm100", "vllm"):
            del sys.modules[name]
    importlib.invalidate_caches()
    double.calls.clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to install into; what is installed elsewhere is hidden."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        spec = find_spec(name, package)
        inside = spec is not None and str(spec.origin).startswith(str(tmp_path))
        return spec if inside or name not in ("fmha_sm100", "vllm") else None

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device there is passes for one of compute capability 10.x."""
    monkeypatch.setattr(fmha_sm100, "unfit", lambda device: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


class Library(NamedTuple):
    """What the backend runs on in a test."""

    device: torch.device
    is_double: bool

    def expect(self, *names: str) -> None:
        """Compare the functions called since the last time; the library itself records nothing."""
        found = [call.name.removeprefix("_") for call in double.calls]
        double.calls.clear()
        if self.is_double:
            assert found == [*names]


PLAN, SCORE, SELECT = "fmha_sm100_plan", "fmha_sm100", "sparse_topk_select"
ATTEND = ("build_k2q_csr", "sparse_atten_func")


@pytest.fixture(
    params=[
        "fmha_sm100",
        "vllm.third_party.fmha_sm100",
        pytest.param("fmha_sm100", id="fmha_sm100-gpu", marks=pytest.mark.gpu),
        pytest.param("vllm.third_party.fmha_sm100", id="vllm-gpu", marks=pytest.mark.gpu),
        pytest.param("", id="real", marks=pytest.mark.gpu),
    ]
)
def library(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Library]:
    """Either kind of double, and the library itself where it can run; chosen for the test."""
    if not HAS_TRITON or (device.type == "cpu" and not INTERPRETED):
        pytest.skip("what the library lacks needs Triton, on CPU tensors with TRITON_INTERPRET=1")
    if request.param:
        install(request.getfixturevalue("folder"), request.param)
        request.getfixturevalue("any_device")
    elif reason := m3ops.backends()["fmha_sm100"].reason:
        pytest.skip(reason)
    with m3ops.use_backend("fmha_sm100"):
        yield Library(device, bool(request.param))


def mixed(device: torch.device, *lengths: tuple[int, int], **options: Any) -> Inputs:
    """A bfloat16 batch, by default of every kind of sequence, with two named for decoding.

    Its bound on query tokens is that of longer prompts, which are slow to interpret.
    """
    options = {"dtype": torch.bfloat16, "device": device, "geometry": GEOMETRY, **options}
    if not lengths:
        options = {"num_decode_seqs": 2, "padding_rows": 3, **options}
    inputs = make_inputs(lengths or MIXED, options.pop("geometry"), **options)
    inputs.batch.setdefault("max_seqlen_q", 1000)
    return inputs


def score(inputs: Inputs, **options: Any) -> Tensor:
    return m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch, **options)


def select(inputs: Inputs, **options: Any) -> Tensor:
    return m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch, **options)


def attend(inputs: Inputs, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    result = m3ops.sparse_attention(
        inputs.q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True, **options
    )
    assert isinstance(result, tuple)
    return result


def check_attention(inputs: Inputs, ids: Tensor, **options: Any) -> None:
    assert_attention(*attend(inputs, ids, **options), inputs, ids)


# What it computes


def test_a_mixed_batch_matches_the_oracle(library: Library) -> None:
    inputs = mixed(library.device)
    ids = poisoned(inputs.total_q, 2, 16, dtype=torch.int32, device=library.device)
    assert select(inputs, out=ids) is ids
    assert_block_ids(ids, inputs, topk=16)
    library.expect(PLAN, SCORE, SELECT)
    out = poisoned(*inputs.q.shape, dtype=torch.bfloat16, device=library.device)
    lse = poisoned(*inputs.q.shape[:2], dtype=torch.float32, device=library.device)
    check_attention(inputs, ids, out=out, lse_out=lse)
    library.expect(*ATTEND)


@pytest.mark.parametrize("strides", ["sliced", "transposed", "interleaved"])
def test_any_strides(library: Library, strides: str) -> None:
    inputs = mixed(library.device, (2306, 2), (150, 3), strides=strides)
    ids = select(inputs)
    assert_block_ids(ids, inputs, topk=16)
    check_attention(inputs, ids)
    library.expect(PLAN, SCORE, SELECT, *ATTEND)


@pytest.mark.parametrize("columns", [19, 24, 128, 300], ids=lambda n: f"{n} columns")
def test_scores_of_a_buffer_of_any_width(library: Library, columns: int) -> None:
    inputs = mixed(library.device, *CHUNK, extra_blocks=0, num_decode_seqs=0)
    scores = poisoned(inputs.total_q, 2, columns, dtype=torch.float32, device=library.device)
    score(inputs, out=scores)
    assert_scores(scores, inputs)
    library.expect(PLAN, SCORE)
    # Allocated by the op, where rows lie side by side.
    assert_scores(score(inputs), inputs)


def test_scored_and_selected_in_two_calls(library: Library) -> None:
    inputs = mixed(library.device)
    for scores in (score(inputs), torch.full((inputs.total_q, 2, 32), torch.nan)):
        scores = score(inputs, out=scores.to(library.device))
        ids = m3ops.topk_select(scores, inputs.num_valid_blocks())
        assert_block_ids(ids, inputs, topk=16)


def test_forced_blocks(library: Library) -> None:
    inputs = mixed(library.device, *CHUNK)
    ids = select(inputs, init_blocks=2, local_blocks=3)
    assert_block_ids(ids, inputs, topk=16, init_blocks=2, local_blocks=3)
    library.expect(PLAN, SCORE, SELECT)


@pytest.mark.parametrize("topk", [4, 8, 32])
def test_ids_in_any_order(library: Library, topk: int) -> None:
    inputs = mixed(library.device)
    check_attention(inputs, random_ids(inputs, topk))
    library.expect(*ATTEND)


def test_rows_without_a_block(library: Library) -> None:
    inputs = mixed(library.device, (150, 4), (300, 5))
    ids = random_ids(inputs, 4)
    ids[1:3] = -1
    ids[5:, 1] = 2**31 - 1
    check_attention(inputs, ids)
    library.expect(*ATTEND)


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_groups(library: Library, group: int) -> None:
    geometry = Geometry(heads_q=group, heads_kv=1, dim=128, index_dim=128, block_size=128)
    inputs = mixed(library.device, (300, 3), geometry=geometry)
    check_attention(inputs, random_ids(inputs, 4))
    library.expect(*ATTEND)


def test_a_scale_of_the_logits(library: Library) -> None:
    inputs = mixed(library.device, (300, 3))
    ids = random_ids(inputs, 4)
    out, lse = attend(inputs, ids, softmax_scale=0.3)
    assert_attention(out, lse, inputs, ids, softmax_scale=0.3)


def test_scratch_stays_under_its_bound(library: Library) -> None:
    inputs = mixed(library.device)
    whole = select(inputs)
    library.expect(PLAN, SCORE, SELECT)
    # 5 of the 12 rows, 128 columns wide, in two buffers; the last 3 are padding.
    part = select(inputs, max_scratch_bytes=5 * 2 * 4 * 2 * 128)
    assert torch.equal(part, whole)
    library.expect(PLAN, SCORE, SELECT, PLAN, SCORE, SELECT, SELECT)
    # 3 of the 10 rows that are not for decoding, with 17 results of 4 heads.
    check_attention(inputs, whole, max_scratch_bytes=3 * 17 * 4 * (2 * 128 + 4))
    library.expect(*ATTEND, *ATTEND, *ATTEND)


def test_layers_share_a_plan_until_a_length_changes(library: Library) -> None:
    inputs = mixed(library.device, (300, 3), (200, 2))
    score(inputs)
    score(inputs)
    library.expect(PLAN, SCORE, SCORE)
    inputs.batch["seqused_k"][1] -= 80
    shorter = score(inputs)
    library.expect(PLAN, SCORE)
    with m3ops.use_backend("reference"):
        expected = score(inputs)
    visible = m3ops.num_valid_blocks(
        inputs.batch["cu_seqlens_q"], inputs.batch["seqused_k"], inputs.total_q
    )
    seen = torch.arange(expected.shape[2], device=library.device) < visible[:, None, None]
    torch.testing.assert_close(shorter.where(seen, 0), expected.where(seen, 0))


def test_equal_scores_fill_a_row_with_distinct_blocks(library: Library) -> None:
    """Ties go to no fixed block, unlike on the other backends."""
    scores = torch.zeros(1, 2, 40, device=library.device)
    counts = torch.tensor([40], dtype=torch.int32, device=library.device)
    ids = m3ops.topk_select(scores, counts, init_blocks=1)
    for row in ids[0].tolist():
        assert row == sorted(set(row)) and row[0] == 0 and row[-1] == 39


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_nothing_past_a_row_counts(library: Library, value: float) -> None:
    scores = torch.randn(18, 2, 40, device=library.device)
    counts = torch.arange(10, 28, dtype=torch.int32, device=library.device)
    counts[3], counts[4] = 0, -5
    for row, count in enumerate(counts.tolist()):
        scores[row, :, max(count, 0) :] = value
    ids = m3ops.topk_select(scores, counts)
    library.expect(SELECT)
    with m3ops.use_backend("reference"):
        assert torch.equal(ids, m3ops.topk_select(scores, counts))


def test_ids_go_where_they_are_asked_for(library: Library) -> None:
    scores = torch.randn(5, 2, 40, device=library.device)
    counts = torch.full((10,), 30, dtype=torch.int32, device=library.device)[::2]
    out = torch.zeros(2, 16, 5, dtype=torch.int32, device=library.device).permute(2, 0, 1)
    m3ops.topk_select(scores, counts, out=out)
    library.expect(SELECT)
    with m3ops.use_backend("reference"):
        assert torch.equal(out, m3ops.topk_select(scores, counts))


# Where its part ends


def test_decode_rows_are_not_its_to_score_or_attend(library: Library) -> None:
    inputs = mixed(library.device, (2180, 1), (300, 1), host_bounds=True)
    ids = select(inputs)
    assert_block_ids(ids, inputs, topk=16)
    library.expect(SELECT)
    check_attention(inputs, ids)
    library.expect()


@pytest.mark.parametrize("named", [0, 1])
def test_decode_rows_among_others_are_its_unless_they_are_named(
    library: Library, named: int
) -> None:
    inputs = mixed(library.device, (300, 1), (150, 4), num_decode_seqs=named)
    ids = select(inputs)
    assert_block_ids(ids, inputs, topk=16)
    rows = [call.args[0].shape[0] for call in double.calls if call.name.endswith(SCORE)]
    check_attention(inputs, ids)
    rows += [call.args[0].shape[0] for call in double.calls if call.name == ATTEND[1]]
    if library.is_double:
        assert rows == [5 - named] * 2


@pytest.mark.parametrize("topk", [3, 8, 17])
def test_another_number_of_blocks(library: Library, topk: int) -> None:
    inputs = mixed(library.device, *CHUNK)
    ids = select(inputs, topk=topk)
    assert_block_ids(ids, inputs, topk=topk)
    library.expect(PLAN, SCORE)
    check_attention(inputs, ids)
    library.expect(*(ATTEND if topk == 8 else ()))


@pytest.mark.parametrize("columns", [12287, 12288])
def test_wide_rows(library: Library, columns: int) -> None:
    scores = torch.randn(1, 1, columns, device=library.device)
    counts = torch.tensor([columns], dtype=torch.int32, device=library.device)
    ids = m3ops.topk_select(scores, counts)
    library.expect(*([SELECT] if columns == 12287 else []))
    with m3ops.use_backend("reference"):
        assert torch.equal(ids, m3ops.topk_select(scores, counts))


def test_the_widest_rows_that_it_takes_are_not_padded_past_that(library: Library) -> None:
    inputs = mixed(library.device, (300, 3), extra_blocks=12287 - 3)
    assert inputs.batch["block_table"].shape[1] == 12287
    assert_block_ids(select(inputs), inputs, topk=16)
    library.expect(PLAN, SCORE, SELECT)


@pytest.mark.parametrize("dim", [64, 192])
def test_other_head_dims(library: Library, dim: int) -> None:
    geometry = Geometry(heads_q=4, heads_kv=2, dim=dim, index_dim=dim, block_size=128)
    inputs = mixed(library.device, (300, 3), geometry=geometry)
    ids = select(inputs)
    assert_block_ids(ids, inputs, topk=16)
    library.expect(SELECT)
    check_attention(inputs, ids)
    library.expect()


def test_keys_that_cannot_be_fetched(library: Library) -> None:
    inputs = mixed(library.device, (300, 3))
    # Rows of 129 elements do not start at multiples of 16 bytes.
    k, v, index_k = (
        torch.cat([keys, keys[..., :1]], -1)[..., :128]
        for keys in (inputs.k, inputs.v, inputs.index_k)
    )
    inputs = dataclasses.replace(inputs, k=k, v=v, index_k=index_k)
    ids = select(inputs)
    assert_block_ids(ids, inputs, topk=16)
    library.expect(SELECT)
    check_attention(inputs, ids)
    library.expect()


def test_rows_before_the_first_key(library: Library) -> None:
    inputs = mixed(library.device, (1, 2), (300, 3))
    ids = select(inputs)
    assert_block_ids(ids, inputs, topk=16)
    library.expect(SELECT)
    check_attention(inputs, ids)
    library.expect()


@pytest.mark.parametrize("options", [{"num_splits": 2}, {"softmax_scale": -0.1}], ids=str)
def test_what_it_does_not_promise(library: Library, options: dict[str, Any]) -> None:
    inputs = mixed(library.device, (300, 3))
    ids = random_ids(inputs, 4)
    out, lse = attend(inputs, ids, **options)
    assert_attention(out, lse, inputs, ids, softmax_scale=options.get("softmax_scale"))
    library.expect()


@pytest.mark.parametrize("lengths", [(), ((0, 0),), ((300, 0),)], ids=str)
def test_nothing_to_do(library: Library, lengths: tuple[tuple[int, int], ...]) -> None:
    inputs = mixed(library.device, *(lengths or ((0, 0),)), padding_rows=20 if not lengths else 0)
    ids = select(inputs)
    assert (ids == -1).all()
    out, lse = attend(inputs, ids)
    assert not out.count_nonzero() and (lse == -torch.inf).all()


def test_gradients_and_the_cache_are_as_on_triton(library: Library) -> None:
    inputs = mixed(library.device, (150, 3))
    ids = random_ids(inputs, 4)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = attend(inputs, ids)[0]
    dout = torch.randn_like(out)
    dq, dk, dv = torch.autograd.grad(out, tensors, dout)
    assert_gradients(dq, dk, dv, inputs, ids, dout)
    library.expect(*ATTEND)
    key = torch.randn(1, 2, 128, device=library.device, dtype=torch.bfloat16)
    caches = [x.detach().clone() for x in (inputs.k, inputs.v, inputs.index_k)]
    slots = torch.tensor([5], device=library.device)
    m3ops.store_kv(key, -key, key[:, 0], slots, *caches)
    assert torch.equal(caches[0][0, :, 5], key[0])
    assert torch.equal(caches[1][0, :, 5], -key[0])
    library.expect()


# What it refuses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, r"takes bfloat16, got torch\.float16"),
        ({"dtype": torch.float32}, r"takes bfloat16, got torch\.float32"),
        ({"geometry": Geometry(4, 2, 128, 128, 64)}, "takes blocks of 128 tokens, got 64"),
        ({"layout": "packed"}, "takes paged keys, got packed ones"),
        ({"layout": "batched"}, "takes paged keys, got batched ones"),
        # The first thing that does not fit.
        (
            {"dtype": torch.float32, "layout": "packed", "geometry": Geometry(3, 1, 128, 128, 64)},
            r"takes bfloat16, got torch\.float32",
        ),
    ],
    ids=str,
)
def test_calls_that_none_of_its_kernels_takes(
    library: Library, options: dict[str, Any], message: str
) -> None:
    inputs = mixed(library.device, (150, 3), **options)
    ids = random_ids(inputs, 4)
    with pytest.raises(NotImplementedError, match=f"^index_score on backend 'fmha_.*{message}"):
        score(inputs)
    with pytest.raises(NotImplementedError, match=f"^select_blocks on backend 'fmha_.*{message}"):
        select(inputs)
    with pytest.raises(NotImplementedError, match=f"^sparse_attention on backend .*{message}"):
        attend(inputs, ids)
    library.expect()


def test_groups_that_it_has_no_kernel_for(library: Library) -> None:
    geometry = Geometry(heads_q=6, heads_kv=2, dim=128, index_dim=128, block_size=128)
    inputs = mixed(library.device, (150, 3), geometry=geometry)
    assert_block_ids(select(inputs), inputs, topk=16)
    with pytest.raises(NotImplementedError, match=r"takes 1, 2, 4, 8, 16 query heads .*, got 3"):
        attend(inputs, random_ids(inputs, 4))


# Captured, compiled


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CUDA graph were being captured, in which nothing can be planned."""
    monkeypatch.setattr(fmha_sm100, "capturing", lambda device: True)
    monkeypatch.setattr(double, "capturing", True)


@pytest.mark.usefixtures("capturing")
def test_only_the_selection_is_captured(library: Library) -> None:
    inputs = mixed(library.device)
    ids = select(inputs)
    assert_block_ids(ids, inputs, topk=16)
    library.expect(SELECT)
    assert_scores(score(inputs), inputs)
    inputs = mixed(library.device, (300, 2), (150, 1))
    check_attention(inputs, random_ids(inputs, 4))
    library.expect()


@pytest.mark.gpu
def test_a_captured_step(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The double reads counts back to the host, so only the library selects here."""
    topk = 8 if library.is_double else 16
    inputs = mixed(library.device)

    def step() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        ids = select(inputs, topk=topk)
        return ids, attend(inputs, ids)

    with monkeypatch.context() as patch:
        # Compiles what is launched inside a capture.
        patch.setattr(fmha_sm100, "capturing", lambda device: True)
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, (out, lse) = step()
    graph.replay()
    library.expect()
    assert_block_ids(ids, inputs, topk=topk)
    assert_attention(out, lse, inputs, ids)


def test_warmup_runs_what_is_captured_and_what_is_not(library: Library) -> None:
    config = m3ops.MiniMaxM3AttentionConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, index_n_heads=1
    )
    m3ops.warmup(config, [(20, 20)], max_seqlen_k=256, dtype=torch.bfloat16, device=library.device)
    captured = [SELECT] * 3
    library.expect(*captured, PLAN, SCORE, SELECT, SCORE, SELECT, SCORE, SELECT, *ATTEND)


def test_a_compiled_step_calls_what_an_eager_one_does(library: Library) -> None:
    def step(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        ids = select(inputs)
        return ids, *attend(inputs, ids)

    inputs = mixed(library.device, (300, 3), (150, 2))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(inputs)
    library.expect(PLAN, SCORE, SELECT, *ATTEND)
    for found, want in zip(compiled, step(inputs), strict=True):
        assert torch.equal(found, want)


@torch.no_grad()
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "with a workspace"])
def test_the_layer(library: Library, shared: bool) -> None:
    config = m3ops.MiniMaxM3AttentionConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, index_n_heads=2
    )
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": library.device}
    layer = m3ops.MiniMaxM3SparseAttention(config, **options)
    pages = [list(range(18)), [20, 19]]
    batch = m3ops.BatchMetadata.from_lengths([1, 20], [2200, 100], pages, device=library.device)
    cache = m3ops.PagedKVCache(config, 21, **options)
    for buffer in cache.buffers():
        buffer.normal_()
    hidden = torch.randn(21, 64, **options)
    workspace = m3ops.Workspace(config, 64, 18 * 128, device=library.device) if shared else None
    wide_layer, wide_cache = (copy.deepcopy(module).double() for module in (layer, cache))
    out, ids = layer(hidden, batch, cache, workspace=workspace, return_block_ids=True)
    library.expect(PLAN, SCORE, SELECT, *ATTEND)
    assert (ids[0] >= 0).all() and ids[0, :, -1].tolist() == [17, 17]
    with m3ops.use_backend("reference"):
        exact = wide_layer(hidden.double(), batch, wide_cache, block_ids=ids)
        eager = layer(hidden, batch, cache, block_ids=ids)
    assert_within_budget("out", out, exact, eager)


# Which library it is


def test_it_says_which_library_it_found(folder: Path, any_device: None) -> None:
    assert not m3ops.backends()["fmha_sm100"].usable
    install(folder, "vllm.third_party.fmha_sm100")
    assert m3ops.backends()["fmha_sm100"].version == "vllm 1.2.3"
    assert fmha_sm100.library().__name__ == "vllm.third_party.fmha_sm100"
    # MiniMax's own package comes first.
    install(folder, "fmha_sm100")
    found = m3ops.backends()["fmha_sm100"]
    assert (found.version, found.usable) == ("fmha_sm100 1.2.3", HAS_TRITON)
    assert fmha_sm100.library().__name__ == "fmha_sm100"
    assert "ties" in found.notes and "NaN" in found.notes


def test_vllm_without_it(folder: Path, any_device: None) -> None:
    install(folder, "vllm")
    found = m3ops.backends()["fmha_sm100"]
    assert (found.version, found.usable) == ("", False)
    assert found.reason == "neither fmha_sm100 nor vllm.third_party.fmha_sm100 is installed"
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        (
            "def sparse_topk_select(max_score, topk, num_valid_pages=None): pass",
            "must take `max_score_layout` .*, got the older fmha_sm100 1.2.3",
        ),
        ("", "has no attribute 'sparse_topk_select'"),
    ],
)
def test_a_library_that_cannot_be_used(
    folder: Path, any_device: None, source: str, reason: str
) -> None:
    install(folder, "fmha_sm100", source)
    found = m3ops.backends()["fmha_sm100"]
    assert not found.usable and found.version == "fmha_sm100 1.2.3"
    assert re.search(f"^fmha_sm100 cannot be used: .*{reason}", found.reason)
    with (
        pytest.raises(RuntimeError, match=f"'fmha_sm100' is not usable here: .*{reason}"),
        m3ops.use_backend("fmha_sm100"),
    ):
        pass


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_other_gpus_are_refused_without_importing_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    install(folder, "fmha_sm100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    needed = "it needs a GPU of compute capability 10.x, got "
    found = m3ops.backends()["fmha_sm100"].reason
    assert found == needed + ".".join(map(str, capability))
    assert "fmha_sm100" not in sys.modules
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    forget()
    assert m3ops.backends()["fmha_sm100"].usable == HAS_TRITON
    monkeypatch.setattr(torch.version, "hip", "6.4")
    forget()
    assert m3ops.backends()["fmha_sm100"].reason == f"{needed}a ROCm device"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    forget()
    assert m3ops.backends()["fmha_sm100"].reason == f"{needed}none"


def test_tensors_on_the_cpu_are_refused(
    folder: Path, any_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folder, "fmha_sm100")
    inputs = mixed(torch.device("cpu"), (150, 3))
    with m3ops.use_backend("fmha_sm100"):
        monkeypatch.setattr(fmha_sm100, "unfit", UNFIT)
        with pytest.raises(RuntimeError, match=r"for tensors on cpu: it needs a GPU .*, got cpu"):
            select(inputs)


def test_it_is_never_the_default(folder: Path, any_device: None) -> None:
    install(folder, "fmha_sm100")
    assert m3ops.backends()["fmha_sm100"].usable == HAS_TRITON
    select(mixed(torch.device("cpu"), (150, 3)))
    assert not double.calls


# The double


def wrong_calls() -> dict[str, Callable[[], Any]]:
    scores, counts = torch.randn(3, 2, 40), torch.full((3,), 40, dtype=torch.int32)
    ids = torch.arange(4, dtype=torch.int32).repeat(3, 2, 1)
    starts_q, starts_k = (torch.tensor([0, n], dtype=torch.int32) for n in (3, 500))
    heads_first = ids.transpose(0, 1)
    bounds = {"max_seqlen_q": 3, "max_seqlen_k": 500}
    rows = {"total_k": 500, "total_rows": 4, **bounds}
    q = torch.randn(3, 4, 128, dtype=torch.bfloat16)
    k = torch.randn(4, 2, 128, 128, dtype=torch.bfloat16)
    row_ptr, q_idx = double.build_k2q_csr(heads_first, starts_q, starts_k, 128, **rows)
    attention: dict[str, Any] = {
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        **bounds,
        "causal": True,
        "page_table": torch.arange(4, dtype=torch.int32)[None],
        "seqused_k": starts_k[1:],
    }
    lengths = [torch.tensor([n], dtype=torch.int32) for n in (3, 500)]
    planned = {"num_kv_splits": 1, "page_size": 128, "output_maxscore": True}
    plan = double.fmha_sm100_plan(*lengths, 4, 1, **planned)
    pages, keys = torch.arange(4, dtype=torch.int32), k[:, :1]
    scoring = {"kv_indices": pages, "output_o": False}

    def topk(scores: Tensor, k: int = 16, **options: Any) -> Any:
        options = {"num_valid_pages": counts, "max_score_layout": "THK", **options}
        return double.sparse_topk_select(scores, k, **options)

    def csr(ids: Tensor, **options: Any) -> Any:
        return double.build_k2q_csr(ids, starts_q, starts_k, 128, **{**rows, **options})

    def attend(q: Tensor = q, k: Tensor = k, topk: int = 4, **options: Any) -> Any:
        options = {**attention, **options}
        return double.sparse_atten_func(q, k, k, row_ptr, q_idx, topk, **options)

    # None of these is refused.
    topk(scores)
    csr(heads_first)
    attend()
    double.fmha_sm100(q, keys, keys, plan, **scoring)
    return {
        "heads first": lambda: topk(scores, max_score_layout="HKT"),
        "strided scores": lambda: topk(torch.randn(3, 2, 41)[..., :40]),
        "half scores": lambda: topk(scores.half()),
        "15 blocks": lambda: topk(scores, 15),
        "12288 tiles": lambda: topk(torch.randn(3, 2, 12288)),
        "17 forced": lambda: topk(scores, force_begin_blocks=8, force_end_blocks=9),
        "int64 ids": lambda: topk(scores, output=torch.zeros(3, 2, 16, dtype=torch.int64)),
        "int64 counts": lambda: topk(scores, num_valid_pages=counts.long()),
        "tokens first": lambda: csr(ids),
        "descending": lambda: csr(heads_first.flip(2).contiguous()),
        "-1 first": lambda: csr(heads_first - 1),
        "past the end": lambda: csr(heads_first + 1),
        "another table": lambda: csr(heads_first, total_rows=5),
        "unaligned ids": lambda: csr(torch.zeros(2, 3, 7, dtype=torch.int32)[..., :4]),
        "not causal": lambda: attend(causal=False),
        "causal by default": lambda: attend(causal=None),
        "halves": lambda: attend(q.half(), k.half()),
        "another head dim": lambda: attend(q[..., :64].contiguous(), k[..., :64]),
        "strided q": lambda: attend(q.transpose(0, 1).contiguous().transpose(0, 1)),
        "16 for 4": lambda: attend(topk=16),
        "int64 table": lambda: attend(page_table=torch.arange(4)[None]),
        "other lengths": lambda: attend(seqused_k=starts_k[1:] - 1),
        "no output": lambda: double.fmha_sm100(q, keys, keys, plan, kv_indices=pages),
        "a page more": lambda: double.fmha_sm100(
            q, keys, keys, plan, **{**scoring, "kv_indices": torch.cat([pages, pages[:1]])}
        ),
        "no such page": lambda: double.fmha_sm100(
            q, keys, keys, plan, **{**scoring, "kv_indices": pages + 1}
        ),
        "all heads": lambda: double.fmha_sm100(q, k, k, plan, **scoring),
        "token-major": lambda: double.fmha_sm100(
            q, keys, keys, plan, **scoring, max_score=torch.zeros(3, 4, 128)
        ),
        "no scores": lambda: double.fmha_sm100_plan(*lengths, 4, 1, page_size=128),
        "decode": lambda: double.sparse_decode_atten_func(
            q, k, k, ids, page_table=pages, seqused_k=counts, seqlen_q=1, max_seqlen_k=500
        ),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_the_double_refuses_wrong_calls(name: str) -> None:
    with pytest.raises((AssertionError, TypeError)):
        wrong_calls()[name]()


@pytest.mark.parametrize("name", ["fmha_sm100", "vllm.third_party.fmha_sm100"])
def test_our_calls_bind_to_the_real_signatures(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, any_device: None
) -> None:
    if not REAL:
        pytest.skip("neither fmha_sm100 nor vllm.third_party.fmha_sm100 is installed")
    if not HAS_TRITON or not INTERPRETED:
        pytest.skip("the calls are recorded from interpreted kernels: needs TRITON_INTERPRET=1")
    install(folder, name)
    inputs = mixed(torch.device("cpu"))
    with m3ops.use_backend("fmha_sm100"):
        attend(inputs, select(inputs))
    calls = [*double.calls]
    assert len(calls) == 5
    monkeypatch.undo()
    forget()
    for call in calls:
        try:
            real = importlib.import_module(REAL)
            api = importlib.import_module(f"{REAL}.api")
            function = getattr(api if call.name.startswith("_") else real, call.name)
        except ImportError as error:
            pytest.skip(f"{REAL} cannot be imported here: {error}")
        signature = inspect.signature(function)
        signature.bind(*call.args, **call.kwargs)
        if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            inner = inspect.signature(getattr(api, f"_{call.name}"))
            inner.bind(*call.args, **call.kwargs)
