"""Gemma's RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
