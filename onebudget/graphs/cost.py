"""What graphs cost: declared before any is captured, extended from a few samples, compared with what capture took."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from onebudget.errors import ConfigError
from onebudget.units import format_bytes

logger = logging.getLogger(__name__)

STATED_ERROR = Fraction(2, 100)
"""How far what capture took may lie from what was declared before somebody is told."""
MIN_SAMPLES = 3


def sample_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes to record for the others: the largest, which the pool is as large as, the smallest and one between."""
    ascending = sorted(set(sizes))
    if len(ascending) <= MIN_SAMPLES:
        return ascending
    return [ascending[0], ascending[len(ascending) // 2], ascending[-1]]


@dataclass(frozen=True, slots=True)
class BucketBytes:
    """Bytes of a batch size's own memory, from samples: between two of them on the straight line, beyond the last one
    on the line through the last two. ``samples``: batch size -> bytes."""

    samples: Mapping[int, int]

    def bytes_for(self, size: int) -> int:
        """At least what the lines say, in whole bytes."""
        known = sorted(self.samples)
        if size in self.samples:
            return self.samples[size]
        if len(known) < 2:
            raise ConfigError.for_field("samples", dict(self.samples), "at least two batch sizes to go between")
        at = min(max(bisect_left(known, size), 1), len(known) - 1)
        low, high = known[at - 1], known[at]
        slope = Fraction(self.samples[high] - self.samples[low], high - low)
        return max(0, ceil(self.samples[low] + slope * (size - low)))


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What a ladder of captures takes: the first one makes the pool and whatever libraries make once, so it says
    nothing about the next ones."""

    first_bytes: int
    marginal_bytes: Fraction

    @classmethod
    def from_growth(cls, growth_bytes: Sequence[int]) -> CaptureCost:
        """From how much memory each capture took, in capture order; at least three of them."""
        if len(growth_bytes) < MIN_SAMPLES:
            raise ConfigError.for_field("growth_bytes", list(growth_bytes), f"at least {MIN_SAMPLES} captures")
        first, *others = growth_bytes
        return cls(first, Fraction(sum(others), len(others)))

    def ladder_bytes(self, count: int) -> int:
        """Bytes of ``count`` captures."""
        return 0 if count < 1 else self.first_bytes + ceil(self.marginal_bytes * (count - 1))

    def __str__(self) -> str:
        first, next_bytes = format_bytes(self.first_bytes), format_bytes(ceil(self.marginal_bytes))
        return f"{first} by the first capture, {next_bytes} each next"


def warn_of_buckets(declared: Mapping[int, int], measured: Mapping[int, int], unit_bytes: int) -> str | None:
    """A sentence, logged as a warning, naming batch sizes whose graph took more or less than was declared by more than
    the stated error and one ``unit_bytes``, the step in which such memory grows. Both: batch size -> bytes."""
    beyond = [
        f"{size} ({format_bytes(measured[size])}, declared {format_bytes(told)})"
        for size, told in sorted(declared.items())
        if size in measured and abs(measured[size] - told) > max(Fraction(unit_bytes), told * STATED_ERROR)
    ]
    if not beyond:
        return None
    text = f"graphs further than {float(STATED_ERROR):.0%} from what was declared: batch sizes {', '.join(beyond)}"
    logger.warning("%s", text)
    return text


def warn_beyond(declared_bytes: int, measured_bytes: int, stated_error: Fraction = STATED_ERROR) -> str | None:
    """A sentence, logged as a warning, when graphs took more or less than was declared by more than the stated
    error."""
    if abs(measured_bytes - declared_bytes) <= declared_bytes * stated_error:
        return None
    text = (
        f"graphs hold {format_bytes(measured_bytes)} and {format_bytes(declared_bytes)} were declared for them, "
        f"further apart than the stated {float(stated_error):.0%}"
    )
    logger.warning("%s", text)
    return text
