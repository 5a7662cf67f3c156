"""Run transformers' common model tests on MiniMax-M3's text model, with m3ops and without.

``python tests/integrations/common_suite/run.py`` fetches the source distribution of the installed
transformers into the git-ignored folder ``build/``, runs its ``tests/test_modeling_common.py`` with
the attention implementations ``m3ops`` and ``sdpa``, and prints what differs; needs transformers'
test requirements (``pip install parameterized accelerate psutil``). The exit status is 0 if m3ops
fails only in what it refuses.

The source distribution lacks ``tests/generation`` and ``tests/exporters``, whose mixins are then
left out. With ``--source FOLDER``, a checkout of the same version, they run as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).with_name("cases.py")
# What stands in for a file that the source distribution lacks: its mixin, empty.
LACKING = {
    "tests/generation/test_utils.py": "GenerationTesterMixin",
    "tests/exporters/test_export.py": "ExportTesterMixin",
}
# Tests that pass with sdpa and cannot with m3ops.
CANNOT = {
    "test_capture_outputs_decorator": "asks for attention weights",
    "test_model_outputs_equivalence": "asks for attention weights",
}


def fetch(folder: Path) -> Path:
    """The unpacked source distribution of the installed transformers, downloaded once."""
    name = f"transformers-{version('transformers')}"
    source = folder / name
    if not source.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as downloads:
            options = ["--no-deps", "--no-binary", "transformers", "--dest", downloads]
            command = [sys.executable, "-m", "pip", "download", "-q", *options]
            subprocess.run([*command, name.replace("-", "==")], check=True)
            with tarfile.open(next(Path(downloads).glob("*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
    for path, mixin in LACKING.items():
        if not (source / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_text(f"class {mixin}:\n    pass\n")
    return source


def outcomes(source: Path, implementation: str, options: list[str]) -> dict[str, tuple[str, str]]:
    """Outcome and message by test."""
    environ = {**os.environ, "M3OPS_COMMON_SUITE": implementation, "HF_HUB_OFFLINE": "1"}
    environ["PYTHONPATH"] = os.pathsep.join((str(source), str(ROOT)))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, f"--rootdir={source}", "--import-mode=importlib"]
        command += ["--tb=line", f"--junitxml={report}", *options, str(CASES)]
        subprocess.run(command, cwd=source, env=environ, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        return {case.attrib["name"]: outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            return child.tag, (child.attrib.get("message", "").splitlines() or [""])[0][:300]
    return "passed", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="a checkout of the installed version")
    parser.add_argument("--only", default="", help="as pytest's -k")
    arguments = parser.parse_args()
    source = arguments.source or fetch(ROOT / "build" / "transformers-tests")
    options = ["-k", arguments.only] if arguments.only else []
    results = {name: outcomes(source, name, options) for name in ("sdpa", "m3ops")}
    for name, tests in results.items():
        print(f"{name}: {dict(Counter(result for result, _ in tests.values()))}")
    worse = 0
    for test, (result, message) in results["m3ops"].items():
        before = results["sdpa"][test][0]
        if result != before:
            print(f"{test}: {before} with sdpa, {result} with m3ops: {message}")
        elif result in ("failure", "error"):
            print(f"{test}: {result} with both: {message}")
        if test in CANNOT and "`output_attentions` must be False" in message:
            print(f"  as expected: {CANNOT[test]}")
        else:
            worse += before == "passed" and result in ("failure", "error")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
