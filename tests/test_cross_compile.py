"""Every Triton kernel compiles for real GPUs: the interpreter accepts what they refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")


class Limits(NamedTuple):
    """What a program may use, and the instruction that multiplies its tiles.

    Attributes:
        shared: bytes of shared memory, or LDS.
        dense: of 64 rows and more.
        any_rows: of any tile.
    """

    shared: int
    dense: str
    any_rows: tuple[str, ...]


KIB = 1024
LIMITS = {
    "sm_80": Limits(163 * KIB, "mma", ("mma",)),
    "sm_86": Limits(99 * KIB, "mma", ("mma",)),
    "sm_90": Limits(227 * KIB, "wgmma", ("mma", "wgmma")),
    "sm_100": Limits(227 * KIB, "tcgen05", ("mma", "tcgen05")),
    "sm_120": Limits(99 * KIB, "mma", ("mma",)),
    "gfx942": Limits(64 * KIB, "mfma", ("mfma",)),
}
REGISTERS = {"sm": 65536, "gfx": 131072}
THREADS = 1024
TENSOR_MEMORY_COLUMNS = 512
# Bytes of a thread. Some registers that wait in L1 cost little next to the loads of a tile. A
# float32 product keeps whole rows of its operands in registers, which large dims do not fit.
SPILLED = {"bfloat16": 160, "float16": 160, "float32": 2048}
KERNELS = {
    "_index_score_kernel",
    "_topk_select_rows_kernel",
    "_topk_select_columns_kernel",
    "_topk_select_wide_kernel",
    "_sparse_attention_kernel",
    "_sparse_attention_merge_kernel",
    "_sparse_attention_union_kernel",
    "_sparse_attention_tile_kernel",
    "_store_kv_kernel",
}
GLUON_KERNELS = {
    "_index_score_decode_kernel",
    "_index_score_hopper_kernel",
    "_sparse_attention_decode_kernel",
    "_sparse_attention_drafts_kernel",
    "_sparse_attention_hopper_kernel",
    "_sparse_attention_kv_major_kernel",
}
HOPPER_KERNELS = GLUON_KERNELS | {
    "_kv_major_count_kernel",
    "_kv_major_lists_kernel",
    "_kv_major_place_kernel",
    "_kv_major_merge_kernel",
}
# Every kind of GPU in the dtype of the model. float32 has configurations of its own, the same for
# all: with the copy engine, without it, and on the other vendor's. float16 takes bfloat16's.
TARGETS = [
    *((arch, "bfloat16") for arch in LIMITS),
    *((arch, "float32") for arch in ("sm_80", "sm_90", "gfx942")),
    ("sm_90", "float16"),
]


# In a process of its own: LLVM aborts on what it cannot compile.
def compile_all(arch: str, dtype: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, bool]]]:
    """What became of every kernel, and whether each entry of the tables was used."""
    script = Path(__file__).with_name("cross_compile.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, str(script), arch, dtype],
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, f"{lines[-1:]} failed:\n{result.stderr[-4000:]}"
    *records, used = [json.loads(line) for line in lines if line.startswith("{")]
    return records, used


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("arch", "dtype"), TARGETS)
def test_kernels_compile_within_limits(arch: str, dtype: str) -> None:
    limits = LIMITS[arch]
    registers = REGISTERS["gfx" if arch.startswith("gfx") else "sm"]
    records, used = compile_all(arch, dtype)
    expected = KERNELS | HOPPER_KERNELS
    if arch != "sm_90" or dtype == "float32":
        expected -= HOPPER_KERNELS
    if dtype != "bfloat16":
        # No dtype changes what selects.
        expected -= {"_topk_select_wide_kernel"}
    assert {record["kernel"] for record in records} == expected
    # Every entry of the tables for this kind of GPU was among them.
    for table in used.values():
        for case, looked_up in table.items():
            assert looked_up == ((case == "float32") == (dtype == "float32")), (case, table)
    for record in records:
        assert record["shared"] <= limits.shared, record
        assert record["threads"] <= THREADS, record
        assert record["registers"] * record["threads"] <= registers, record
        assert record["tensor_memory"] <= TENSOR_MEMORY_COLUMNS, record
        assert record["spilled"] <= SPILLED[dtype], record
        if dtype != "float32" and record["product_rows"]:
            assert sum(record[name] for name in limits.any_rows) > 0, record
            if record["product_rows"][-1] >= 64:
                assert record[limits.dense] > 0, record
        if record["kernel"] in GLUON_KERNELS:
            assert record["wgmma"] > 0, record
