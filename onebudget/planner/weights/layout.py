"""How many ranks divide a model, and how."""

from __future__ import annotations

from dataclasses import dataclass, fields

from onebudget.errors import ConfigError

MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Ranks of tensor, pipeline, expert and data parallelism; ``ep`` ranks are among the ``tp * dp`` of a stage."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_RANKS:
                raise ConfigError.for_field(each.name, value, f"a whole number from 1 to {MOST_RANKS}")
        if (self.tp * self.dp) % self.ep:
            raise ConfigError.for_field("ep", self.ep, f"a divisor of tp x dp = {self.tp * self.dp}")

    @property
    def ranks(self) -> int:
        """Cards of the whole layout."""
        return self.tp * self.pp * self.dp
