"""The quickstart, generate.py, the soak and the README's example: their checks, their failures."""

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
MISSING = [
    name for name in ("matplotlib", "rich", "tqdm", "typer") if not importlib.util.find_spec(name)
]
needs_extra = pytest.mark.skipif(
    bool(MISSING), reason=f"needs m3ops[examples]: {', '.join(MISSING)} not installed"
)
needs_transformers = pytest.mark.skipif(
    bool(MISSING) or not importlib.util.find_spec("transformers"),
    reason="needs m3ops[examples,transformers]",
)
# Selections with a choice begin in the 17th block.
LONG = 17 * 128


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the examples by name."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def run_quickstart(folder: Path, *options: str, **environ: str) -> tuple[int, str, dict[str, Any]]:
    return run_example("quickstart.py", folder, "--hidden-size", "32", *options, **environ)


def run_example(
    script: str, folder: Path, *options: str, **environ: str
) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and JSON results of a run in a process of its own."""
    result_file = folder / "result.json"
    command = [sys.executable, str(EXAMPLES / script), "--json", str(result_file)]
    run = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result_file.exists(), run.stdout
    return run.returncode, run.stdout, json.loads(result_file.read_text())


@needs_extra
@pytest.mark.timeout(600)
def test_quickstart_passes_where_blocks_are_left_out(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(32 + (i * i) % 95 for i in range(LONG + 200)))
    plot = tmp_path / "blocks.png"
    status, output, result = run_quickstart(
        tmp_path, str(text), "--context", str(LONG), "--plot", str(plot)
    )
    assert status == 0, output
    assert result["passed"] and all(check["passed"] for check in result["checks"])
    names = [check["name"] for check in result["checks"]]
    assert {"largest error, prefill", "largest error, decode", "graphs"} <= set(names)
    assert all(check["budget"] > 0 for check in result["checks"] if "error" in check["name"])
    assert (result["text"], result["context"], result["decoded"]) == (str(text), LONG, 32)
    assert (result["blocks_visible"], result["blocks_kept"]) == (18, 16)
    # Only the rows past the 16th block leave keys out, each one or two blocks of 17 or 18.
    assert 0.9 < result["share_of_keys_attended"] < 1
    assert 1 <= result["graphs"] <= 2 and result["graph_breaks"] == 0
    assert "18 visible, 16 kept" in output
    assert plot.read_bytes().startswith(b"\x89PNG")


@needs_extra
@pytest.mark.timeout(600)
def test_quickstart_fails_over_budget_and_runs_without_a_compiler(tmp_path: Path) -> None:
    status, output, result = run_quickstart(
        tmp_path,
        *("--context", "130", "--factor", "0"),
        CXX=str(tmp_path / "missing"),
        PATH=str(tmp_path),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert status == 1, output
    failed = {check["name"] for check in result["checks"] if not check["passed"]}
    assert failed == {
        f"{kind} error, {part}" for kind in ("largest", "RMS") for part in ("prefill", "decode")
    }
    assert not result["passed"] and "FAILED: largest error, prefill" in output
    assert result["compiler"] == "aot_eager" and "C++ compiler" in output
    assert result["graphs"] == 2


def invoke(main: Any, *options: str) -> tuple[int, str]:
    """Exit status and output of an example's command in this process."""
    typer = importlib.import_module("typer")
    testing = importlib.import_module("typer.testing")
    app = typer.Typer()
    app.command()(main)
    result = testing.CliRunner().invoke(app, options, env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


on_no_cuda = pytest.param(
    ["--device", "cuda"],
    "finds no CUDA device",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
)


@needs_extra
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.txt"], "No such file"),
        ([str(EXAMPLES)], "TEXT_FILE"),
        ([str(Path(__file__)), "--context", "1000000"], "need 1000032 bytes"),
        (["--context", "0"], "--context"),
        (["--json", "missing/result.json"], "no folder missing"),
        (["--plot", "blocks.gif"], "must end in one of .png, .pdf, .svg"),
        on_no_cuda,
    ],
)
def test_quickstart_refuses(example: Any, options: list[str], message: str) -> None:
    status, output = invoke(example("quickstart").main, *options)
    assert status == 2
    assert message in output


@pytest.fixture
def generate(example: Any) -> Iterator[Any]:
    """The module generate.py, which quietens transformers."""
    logging = importlib.import_module("transformers").logging
    verbosity = logging.get_verbosity()
    yield example("generate")
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()


# A token of the small model keeps 8 blocks of 32 tokens; here it sees up to 12.
BRIEF = ("--context", "384", "--new-tokens", "8")


