"""The device memory of the paged KV cache and the views attention reads and writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from onebudget.buffers.dtypes import ITEM_BYTES
from onebudget.errors import StateError

if TYPE_CHECKING:
    from onebudget.buffers import Buffer, BufferManager
    from onebudget.resources.kv.tier import BlockTier

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

    A block holds whatever was in the memory until ``clear_fresh`` was told about it. Copies run in the order of the
    device's current stream, like the forward; those through pageable memory wait for it.
    """

    def __init__(self, manager: BufferManager, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._manager = manager
        self.allocate()

    def allocate(self) -> None:
        """Take the pool's memory and make its views; also after the memory was lost."""
        layout, blocks = self.layout, self._viewed_blocks
        sizes = [math.prod(shape) * blocks * layout.tokens_per_block for shape in layout.parts] * layout.num_layers
        self.buffer = self._take(sum(sizes))
        pages = iter(self.buffer.as_tensor().split(sizes))
        self.parts = [[self._part(next(pages), shape) for shape in layout.parts] for _ in range(layout.num_layers)]
        self._pages = [part.blocks for layer in self.parts for part in layer]

    def _take(self, elements: int) -> Buffer:
        return self._manager.gpu(elements, self.layout.dtype, owner=OWNER)

    def clear_fresh(self, blocks: Sequence[int]) -> None:
        """Set ``blocks``, which nobody used before, to 0.

        Attention reads whole blocks and masks what a sequence has not written, but a masked slot still counts when it
        holds no number (0 times infinity). Slots of earlier sequences hold numbers.
        """
        if blocks:
            self.buffer.check_use()  # the views would reach memory that is gone while the cache sleeps
            index = torch.tensor(list(blocks), device=self._pages[0].device)
            for page in self._pages:
                page.view(torch.uint8).index_fill_(0, index, 0)

    def copy_block(self, source: int, target: int) -> None:
        for page in self._pages:
            page[target].copy_(page[source])

    def offload(self, blocks: Sequence[int], tier: BlockTier, slots: Sequence[int]) -> bool:
        if tier.in_memory:
            for block, slot in zip(blocks, slots, strict=True):
                self._pack(block, tier.row(slot))
            return True
        row = torch.empty(self.block_bytes, dtype=torch.uint8)
        for block, slot in zip(blocks, slots, strict=True):
            self._pack(block, row)
            self._wait()
            if not tier.write(slot, row.numpy().data):
                return False
        return True

    def onboard(self, tier: BlockTier, slots: Sequence[int], blocks: Sequence[int]) -> int:
        for done, (slot, block) in enumerate(zip(slots, blocks, strict=True)):
            if tier.in_memory:
                self._unpack(tier.row(slot), block)
                continue
            data = tier.read(slot)
            if data is None or len(data) != self.block_bytes:
                return done
            self._unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), block)
        return len(slots)

    def _wait(self) -> None:
        if self._pages[0].is_cuda:
            torch.cuda.current_stream(self._pages[0].device).synchronize()

    def _pack(self, block: int, row: torch.Tensor) -> None:
        """One block of all layers and parts, in this order, into ``[block_bytes]``."""
        start = 0
        for page in self._pages:
            source = page[block].view(torch.uint8)
            row[start : start + source.numel()].copy_(source, non_blocking=True)
            start += source.numel()

    def _unpack(self, row: torch.Tensor, block: int) -> None:
        start = 0
        for page in self._pages:
            target = page[block].view(torch.uint8)
            target.copy_(row[start : start + target.numel()], non_blocking=True)
            start += target.numel()

    def resize(self, num_blocks: int) -> None:
        raise StateError(f"a pool in one plain buffer keeps its {self.num_blocks} blocks")

    @property
    def step_blocks(self) -> int:
        return 0

    @property
    def _viewed_blocks(self) -> int:
        """Blocks that the views span."""
        return self.num_blocks

    def _part(self, page: torch.Tensor, shape: tuple[int, ...]) -> PagePart:
        blocks = self._viewed_blocks
        return PagePart(page.view(blocks * self.tokens_per_block, *shape), page.view(blocks, -1))

    @property
    def allocated_bytes(self) -> int:
        return self.layout.block_bytes * self.num_blocks

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    @property
    def tokens_per_block(self) -> int:
        return self.layout.tokens_per_block

    def release(self) -> None:
        """Drop the views, then the memory. Safe to call again."""
        self.parts = []
        self._pages = []
        if not self.buffer.released:
            self.buffer.release()
