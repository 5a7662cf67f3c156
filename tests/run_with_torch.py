"""Run the tests under another torch: ``python tests/run_with_torch.py 2.10.0 [pytest arguments]``.

Makes a virtual environment in a temporary folder, installs that torch with the Triton that it asks
for, then this repository as CI does, and runs pytest there. On Linux, PyPI's torch is a CUDA build
of several gigabytes; ``--index-url https://download.pytorch.org/whl/cpu`` takes a CPU build, which
asks for no Triton: say which with ``--triton``. ``--with 'numpy<2.4'`` adds a requirement.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = """
from importlib.metadata import PackageNotFoundError, version
for name in ("torch", "triton", "transformers", "numpy"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "is not installed")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("torch", help="version of torch, as in 2.10.0")
    parser.add_argument("--index-url", help="where torch comes from, if not from PyPI")
    parser.add_argument("--triton", help="version of Triton, if not the one torch asks for")
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="REQUIREMENT")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument("--keep", type=Path, help="folder of the environment, kept or used again")
    options, pytest_arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="m3ops-") as scratch:
        folder = options.keep or Path(scratch) / "venv"
        python = folder / "bin" / "python"
        if not python.exists():
            subprocess.run([options.python, "-m", "venv", folder], check=True)
            install(python, options)
        subprocess.run([python, "-c", VERSIONS], check=True)
        # What other versions compiled is left alone.
        caches = {
            "TRITON_CACHE_DIR": f"{scratch}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
        }
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", *pytest_arguments]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **caches}).returncode


def install(python: Path, options: argparse.Namespace) -> None:
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    index = ["--index-url", options.index_url] if options.index_url else []
    # torch first, so that no later requirement chooses another.
    subprocess.run([*pip, *index, f"torch=={options.torch}"], check=True)
    if options.triton:
        subprocess.run([*pip, f"triton=={options.triton}"], check=True)
    own = ["--editable", f"{ROOT}[test,examples,transformers]"]
    subprocess.run([*pip, *own, *options.others], check=True)


if __name__ == "__main__":
    sys.exit(main())
