"""Gluon functions that place and join the results of splits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...kernels import _LN_2, _LOG2_E, _LOWEST, _barrier


@gluon.jit
def _place(results, split, out_row, head):
    """Pointers to what some splits have for some heads of a row."""
    ptr, stride_s, stride_t, stride_h = results
    ptrs = ptr + split.to(gl.int64) * stride_s + out_row.to(gl.int64) * stride_t
    return ptrs + head.to(gl.int64) * stride_h


@gluon.jit
def _join_if_last(
    outputs,
    joined,
    place,
    limit,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    MAX_JOINED_SPLITS: gl.constexpr,
):
    """Join all splits' results if this one's came last, in an order that does not depend on it.

    They are of `ROWS` rows, as far as those lie before `limit`, and the heads of one KV head.
    Tickets say who is the last: it leaves 0 behind, as it found it.
    """
    outs_ptr, stride_s, stride_t, stride_h = outputs[0]
    counters_ptr, counter, num_splits, final_out, final_lse = joined
    _, out_row, head_kv, split = place
    # All threads have stored, then one of them publishes that for all.
    _barrier()
    ticket = gl.atomic_add(counters_ptr + counter, 1, sem="acq_rel", scope="gpu")
    if ticket == num_splits - 1:
        gl.store(counters_ptr + counter, 0)
        # All loads are in flight at once, of 16 bytes each: splits lie whole heads apart.
        outs = (outs_ptr, stride_s // DIM * DIM, stride_t, stride_h)
        LAYOUT: gl.constexpr = gl.BlockedLayout(
            [MAX_JOINED_SPLITS, 1, 4], [1, 4, 8], [1, 4, 1], [2, 1, 0]
        )
        SPLIT_PAIR: gl.constexpr = gl.SliceLayout(2, LAYOUT)
        OUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
        s = gl.arange(0, MAX_JOINED_SPLITS, gl.SliceLayout(1, SPLIT_PAIR))
        pair = gl.arange(0, ROWS * GROUP, gl.SliceLayout(0, SPLIT_PAIR))
        row = out_row + pair // GROUP
        head = head_kv * GROUP + pair % GROUP
        live = row < limit
        d = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        # [MAX_JOINED_SPLITS, ROWS * GROUP]
        o_ptrs = _place(outs, s[:, None], row[None, :], head[None, :])
        l_ptrs = _place(outputs[1], s[:, None], row[None, :], head[None, :])
        mask = (s < num_splits)[:, None] & live[None, :]
        lse = gl.load(l_ptrs, mask=mask, other=float("-inf"), cache_modifier=".cg")
        # [MAX_JOINED_SPLITS, ROWS * GROUP, DIM]
        out = gl.load(
            o_ptrs[:, :, None] + d[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        top = gl.maximum(gl.max(lse, 0), _LOWEST)
        shares = gl.exp2((lse - top[None, :]) * _LOG2_E)
        total = gl.sum(shares, 0)
        divisor = gl.where(total > 0, total, 1.0)
        joined_lse = gl.where(total > 0, top + gl.log2(divisor) * _LN_2, float("-inf"))
        gl.store(_place(final_lse, split, row, head), joined_lse, mask=live)
        shares *= (1.0 / divisor)[None, :]
        # [ROWS * GROUP, DIM]
        joined_out = gl.sum(out * shares[:, :, None], 0)
        pair = gl.arange(0, ROWS * GROUP, gl.SliceLayout(1, OUT))
        row = out_row + pair // GROUP
        d = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
        o_ptrs = _place(final_out, split, row, head_kv * GROUP + pair % GROUP)
        gl.store(
            o_ptrs[:, None] + d[None, :],
            joined_out.to(final_out[0].dtype.element_ty),
            mask=(row < limit)[:, None],
        )
