"""Fetch the peers' kernel files into the git-ignored folder ``benchmarks/.peers``.

``python benchmarks/fetch_peers.py`` downloads the published vLLM wheel with pip (340 MB, into a
temporary folder) and keeps the two Triton files of MiniMax-M3. For a machine without a network,
fetch elsewhere and copy the folder. Nothing of it belongs into version control.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VLLM_VERSION = "0.33.0"
VLLM_FOLDER = Path(__file__).parent / ".peers" / f"vllm-{VLLM_VERSION}"
# SHA-256 of what was measured.
VLLM_FILES = {
    "vllm/models/minimax_m3/common/ops/index_topk.py": (
        "9dfd0744fbf44417d6ad6cf1ac11ec978979a016ed63fb40702e1b642753db0f"
    ),
    "vllm/models/minimax_m3/common/ops/sparse_attn.py": (
        "ce426367eba80e32808efb346c6d42eab834099d4db2e134e6525fc27e7704e1"
    ),
}


def extract(wheel: Path) -> None:
    VLLM_FOLDER.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name, expected in VLLM_FILES.items():
            content = archive.read(name)
            if hashlib.sha256(content).hexdigest() != expected:
                raise SystemExit(f"{name} is not that of vllm {VLLM_VERSION}")
            target = VLLM_FOLDER / Path(name).name
            target.write_bytes(content)
            print(f"{target} ({len(content)} bytes)")


def download(folder: str) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--dest", folder]
    command = [sys.executable, "-m", "pip", "download", *options, f"vllm=={VLLM_VERSION}"]
    subprocess.run(command, check=True)
    return next(Path(folder).glob("vllm-*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="a wheel that is already here")
    wheel = parser.parse_args().wheel
    if wheel is not None:
        extract(wheel)
        return
    with tempfile.TemporaryDirectory() as folder:
        extract(download(folder))


if __name__ == "__main__":
    main()
