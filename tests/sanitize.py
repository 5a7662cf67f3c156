"""Small GPU tests under NVIDIA's compute-sanitizer: ``python tests/sanitize.py [TOOL ...]``.

``memcheck`` finds accesses outside of allocations, ``racecheck`` hazards in shared memory. Each
tool runs the tests of its selection in one process and stops at the time limit; the exit status is
0 only if every tool ran to its end, found nothing, and the tests passed. Run ``pytest -m gpu`` on
the same files before: the kernels then come out of Triton's cache.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Files, and an expression for `-k`. Captured graphs need the caching allocator, which hides
# overruns, so they are in none.
SELECTIONS = {
    "memcheck": (
        ["tests/test_memory_safety.py", "tests/test_store_kv.py"],
        "not high_pages",
    ),
    "racecheck": (
        [
            "tests/test_memory_safety.py",
            "tests/test_select_blocks.py",
            "tests/test_topk_select.py",
        ],
        "(others and bfloat16) or (own_sizes and pages) or mixed_batch or every_topk",
    ),
}

SUMMARY = re.compile(r"={9} (?:ERROR|RACECHECK) SUMMARY: .*")


def find_sanitizer() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if found is None:
        raise SystemExit("compute-sanitizer must be on PATH or under $CUDA_HOME/bin, found none")
    return found


def run(tool: str, files: list[str], expression: str, limit: int) -> bool:
    """Whether `tool` found nothing and the tests passed."""
    command = [find_sanitizer(), "--tool", tool, "--error-exitcode", "99", "--print-limit", "20"]
    command += [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "gpu", "-k", expression]
    command += ["--timeout", str(limit), *files]
    # Otherwise torch cuts tensors out of large allocations, and an overrun stays inside of one.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    print(f"{tool}: {' '.join(files)} -k {expression!r}", flush=True)
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        print(output.decode(errors="replace")[-3000:] if isinstance(output, bytes) else output)
        print(f"{tool}: not done after {limit} s")
        return False
    summaries = SUMMARY.findall(result.stdout)
    clean = result.returncode == 0 and bool(summaries)
    print(
        "\n".join(summaries + result.stdout.splitlines()[-3:]) if clean else result.stdout[-9000:]
    )
    print(f"{tool}: {'nothing found' if clean else f'exit status {result.returncode}'}", flush=True)
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tools", nargs="*", default=list(SELECTIONS), metavar="TOOL")
    parser.add_argument("-k", dest="expression", help="other tests of the files, as pytest's -k")
    parser.add_argument("--files", nargs="+", help="other files of tests")
    parser.add_argument("--limit", type=int, default=240, help="seconds for each tool")
    arguments = parser.parse_args()
    clean = True
    for tool in arguments.tools:
        files, expression = SELECTIONS.get(tool, SELECTIONS["memcheck"])
        clean &= run(
            tool,
            arguments.files or files,
            arguments.expression or expression,
            arguments.limit,
        )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
