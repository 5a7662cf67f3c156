"""MiniMax-M3 of Hugging Face transformers, its sparse layers computed by m3ops.

Importing this module registers the attention implementation ``"m3ops"``, so that

    import m3ops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="m3ops")

and ``model.set_attn_implementation("m3ops")`` work; :func:`apply_m3ops` switches the text layers
of one model. Nothing changes for models of another implementation. A model can be copied, pickled,
saved and loaded as before: what is patched is the classes, which ask their config at each call.

A sparse layer then selects blocks with :func:`m3ops.select_blocks` and attends with
:func:`m3ops.sparse_attention`, on keys that stay where transformers' cache holds them, and never
holds the scores of all queries and keys. Dense layers run SDPA with the mask it always gets.

What differs from transformers:

- Blocks count from a sequence's first token, not from slot 0 of the batch, so a prompt padded on
  the left gives what it gives alone.
- Sequences packed in one row (positions that restart, no mask) stay apart also where a new dynamic
  cache is filled. Such a cache cannot be continued.
- Padding between a row's tokens, as a batch padded on the right leaves it in a cache, is refused.
  A compiled function does not look, and attends to that padding.
- Attention weights, masks of four axes and attention dropout are refused.
- Under ``torch.compile``, a call with neither mask nor cache may hold packed sequences, so it is
  computed as if every token could start one; with a mask of ones it is faster.

transformers 5.17 or newer. What the caches of 5.17 cannot do is not mended: a static cache has no
``crop``, and a dynamic one keeps the index keys of its sparse layers in ``reset``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn

if Version(transformers.__version__) < Version("5.17"):
    raise ImportError(
        f"m3ops.integrations.transformers needs transformers 5.17 or newer, "
        f"got {transformers.__version__}"
    )

from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    find_packed_sequence_indices,
    sdpa_mask,
)
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
from transformers.utils.import_utils import is_tracing

from ..custom_ops.select_blocks.api import select_blocks
from ..custom_ops.sparse_attention.api import sparse_attention
from ..modules.norm import gemma_rms_norm
from ..modules.rotary import apply_rotary

__all__ = ["ModelBatch", "apply_m3ops", "remove_m3ops"]

NAME = "m3ops"


def apply_m3ops(model: nn.Module) -> None:
    """Let m3ops compute the sparse layers of `model`, in place.

    Args:
        model: a MiniMax-M3 model of transformers, or a module that holds one. Its vision tower
            keeps its implementation.

    Raises:
        TypeError: there is no MiniMax-M3 text model in it.
    """
    _set_implementation(model, NAME)


def remove_m3ops(model: nn.Module, attn_implementation: str = "sdpa") -> None:
    """Undo :func:`apply_m3ops`, in place.

    Args:
        model: as in :func:`apply_m3ops`.
        attn_implementation: what the text layers use from now on; transformers' default if not
            given.

    Raises:
        TypeError: there is no MiniMax-M3 text model in it.
    """
    _set_implementation(model, attn_implementation)


def _set_implementation(model: nn.Module, name: str) -> None:
    text_models = [m for m in model.modules() if isinstance(m, modeling.MiniMaxM3VLTextModel)]
    if not text_models:
        raise TypeError(
            f"`model` must be or hold a MiniMaxM3VLTextModel, got {type(model).__name__}"
        )
    for text_model in text_models:
        text_model.set_attn_implementation(name)


class ModelBatch(NamedTuple):
    """What the layers of one forward pass get in place of an attention mask.

    Query rows are those of ``hidden_states.flatten(0, 1)``.

    Attributes:
        cu_seqlens_q: int32 ``[n + 1]``, where each sequence's query rows start.
        seqused_k: int32 ``[n]``, keys of each sequence once this call's tokens are in (tokens).
        leftpad_k: int32 ``[n]``, slots before each sequence's first token; None for no padding.
        max_seqlen_q: host bound on a sequence's query tokens.
        packed: whether rows of the batch hold several sequences each, without a past.
        sdpa_mask: bool ``[B, 1, Sq, Sk]``, what SDPA gets in dense layers; None where it needs no
            mask.
    """

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    leftpad_k: Tensor | None
    max_seqlen_q: int
    packed: bool
    sdpa_mask: Tensor | None

    def keywords(self, block_size: int) -> dict[str, Any]:
        """The keyword arguments by which the ops of :mod:`m3ops` take the batch."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "seqused_k": self.seqused_k,
            "cu_seqlens_k": self.cu_seqlens_q if self.packed else None,
            "leftpad_k": self.leftpad_k,
            "max_seqlen_q": self.max_seqlen_q,
            "block_size": block_size,
        }

    def keys(self, states: Tensor) -> Tensor:
        """Cached ``[B, Sk, ...]`` in the layout of the batch: a view, unless rows are packed."""
        return states.flatten(0, 1) if self.packed else states


