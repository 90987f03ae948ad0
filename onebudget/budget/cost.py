"""What a token of KV cache costs: a line ``bytes = slope * tokens + intercept``, with policy figures carried along."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from onebudget.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Linear cost of a KV cache on one rank, in bytes.

    ``slope`` is bytes per token, ``intercept`` what is taken before the first token (recurrent state, windows).
    ``bytes_per_request`` and ``quota_per_request`` are policy (weights and bounds of a split), not cost: adding two
    costs drops them, scaling keeps them. Negative slopes and intercepts can be written down, because a difference of
    two costs may have them, but whoever divides a budget refuses them.
    """

    slope: int
    intercept: int = 0
    bytes_per_request: int | None = None
    quota_per_request: int | None = None

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            object.__setattr__(self, item.name, _whole_bytes(item.name, value))

    @classmethod
    def from_raw(cls, raw: int | tuple[int, int] | CacheCost) -> CacheCost:
        """A slope, a ``(slope, intercept)`` pair, or a cost, as a cost."""
        if isinstance(raw, CacheCost):
            return raw
        return cls(*raw) if isinstance(raw, tuple) else cls(raw)

    def bytes_for_tokens(self, tokens: int) -> int:
        """Bytes that ``tokens`` tokens take."""
        return self.slope * tokens + self.intercept

    def tokens_for_budget(self, budget_bytes: int) -> int:
        """Whole tokens that fit; 0 when the slope is not positive, because then memory does not bound the tokens."""
        return 0 if self.slope <= 0 else max((budget_bytes - self.intercept) // self.slope, 0)

    def __add__(self, other: object) -> CacheCost:
        if not isinstance(other, CacheCost):
            return NotImplemented
        return CacheCost(self.slope + other.slope, self.intercept + other.intercept)

    def __sub__(self, other: object) -> CacheCost:
        if not isinstance(other, CacheCost):
            return NotImplemented
        return CacheCost(self.slope - other.slope, self.intercept - other.intercept)

    def scaled(self, factor: int | Fraction) -> CacheCost:
        """The cost with its slope times ``factor``, rounded up; every other field stays as it is."""
        if isinstance(factor, bool) or not isinstance(factor, (int, Fraction)) or factor < 0:
            raise ConfigError.for_field("factor", factor, "an integer or Fraction of at least 0")
        return dataclasses.replace(self, slope=ceil(self.slope * factor))


def _whole_bytes(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError.for_field(name, value, "a whole number of bytes") from None
