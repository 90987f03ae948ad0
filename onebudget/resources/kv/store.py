"""What a KV manager asks of the memory behind its blocks, and a store without any for simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from onebudget.resources.kv.tier import BlockTier


class KVStore(Protocol):
    """Device blocks of one pool. All copies are in the order of the execution stream, so a block may be handed on as
    soon as its copy was asked for."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def allocated_bytes(self) -> int:
        """Device bytes of the pool."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, as a tier has to keep them."""
        ...

    @property
    def step_blocks(self) -> int:
        """``resize`` takes sizes that differ from this one by a multiple of it; 0: the pool keeps its size."""
        ...

    def resize(self, num_blocks: int) -> None:
        """Have so many blocks: the last ones go, or new ones come behind them, and all others stay as they are.
        ``AllocationError`` with nothing changed where there is no memory for more."""
        ...

    def clear_fresh(self, blocks: Sequence[int]) -> None:
        """Make blocks readable that hold whatever was in the memory before."""
        ...

    def copy_block(self, source: int, target: int) -> None: ...

    def offload(self, blocks: Sequence[int], tier: BlockTier, slots: Sequence[int]) -> bool:
        """Copy blocks out to slots of a tier; False when the tier could not take them."""
        ...

    def onboard(self, tier: BlockTier, slots: Sequence[int], blocks: Sequence[int]) -> int:
        """Copy slots of a tier into blocks; how many of them, from the first on, hold what they should."""
        ...

    def release(self) -> None:
        """Give the memory back. Safe to call again."""
        ...


@dataclass(slots=True)
class CountedStore:
    """Books only: ``num_blocks`` numbers without contents."""

    num_blocks: int
    tokens_per_block: int
    block_bytes: int = 0
    released: bool = False
    step_blocks: int = 1

    @property
    def allocated_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def resize(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def clear_fresh(self, blocks: Sequence[int]) -> None:
        pass

    def copy_block(self, source: int, target: int) -> None:
        pass

    def offload(self, blocks: Sequence[int], tier: BlockTier, slots: Sequence[int]) -> bool:
        return True

    def onboard(self, tier: BlockTier, slots: Sequence[int], blocks: Sequence[int]) -> int:
        return len(slots)

    def release(self) -> None:
        self.released = True
