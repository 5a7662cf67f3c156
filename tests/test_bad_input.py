"""What does not fit is refused by name, with what was expected and what came, before any launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import m3ops
from m3ops import BatchMetadata, MiniMaxM3AttentionConfig, PagedKVCache, Workspace
from m3ops.testing import Geometry, make_inputs, random_ids

GEOMETRY = Geometry(heads_q=4, heads_kv=2, dim=16, index_dim=8, block_size=16)

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


class NoLaunch(TorchDispatchMode):
    """Fails when an op of ours runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.namespace != "m3ops", f"{func} was launched"
        return func(*args, **(kwargs or {}))


def arguments(name: str, layout: str = "paged") -> Arguments:
    """Arguments that `name` accepts."""
    inputs = make_inputs([(40, 1), (33, 3)], GEOMETRY, layout=layout)
    ids = random_ids(inputs, 4, ordered=True)
    if name == "topk_select":
        return {
            "scores": torch.randn(4, 2, 5),
            "num_valid_blocks": inputs.num_valid_blocks(),
            "topk": 4,
        }
    if name == "store_kv":
        return {
            "key": torch.randn(4, 2, 16),
            "value": torch.randn(4, 2, 16),
            "index_key": torch.randn(4, 8),
            "slot_mapping": torch.arange(4),
            "k_cache": torch.randn(3, 2, 16, 16),
            "v_cache": torch.randn(3, 2, 16, 16),
            "index_k_cache": torch.randn(3, 16, 8),
        }
    if name == "num_valid_blocks":
        return {
            "cu_seqlens_q": inputs.batch["cu_seqlens_q"],
            "seqused_k": inputs.batch["seqused_k"],
            "total_q": 4,
            "block_size": 16,
        }
    if name == "sparse_attention":
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "block_ids": ids}
        return {**tensors, **inputs.batch}
    options = {"topk": 4} if name == "select_blocks" else {}
    return {"index_q": inputs.index_q, "index_k": inputs.index_k, **inputs.batch, **options}


def put(**values: Any) -> Change:
    return lambda old: {**old, **values}


