"""``torch.library.opcheck`` on every op: schema, fake function, autograd and AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch.library import opcheck

import m3ops  # noqa: F401
from m3ops.batch import Batch
from m3ops.testing import Inputs, lay_out, random_ids, random_sequences

TOPK = 3

# In each sequence all query rows stand in the last block, and all sequences have as many: no score
# is unspecified, so that two runs can be compared.
LENGTHS = [(40, 1), (45, 3)]

# Layout, dtype and strides: each dtype and each optional tensor, contiguous and dense permuted.
VARIANTS = [
    ("paged", torch.float32, "contiguous"),
    ("paged", torch.float32, "transposed"),
    ("paged", torch.float16, "transposed"),
    ("paged", torch.bfloat16, "contiguous"),
    ("packed", torch.float32, "contiguous"),
    ("packed", torch.bfloat16, "transposed"),
    ("batched", torch.float16, "contiguous"),
    ("batched", torch.float32, "transposed"),
    ("batched without leftpad", torch.float32, "contiguous"),
    ("no rows", torch.float32, "contiguous"),
    ("no sequences", torch.float32, "transposed"),
]

OPS = [
    "index_score",
    "topk_select",
    "select_blocks",
    "sparse_attention",
    "sparse_attention_backward",
    "store_kv",
]

variants = pytest.mark.parametrize(
    ("layout", "dtype", "strides"),
    VARIANTS,
    ids=[f"{a}-{str(b).removeprefix('torch.')}-{c}" for a, b, c in VARIANTS],
)
devices = pytest.mark.parametrize("device", DEVICES)


def make(layout: str, dtype: torch.dtype, strides: str, device: torch.device) -> Inputs:
    lengths = [(40, 0), (45, 0)] if layout == "no rows" else LENGTHS
    inputs = lay_out(
        random_sequences(lengths, dtype=dtype, device=device),
        layout={"no rows": "packed", "no sequences": "paged"}.get(layout, layout.split()[0]),
        leftpad="without" not in layout,
        extra_blocks=0,
        host_bounds=True,
        poison=7.0,
        strides=strides,
    )
    if layout == "no sequences":
        batch, none = inputs.batch, slice(0, 0)
        batch["cu_seqlens_q"] = batch["cu_seqlens_q"][:1]
        batch["seqused_k"], batch["block_table"] = (
            batch["seqused_k"][none],
            batch["block_table"][none],
        )
        inputs = Inputs(
            **{**vars(inputs), "q": inputs.q[none], "index_q": inputs.index_q[none]}
            | {"sequences": [], "slots": []}
        )
    return inputs


def batch_arguments(inputs: Inputs) -> Batch:
    batch = {"block_table": None, "cu_seqlens_k": None, "leftpad_k": None, **inputs.batch}
    return Batch(num_decode_seqs=0, num_decode_tokens=0, **batch)


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    """Dense, with the first axis innermost in memory but for the last one."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def arguments(op: str, inputs: Inputs, strides: str) -> tuple[tuple[Any, ...], list[Any]]:
    """Arguments of the functional op, and outputs of the right sizes for its out-variant."""
    index, batch = (inputs.index_q, inputs.index_k), batch_arguments(inputs)
    ids = random_ids(inputs, TOPK)
    rows, heads = inputs.index_q.shape[:2]
    scores = inputs.q.new_full((rows, heads, 5), 0.5, dtype=torch.float32)
    empty_ids = torch.zeros_like(ids)
    lse = inputs.q.new_zeros(inputs.q.shape[:2], dtype=torch.float32)
    if op == "index_score":
        return (*index, *batch, 0), [scores[..., :3]]
    if op == "topk_select":
        scores = torch.randn(scores.shape, device=scores.device)
        scores = permuted(scores) if strides == "transposed" else scores
        return (scores, inputs.num_valid_blocks(), TOPK, 0, 1), [empty_ids]
    if op == "select_blocks":
        return (*index, *batch, TOPK, 0, 1, 0, 2**20), [empty_ids]
    qkv = (inputs.q, inputs.k, inputs.v)
    if op == "sparse_attention":
        return (*qkv, ids, *batch, 0.25, 0, 2**20), [torch.zeros_like(inputs.q), lse]
    if op == "sparse_attention_backward":
        out, lse = torch.ops.m3ops.sparse_attention(*qkv, ids, *batch, 0.25, 0, 2**20)
        dout = torch.randn_like(inputs.q)
        return (dout, *qkv, ids, out, lse, *batch, 0.25, 2**20), []
    heads_kv, dim = inputs.v.shape[-2], inputs.v.shape[-1]
    if inputs.layout == "paged":
        heads_kv = inputs.v.shape[1]
    tokens = [
        inputs.q.new_full((rows, *shape), 2.0)
        for shape in ((heads_kv, dim), (heads_kv, dim), (inputs.index_q.shape[2],))
    ]
    caches = [
        inputs.q.new_zeros(2, *shape)
        for shape in ((heads_kv, 16, dim), (heads_kv, 16, dim), (16, inputs.index_q.shape[2]))
    ]
    if strides == "transposed":
        tokens = [permuted(x) if x.ndim > 2 else x for x in tokens]
        caches = [permuted(x) if x.ndim > 3 else x for x in caches]
    slots = torch.tensor([5, -1, 31, 32], device=inputs.q.device)[:rows]
    return (*tokens, slots, *caches), []


