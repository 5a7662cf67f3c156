"""What warmup compiles, a captured step finds."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import m3ops

CONFIG = m3ops.MiniMaxM3AttentionConfig(
    hidden_size=64,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=48,
    index_n_heads=2,
    index_head_dim=48,
    index_block_size=32,
    index_topk_blocks=5,
)


def make_step(device: torch.device, tokens: int) -> Callable[[], Any]:
    """A decode step of `tokens` sequences, its tensors already there."""
    cache = torch.randn(40, 2, 32, 48, device=device).half()
    index_cache = torch.randn(40, 32, 48, device=device).half()
    batch: dict[str, Any] = {
        "cu_seqlens_q": torch.arange(tokens + 1, dtype=torch.int32, device=device),
        "seqused_k": torch.full((tokens,), 300, dtype=torch.int32, device=device),
        "block_table": torch.arange(10 * tokens, dtype=torch.int32, device=device).view(tokens, -1),
        "max_seqlen_q": 1,
        "block_size": 32,
    }
    q = torch.randn(tokens, 6, 48, device=device).half()
    index_q = torch.randn(tokens, 2, 48, device=device).half()

    def step() -> Any:
        block_ids = m3ops.select_blocks(index_q, index_cache, topk=5, **batch)
        return m3ops.sparse_attention(q, cache, cache, block_ids, **batch)

    return step


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_warmup_runs_every_kind_of_step(backend: str) -> None:
    with m3ops.use_backend(backend):
        m3ops.warmup(
            CONFIG,
            [(1, 1), (3, 1), (4, 2), (20, 20)],
            max_seqlen_k=100,
            dtype=torch.float32,
            device="cpu",
        )


@pytest.mark.parametrize("bad", [(0, 0), (2, 3), (3, 0)])
def test_impossible_steps_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="`steps` must hold pairs"):
        m3ops.warmup(CONFIG, [bad], max_seqlen_k=100, dtype=torch.float32, device="cpu")


# Not in this process: whether a kernel has been compiled depends on what ran before.
SCRIPT = """
import sys, torch, m3ops
sys.path.insert(0, {tests!r})
from test_warmup import CONFIG, make_step
device = torch.device("cuda", 0)
step = make_step(device, 3)
torch.cuda.synchronize()
if {warm}:
    m3ops.warmup(CONFIG, [(3, 1)], max_seqlen_k=320, dtype=torch.float16, device=device)
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        step()
except RuntimeError as error:
    print("refused:", error)
else:
    graph.replay()
    torch.cuda.synchronize()
    print("captured")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
def test_first_use_inside_a_capture(device: torch.device, warm: bool) -> None:
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(tests=str(here), warm=warm)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])},
    )
    if warm:
        assert "captured" in result.stdout, result.stderr[-2000:]
    else:
        assert "refused" in result.stdout, result.stderr[-2000:]
        assert "m3ops.warmup" in result.stdout