def m3ops_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> ModelBatch:
    """The mask function of the implementation, as transformers' AttentionMaskInterface calls it.

    Args:
        attention_mask: bool ``[B, slots]``, False in padding; None for none.
        others: as in transformers' ``sdpa_mask``.

    Raises:
        ValueError: there is padding between the tokens of a row (not looked for while tracing).
    """
    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        **kwargs,
    )
    # transformers forbids the skip where it found packed sequences.
    if attention_mask is None and not allow_is_causal_skip and q_length > 1:
        starts = _packed_starts(batch_size, q_length, mask_function, device)
        return ModelBatch(starts, starts.diff(), None, q_length, True, mask)
    starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * q_length
    length = torch.full((batch_size,), q_length, device=device) + q_offset
    leftpad = None
    if attention_mask is not None:
        if not is_tracing(attention_mask):
            _check_padding(attention_mask, q_length + q_offset)
        leftpad = attention_mask.int().argmax(-1)
        # A row may hold nothing but padding so far.
        length = (length - leftpad).clamp(min=0)
        leftpad = leftpad.int()
    return ModelBatch(starts, length.int(), leftpad, q_length, False, mask)


def _packed_starts(
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device | str,
) -> Tensor:
    """``cu_seqlens_q`` of rows that hold several sequences: a token starts one if it does not see
    the token before it."""
    row = torch.arange(batch_size, device=device)[:, None]
    token = torch.arange(1, q_length, device=device)[None]
    goes_on = mask_function(row, torch.zeros_like(row), token, token - 1)
    starts = ~F.pad(goes_on.expand(batch_size, -1), (1, 0)).flatten()
    total = batch_size * q_length
    if is_tracing(starts):
        # How many there are is not known: sequences without tokens fill up.
        first = torch.arange(total, device=device).where(starts, total).sort().values
    else:
        first = starts.nonzero()[:, 0]
    return F.pad(first, (0, 1), value=total).int()


def _check_padding(attention_mask: Tensor, length: int | Tensor) -> None:
    """Refuse rows whose tokens among the first `length` slots do not stand side by side."""
    slots = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    seen = (attention_mask & (slots < length)).int()
    runs = (F.pad(seen, (1, 0)).diff() > 0).sum(-1)
    if (runs > 1).any():
        raise ValueError(
            "`attention_mask` must have the tokens of a row side by side, got padding between "
            "them; to generate, pad prompts on the left"
        )


def m3ops_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelBatch | Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """SDPA for layers without an indexer, as transformers' AttentionInterface calls it."""
    _refuse_weights(module, kwargs)
    if isinstance(attention_mask, ModelBatch):
        attention_mask = attention_mask.sdpa_mask
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _refuse_weights(module: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions") or module.config.output_attentions:
        raise NotImplementedError(
            "`output_attentions` must be False with attn_implementation='m3ops', which never holds "
            "the attention weights, got True: use 'eager'"
        )


_attention_forward = modeling.MiniMaxM3VLAttention.forward
_indexer_forward = modeling.MiniMaxM3VLIndexer.forward
_create_causal_mask = modeling.create_causal_mask
# The name of the argument changed between versions.
_CACHE = (
    "cache" if "cache" in inspect.signature(_create_causal_mask).parameters else ("past_key_values")
)


@functools.wraps(_attention_forward)
def _sparse_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: ModelBatch | Tensor | None = None,
    cache: Cache | None = None,
    *,
    past_key_values: Cache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    cache = past_key_values if cache is None else cache
    if self.indexer is None or self.config._attn_implementation != NAME:
        return _attention_forward(
            self, hidden_states, position_embeddings, attention_mask, cache, **kwargs
        )
    _refuse_weights(self, kwargs)
    if self.training and self.attention_dropout:
        raise NotImplementedError(
            f"`attention_dropout` must be 0 with attn_implementation='m3ops', "
            f"got {self.attention_dropout}"
        )
    batch = _as_batch(self, hidden_states, attention_mask, cache, kwargs.get("position_ids"))
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    # All [B, S, H, D].
    query = _normalized(self.q_norm, self.q_proj(hidden_states).view(heads))
    key = _normalized(self.k_norm, self.k_proj(hidden_states).view(heads))
    value = self.v_proj(hidden_states).view(heads)
    query, key = (_rotated(states, position_embeddings).to(value.dtype) for states in (query, key))
    if cache is not None:
        states = cache.update(key.transpose(1, 2), value.transpose(1, 2), self.layer_idx)
        key, value = (state.transpose(1, 2) for state in states)
    block_ids = self.indexer(hidden_states, position_embeddings, cache, batch=batch)
    attended = sparse_attention(
        query.flatten(0, 1),
        batch.keys(key),
        batch.keys(value),
        block_ids.transpose(1, 2).flatten(0, 1),
        softmax_scale=self.scaling,
        **batch.keywords(self.indexer.block_size),
    )
    assert isinstance(attended, Tensor)
    return self.o_proj(attended.view(*hidden_states.shape[:-1], -1)), None


@functools.wraps(_indexer_forward)
def _select_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Cache | None = None,
    position_ids: Tensor | None = None,
    *,
    past_key_values: Cache | None = None,
    batch: ModelBatch | None = None,
) -> Tensor:
    """As transformers', but int32, and in ascending order before the -1."""
    cache = past_key_values if cache is None else cache
    if self.config._attn_implementation != NAME:
        return _indexer_forward(self, hidden_states, position_embeddings, cache, position_ids)
    if batch is None:
        batch = _as_batch(self, hidden_states, None, cache, position_ids)
    rows = hidden_states.shape[:-1]
    # Ids carry no gradient.
    with torch.no_grad():
        index_q = self.q_proj(hidden_states).view(*rows, -1, self.head_dim)
        index_q = _rotated(_normalized(self.q_norm, index_q), position_embeddings)
        index_k = self.k_proj(hidden_states).view(*rows, 1, self.head_dim)
        index_k = _rotated(_normalized(self.k_norm, index_k), position_embeddings)
        index_k = index_k.transpose(1, 2)
        if cache is not None:
            index_k = cache.layers[self.layer_idx].update_index(index_k)
        block_ids = select_blocks(
            index_q.flatten(0, 1),
            batch.keys(index_k[:, 0]),
            topk=self.topk_blocks,
            local_blocks=self.local_blocks,
            **batch.keywords(self.block_size),
        )
    return block_ids.unflatten(0, rows).transpose(1, 2)


