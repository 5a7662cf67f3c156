"""Gluon functions of programs that are clusters of multiprocessors, one for each split.

Every multiprocessor joins the splits of some of the heads: all write theirs into its shared memory,
and each write counts at a barrier there. A barrier of the cluster, for which all threads come,
says before that every multiprocessor is there to be written to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...kernels import _LN_2
from ...layouts import _blocked, _heads_apart
from ..join.kernels import _place

# Floats from one head of one split to the next: its channels, its largest logit, its sum, and two
# more, so that channels lie at multiples of 16 bytes.
_PITCH = gl.constexpr(132)
# Splits times heads of a multiprocessor are as many as a group has heads: 16 times 132 floats, then
# the barrier. The memory is static, since a kernel learns no address of what is allocated for it.
# That lies behind it, at a multiple of 1024 bytes, as the copy engine wants.
_BUFFER = gl.constexpr("{ .shared .align 1024 .b8 joined[9216]; mov.u32 $0, joined; }")
_BARRIER = gl.constexpr(8448)
# For the 16 times 130 floats that will be written.
_EXPECT = gl.constexpr(
    """
    {
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.init.shared::cta.b64 [$1], 1;
        @first fence.mbarrier_init.release.cluster;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], 8320;
        mov.u32 $0, 0;
    }
    """
)
# From the four threads that have all columns between them.
_SEND_SUMS = gl.constexpr(
    """
    {
        .reg .pred first;
        .reg .b32 there, barrier, thread;
        mov.u32 thread, %tid.x;
        setp.lt.u32 first, thread, 4;
        mapa.shared::cluster.u32 there, $1, $3;
        mapa.shared::cluster.u32 barrier, $2, $3;
        @first st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32
            [there], {$4, $5}, [barrier];
        mov.u32 $0, 0;
    }
    """
)
_SEND_FOUR = gl.constexpr(
    """
    {
        .reg .b32 there, barrier;
        mapa.shared::cluster.u32 there, $4, $12;
        mapa.shared::cluster.u32 barrier, $8, $12;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32
            [there], {$16, $17, $18, $19}, [barrier];
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        mov.u32 $2, 0;
        mov.u32 $3, 0;
    }
    """
)
_WAIT = gl.constexpr(
    """
    {
        .reg .pred complete;
        again:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [$1], 0;
        @!complete bra.uni again;
        mov.u32 $0, 0;
    }
    """
)


@gluon.jit
def _run(text: gl.constexpr, value):
    return gl.inline_asm_elementwise(text, "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _rank():
    """Which multiprocessor of the cluster this is."""
    return _run("mov.u32 $0, %cluster_ctarank;", gl.to_tensor(0))


@gluon.jit
def _arrive():
    """At the barrier of the cluster."""
    _run("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", gl.to_tensor(0))


@gluon.jit
def _await():
    """Until all threads of the cluster have arrived."""
    _run("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;", gl.to_tensor(0))


@gluon.jit
def _stand_by():
    """Warps without work: the barrier of a cluster waits for every thread."""
    _arrive()
    _await()


@gluon.jit
def _prepare():
    """Where the other multiprocessors write, with a barrier that expects that."""
    buffer = _run(_BUFFER, gl.to_tensor(0))
    _run(_EXPECT, buffer + _BARRIER)
    return buffer


@gluon.jit
def _join_in_cluster(acc, top, weight_sum, buffer, outputs, place):
    """Send a split's sums to where their heads are joined, and join those of some heads.

    Always in the order of the splits. `acc` ``[D, heads]`` is not yet divided by `weight_sum`, and
    `top` are the largest logits in powers of 2.
    """
    out_ptr, _, stride_o_t, stride_o_h = outputs[0]
    lse_ptr, _, stride_l_t, stride_l_h = outputs[1]
    _, out_row, head_kv, split = place
    DIM: gl.constexpr = acc.shape[0]
    GROUP: gl.constexpr = acc.shape[1]
    SPLITS: gl.constexpr = gl.num_ctas()
    HEADS: gl.constexpr = GROUP // SPLITS
    # A warp has whole heads.
    SENT: gl.constexpr = _blocked([4, 1], [32, 1], [1, 4], [0, 1], SPLITS)
    COLUMN: gl.constexpr = top.type.layout
    _await()
    g = gl.arange(0, GROUP, COLUMN)
    slot = buffer + (split * HEADS + g % HEADS) * (_PITCH * 4)
    barrier = buffer + _BARRIER
    gl.inline_asm_elementwise(
        _SEND_SUMS,
        "=r,r,r,r,f,f",
        [slot + DIM * 4, barrier, g // HEADS, top, weight_sum],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    g = gl.arange(0, GROUP, gl.SliceLayout(0, SENT))[None, :]
    d = gl.arange(0, DIM, gl.SliceLayout(1, SENT))[:, None]
    slot = buffer + (split * HEADS + g % HEADS) * (_PITCH * 4)
    gl.inline_asm_elementwise(
        _SEND_FOUR,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
        [slot + d * 4, barrier, g // HEADS, gl.convert_layout(acc, SENT)],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )

    JOINED: gl.constexpr = _heads_apart(SPLITS)
    PAIR: gl.constexpr = gl.SliceLayout(2, JOINED)
    OUT: gl.constexpr = gl.SliceLayout(0, JOINED)
    s = gl.arange(0, SPLITS, gl.SliceLayout(1, PAIR))
    g = gl.arange(0, GROUP, gl.SliceLayout(0, PAIR))
    d = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, JOINED)))
    # [SPLITS, GROUP], of which a multiprocessor has its own heads
    slot = buffer + (s[:, None] * HEADS + (g % HEADS)[None, :]) * (_PITCH * 4)
    _run(_WAIT, barrier)
    tops, sums = gl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];",
        "=f,=f,r",
        [slot + DIM * 4],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )
    # [SPLITS, GROUP, DIM]
    accs = gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [slot[:, :, None] + d[None, None, :] * 4],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
    top = gl.max(tops, 0)
    shares = gl.exp2(tops - top[None, :])
    total = gl.sum(sums * shares, 0)
    divisor = gl.where(total > 0, total, 1.0)
    lse = gl.where(total > 0, (top + gl.log2(divisor)) * _LN_2, float("-inf"))
    results = (lse_ptr, 0, stride_l_t, stride_l_h)
    gl.store(_place(results, split, out_row, head_kv * GROUP + g), lse)
    shares *= (1.0 / divisor)[None, :]
    # [GROUP, DIM]
    out = gl.sum(accs * shares[:, :, None], 0)
    g = gl.arange(0, GROUP, gl.SliceLayout(1, OUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    results = (out_ptr, 0, stride_o_t, stride_o_h)
    o_ptrs = _place(results, split, out_row, head_kv * GROUP + g)[:, None] + d[None, :]
    gl.store(o_ptrs, out.to(out_ptr.dtype.element_ty))
