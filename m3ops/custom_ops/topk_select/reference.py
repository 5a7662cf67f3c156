"""The meaning of ``topk_select``, in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_FORCED, _VISIBLE, _HIDDEN = 2, 1, 0


def topk_select_reference(
    scores: Tensor,
    num_valid_blocks: Tensor,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
) -> None:
    """Two stable sorts: by score within a class, then forced before visible before hidden."""
    columns = torch.arange(scores.shape[2], device=scores.device)
    visible = num_valid_blocks.clamp(0, scores.shape[2])[:, None]
    forced = (columns < init_blocks) | (columns >= visible - local_blocks)
    classes = torch.where(forced, _FORCED, _VISIBLE).where(columns < visible, _HIDDEN)
    classes = classes[:, None].expand(scores.shape)
    keys = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    by_score = keys.argsort(dim=2, descending=True, stable=True)
    by_class = classes.gather(2, by_score).argsort(dim=2, descending=True, stable=True)
    best = by_score.gather(2, by_class)[:, :, :topk]
    best = F.pad(best, (0, topk - best.shape[2]))
    kept = torch.arange(topk, device=scores.device) < visible
    last = torch.iinfo(torch.int32).max
    ids = best.masked_fill(~kept[:, None], last).sort(dim=2).values
    out.copy_(ids.masked_fill(ids == last, -1))