@needs_transformers
@pytest.mark.timeout(600)
def test_generate_finds_the_same_tokens(generate: Any, tmp_path: Path) -> None:
    result_file = tmp_path / "result.json"
    status, output = invoke(generate.main, *BRIEF, "--json", str(result_file))
    assert status == 0, output
    assert "8 of 8" in output
    result = json.loads(result_file.read_text())
    assert result["tokens_that_agree"] == 8
    assert (result["context"], result["dtype"], result["device"]) == (384, "float32", "cpu")
    unpatched, patched = result["runs"]["transformers"], result["runs"]["m3ops"]
    assert unpatched["tokens"] == patched["tokens"]
    # Not one letter over and over.
    assert len(set(patched["tokens"])) > 4
    for run in (unpatched, patched):
        assert run["prompt_tokens_per_second"] > 0 and run["decode_tokens_per_second"] > 0


@needs_transformers
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "expected"), [("float32", 1), ("bfloat16", 0)])
def test_generate_tells_other_tokens(
    generate: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, expected: int
) -> None:
    apply_m3ops = generate.apply_m3ops

    def keep_too_little(model: Any) -> None:
        apply_m3ops(model)
        for layer in model.model.layers[1:]:
            layer.self_attn.indexer.topk_blocks = 1

    monkeypatch.setattr(generate, "apply_m3ops", keep_too_little)
    status, output = invoke(generate.main, *BRIEF, "--dtype", dtype)
    assert status == expected, output
    assert "8 of 8" not in output and "of 8" in output
    assert ("FAILED: the tokens differ" in output) == (expected == 1)


@needs_transformers
@pytest.mark.timeout(600)
def test_generate_takes_a_model_and_its_tokenizer(generate: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # A token for every letter, not in the order of the bytes.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: token for token, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    model = generate.small_model(seed=1)
    model.save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 10)

    result_file = tmp_path / "result.json"
    options = ("--model", str(tmp_path), *BRIEF, "--json", str(result_file))
    status, output = invoke(generate.main, str(text), *options)
    assert status == 0, output
    tokens = json.loads(result_file.read_text())["runs"]["m3ops"]["tokens"]
    prompt = torch.tensor([[vocab["Ġ" if c == " " else c] for c in text.read_text()[:384]]])
    expected = model.generate(prompt, do_sample=False, max_new_tokens=8)[0, 384:].tolist()
    assert tokens == expected


@needs_transformers
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.txt"], "No such file"),
        ([str(Path(__file__)), "--context", "1000000"], "--context 1000000 needs as many tokens"),
        (["--new-tokens", "1"], "--new-tokens"),
        # No name that the Hub could be asked for.
        (["--model", "./missing/model"], "--model"),
        (["--json", "missing/result.json"], "no folder missing"),
        on_no_cuda,
    ],
)
def test_generate_refuses(generate: Any, options: list[str], message: str) -> None:
    status, output = invoke(generate.main, *options)
    assert status == 2
    assert message in output


@needs_transformers
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak")
def test_generate_measures_memory(generate: Any) -> None:
    size = 2**26
    memory = generate.MemoryPeak(torch.device("cpu"))
    torch.ones(size, dtype=torch.uint8)
    assert memory.read() > 0.9 * size
    # What was given back before does not count.
    assert generate.MemoryPeak(torch.device("cpu")).read() < 0.5 * size


@needs_extra
def test_default_text_is_long_enough(example: Any) -> None:
    _, text = example("command_line").read_text(None)
    assert len(text) > 4096 + 32
    # Not one letter over and over.
    assert len(set(text[:4128])) > 40


SCORES = [5.0, 1.0, 4.0, 1.0 - 1e-6, 3.0, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("ids", "gap"),
    [
        ([0, 1, 2, 4, 5], 0.0),
        ([0, 2, 3, 4, 5], 1e-6),
        ([1, 2, 3, 4, 5], 4.0 + 1e-6),
        ([0, 1, 2, 3, 4], math.inf),
        ([1, 0, 2, 4, 5], math.inf),
        ([0, 0, 2, 4, 5], math.inf),
        ([0, 2, 4, 5, -1], math.inf),
        ([0, 2, 4, 5, 6], math.inf),
        ([0, 2, 4, 5, 7], math.inf),
        ([-1, 0, 2, 4, 5], math.inf),
    ],
    ids=["best", "tie", "worse", "forced", "order", "twice", "few", "unseen", "outside", "hole"],
)
def test_selection_gap_tells_wrong_blocks(example: Any, ids: list[int], gap: float) -> None:
    scores = torch.tensor([[SCORES]], dtype=torch.float64)
    found = example("dense_oracle").selection_gap(torch.tensor([[ids]], dtype=torch.int32), scores)
    assert found.item() == pytest.approx(gap, rel=1e-6)


