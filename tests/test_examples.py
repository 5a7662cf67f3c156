"""The quickstart and generate.py, their ways of failing, their checks, and the README's example."""

import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
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
    """Exit status, output and JSON results of a run in a process of its own."""
    result_file = folder / "result.json"
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), "--json", str(result_file)]
    run = subprocess.run(
        [*command, "--hidden-size", "32", *options],
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
