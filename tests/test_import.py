"""``import m3ops``: quick, without Triton, without touching a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Stands in for an installation without Triton.
NO_TRITON = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: (
    None if name.split(".")[0] == "triton" else find(name, *args)
)
"""


def run(code: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET",)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=inherited, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def seconds(code: str) -> float:
    """Processor time of a fresh process, the best of three."""
    measured = []
    for _ in range(3):
        before = os.times()
        run(code)
        after = os.times()
        measured.append(
            after.children_user
            - before.children_user
            + after.children_system
            - before.children_system
        )
    return min(measured)


def test_it_takes_little_longer_than_torch() -> None:
    # The first run compiles to bytecode.
    run("import m3ops")
    assert seconds("import m3ops") <= seconds("import torch") + 0.3


def test_it_imports_neither_triton_nor_the_compiler() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import m3ops
new = {name for name in set(sys.modules) - before if not name.startswith("m3ops")}
print(*sorted(n for n in new if n.split(".")[0] in ("triton", "transformers", "numpy")
              or n.startswith("torch._inductor")))
"""
    assert run(code).split() == []


def test_it_touches_no_gpu() -> None:
    code = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("a CUDA device was asked for")
torch.cuda._lazy_init = torch.cuda.init = torch._C._cuda_init = refuse
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = refuse
import m3ops
print(torch.cuda.is_initialized())
"""
    assert run(code).strip() == "False"


def test_everything_runs_without_triton() -> None:
    code = f"""
{NO_TRITON}
import torch, m3ops
from m3ops.testing import assert_attention, assert_block_ids, make_inputs
backend = m3ops.backends()["triton"]
assert not backend.usable and "not installed" in backend.reason, backend
try:
    with m3ops.use_backend("triton"):
        pass
except RuntimeError as error:
    assert "not installed" in str(error)
else:
    raise AssertionError
inputs = make_inputs([(40, 1), (33, 3)])
scores = m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)
ids = m3ops.topk_select(scores, inputs.num_valid_blocks(), topk=2)
assert_block_ids(ids, inputs, topk=2)
q = inputs.q.requires_grad_()
out, lse = m3ops.sparse_attention(q, inputs.k, inputs.v, ids, **inputs.batch, return_lse=True)
assert_attention(out.detach(), lse, inputs, ids)
out.sum().backward()
assert "triton" not in sys.modules
print("done")
"""
    assert run(code).strip() == "done"


@pytest.mark.parametrize("module", ["m3ops.testing", "m3ops.modules", "m3ops.batch"])
def test_parts_import_alone(module: str) -> None:
    run(f"import {module}")


def test_every_public_name_is_there() -> None:
    code = """
import m3ops
missing = [name for name in m3ops.__all__ if not hasattr(m3ops, name)]
assert not missing, missing
assert m3ops.__all__ == sorted(m3ops.__all__)
undocumented = [name for name in m3ops.__all__ if not getattr(m3ops, name).__doc__]
assert not undocumented, undocumented
"""
    run(code)