@needs_extra
@pytest.mark.parametrize("place", [0, 3])
def test_comparison_does_not_lose_nan(example: Any, place: int) -> None:
    comparison = example("comparison")
    error = comparison.Error()
    for row in range(4):
        error.add(torch.full((2,), math.nan if row == place else 1.0))
    check = comparison.Check("error", error.largest, 10.0)
    assert math.isnan(error.largest) and math.isnan(error.rms) and not check.passed


# The soak.


@needs_extra
@pytest.mark.timeout(600)
def test_soak_passes(tmp_path: Path) -> None:
    status, output, result = run_example("soak.py", tmp_path, "--steps", "40")
    assert status == 0, output
    assert result["passed"] and all(check["passed"] for check in result["checks"])
    assert result["mismatches"] == result["page_errors"] == []
    assert result["recompilations"] == 0 and result["buckets"] == 10
    assert sum(result["steps_by_kind"].values()) == result["steps"] == 40
    # What it is there for happened.
    assert {"mixed", "drafts"} <= set(result["steps_by_kind"])
    for name in ("finished", "rejected", "pages_reused", "pages_rolled_back", "prefixes_shared"):
        assert result[name] > 0, name
    assert result["rows_compared"] > result["sequences_compared"] >= 30


@needs_extra
@pytest.mark.gpu
def test_soak_passes_in_captured_graphs(tmp_path: Path) -> None:
    status, output, result = run_example(
        "soak.py", tmp_path, "--device", "cuda", "--steps", "300", "--seed", "1"
    )
    assert status == 0, output
    assert result["passed"] and result["backend"] == "triton"
    assert {"decode", "drafts", "mixed"} <= set(result["steps_by_kind"])
    assert result["memory"]["end"]["device"] > 0
    for name in ("finished", "rejected", "pages_reused", "prefixes_shared"):
        assert result[name] > 0, name