def edit(key: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda old: {**old, key: function(old[key])}


def drop(key: str) -> Change:
    return lambda old: {k: v for k, v in old.items() if k != key}


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a last stride of 2."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


I32 = torch.arange(3, dtype=torch.int32)

# What any function that takes a batch refuses: (change, error, message).
BATCH: list[tuple[Change, type[Exception], str]] = [
    (edit("cu_seqlens_q", torch.Tensor.long), TypeError, "`cu_seqlens_q` must be int32, got .*64"),
    (edit("cu_seqlens_q", torch.Tensor.float), TypeError, "`cu_seqlens_q` must be int32"),
    (edit("seqused_k", torch.Tensor.long), TypeError, "`seqused_k` must be int32, got torch.int64"),
    (edit("block_table", torch.Tensor.long), TypeError, "`block_table` must be int32"),
    (edit("cu_seqlens_q", lambda t: t[:-1]), ValueError, r"`cu_seqlens_q` .* = \[3\], got \[2\]"),
    (edit("cu_seqlens_q", lambda t: t[None]), ValueError, "`cu_seqlens_q` must be"),
    (edit("seqused_k", lambda t: t[:, None]), ValueError, r"`seqused_k` .* got \[2, 1\]"),
    (edit("block_table", lambda t: t[:1]), ValueError, r"`block_table` must be \[B, W\]"),
    (edit("block_table", strided), ValueError, "`block_table` must have a last stride of 1"),
    (edit("cu_seqlens_q", strided), ValueError, "`cu_seqlens_q` must have a last stride of 1"),
    (edit("seqused_k", lambda t: t[:1].expand(2)), ValueError, "`seqused_k` must have a last str"),
    (edit("cu_seqlens_q", meta), ValueError, "must be on .*, got"),
    (edit("seqused_k", meta), ValueError, "`seqused_k` must be on cpu, got meta"),
    (edit("block_table", meta), ValueError, "`block_table` must be on cpu, got meta"),
    (put(cu_seqlens_k=I32), ValueError, "exactly one layout, got both"),
    (put(leftpad_k=I32[:2]), ValueError, "`leftpad_k` must come with batched keys alone"),
    (drop("block_table"), ValueError, r"\(batched\)"),
    (put(block_size=32), ValueError, "32.*got"),
    (put(block_size=0), ValueError, "`block_size` must be at least 1, got 0"),
    (put(max_seqlen_k=-1), ValueError, "`max_seqlen_k` must be at least 0, got -1"),
    (put(max_seqlen_q=-1), ValueError, "`max_seqlen_q` must be at least 0, got -1"),
    (put(num_splits=-1), ValueError, "`num_splits` must be at least 0, got -1"),
    (put(num_decode_seqs=3), ValueError, "`num_decode_seqs` must be at most B = 2, got 3"),
    (put(num_decode_seqs=-1), ValueError, "`num_decode_seqs` must be at least 0, got -1"),
    (put(num_decode_tokens=5), ValueError, "`num_decode_tokens` must be at most T = 4, got 5"),
]

INDEX: list[tuple[Change, type[Exception], str]] = [
    (edit("index_q", torch.Tensor.half), TypeError, "`index_k` must be float16, got torch.float32"),
    (edit("index_k", torch.Tensor.double), TypeError, "`index_k` must be float32"),
    (edit("index_q", torch.Tensor.int), TypeError, "`index_q` must be .*, got torch.int32"),
    (edit("index_q", lambda t: t[0]), ValueError, r"`index_q` must be \[T, Hi, Di\]"),
    (edit("index_q", strided), ValueError, "`index_q` must have a last stride of 1"),
    (edit("index_k", strided), ValueError, "`index_k` must have a last stride of 1"),
    (edit("index_q", lambda t: t[..., :4]), ValueError, "index dim of `index_q`, 4, got 8"),
    (edit("index_k", lambda t: t[:, :8]), ValueError, r"`index_k` must be .*16.* got"),
    (edit("index_k", lambda t: t[0]), ValueError, r"`index_k` must be \[P, N, D"),
    (edit("index_k", meta), ValueError, "`index_k` must be on cpu, got meta"),
]

SELECTION: list[tuple[Change, type[Exception], str]] = [
    (put(topk=0), ValueError, "`topk` must be at least 1, got 0"),
    (put(init_blocks=-1), ValueError, "`init_blocks` must be at least 0, got -1"),
    (put(local_blocks=-1), ValueError, "`local_blocks` must be at least 0, got -1"),
    (put(init_blocks=3, local_blocks=2), ValueError, r"at most topk = 4, got 3 \+ 2"),
    (put(out=torch.empty(4, 2, 3, dtype=torch.int32)), ValueError, r"\[4, 2, 4\], got \[4, 2, 3\]"),
    (put(out=torch.empty(3, 2, 4, dtype=torch.int32)), ValueError, r"got \[3, 2, 4\]"),
    (put(out=torch.empty(4, 2, 4, dtype=torch.int64)), TypeError, "`out` must be int32"),
    (put(out=torch.empty(4, 2, 4, dtype=torch.int32, device="meta")), ValueError, "on cpu, got"),
]

TABLES: dict[str, list[tuple[Change, type[Exception], str]]] = {
    "index_score": [
        *BATCH,
        *INDEX,
        (put(out=torch.empty(4, 2, 4)), ValueError, "at least .* = 5 block columns, got 4"),
        (put(out=torch.empty(4, 3, 5)), ValueError, "`out` must be"),
        (put(out=torch.empty(5, 2, 5)), ValueError, "`out` must be"),
        (put(out=torch.empty(4, 2, 5).bfloat16()), TypeError, "`out` must be float32"),
        (put(out=torch.empty(4, 2, 5, device="meta")), ValueError, "`out` must be on cpu"),
        (
            lambda old: put(out=torch.empty(4, 2, 5))(
                edit("index_q", torch.Tensor.requires_grad_)(old)
            ),
            ValueError,
            "`index_q` must not require grad",
        ),
    ],
    "select_blocks": [
        *BATCH,
        *INDEX,
        *SELECTION,
        (put(max_scratch_bytes=0), ValueError, "`max_scratch_bytes` must be at least 1, got 0"),
    ],
    "topk_select": [
        *SELECTION,
        (edit("scores", torch.Tensor.half), TypeError, "`scores` must be float32"),
        (edit("scores", torch.Tensor.double), TypeError, "`scores` must be float32"),
        (edit("scores", lambda t: t[0]), ValueError, r"`scores` must be \[T, Hi, NB\]"),
        (
            edit("num_valid_blocks", torch.Tensor.long),
            TypeError,
            "`num_valid_blocks` must be int32",
        ),
        (edit("num_valid_blocks", lambda t: t[1:]), ValueError, r"= \[4\], got \[3\]"),
        (edit("num_valid_blocks", meta), ValueError, "`num_valid_blocks` must be on cpu"),
    ],
    "sparse_attention": [
        *BATCH,
        (edit("q", torch.Tensor.half), TypeError, "`k` must be float16, got torch.float32"),
        (edit("k", torch.Tensor.half), TypeError, "`k` must be float32, got torch.float16"),
        (edit("v", torch.Tensor.bfloat16), TypeError, "`v` must be float32, got torch.bfloat16"),
        (edit("q", torch.Tensor.int), TypeError, "`q` must be .*, got torch.int32"),
        (edit("block_ids", torch.Tensor.long), TypeError, "`block_ids` must be int32"),
        (edit("q", lambda t: t[0]), ValueError, r"`q` must be \[T, Hq, D\]"),
        (edit("q", lambda t: t[:, :3]), ValueError, "multiple of the 2 KV heads of `k`, got 3"),
        (edit("q", lambda t: t[..., :8]), ValueError, "head dim of `q`, 8, got 16"),
        (edit("k", lambda t: t[:, :, :8]), ValueError, "`k` must be .*16.* got"),
        (edit("k", lambda t: t[0]), ValueError, r"`k` must be \[P, Hkv, N, D\]"),
        (edit("v", lambda t: t[:1]), ValueError, "`v` must be the shape of `k`"),
        (edit("v", lambda t: t[..., :8]), ValueError, "`v` must be the shape of `k`"),
        (edit("block_ids", lambda t: t[:, :1]), ValueError, r"\[4, 2, \*\], got \[4, 1, 4\]"),
        (edit("block_ids", lambda t: t[:3]), ValueError, r"\[4, 2, \*\], got \[3, 2, 4\]"),
        (edit("block_ids", lambda t: t[..., :0]), ValueError, "block_ids.* at least 1, got 0"),
        (edit("q", strided), ValueError, "`q` must have a last stride of 1"),
        (edit("k", strided), ValueError, "`k` must have a last stride of 1"),
        (edit("v", strided), ValueError, "`v` must have a last stride of 1"),
        (edit("q", meta), ValueError, "must be on meta, got cpu"),
        (edit("k", meta), ValueError, "`k` must be on cpu, got meta"),
        (edit("v", meta), ValueError, "`v` must be on cpu, got meta"),
        (edit("block_ids", meta), ValueError, "`block_ids` must be on cpu, got meta"),
        (put(max_scratch_bytes=0), ValueError, "`max_scratch_bytes` must be at least 1, got 0"),
        (put(lse_out=torch.empty(4, 4)), ValueError, "`lse_out` must come with `out`"),
        (put(out=torch.empty(4, 4, 8)), ValueError, "`out` must be"),
        (put(out=torch.empty(3, 4, 16)), ValueError, "`out` must be"),
        (put(out=torch.empty(4, 4, 16).half()), TypeError, "`out` must be float32"),
        (put(out=strided(torch.empty(4, 4, 16))), ValueError, "`out` must have a last stride"),
        (put(out=torch.empty(4, 4, 16, device="meta")), ValueError, "`out` must be on cpu"),
        (
            put(out=torch.empty(4, 4, 16), lse_out=torch.empty(4, 3)),
            ValueError,
            r"`lse_out` must be \[T, Hq\]",
        ),
        (
            put(out=torch.empty(4, 4, 16), lse_out=torch.empty(4, 4).half()),
            TypeError,
            "`lse_out` must be float32",
        ),
        (
            put(out=torch.empty(4, 4, 16), lse_out=torch.empty(4, 4, device="meta")),
            ValueError,
            "`lse_out` must be on cpu",
        ),
        *(
            (
                lambda old, key=key: put(out=torch.empty(4, 4, 16))(
                    edit(key, torch.Tensor.requires_grad_)(old)
                ),
                ValueError,
                f"`{key}` must not require grad",
            )
            for key in ("q", "k", "v")
        ),
    ],
    "store_kv": [
        (edit("slot_mapping", torch.Tensor.int), TypeError, "`slot_mapping` must be int64, got"),
        (edit("slot_mapping", lambda t: t[1:]), ValueError, r"`slot_mapping` .* \[4\], got \[3\]"),
        (edit("slot_mapping", meta), ValueError, "`slot_mapping` must be on cpu"),
        (edit("key", torch.Tensor.half), TypeError, "`k_cache` must be float16, got torch.float32"),
        (edit("v_cache", torch.Tensor.half), TypeError, "`v_cache` must be float32"),
        (edit("index_k_cache", torch.Tensor.double), TypeError, "`index_k_cache` must be float32"),
        (edit("key", lambda t: t[0]), ValueError, r"`key` must be \[T, Hkv, D\]"),
        (edit("value", lambda t: t[1:]), ValueError, "`value` must be"),
        (edit("index_key", lambda t: t[1:]), ValueError, "`index_key` must be"),
        (edit("k_cache", lambda t: t[:, :1]), ValueError, "`k_cache` must be"),
        (edit("v_cache", lambda t: t[:2]), ValueError, "`v_cache` must be"),
        (edit("index_k_cache", lambda t: t[:, :8]), ValueError, "`index_k_cache` must be"),
        (edit("index_k_cache", lambda t: t[..., :4]), ValueError, "`index_k_cache` must be"),
        (edit("key", strided), ValueError, "`key` must have a last stride of 1"),
        (edit("k_cache", strided), ValueError, "`k_cache` must have a last stride of 1"),
        (edit("value", meta), ValueError, "`value` must be on cpu, got meta"),
        (edit("index_k_cache", meta), ValueError, "`index_k_cache` must be on cpu, got meta"),
        (edit("key", torch.Tensor.requires_grad_), ValueError, "`key` must not require grad"),
    ],
    "num_valid_blocks": [
        (edit("cu_seqlens_q", torch.Tensor.long), TypeError, "`cu_seqlens_q` must be int32"),
        (edit("seqused_k", torch.Tensor.long), TypeError, "`seqused_k` must be int32"),
        (edit("seqused_k", lambda t: t[1:]), ValueError, r"= \[2\], got \[3\]"),
        (put(block_size=0), ValueError, "`block_size` must be at least 1, got 0"),
        (put(total_q=-1), ValueError, "`total_q` must be at least 0, got -1"),
    ],
}

CASES = [
    pytest.param(name, *row, id=f"{name}-{row[2]}") for name, rows in TABLES.items() for row in rows
]


@pytest.mark.parametrize("name", TABLES)
def test_the_arguments_without_a_change_are_accepted(name: str) -> None:
    getattr(m3ops, name)(**arguments(name))


@pytest.mark.parametrize(("name", "change", "error", "message"), CASES)
def test_one_wrong_argument(
    name: str, change: Change, error: type[Exception], message: str
) -> None:
    wrong = change(arguments(name))
    with NoLaunch(), pytest.raises(error, match=message) as caught:
        getattr(m3ops, name)(**wrong)
    assert type(caught.value) is error


@pytest.mark.parametrize("name", ["index_score", "select_blocks", "sparse_attention"])
@pytest.mark.parametrize(
    ("layout", "change", "error", "message"),
    [
        (
            "packed",
            edit("cu_seqlens_k", torch.Tensor.long),
            TypeError,
            "`cu_seqlens_k` must be int",
        ),
        ("packed", edit("cu_seqlens_k", lambda t: t[1:]), ValueError, r"\[3\], got \[2\]"),
        ("packed", edit("cu_seqlens_k", meta), ValueError, "`cu_seqlens_k` must be on cpu"),
        ("packed", drop("cu_seqlens_k"), ValueError, r"must be \[B, S, .*\(batched\) when neither"),
        ("packed", put(leftpad_k=I32[:2]), ValueError, "`leftpad_k` must come with batched keys"),
        ("packed", put(block_table=I32[:2, None]), ValueError, "exactly one layout, got both"),
        ("batched", edit("leftpad_k", torch.Tensor.long), TypeError, "`leftpad_k` must be int32"),
        ("batched", edit("leftpad_k", lambda t: t[1:]), ValueError, r"= \[2\], got \[1\]"),
        ("batched", edit("leftpad_k", meta), ValueError, "`leftpad_k` must be on cpu"),
        ("batched", put(seqused_k=I32, cu_seqlens_q=I32.new_zeros(4)), ValueError, "must be"),
    ],
)
def test_a_wrong_description_of_a_layout(
    name: str, layout: str, change: Change, error: type[Exception], message: str
) -> None:
    wrong = change(arguments(name, layout))
    with NoLaunch(), pytest.raises(error, match=message):
        getattr(m3ops, name)(**wrong)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(33, 2), (3, 2), (1, 2), (4, 3)])
