"""The public function ``store_kv``."""

from __future__ import annotations

import torch
from torch import Tensor

from ...batch import (
    check_at_least,
    check_device,
    check_dtype,
    check_floating,
    check_no_grad,
    check_rows,
    check_shape,
    check_written,
)
from . import ops as ops


def store_kv(
    key: Tensor,
    value: Tensor,
    index_key: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_k_cache: Tensor,
) -> None:
    """Write this step's keys, values and index keys into the three paged caches, in place.

    Args:
        key: ``[T, Hkv, D]``.
        value: ``[T, Hkv, D]``.
        index_key: ``[T, Di]``.
        slot_mapping: int64 ``[T]``, ``page * N + offset`` of each token (slots); a slot below 0 or
            past the end writes nothing. Two tokens with one slot are undefined.
        k_cache: ``[P, Hkv, N, D]``, written; dtype of `key`.
        v_cache: ``[P, Hkv, N, D]``, written; dtype of `value`.
        index_k_cache: ``[P, N, Di]``, written; dtype of `index_key`.

    Raises:
        TypeError: a dtype is not the expected one.
        ValueError: shapes, strides or devices do not fit, a token requires grad, or caches share
            memory.
    """
    check_shape("key", key, "[T, Hkv, D]", (None, None, None))
    rows, heads, dim = key.shape
    check_shape("value", value, "[T, Hkv, D]", (rows, heads, dim))
    check_shape("index_key", index_key, "[T, Di]", (rows, None))
    check_shape("slot_mapping", slot_mapping, "[T]", (rows,))
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_shape("k_cache", k_cache, "[P, Hkv, N, D]", (None, heads, None, dim))
    check_at_least("k_cache.shape[2]", k_cache.shape[2], 1)
    check_shape("v_cache", v_cache, "[P, Hkv, N, D]", tuple(k_cache.shape))
    check_shape(
        "index_k_cache",
        index_k_cache,
        "[P, N, Di]",
        (k_cache.shape[0], k_cache.shape[2], index_key.shape[1]),
    )
    for name, token, cache_name, cache in (
        ("key", key, "k_cache", k_cache),
        ("value", value, "v_cache", v_cache),
        ("index_key", index_key, "index_k_cache", index_k_cache),
    ):
        check_floating(name, token)
        check_dtype(cache_name, cache, token.dtype)
        check_rows(name, token)
        check_rows(cache_name, cache)
        check_device(name, token, key.device)
        check_device(cache_name, cache, key.device)
    check_device("slot_mapping", slot_mapping, key.device)
    check_no_grad(key=key, value=value, index_key=index_key)
    check_no_grad(k_cache=k_cache, v_cache=v_cache, index_k_cache=index_k_cache)
    check_written("k_cache", k_cache, v_cache=v_cache, index_k_cache=index_k_cache)
    check_written("v_cache", v_cache, index_k_cache=index_k_cache)
    check_written("index_k_cache", index_k_cache)
    torch.ops.m3ops.store_kv(key, value, index_key, slot_mapping, k_cache, v_cache, index_k_cache)
