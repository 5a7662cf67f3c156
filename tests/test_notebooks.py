"""The notebooks run, and give what they are kept with.

``EXPECTTEST_ACCEPT=1 pytest -n 0 tests/test_notebooks.py`` rewrites what they are kept with.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEVICES

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ACCEPT = os.environ.get("EXPECTTEST_ACCEPT") == "1"
# Of a cell whose output depends on the device; the file keeps what it is on the CPU.
DEVICE_TAG = "device"
MAX_BYTES = 200_000
NEEDS = ("ipykernel", "matplotlib", "nbclient", "nbformat", "rich", "tqdm", "typer")
MISSING = [name for name in NEEDS if not importlib.util.find_spec(name)]

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs m3ops[test,examples]: {', '.join(MISSING)} not installed"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "needs"),
    [("ops_by_hand", None), ("compiled_layer", None), ("transformers_model", "transformers")],
)
def test_notebook_gives_what_it_is_kept_with(
    name: str, needs: str | None, device: torch.device
) -> None:
    if needs is not None:
        pytest.importorskip(needs)
    nbclient, nbformat = map(importlib.import_module, ("nbclient", "nbformat"))
    path = EXAMPLES / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    kept = [outputs(cell) for cell in notebook.cells]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    if device.type == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    # Timings of the cells would change in the file each time.
    client = nbclient.NotebookClient(
        notebook, record_timing=False, resources={"metadata": {"path": str(EXAMPLES)}}
    )
    # A cell that raises makes this raise, with its traceback.
    client.execute(env=environ)
    if ACCEPT and device.type == "cpu":
        # The language's version is that of whoever ran it last.
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
        kept = [outputs(cell) for cell in nbformat.read(path, as_version=4).cells]
    for cell, expected in zip(notebook.cells, kept, strict=True):
        if device.type == "cpu" or DEVICE_TAG not in cell.metadata.get("tags", []):
            # Another version of a library may have something to warn of.
            given = [output for output in outputs(cell) if output[0] != "stderr"]
            assert given == expected, cell.source
    kinds = {kind for cell in kept for kind, _ in cell}
    assert "image" in kinds and "stderr" not in kinds
    assert path.stat().st_size < MAX_BYTES


def outputs(cell: Any) -> list[tuple[str, str]]:
    """What a cell printed and showed, in order; of pictures, only that they are there."""
    found: list[tuple[str, str]] = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            kind, text = output.name, output.text
        elif "image/png" in output.data:
            kind, text = "image", ""
        else:
            kind, text = "value", output.data["text/plain"]
        # How a stream is cut into pieces is a matter of timing.
        if found and kind == found[-1][0] == "stdout":
            text = found.pop()[1] + text
        found.append((kind, text))
    return found