def test_query_heads_that_no_group_holds(heads_q: int, heads_kv: int) -> None:
    inputs = make_inputs([(40, 1)], Geometry(heads_q=heads_q, heads_kv=heads_kv))
    ids = random_ids(inputs, 2)
    with pytest.raises(ValueError, match=f"{heads_kv} KV heads of `k`, got {heads_q} heads"):
        m3ops.sparse_attention(inputs.q, inputs.k, inputs.v, ids, **inputs.batch)


def test_out_variants_take_inputs_that_require_grad_without_grad_mode() -> None:
    given = arguments("sparse_attention")
    given["q"].requires_grad_()
    out = torch.full_like(given["q"], torch.nan, requires_grad=False)
    with torch.no_grad():
        m3ops.sparse_attention(**given, out=out)
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("index_score", put(block_size=8), "8"),
        ("index_score", put(block_size=48), "48"),
        ("index_score", put(block_size=512), "512"),
        ("select_blocks", put(block_size=8), "8"),
        ("sparse_attention", put(block_size=48), "48"),
        ("sparse_attention", put(block_size=512), "512"),
    ],
)
def test_block_sizes_that_the_kernels_do_not_take(
    backend: str, name: str, change: Change, message: str
) -> None:
    wrong = change(arguments(name, "batched"))
    with m3ops.use_backend(backend), pytest.raises(NotImplementedError, match=message):
        getattr(m3ops, name)(**wrong)
    getattr(m3ops, name)(**wrong)


