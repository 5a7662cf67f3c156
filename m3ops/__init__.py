"""MiniMax-M3's block-sparse attention as PyTorch ops and modules."""

from .backends import Backend, backends, use_backend
from .batch import num_valid_blocks
from .checks import check_mode
from .custom_ops.index_score.api import index_score
from .custom_ops.select_blocks.api import select_blocks
from .custom_ops.sparse_attention.api import merge_attention, sparse_attention
from .custom_ops.store_kv.api import store_kv
from .custom_ops.topk_select.api import topk_select
from .modules import (
    BatchMetadata,
    LightningIndexer,
    MiniMaxM3AttentionConfig,
    MiniMaxM3SparseAttention,
    PagedKVCache,
    Workspace,
)
from .visible import visible_kernels
from .warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BatchMetadata",
    "LightningIndexer",
    "MiniMaxM3AttentionConfig",
    "MiniMaxM3SparseAttention",
    "PagedKVCache",
    "Workspace",
    "backends",
    "check_mode",
    "index_score",
    "merge_attention",
    "num_valid_blocks",
    "select_blocks",
    "sparse_attention",
    "store_kv",
    "topk_select",
    "use_backend",
    "visible_kernels",
    "warmup",
]