@pytest.fixture
def soak(example: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server under way, uncompiled, that compares every sequence of every step."""
    module = example("soak")
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    with torch.no_grad():
        server = module.Soak(
            module.SETUPS[module.Size.small], torch.device("cpu"), torch.float32, samples=100.0
        )
        while len(server.scheduler.running) < 3:
            server.step()
        assert server.compared and not server.mismatches and not server.page_errors
        yield server


def run_until(done: Callable[[], Any], soak: Any) -> None:
    for _ in range(200):
        if done():
            return
        soak.step()
    raise AssertionError("what the test waits for did not happen")


def corrupt_value(soak: Any) -> None:
    """One channel of one token in a page that the next step attends to."""
    requests = soak.scheduler.running

    def inside_a_page() -> list[Any]:
        return [r for r in requests if r.decodes and r.computed % 16 > 0]

    run_until(inside_a_page, soak)
    page = inside_a_page()[0].pages[-1]
    soak.model.cache.v_cache[page, :, 0, 0] += 1


def corrupt_index_keys(soak: Any) -> None:
    """Of a sequence that has blocks to leave out, those of some blocks."""
    requests = soak.scheduler.running

    def long() -> list[Any]:
        return [r for r in requests if r.decodes and len(r.pages) > 12]

    run_until(long, soak)
    pages = long()[0].pages[:6]
    soak.model.cache.index_k_cache[pages] *= -1


def keep_wrong_drafts(soak: Any) -> None:
    """A rollback forgotten: tokens that were rejected stay in the cache."""
    scheduler = soak.scheduler
    plan = scheduler.plan
    scheduler.plan = lambda: [
        dataclasses.replace(chunk, right=len(chunk.tokens)) for chunk in plan()
    ]
    before = scheduler.counts["tokens"]
    run_until(lambda: scheduler.counts["tokens"] > before + 500, soak)


def change_lengths(by: int) -> Callable[[Any], None]:
    """Sequences that seem longer, or shorter, than they are, though by no page."""

    def fault(soak: Any) -> None:
        def run(tokens: Any, batch: Any) -> Any:
            lengths = batch.seqused_k
            wrong = lengths + by * (lengths % 16 > 1).int()
            return soak.model(tokens, dataclasses.replace(batch, seqused_k=wrong))

        for bucket in soak.buckets:
            bucket.run = run

    return fault


def name_a_foreign_page(soak: Any) -> None:
    """A sequence whose blocks are all kept reads a page of another one."""
    requests = soak.scheduler.running

    def several() -> list[Any]:
        return [r for r in requests if r.decodes and 1 < len(r.pages) <= 4]

    run_until(lambda: several() and len(requests) > 1, soak)
    request = several()[0]
    other = next(r for r in requests if r is not request)
    soak.scheduler.block_table[request.row, 0] = other.pages[-1]


def write_into_padding(soak: Any) -> None:
    for bucket in soak.buckets:

        def run(tokens: Any, batch: Any) -> Any:
            out, block_ids = soak.model(tokens, batch)
            out[-1, 0] += 1
            return out, block_ids

        bucket.run = run


@needs_extra
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (corrupt_value, "`out`: the largest error"),
        (corrupt_index_keys, "blocks were left out"),
        (keep_wrong_drafts, "`out`: the largest error"),
        (change_lengths(1), "`out` is NaN"),
        (change_lengths(-1), "`out`: the largest error"),
        (name_a_foreign_page, "`out`"),
        (write_into_padding, "padding rows are not empty"),
    ],
    ids=["value", "index keys", "drafts", "longer", "shorter", "foreign page", "padding"],
)
def test_soak_notices_a_wrong_result(soak: Any, fault: Callable[[Any], None], message: str) -> None:
    fault(soak)
    run_until(lambda: any(message in mismatch for mismatch in soak.mismatches), soak)


@needs_extra
def test_soak_overwrites_freed_pages(soak: Any) -> None:
    """A page that went to another sequence too early shows as NaN there."""
    scheduler = soak.scheduler
    run_until(lambda: any(r.decodes for r in scheduler.running), soak)
    request = next(r for r in scheduler.running if r.decodes)
    scheduler.pool.freed.append(request.pages[-1] if request.computed % 16 else request.pages[0])
    run_until(lambda: any("NaN" in mismatch for mismatch in soak.mismatches), soak)


@needs_extra
@pytest.mark.parametrize("fault", ["taken twice", "lost", "shared and written"])
def test_soak_notices_wrong_page_accounting(soak: Any, fault: str) -> None:
    scheduler = soak.scheduler
    run_until(lambda: any(r.decodes and r.pages for r in scheduler.running), soak)
    request = next(r for r in scheduler.running if r.decodes and r.pages)
    if fault == "taken twice":
        scheduler.pool.free.append(request.pages[-1])
    elif fault == "lost":
        scheduler.pool.free.pop()
    else:
        scheduler.pool.share(request.pages)
    soak.step()
    assert soak.page_errors


@needs_extra
def test_soak_notices_a_page_that_does_not_come_back(soak: Any) -> None:
    soak.scheduler.running[0].pages.pop()
    soak.finish()
    assert soak.page_errors


@needs_extra
def test_soak_counts_recompilations(example: Any) -> None:
    module = example("soak")
    with torch.no_grad():
        server = module.Soak(module.SETUPS[module.Size.small], torch.device("cpu"), torch.float32)
        assert server.recompilations() == 0
        # A graph of its own for a single token.
        one = module.Shape("decode", 1, 2, 1, None)
        module.Bucket(server.buckets[0].run, one, server.scheduler.load, torch.device("cpu"))
    assert server.recompilations() == 1


@needs_extra
def test_soak_fails_where_memory_grows(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("soak")
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    held = iter(range(0, 1000, 33))
    monkeypatch.setattr(module, "_resident_bytes", lambda: next(held) * 2**20)
    status, output = invoke(module.main, "--steps", "25")
    assert status == 1
    assert "FAILED: host memory grown (MiB)" in output


@needs_extra
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps"),
        (["--samples", "0"], "--samples"),
        (["--json", "missing/result.json"], "no folder missing"),
        pytest.param(
            ["--device", "cuda"],
            "finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
        ),
    ],
)
def test_soak_refuses(example: Any, options: list[str], message: str) -> None:
    status, output = invoke(example("soak").main, *options)
    assert status == 2
    assert message in output


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(compile(code[1], "README.md", "exec"), names)
    block_ids, out = names["block_ids"], names["out"]
    assert capsys.readouterr().out == f"{block_ids[0, 0].tolist()}\n"
    assert block_ids.shape == (1, 4, 16) and (block_ids[..., -1] == 63).all()
    keys = (block_ids[0, 0].long()[:, None] * 128 + torch.arange(128)).flatten()
    k, v = (names[name][0, keys, 0].double() for name in ("k", "v"))
    weights = (names["q"][0, :16].double() @ k.T * 128**-0.5).softmax(-1)
    torch.testing.assert_close(out[0, :16].double(), weights @ v, atol=1e-5, rtol=0)