@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dims_and_dtypes_that_the_kernels_do_not_take(backend: str, dtype: torch.dtype) -> None:
    dim = 16 if dtype == torch.float64 else 264
    geometry = Geometry(heads_q=2, heads_kv=2, dim=dim, index_dim=dim)
    inputs = make_inputs([(40, 1)], geometry, dtype=dtype)
    ids = random_ids(inputs, 2)
    message = "float64" if dtype == torch.float64 else "264"
    with m3ops.use_backend(backend):
        with pytest.raises(NotImplementedError, match=message):
            m3ops.index_score(inputs.index_q, inputs.index_k, **inputs.batch)
        with pytest.raises(NotImplementedError, match=message):
            m3ops.select_blocks(inputs.index_q, inputs.index_k, **inputs.batch)
        with pytest.raises(NotImplementedError, match=message):
            m3ops.sparse_attention(inputs.q, inputs.k, inputs.v, ids, **inputs.batch)


# What is no tensor, or none of its kind: (change, error, message).
KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "list": (torch.Tensor.tolist, TypeError, "a tensor, got list"),
    "float": (lambda t: 1.5, TypeError, "a tensor, got float"),
    "str": (lambda t: "tensor", TypeError, "a tensor, got str"),
    "array": (torch.Tensor.numpy, TypeError, "a tensor, got ndarray"),
    "None": (lambda t: None, TypeError, "a tensor, got NoneType"),
    "sparse": (torch.Tensor.to_sparse, TypeError, "a dense tensor, got layout torch.sparse_coo"),
    "complex": (lambda t: t.to(torch.complex64), TypeError, ".*, got torch.complex64"),
    "bool": (torch.Tensor.bool, TypeError, ".*, got torch.bool"),
    "one number": (lambda t: t.flatten()[0], ValueError, r".*, got \[\]"),
    "one axis more": (lambda t: t[..., None, :], ValueError, ".*, got "),
}

