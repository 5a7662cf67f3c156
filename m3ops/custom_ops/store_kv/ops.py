"""Schema, fake and dispatch of ``m3ops::store_kv``."""

from __future__ import annotations

from typing import Any

from ...backends import implementation
from ..registration import define_mutating_op


def _store_kv(*args: Any) -> None:
    implementation("store_kv", args[0].device)(*args)


define_mutating_op(
    "store_kv",
    "Tensor key, Tensor value, Tensor index_key, Tensor slot_mapping, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) index_k_cache",
    num_mutated=3,
    fill=_store_kv,
)
