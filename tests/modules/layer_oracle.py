"""The layer written again: dense, masked, in float64, one token and one head at a time.

It shares no code with the library. Rotations are complex products and selections are sorts, so that
a mistake in the layer has no twin here. Gradients flow through it, for given block ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m3ops import (
    BatchMetadata,
    MiniMaxM3AttentionConfig,
    MiniMaxM3SparseAttention,
    PagedKVCache,
)

# 16 tokens a block and three blocks a token, so that a prompt of 49 tokens has to choose.
SMALL = MiniMaxM3AttentionConfig(
    hidden_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    index_n_heads=2,
    index_head_dim=32,
    index_block_size=16,
    index_topk_blocks=3,
)


class Oracle(NamedTuple):
    """What the layer must give for one sequence.

    Attributes:
        out: float64 ``[S, hidden_size]``.
        scores: float64 ``[S, Hi, NB]``, -inf for blocks that a token does not see.
        values: float64 ``[S, Hkv, D]``.
    """

    out: Tensor
    scores: Tensor
    values: Tensor


def make_layer(
    config: MiniMaxM3AttentionConfig = SMALL,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> MiniMaxM3SparseAttention:
    """A layer with weights of a size at which scores differ, norm weights not zero."""
    layer = MiniMaxM3SparseAttention(config)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            scale = 0.3 if "norm" in name else parameter.shape[-1] ** -0.5
            parameter.normal_(std=scale)
    return layer.to(device, dtype)


def rotary_angles(config: MiniMaxM3AttentionConfig, length: int) -> Tensor:
    """float64 ``[S, rotary_dim / 2]``, of values rounded to float32 as the layer has them."""
    half = config.rotary_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half) / half)
    return (torch.arange(length)[:, None] * frequencies.float()).double()


def position_tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's ``position_embeddings`` for the oracle's angles."""
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def dense_layer(
    layer: MiniMaxM3SparseAttention,
    hidden: Tensor,
    block_ids: Tensor | None = None,
    angles: Tensor | None = None,
    parameters: dict[str, Tensor] | None = None,
) -> Oracle:
    """One whole sequence ``[S, hidden_size]`` through the layer's parameters.

    Args:
        block_ids: ``[S, Hkv, K]``; None to select from the oracle's own scores.
        parameters: float64, in place of the layer's.
    """
    config = layer.config
    if parameters is None:
        parameters = {k: v.detach().double().cpu() for k, v in layer.state_dict().items()}
    hidden = hidden.cpu().double()
    length = len(hidden)
    angles = rotary_angles(config, length) if angles is None else angles

    def heads(name: str, norm: bool = True) -> Tensor:
        size = config.index_head_dim if name.startswith("indexer") else config.head_dim
        x = (hidden @ parameters[f"{name}_proj.weight"].T).view(length, -1, size)
        if not norm:
            return x
        x = x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        return _rotate(x * (1 + parameters[f"{name}_norm.weight"]), angles)

    q, k, v = heads("q"), heads("k"), heads("v", norm=False)
    index_q, index_k = heads("indexer.q"), heads("indexer.k")[:, 0]
    scores = _block_scores(index_q, index_k, config.index_block_size)
    rows = []
    group = config.num_attention_heads // config.num_key_value_heads
    for t in range(length):
        for head in range(config.num_attention_heads):
            if block_ids is None:
                ids = _best(scores[t, head // group], t // config.index_block_size, config)
            else:
                ids = [j for j in block_ids[t, head // group].tolist() if j >= 0]
            kept = [s for s in range(t + 1) if s // config.index_block_size in ids]
            logits = k[kept, head // group] @ q[t, head] / config.head_dim**0.5
            rows.append(logits.softmax(0) @ v[kept, head // group])
    attended = torch.stack(rows).view(length, -1)
    return Oracle(attended @ parameters["o_proj.weight"].T, scores, v)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    half = angles.shape[1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def _block_scores(index_q: Tensor, index_k: Tensor, block_size: int) -> Tensor:
    length = len(index_k)
    dots = torch.einsum("thd,sd->ths", index_q, index_k)
    future = torch.arange(length) > torch.arange(length)[:, None]
    dots = dots.masked_fill(future[:, None], -torch.inf)
    return torch.stack([part.amax(-1) for part in dots.split(block_size, -1)], -1)


def _best(scores: Tensor, own: int, config: MiniMaxM3AttentionConfig) -> list[int]:
    forced = [j for j in range(own + 1) if own - j < config.index_local_blocks]
    others = sorted(set(range(own + 1)) - set(forced), key=lambda j: (-float(scores[j]), j))
    return sorted((forced + others)[: config.index_topk_blocks])


def assert_selection(block_ids: Tensor, scores: Tensor, block_size: int, slack: float) -> None:
    """The ids are the best by the oracle's scores, up to `slack` between kept and dropped."""
    topk = block_ids.shape[2]
    for t, row in enumerate(block_ids.tolist()):
        visible = t // block_size + 1
        for head, ids in enumerate(row):
            live = ids[: min(topk, visible)]
            assert live == sorted(set(live)) and live[0] >= 0 and live[-1] == visible - 1
            assert ids[len(live) :] == [-1] * (topk - len(live))
            dropped = [float(scores[t, head, j]) for j in range(visible) if j not in live]
            kept = [float(scores[t, head, j]) for j in live[:-1]]
            if dropped and kept:
                assert min(kept) >= max(dropped) - slack, (t, head, ids)


class PagedSequences:
    """Sequences that are fed to a layer step by step, through scattered pages of one cache.

    Pages that nobody owns, and slots that nobody wrote, are NaN.
    """

    def __init__(
        self,
        config: MiniMaxM3AttentionConfig,
        lengths: Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.device = device
        size = config.index_block_size
        needed = [-(-length // size) for length in lengths]
        self.cache = PagedKVCache(config, sum(needed) + 5, dtype=dtype, device=device)
        for buffer in self.cache.buffers():
            buffer.fill_(torch.nan)
        pages = iter(torch.randperm(self.cache.num_pages).tolist())
        self.tables = [[next(pages) for _ in range(n)] for n in needed]
        self.contexts = [0] * len(lengths)

    def step(self, query_lens: dict[int, int], **options: Any) -> BatchMetadata:
        """The batch of a step that takes so many tokens of each sequence, in the dict's order."""
        contexts = [self.contexts[i] for i in query_lens]
        for i, count in query_lens.items():
            self.contexts[i] += count
        return BatchMetadata.from_lengths(
            list(query_lens.values()),
            contexts,
            [self.tables[i] for i in query_lens],
            block_size=self.config.index_block_size,
            device=self.device,
            **options,
        )
