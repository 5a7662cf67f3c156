"""Draws which blocks the tokens of a run kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dense_oracle import blocks_kept
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

PLOT_TYPES = (".png", ".pdf", ".svg")
SHADES = " .:-=+*#%@"


def text_map(block_ids: Tensor, num_blocks: int, block_size: int, side: int = 39) -> str:
    """A legend and a square of characters, darker where more tokens and groups kept a block.

    Args:
        block_ids: ``[S, Hkv, K]``, the blocks that token ``0 .. S - 1`` kept, -1 for none.
        num_blocks: blocks of the sequence.
        block_size: tokens of a block.
        side: most lines of the square; a line has two characters for each.
    """
    kept = blocks_kept(block_ids, num_blocks).float().mean(1)
    span = -(-num_blocks // side)
    lines = [
        f"Blocks kept: {span * block_size} tokens a line, "
        f"{span} block{'s' * (span > 1)} a column, by none '{SHADES[0]}' to all '{SHADES[-1]}'"
    ]
    for tokens in kept.split(span * block_size):
        shares = [blocks.mean().item() for blocks in tokens.split(span, dim=1)]
        shades = (SHADES[round(share * (len(SHADES) - 1))] for share in shares)
        lines.append("".join(2 * shade for shade in shades).rstrip())
    return "\n".join(lines)


def draw_map(
    block_ids: Tensor, num_blocks: int, block_size: int, labels: Sequence[str] | None = None
) -> Figure:
    """Draw one panel per KV group: tokens to the right, blocks upwards.

    Args:
        block_ids: ``[S, Hkv, K]``, on the CPU; groups of several layers may stand side by side.
        num_blocks: blocks of the sequence.
        block_size: tokens of a block.
        labels: name of each panel; None for ``KV group 0`` and so on.
    """
    total, groups, _ = block_ids.shape
    # More tokens than pixels would only blur.
    rows = torch.linspace(0, total - 1, min(total, 4096)).round().long()
    visible = rows[:, None] // block_size >= torch.arange(num_blocks)
    kept = blocks_kept(block_ids[rows], num_blocks)
    shades = visible[:, None].int() + kept.int()
    colors = {"not visible": "white", "left out": "#d5dbe3", "kept": "#1f4e79"}
    # Not by pyplot, which would show it or need a display, as the case may be.
    figure = Figure(figsize=(10, 2.2 * groups + 0.5), layout="constrained")
    axes = figure.subplots(groups, 1, sharex=True, sharey=True, squeeze=False)
    for group, axis in enumerate(axes[:, 0]):
        axis.imshow(
            shades[:, group].T.numpy(),
            cmap=ListedColormap(list(colors.values())),
            vmin=0,
            vmax=2,
            origin="lower",
            aspect="auto",
            interpolation="nearest",
            extent=(0, total, -0.5, num_blocks - 0.5),
        )
        label = f"KV group {group}" if labels is None else labels[group]
        axis.set_ylabel(f"{label}\nblock")
    axes[-1, 0].set_xlabel("token")
    figure.legend(
        handles=[
            Patch(facecolor=color, edgecolor="grey", label=name) for name, color in colors.items()
        ],
        loc="outside upper center",
        ncols=len(colors),
    )
    return figure
