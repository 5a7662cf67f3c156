"""Partial rotary embedding with half-split pairing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Cosines and sines of ``position * theta**(-2i / dim)``.

    The frequencies are a buffer that no state dict holds and that stays float32 when the module is
    cast: rounded to bfloat16 they would be wrong by many turns at large positions.

    Args:
        dim: rotated channels, even.
        theta: base of the frequencies.
    """

    inv_freq: Tensor

    def __init__(self, dim: int, theta: float, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        channels = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)
        return 1.0 / self.theta ** (channels / self.dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Angles in float32, results in the dtype of `x`.

        Args:
            x: any tensor of the dtype the results shall have.
            positions: integers ``[...]`` (tokens).

        Returns:
            ``(cos, sin)``, each ``[..., dim]``, the second half repeating the first.
        """
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, theta={self.theta}"


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of every head; channel ``i`` pairs with ``i + dim / 2``.

    Args:
        x: ``[..., H, D]``.
        cos: ``[..., dim]``, of which at most ``D`` channels are used.
        sin: like `cos`.

    Returns:
        ``[..., H, D]`` in the dtype of `x`.
    """
    dim = min(cos.shape[-1], x.shape[-1])
    half = dim // 2
    cos, sin = (table[..., None, :dim].to(x.dtype) for table in (cos, sin))
    places = slice(half), slice(half, dim), slice(dim, None)
    first, second, passed = (x[..., place] for place in places)
    parts = (
        first * cos[..., :half] - second * sin[..., :half],
        second * cos[..., half:] + first * sin[..., half:],
        passed,
    )
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat(parts, -1)
    # What cat writes, in half its time where its parts are short stretches of memory.
    out = torch.empty_like(x)
    for place, part in zip(places, parts, strict=True):
        out[..., place] = part
    return out
