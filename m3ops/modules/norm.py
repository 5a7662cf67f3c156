"""Gemma's RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What :class:`GemmaRMSNorm` computes of ``[..., dim]``, with `weight` ``[dim]``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = 1.0 + weight.to(wide.dtype)
    return F.rms_norm(wide, scale.shape, scale, eps).to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * (1 + weight)`` over the last axis, in float32 or wider.

    Args:
        dim: size of the last axis.
        eps: added to the mean square.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        # Text: of a float, torch.compile(dynamic=True) makes a tensor on the CPU, which CUDA graphs
        # refuse.
        self._eps = repr(float(eps))
        self.weight = nn.Parameter(torch.zeros(dim, dtype=dtype, device=device))

    @property
    def eps(self) -> float:
        """Added to the mean square."""
        return float(self._eps)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., dim]`` -> the same shape and dtype, rounded once, at the end."""
        return gemma_rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
