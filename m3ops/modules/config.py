"""The sizes of one MiniMax-M3 sparse attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..batch import check_at_least, check_number

# What a configuration of transformers must say.
_REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "index_n_heads",
    "index_head_dim",
    "index_block_size",
    "index_topk_blocks",
    "index_local_blocks",
    "rms_norm_eps",
)


@dataclass(frozen=True)
class MiniMaxM3AttentionConfig:
    """Sizes and constants of a sparse attention layer; the defaults are MiniMax-M3's.

    The names are those of transformers' text configuration of this model.

    Attributes:
        hidden_size: channels of the residual stream.
        num_attention_heads: ``Hq``, query heads.
        num_key_value_heads: ``Hkv``, KV heads; divides ``Hq``.
        head_dim: ``D``, channels of a query, key or value head.
        index_n_heads: ``Hi``, index query heads, one per KV head.
        index_head_dim: ``Di``, channels of an index head.
        index_block_size: ``N``, tokens of a block and of a cache page.
        index_topk_blocks: ``K``, blocks each token and KV head attends to.
        index_init_blocks: first visible blocks that are always among them.
        index_local_blocks: last visible blocks that are always among them.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        partial_rotary_factor: share of ``head_dim`` that is rotated.

    Raises:
        TypeError: a size is not an int, or a constant not a number.
        ValueError: a size does not fit the others.
    """

    hidden_size: int = 6144
    num_attention_heads: int = 64
    num_key_value_heads: int = 4
    head_dim: int = 128
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_block_size: int = 128
    index_topk_blocks: int = 16
    index_init_blocks: int = 0
    index_local_blocks: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    partial_rotary_factor: float = 0.5

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "index_n_heads",
            "index_head_dim",
            "index_block_size",
            "index_topk_blocks",
        ):
            check_at_least(name, getattr(self, name), 1)
        for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
            check_number(name, getattr(self, name))
        check_at_least("index_init_blocks", self.index_init_blocks, 0)
        check_at_least("index_local_blocks", self.index_local_blocks, 0)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads` = "
                f"{self.num_key_value_heads}, got {self.num_attention_heads}"
            )
        if self.index_n_heads != self.num_key_value_heads:
            raise ValueError(
                f"`index_n_heads` must be `num_key_value_heads` = {self.num_key_value_heads}, "
                f"got {self.index_n_heads}"
            )
        if self.index_init_blocks + self.index_local_blocks > self.index_topk_blocks:
            raise ValueError(
                f"`index_init_blocks + index_local_blocks` must be at most `index_topk_blocks` = "
                f"{self.index_topk_blocks}, got {self.index_init_blocks} + "
                f"{self.index_local_blocks}"
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"`partial_rotary_factor` must rotate an even number of the {self.head_dim} "
                f"channels of a head, got {self.partial_rotary_factor}: {self.rotary_dim} channels"
            )

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_transformers(cls, config: Any) -> MiniMaxM3AttentionConfig:
        """Read a configuration object of transformers, without importing transformers.

        As there, the rotated channels come from ``rope_parameters["partial_rotary_factor"]``, 1.0
        if absent; the ``rotary_dim`` of the published checkpoint does not count.

        Args:
            config: a ``MiniMaxM3VLTextConfig``, a ``MiniMaxM3VLConfig`` that holds one, or any
                object with its attributes.

        Raises:
            TypeError: `config` lacks an attribute.
            NotImplementedError: a rope type other than ``"default"``, or attention dropout.
            ValueError: sizes do not fit.
        """
        config = getattr(config, "text_config", None) or config
        if missing := [name for name in _REQUIRED if not hasattr(config, name)]:
            raise TypeError(
                f"`config` must have {', '.join(_REQUIRED)}, got a {type(config).__name__} "
                f"without {', '.join(missing)}"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default" or any(isinstance(value, dict) for value in rope.values()):
            raise NotImplementedError(
                "`rope_parameters` must be of rope type 'default', the same for all layers, "
                f"got {rope}"
            )
        if getattr(config, "attention_dropout", 0.0):
            raise NotImplementedError(
                f"`attention_dropout` must be 0, got {config.attention_dropout}"
            )
        hidden_size, num_heads = config.hidden_size, config.num_attention_heads
        return cls(
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or hidden_size // num_heads,
            index_n_heads=config.index_n_heads,
            index_head_dim=config.index_head_dim,
            index_block_size=config.index_block_size,
            index_topk_blocks=config.index_topk_blocks,
            index_local_blocks=config.index_local_blocks,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=rope.get("rope_theta", cls.rope_theta),
            partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
        )
