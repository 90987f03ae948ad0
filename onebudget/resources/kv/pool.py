"""The device memory of the paged KV cache and the views attention reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.models.facts import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

    from onebudget.buffers import BufferManager

OWNER = "kv_cache"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the cache: one block holds ``tokens_per_block`` tokens of every layer, K and V."""

    num_layers: int
    tokens_per_block: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.tokens_per_block * self.row_bytes


class KVPool:
    """``[layers, 2, blocks, tokens_per_block, kv_heads, head_dim]`` in one device buffer.

    Per layer and for K and V: ``slots`` views the pool as ``[blocks * tokens_per_block, kv_heads, head_dim]`` for
    writing tokens, ``blocks`` as ``[blocks, row elements]`` for reading whole blocks.
    """

    def __init__(self, manager: BufferManager, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, 2, num_blocks, layout.tokens_per_block, layout.num_kv_heads, layout.head_dim)
        self._buffer = manager.gpu(shape, layout.dtype, owner=OWNER)
        pool: torch.Tensor = self._buffer.as_tensor()
        slots = pool.view(layout.num_layers, 2, num_blocks * layout.tokens_per_block, layout.num_kv_heads, layout.head_dim)
        blocks = pool.view(layout.num_layers, 2, num_blocks, -1)
        self.key_slots = [layer[0] for layer in slots]
        self.value_slots = [layer[1] for layer in slots]
        self.key_blocks = [layer[0] for layer in blocks]
        self.value_blocks = [layer[1] for layer in blocks]

    @property
    def allocated_bytes(self) -> int:
        return self.layout.block_bytes * self.num_blocks

    def release(self) -> None:
        """Drop the views, then the memory. Safe to call again."""
        self.key_slots, self.value_slots, self.key_blocks, self.value_blocks = [], [], [], []
        self._buffer.release()