OPTIONAL = ("block_table", "cu_seqlens_k", "leftpad_k")


def tensor_arguments() -> list[Any]:
    rows = []
    for name in (*TABLES, "packed", "batched"):
        layout = name if name in ("packed", "batched") else "paged"
        function = "sparse_attention" if layout != "paged" else name
        for argument, value in arguments(function, layout).items():
            if isinstance(value, torch.Tensor) and (layout == "paged" or argument in OPTIONAL):
                rows.append(pytest.param(function, layout, argument, id=f"{name}-{argument}"))
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "layout", "argument"), tensor_arguments())
def test_a_tensor_of_another_kind(name: str, layout: str, argument: str, kind: str) -> None:
    given = arguments(name, layout)
    change, error, message = KINDS[kind]
    if kind == "None" and argument in OPTIONAL:
        pytest.skip("None is a value of this argument")
    given[argument] = change(given[argument])
    with NoLaunch(), pytest.raises(error, match=f"^`{argument}` must be {message}") as caught:
        getattr(m3ops, name)(**given)
    assert type(caught.value) is error


def int_arguments() -> list[tuple[str, str]]:
    batch = ["max_seqlen_q", "max_seqlen_k", "num_decode_seqs", "num_decode_tokens", "block_size"]
    selection = ["topk", "init_blocks", "local_blocks"]
    ints = {
        "index_score": [*batch, "num_splits"],
        "topk_select": selection,
        "select_blocks": [*batch, *selection, "num_splits", "max_scratch_bytes"],
        "sparse_attention": [*batch, "num_splits", "max_scratch_bytes"],
        "num_valid_blocks": ["total_q", "block_size"],
    }
    return [(name, argument) for name, names in ints.items() for argument in names]


