"""The sparse attention layer, its cache and what describes a step: parameters and op calls."""

from .attention import MiniMaxM3SparseAttention
from .cache import PagedKVCache
from .config import MiniMaxM3AttentionConfig
from .indexer import LightningIndexer
from .metadata import BatchMetadata
from .workspace import Workspace

__all__ = [
    "BatchMetadata",
    "LightningIndexer",
    "MiniMaxM3AttentionConfig",
    "MiniMaxM3SparseAttention",
    "PagedKVCache",
    "Workspace",
]
