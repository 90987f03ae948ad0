"""Places that evicted blocks go to: host memory, then disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class BlockTier(Protocol):
    """Slots of one block each. Which slot holds what is the manager's business."""

    @property
    def name(self) -> str: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def in_memory(self) -> bool:
        """Whether ``rows`` gives writable memory, so that a copy can be asynchronous."""
        ...

    def row(self, slot: int) -> Any:
        """A uint8 tensor ``[block_bytes]`` of one slot; only of tiers in memory."""
        ...

    def write(self, slot: int, data: Any) -> bool:
        """Keep a block's bytes; False when the tier can't, which also ends its service."""
        ...

    def read(self, slot: int) -> bytes | None:
        """The bytes of a slot, None when they are gone or damaged."""
        ...

    def discard(self, slots: Sequence[int]) -> None:
        """The contents of these slots are no longer wanted."""
        ...

    def release(self) -> None: ...


@dataclass(slots=True)
class CountedTier:
    """Books only."""

    name: str
    num_slots: int
    in_memory: bool = True

    def row(self, slot: int) -> Any:
        raise NotImplementedError("a counted tier has no contents")

    def write(self, slot: int, data: Any) -> bool:
        return True

    def read(self, slot: int) -> bytes | None:
        return b""

    def discard(self, slots: Sequence[int]) -> None:
        pass

    def release(self) -> None:
        pass