@pytest.mark.parametrize("value", [1.0, "16", True, [16], torch.tensor(16)], ids=repr)
@pytest.mark.parametrize(("name", "argument"), int_arguments())
def test_an_integer_of_another_kind(name: str, argument: str, value: Any) -> None:
    given = {**arguments(name), argument: value}
    message = f"^`{argument}` must be an int, got {type(value).__name__}$"
    with NoLaunch(), pytest.raises(TypeError, match=message):
        getattr(m3ops, name)(**given)


def test_integers_of_numpy_are_integers() -> None:
    given = arguments("select_blocks")
    expected = m3ops.select_blocks(**given)
    sizes = {"topk": np.int64(4), "block_size": np.int32(16), "max_seqlen_k": np.int64(80)}
    assert torch.equal(m3ops.select_blocks(**{**given, **sizes}), expected)


@pytest.mark.parametrize("value", ["0.5", True, torch.tensor(0.5), [1.0]], ids=repr)
def test_a_scale_that_is_no_number(value: Any) -> None:
    given = {**arguments("sparse_attention"), "softmax_scale": value}
    with NoLaunch(), pytest.raises(TypeError, match="`softmax_scale` must be a number, got "):
        m3ops.sparse_attention(**given)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        (torch.zeros(2, 3), [torch.zeros(2)], TypeError, "`outs` must be a list of tensors, got T"),
        (None, [], TypeError, "`outs` must be a list of tensors, got NoneType"),
        ([[1.0]], [torch.zeros(1)], TypeError, r"`outs\[0\]` must be a tensor, got list"),
        ([torch.zeros(3).int()], [torch.tensor(0.0)], TypeError, r"`outs\[0\]` .* torch.int32"),
        ([torch.zeros(3)], [torch.tensor(0)], TypeError, r"`lses\[0\]` must be float32 or"),
        ([torch.tensor(0.0)], [torch.tensor(0.0)], ValueError, r"`outs\[0\]` .* got \[\]"),
        (
            [torch.zeros(3), torch.zeros(3).half()],
            [torch.tensor(0.0)] * 2,
            TypeError,
            r"`outs\[1\]` must be float32, got torch.float16",
        ),
        (
            [torch.zeros(3), meta(torch.zeros(3))],
            [torch.tensor(0.0)] * 2,
            ValueError,
            r"`outs\[1\]` must be on cpu, got meta",
        ),
    ],
)
def test_parts_that_cannot_be_merged(
    outs: Any, lses: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        m3ops.merge_attention(outs, lses)


def test_outputs_that_lie_in_an_input_or_in_themselves() -> None:
    given = arguments("sparse_attention")
    lse_in_out = torch.empty(4, 4, 16)
    refused: list[tuple[str, Arguments, str]] = [
        ("sparse_attention", {"out": given["q"]}, "`out` must not overlap `q`"),
        ("sparse_attention", {"out": given["q"].view(4, 4, 16)}, "`out` must not overlap `q`"),
        (
            "sparse_attention",
            {"out": lse_in_out, "lse_out": lse_in_out[0, 0].view(4, 4)},
            "`out` must not overlap `lse_out`",
        ),
        (
            "sparse_attention",
            {"out": torch.empty(1, 4, 16).expand(4, 4, 16)},
            r"`out` must have an element of memory for each of its own, got strides \[0, 16, 1\]",
        ),
        (
            "select_blocks",
            {"out": torch.empty(1, 2, 4, dtype=torch.int32).expand(4, 2, 4)},
            "`out` must have an element of memory",
        ),
        ("index_score", {"out": torch.empty(4, 1, 5).expand(4, 2, 5)}, "`out` must have an el"),
    ]
    for name, change, message in refused:
        base = given if name == "sparse_attention" else arguments(name)
        with NoLaunch(), pytest.raises(ValueError, match=message):
            getattr(m3ops, name)(**{**base, **change})
    scores = torch.randn(4, 2, 5)
    ids = scores.view(torch.int32)[..., :4]
    visible = torch.full((4,), 5, dtype=torch.int32)
    with NoLaunch(), pytest.raises(ValueError, match="`out` must not overlap `scores`"):
        m3ops.topk_select(scores, visible, topk=4, out=ids)
    stored = arguments("store_kv")
    with NoLaunch(), pytest.raises(ValueError, match="`k_cache` must not overlap `v_cache`"):
        m3ops.store_kv(**{**stored, "v_cache": stored["k_cache"]})
    # Slices of one buffer that lie apart are fine, interleaved ones too.
    both = torch.empty(4, 4, 32)
    both[..., :16] = given["q"]
    apart = {**given, "q": both[..., :16], "out": both[..., 16:]}
    out: Any = m3ops.sparse_attention(**apart)
    expected: Any = m3ops.sparse_attention(**given)
    assert torch.equal(out, expected)


def test_a_negated_view_counts_with_its_sign() -> None:
    """Its memory holds the opposite numbers."""
    given = arguments("topk_select")
    negated = {**given, "scores": torch._neg_view(given["scores"])}
    plain = {**given, "scores": -given["scores"]}
    assert torch.equal(m3ops.topk_select(**negated), m3ops.topk_select(**plain))


# Modules.

CONFIG = MiniMaxM3AttentionConfig(
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    index_n_heads=2,
    index_head_dim=16,
    index_block_size=16,
    index_topk_blocks=3,
)


def from_lengths(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: BatchMetadata.from_lengths(*args, block_size=16, **options)


def forward(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: m3ops.MiniMaxM3SparseAttention(CONFIG)(*args, **options)


def copy_pages(source: Any, target: Any) -> Callable[[], Any]:
    return lambda: PagedKVCache(CONFIG, 3).copy_pages_(source, target)


def step(**options: Any) -> BatchMetadata:
    return BatchMetadata.from_lengths([8], block_size=16, **options)


X = torch.zeros(8, 24)
PAIR = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)


def slotless() -> BatchMetadata:
    batch = step(block_table=[[0]])
    batch.slot_mapping = None
    return batch


def other_workspace() -> Workspace:
    return Workspace(MiniMaxM3AttentionConfig(index_topk_blocks=4), 8, 64)


MODULES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: PagedKVCache({}, 3), TypeError, "`config` must be a MiniMaxM3AttentionConfig, got d"),  # type: ignore[arg-type]
    (lambda: PagedKVCache(CONFIG, "3"), TypeError, "`num_pages` must be an int, got str"),  # type: ignore[arg-type]
    (lambda: PagedKVCache(CONFIG, 3.0), TypeError, "`num_pages` must be an int, got float"),  # type: ignore[arg-type]
    (copy_pages([0], [1]), TypeError, "`source` must be a tensor, got list"),
    (copy_pages(I32, I32), TypeError, "`source` must be int64, got torch.int32"),
    (copy_pages(torch.tensor([0]), torch.tensor([1, 2])), ValueError, r"`target` .* got \[2\]"),
    (
        copy_pages(torch.tensor([3]), torch.tensor([1])),
        ValueError,
        r"`source` must hold pages 0 .. 2, got \[3\]",
    ),
    (
        copy_pages(torch.tensor([0]), torch.tensor([-1])),
        ValueError,
        r"`target` must hold pages 0 .. 2, got \[-1\]",
    ),
    (lambda: Workspace(None, 8, 64), TypeError, "`config` must be a MiniMaxM3Attention.*NoneType"),  # type: ignore[arg-type]
    (lambda: Workspace(CONFIG, 8.5, 64), TypeError, "`max_tokens` must be an int, got float"),  # type: ignore[arg-type]
    (lambda: Workspace(CONFIG, 8, None), TypeError, "`max_seqlen_k` must be an int, got NoneType"),  # type: ignore[arg-type]
    (lambda: MiniMaxM3AttentionConfig(24.0), TypeError, "`hidden_size` must be an int, got float"),  # type: ignore[arg-type]
    (lambda: MiniMaxM3AttentionConfig(head_dim=None), TypeError, "`head_dim` must be an int, got"),  # type: ignore[arg-type]
    (lambda: MiniMaxM3AttentionConfig(rope_theta="5"), TypeError, "`rope_theta` must be a number"),  # type: ignore[arg-type]
    (
        lambda: MiniMaxM3AttentionConfig(partial_rotary_factor=None),  # type: ignore[arg-type]
        TypeError,
        "`partial_rotary_factor` must be a number, got NoneType",
    ),
    (
        lambda: MiniMaxM3AttentionConfig.from_transformers({"hidden_size": 24}),
        TypeError,
        "`config` must have .*, got a dict without hidden_size, ",
    ),
    (lambda: m3ops.MiniMaxM3SparseAttention({}), TypeError, "`config` must be a MiniMaxM3Att"),  # type: ignore[arg-type]
    (lambda: m3ops.LightningIndexer({}), TypeError, "`config` must be a MiniMaxM3AttentionConfig"),  # type: ignore[arg-type]
    (
        lambda: m3ops.warmup({}, [(1, 1)], max_seqlen_k=16, device="cpu"),  # type: ignore[arg-type]
        TypeError,
        "`config` must be a MiniMaxM3AttentionConfig, got dict",
    ),
    (from_lengths(torch.tensor([1])), TypeError, "`query_lens` must be a list of ints, got Tensor"),
    (from_lengths(None), TypeError, "`query_lens` must be a list of ints, got NoneType"),
    (from_lengths(3), TypeError, "`query_lens` must be a list of ints, got int"),
    (from_lengths([1, 2.0]), TypeError, r"`query_lens\[1\]` must be an int, got float"),
    (from_lengths(["1"]), TypeError, r"`query_lens\[0\]` must be an int, got str"),
    (from_lengths([1], [0.0], [[0]]), TypeError, r"`context_lens\[0\]` must be an int, got float"),
    (from_lengths([1], None, [[0.5]]), TypeError, r"`block_table` must hold ints, got \[\[0.5\]\]"),
    (from_lengths([1], None, [["a"]]), TypeError, "`block_table` must be a list of pages for each"),
    (from_lengths([1], None, [0]), TypeError, "`block_table` must be a list of pages for each"),
    (from_lengths([1], None, 7), TypeError, "`block_table` must be a list of pages for each"),
    (from_lengths([1], None, torch.zeros(1, 1)), TypeError, "`block_table` must be int32 or int64"),
    (from_lengths([1], num_tokens=2.0), TypeError, "`num_tokens` must be an int, got float"),
    (from_lengths([1], num_seqs=-1), ValueError, "`num_seqs` must be at least 0, got -1"),
    (from_lengths([1], num_columns="2"), TypeError, "`num_columns` must be an int, got str"),
    (from_lengths([1], max_seqlen_q=1.0), TypeError, "`max_seqlen_q` must be an int, got float"),
    (from_lengths([1], num_decode_seqs="1"), TypeError, "`num_decode_seqs` must be an int, got s"),
    (lambda: step().update_(torch.tensor([8])), TypeError, "`query_lens` must be a list of ints"),  # type: ignore[arg-type]
    (lambda: step().update_([8.0]), TypeError, r"`query_lens\[0\]` must be an int, got float"),  # type: ignore[list-item]
    (lambda: step().copy_({}), TypeError, "`other` must be a BatchMetadata, got dict"),  # type: ignore[arg-type]
    (forward([0.0]), TypeError, "`hidden` must be a tensor, got list"),
    (forward(X.int()), TypeError, "`hidden` must be .*, got torch.int32"),
    (forward(X, {}), TypeError, "`batch` must be a BatchMetadata, got dict"),
    (forward(X, step(), {}), TypeError, "`cache` must be a PagedKVCache, got dict"),
    (
        forward(X, step(), workspace=torch.zeros(1)),
        TypeError,
        "`workspace` must be a Workspace, got Tensor",
    ),
    (forward(X[None], position_embeddings=X), TypeError, "`position_embeddings` must be a pair"),
    (forward(X[None], position_embeddings=(1, 2)), TypeError, "`cos` must be a tensor, got int"),
    (
        forward(X[None], position_embeddings=(PAIR[0][:, 1:], PAIR[1])),
        ValueError,
        r"`cos` must be \[B or 1, S, rotary_dim\] = \[1, 8, \*\], got \[1, 7, 8\]",
    ),
    (forward(X[None], block_ids=[0]), TypeError, "`block_ids` must be a tensor, got list"),
    (
        forward(X[None], block_ids=torch.zeros(8, 2, 3, dtype=torch.int32)),
        ValueError,
        r"`block_ids` must be \[B, S, Hkv, K\] = \[1, 8, 2, \*\], got \[8, 2, 3\]",
    ),
    (
        lambda: forward(X, slotless(), PagedKVCache(CONFIG, 2))(),
        ValueError,
        r"`batch.slot_mapping` must be \[T\] with a cache, got None",
    ),
    (
        lambda: forward(
            X, step(block_table=[[0]]), PagedKVCache(CONFIG, 2), workspace=Workspace(CONFIG, 8, 0)
        )(),
        ValueError,
        "`workspace` must have at least W = 2 block columns, got 0",
    ),
    (
        lambda: forward(
            X, step(block_table=[[0]]), PagedKVCache(CONFIG, 2), workspace=other_workspace()
        )(),
        ValueError,
        "`workspace` must be for 2 index heads and top-k 3, got one for 4 and 4",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [pytest.param(*row, id=f"{i}-{row[2]}") for i, row in enumerate(MODULES)],
)
def test_a_module_refuses_what_it_cannot_use(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with NoLaunch(), torch.no_grad(), pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error
