"""Launching the Gluon kernel of ``index_score`` for Hopper's decode rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .....batch import PACKED, PAGED, Batch
from ....common.launch import (
    MAX_DECODE_QUERIES,
    key_strides,
    launch,
    layout_args,
    num_multiprocessors,
)
from ..launch import BLOCK_SIZE, DIM, _descriptor, _keys, takes
from .kernels import _index_score_decode_kernel

MIN_COLUMNS, MAX_COLUMNS = 8, 64
"""(token, head) pairs of a tile, the short side of its products."""

MIN_BLOCKS = 4
"""Blocks for each multiprocessor that it takes: with fewer, the kernel for every GPU is faster."""

MOST_EXPECTED_COLUMNS = 512
"""Columns of a row that count there: a captured table may be far wider than what is in it."""

BLOCK_B = 128
"""Sequences that one step of the search for a program's share looks at."""


@dataclass(frozen=True)
class DecodeConfig:
    """How a program runs, and how many there are.

    Attributes:
        stages: blocks of keys in flight.
        programs: of each multiprocessor.
        prefetch: blocks that are asked for before the predecessor has ended.
    """

    stages: int
    programs: int
    prefetch: int


CONFIG = DecodeConfig(stages=3, programs=2, prefetch=2)

MAX_REGISTERS = {8: 80, 16: 80, 32: 96, 64: 128}
"""Of a thread, by columns: few enough that the successor's programs find room beside this one's."""


def supports_decode(
    index_q: Tensor, index_k: Tensor, batch: Batch, rows: int, columns: int
) -> bool:
    """Whether the kernel takes these inputs, and `rows` rows of `columns` blocks are worth it."""
    heads = index_q.shape[1]
    return (
        heads <= MAX_COLUMNS
        and heads & (heads - 1) == 0
        and takes(index_q, index_k, batch)
        # Not by the number of sequences, which a captured step of the same rows may pad.
        and rows // _longest(batch) * min(columns, MOST_EXPECTED_COLUMNS)
        >= MIN_BLOCKS * num_multiprocessors(index_q.device)
    )


def _longest(batch: Batch) -> int:
    """The most tokens of a decode sequence, or what they have on average beside longer ones."""
    longest = batch.max_seqlen_q
    if longest > MAX_DECODE_QUERIES:
        longest = -(-batch.num_decode_tokens // max(1, batch.num_decode_seqs))
    return max(1, longest)


def tile_tokens(heads: int, batch: Batch) -> int:
    """Tokens of a tile: as many as a sequence has, if so many fit."""
    wanted = 1 << (_longest(batch) - 1).bit_length()
    return max(MIN_COLUMNS // heads, min(wanted, MAX_COLUMNS // heads), 1)


def launch_hopper_decode_score(
    index_q: Tensor,
    index_k: Tensor,
    batch: Batch,
    scores: Tensor,
    visible: Tensor | None,
    begin: int,
    end: int,
    columns: int,
) -> None:
    """Score rows ``begin .. end`` as `launch_index_score_rows` does.

    Programs take equal shares of all blocks of all rows, so that there is no number of splits.

    Args:
        index_q, index_k, batch: as the op has them.
        scores: the first `columns` columns may be written.
        visible: int32 ``[end - begin]`` or None.
    """
    config = CONFIG
    heads = index_q.shape[1]
    tile_t = tile_tokens(heads, batch)
    stride_outer, stride_token = key_strides(batch, index_k)
    arguments = layout_args(batch, index_k)
    layout = arguments.pop("LAYOUT")
    del arguments["BLOCK_SIZE"]
    arguments["BLOCK_B"] = BLOCK_B
    # A block is prefetched as one piece.
    whole = stride_token == DIM and arguments["num_tokens"] >= BLOCK_SIZE
    most_blocks = ((end - begin) // tile_t + batch.num_seqs) * columns
    programs = config.programs * num_multiprocessors(index_q.device)
    launch(
        _index_score_decode_kernel,
        (max(1, min(programs, most_blocks)),),
        index_q.device,
        q_desc=_descriptor(index_q, [tile_t, heads, DIM]),
        k_desc=_descriptor(_keys(index_k), [1, BLOCK_SIZE, DIM]),
        k_ptr=index_k,
        scores_ptr=scores,
        visible_ptr=visible,
        stride_k_outer=stride_outer,
        stride_s_t=scores.stride(0),
        stride_s_h=scores.stride(1),
        stride_s_j=scores.stride(2),
        row_begin=begin,
        row_end=end,
        num_columns=columns,
        HEADS=heads,
        TILE_T=tile_t,
        PAGED=layout == PAGED,
        PACKED=layout == PACKED,
        STAGES=config.stages,
        PREFETCH=config.prefetch if whole else 0,
        num_warps=4,
        maxnreg=MAX_REGISTERS[tile_t * heads],
        **arguments,
    )
