"""The device memory of the paged KV cache and the views attention reads and writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onebudget.buffers.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from onebudget.buffers import BufferManager

OWNER = "kv_cache"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the cache: one block holds ``tokens_per_block`` tokens of every layer.

    ``parts`` are the shapes of what one token caches in one layer: ``(kv_heads, head_dim)`` twice for K and V, or one
    ``(latent_dim,)``.
    """

    num_layers: int
    tokens_per_block: int
    parts: tuple[tuple[int, ...], ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """All parts of one token in one layer."""
        return sum(math.prod(part) for part in self.parts) * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.tokens_per_block * self.row_bytes


@dataclass(frozen=True, slots=True)
class PagePart:
    """One part of one layer: ``slots`` ``[blocks * tokens_per_block, *shape]`` to write tokens, ``blocks``
    ``[blocks, elements of a block]`` to read whole blocks."""

    slots: torch.Tensor
    blocks: torch.Tensor


class KVPool:
    """Blocks of all layers and parts in one device buffer; ``parts[layer][part]`` are its views.

    A block holds whatever was in the memory until ``clear_fresh`` was told about it.
    """

    def __init__(self, manager: BufferManager, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._manager = manager
        self.allocate()

    def allocate(self) -> None:
        """Take the pool's memory and make its views; also after the memory was lost."""
        layout = self.layout
        self.buffer = self._manager.gpu(self.allocated_bytes // ITEM_BYTES[layout.dtype], layout.dtype, owner=OWNER)
        sizes = [math.prod(shape) * self._slots for shape in layout.parts] * layout.num_layers
        pages = iter(self.buffer.as_tensor().split(sizes))
        self.parts = [[self._part(next(pages), shape) for shape in layout.parts] for _ in range(layout.num_layers)]
        self.forget_contents()

    def forget_contents(self) -> None:
        """The memory was replaced or lost: no block counts as written."""
        self._written = bytearray(self.num_blocks)

    def clear_fresh(self, blocks: Sequence[int]) -> None:
        """Set those of ``blocks`` to 0 that nobody used before.

        Attention reads whole blocks and masks what a sequence has not written, but a masked slot still counts when it
        holds no number (0 times infinity). Slots of earlier sequences hold numbers.
        """
        fresh = [block for block in blocks if not self._written[block]]
        if not fresh:
            return
        for block in fresh:
            self._written[block] = 1
        index = torch.tensor(fresh, device=self.parts[0][0].blocks.device)
        for page in itertools.chain.from_iterable(self.parts):
            page.blocks.view(torch.uint8).index_fill_(0, index, 0)

    @property
    def _slots(self) -> int:
        return self.num_blocks * self.layout.tokens_per_block

    def _part(self, page: torch.Tensor, shape: tuple[int, ...]) -> PagePart:
        return PagePart(page.view(self._slots, *shape), page.view(self.num_blocks, -1))

    @property
    def allocated_bytes(self) -> int:
        return self.layout.block_bytes * self.num_blocks

    def release(self) -> None:
        """Drop the views, then the memory. Safe to call again."""
        self.parts = []
        if not self.buffer.released:
            self.buffer.release()
