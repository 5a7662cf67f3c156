"""Schema, fake and dispatch of ``m3ops::store_kv``."""

from __future__ import annotations

from functools import partial

from ..registration import define_mutating_op, run_implementation

define_mutating_op(
    "store_kv",
    "Tensor key, Tensor value, Tensor index_key, Tensor slot_mapping, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) index_k_cache",
    num_mutated=3,
    fill=partial(run_implementation, "store_kv"),
)