def _normalized(norm: Any, states: Tensor) -> Tensor:
    """As transformers' module does, in fewer passes over memory unless someone hooked into it."""
    hooks = (
        norm._forward_hooks,
        norm._forward_pre_hooks,
        norm._backward_hooks,
        norm._backward_pre_hooks,
    )
    # Offloading replaces the forward of an instance.
    if type(norm) is not modeling.MiniMaxM3VLRMSNorm or "forward" in vars(norm) or any(hooks):
        return norm(states)
    return gemma_rms_norm(states, norm.weight, norm.eps)


def _rotated(states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """In the wider dtype of the two: autocast leaves the embedding in float32."""
    dtype = torch.promote_types(states.dtype, position_embeddings[0].dtype)
    return apply_rotary(states.to(dtype), *position_embeddings)


def _as_batch(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: ModelBatch | Tensor | None,
    cache: Cache | None,
    position_ids: Tensor | None,
) -> ModelBatch:
    """The model's batch, or that of a layer which is called by itself."""
    if attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
        attention_mask = _model_mask(
            config=layer.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            layer_idx=layer.layer_idx,
            **{_CACHE: cache},
        )
    if not isinstance(attention_mask, ModelBatch):
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise NotImplementedError(
            "`attention_mask` must be a padding mask [B, slots] or None with "
            f"attn_implementation='m3ops', got {got}"
        )
    return attention_mask


@functools.wraps(_create_causal_mask)
def _model_mask(*args: Any, **kwargs: Any) -> Any:
    """transformers looks for packed sequences only where there is no cache, yet the models make one
    unless told otherwise."""
    cache, position_ids = kwargs.get(_CACHE), kwargs.get("position_ids")
    if (
        kwargs["config"]._attn_implementation == NAME
        and isinstance(cache, Cache)
        and kwargs["attention_mask"] is None
        and position_ids is not None
        and position_ids.shape[-1] > 1
        and not is_tracing(position_ids)
        and find_packed_sequence_indices(position_ids) is not None
    ):
        if cache.is_compileable or cache.get_seq_length(kwargs.get("layer_idx") or 0):
            raise ValueError(
                "`position_ids` must not restart where a cache is static or continued, got packed "
                "sequences: pass use_cache=False or a new DynamicCache"
            )
        kwargs[_CACHE] = None
    return _create_causal_mask(*args, **kwargs)


AttentionInterface.register(NAME, m3ops_attention)
AttentionMaskInterface.register(NAME, m3ops_mask)
modeling.MiniMaxM3VLAttention.forward = _sparse_forward
modeling.MiniMaxM3VLIndexer.forward = _select_forward
modeling.create_causal_mask = _model_mask
