"""A pool whose size changes while it is used: its addresses stay, memory comes and goes behind the last blocks."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from onebudget.buffers.dtypes import ITEM_BYTES
from onebudget.resources.kv.pool import OWNER, KVLayout, KVPool
from onebudget.units import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onebudget.buffers import BufferManager
    from onebudget.buffers.virtual.elastic import ElasticBuffer

STEPS = 64
"""Into about so many pieces a quota is cut: fewer, larger ones are mapped faster, and shares come out coarser."""


class ElasticPool(KVPool):
    """``num_blocks`` of at most ``most_blocks``; all three sizes are multiples of ``unit_blocks(layout, alignment)``.

    The views span ``most_blocks``, so that captured graphs stay valid; blocks from ``num_blocks`` on must not be
    touched. Every part of every layer is one row of pieces: what ``num_blocks`` leaves over ``step_blocks``, then
    steps.
    """

    buffer: ElasticBuffer

    def __init__(
        self, manager: BufferManager, layout: KVLayout, num_blocks: int, *, most_blocks: int, step_blocks: int
    ) -> None:
        self._most_blocks = most_blocks
        self._step_blocks = step_blocks
        super().__init__(manager, layout, num_blocks)

    @property
    def step_blocks(self) -> int:
        return self._step_blocks

    @property
    def _viewed_blocks(self) -> int:
        return self._most_blocks

    def _take(self, elements: int) -> ElasticBuffer:
        self.buffer = self._manager.elastic(elements, self.layout.dtype, owner=OWNER)
        try:
            self._map(0, self.num_blocks)
        except BaseException:
            self.buffer.release()
            raise
        return self.buffer

    def resize(self, num_blocks: int) -> None:
        before = self.num_blocks
        if num_blocks < before:
            self.num_blocks = num_blocks
            self._unmap(num_blocks, before)
            return
        try:
            self._map(before, num_blocks)
        except BaseException:
            self._unmap(before, num_blocks)
            raise
        self.num_blocks = num_blocks

    def _map(self, first: int, end: int) -> None:
        for start, nbytes in self._pieces(first, end):
            self.buffer.map(start, nbytes)

    def _unmap(self, first: int, end: int) -> None:
        for start, _ in self._pieces(first, end):
            self.buffer.unmap(start)

    def _pieces(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Start and length in bytes of the pieces of blocks ``first`` to ``end`` in all rows."""
        step = self.step_blocks
        cuts = [first, *range(first + ((end - first) % step or step), end, step), end]
        row = 0
        for part_bytes in part_block_bytes(self.layout) * self.num_layers:
            for start, stop in pairwise(cuts):
                yield row + start * part_bytes, (stop - start) * part_bytes
            row += self._most_blocks * part_bytes


def part_block_bytes(layout: KVLayout) -> list[int]:
    """Bytes of one block in each part of one layer."""
    return [math.prod(part) * layout.tokens_per_block * ITEM_BYTES[layout.dtype] for part in layout.parts]


def unit_blocks(layout: KVLayout, alignment_bytes: int) -> int:
    """The fewest blocks that fill whole device pages in every part."""
    return math.lcm(*(math.lcm(alignment_bytes, nbytes) // nbytes for nbytes in part_block_bytes(layout)))


def step_blocks(layout: KVLayout, alignment_bytes: int, quota_bytes: int) -> int:
    """Blocks by which a pool of a quota changes."""
    return align_up(max(1, quota_bytes // STEPS // layout.block_bytes), unit_blocks(layout, alignment_bytes))