@devices
@variants
@pytest.mark.parametrize("op", OPS)
def test_op(op: str, layout: str, dtype: torch.dtype, strides: str, device: torch.device) -> None:
    args, _ = arguments(op, make(layout, dtype, strides, device), strides)
    opcheck(getattr(torch.ops.m3ops, op).default, args)


@devices
@variants
@pytest.mark.parametrize("op", ["index_score", "topk_select", "select_blocks", "sparse_attention"])
def test_out_variant(
    op: str, layout: str, dtype: torch.dtype, strides: str, device: torch.device
) -> None:
    args, outs = arguments(op, make(layout, dtype, strides, device), strides)
    outs = [permuted(out) if strides == "transposed" else out.contiguous() for out in outs]
    opcheck(getattr(torch.ops.m3ops, f"{op}_out").default, (*args, *outs))


@devices
@variants
def test_attention_with_gradients(
    layout: str, dtype: torch.dtype, strides: str, device: torch.device
) -> None:
    inputs = make(layout, dtype, strides, device)
    (q, k, v, *rest), _ = arguments("sparse_attention", inputs, strides)
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    opcheck(torch.ops.m3ops.sparse_attention.default, (*qkv, *rest))


@devices
@pytest.mark.parametrize("differentiable", ["q", "k", "v", "qv"])
def test_attention_with_some_gradients(differentiable: str, device: torch.device) -> None:
    inputs = make("paged", torch.float32, "contiguous", device)
    args, _ = arguments("sparse_attention", inputs, "contiguous")
    qkv = [
        x.detach().requires_grad_(name in differentiable)
        for name, x in zip("qkv", args, strict=False)
    ]
    opcheck(torch.ops.m3ops.sparse_attention.default, (*qkv, *args[3:]))


@devices
@pytest.mark.parametrize("op", ["select_blocks", "sparse_attention"])
def test_padding_rows_and_a_named_decode_part(op: str, device: torch.device) -> None:
    sequences = random_sequences([(40, 1), (0, 1), (33, 3)], device=device)
    inputs = lay_out(sequences, padding_rows=3, num_decode_seqs=2, host_bounds=True, poison=7.0)
    named = inputs.batch.pop("num_decode_seqs"), inputs.batch.pop("num_decode_tokens")
    args, outs = arguments(op, inputs, "contiguous")
    batch = batch_arguments(inputs)._replace(num_decode_seqs=named[0], num_decode_tokens=named[1])
    start = 2 if op == "select_blocks" else 4
    args = (*args[:start], *batch, *args[start + len(batch) :])
    opcheck(getattr(torch.ops.m3ops, op).default, args)
    opcheck(getattr(torch.ops.m3ops, f"{op}_out").default, (*args, *outs))
