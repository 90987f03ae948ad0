"""Memory that comes to life at first use, after the pool took its share: no probe sees it, so its owner registers
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onebudget.budget.ledger import TERM_NAMES
from onebudget.budget.reserves import ReserveLine, penalty_table_bytes
from onebudget.errors import ConfigError
from onebudget.units import format_bytes


@dataclass(frozen=True, slots=True)
class LateAllocation:
    """The most that a buffer can take, and what makes it appear. ``reserve`` False: listed, but not paid for."""

    name: str
    worst_bytes: int
    trigger: str
    reserve: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.worst_bytes, int) or self.worst_bytes < 0:
            allowed = "a whole number of bytes, at least 0"
            raise ConfigError.for_field(f"late allocation {self.name}", self.worst_bytes, allowed)


class LateAllocations:
    """What owners registered before the budget is derived."""

    def __init__(self) -> None:
        self._items: dict[str, LateAllocation] = {}

    def register(self, item: LateAllocation) -> None:
        """Add one; a second one of the same name is a ``ConfigError``, because one of the two would go unpaid."""
        if item.name in self._items:
            allowed = "a name that is not registered yet"
            raise ConfigError.for_field("name of a late allocation", item.name, allowed)
        self._items[item.name] = item

    def __iter__(self) -> Iterator[LateAllocation]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def reserve_lines(self) -> tuple[ReserveLine, ...]:
        """Reserves for those that ask for one: under their own name where ledgers know it, the others together."""
        paid = [item for item in self if item.reserve and item.worst_bytes > 0]
        known = [item for item in paid if item.name in TERM_NAMES]
        others = [item for item in paid if item.name not in TERM_NAMES]
        lines = [ReserveLine(item.name, item.worst_bytes, reason=f"appears with {item.trigger}") for item in known]
        if others:
            parts = (f"{item.name} {format_bytes(item.worst_bytes)} with {item.trigger}" for item in others)
            total = sum(item.worst_bytes for item in others)
            lines.append(ReserveLine("late_allocations", total, reason="; ".join(parts)))
        return tuple(lines)

    def notes(self) -> tuple[str, ...]:
        """A sentence for each one that is listed without being paid for."""
        return tuple(
            f"Not reserved: {item.name}, up to {format_bytes(item.worst_bytes)} with {item.trigger}."
            for item in self
            if not item.reserve
        )


def penalty_tables(
    *, num_sequences: int, max_beam_width: int, vocab_size: int, granule_bytes: int = 1
) -> LateAllocation:
    """The penalty tables of all slots of our own engine: it does not live off the fraction's slack."""
    worst = penalty_table_bytes(
        num_sequences=num_sequences,
        max_beam_width=max_beam_width,
        vocab_size=vocab_size,
        granule_bytes=granule_bytes,
    )
    return LateAllocation("penalty_workspace", worst, "the first penalised request")
