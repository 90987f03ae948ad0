"""What one rank tells the others about why it failed, and the error the others raise then."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from onebudget.errors import AgreementError, BudgetError, ConfigError, ModelError

LOST = "lost"
"""``kind`` of a rank that said nothing: it was killed, crashed, or hangs."""

_SAME_CLASS: dict[str, type[ConfigError] | type[ModelError]] = {"ConfigError": ConfigError, "ModelError": ModelError}


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first failure among the ranks; all ranks end with this one.

    ``kind`` is the class of the error, ``ledger`` what a ``BudgetError`` carried.
    """

    rank: int
    stage: str
    kind: str
    message: str
    ledger: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: BaseException, *, rank: int, stage: str) -> RankFailure:
        ledger = error.ledger.to_dict() if isinstance(error, BudgetError) and error.ledger is not None else None
        return cls(rank, stage, type(error).__name__, str(error), ledger)

    @classmethod
    def from_json(cls, text: str | bytes) -> RankFailure:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def sentence(self) -> str:
        """For people on any rank: who failed, in which stage, and why."""
        if self.kind == LOST:
            return f"rank {self.rank} stopped answering in stage {self.stage!r}: {self.message}"
        return f"rank {self.rank} failed in stage {self.stage!r}: {self.kind}: {self.message}"

    def error(self) -> BaseException:
        """What every other rank raises.

        Errors that decide the exit status keep their class, so that all ranks end with the same one; everything else
        is an ``AgreementError``.
        """
        if self.kind == "KeyboardInterrupt":
            return KeyboardInterrupt()
        if self.kind == "BudgetError":
            from onebudget.budget.ledger import Ledger

            ledger = None if self.ledger is None else Ledger.from_dict(self.ledger)
            return BudgetError(f"rank {self.rank}: {self.message}", ledger=ledger)
        same = _SAME_CLASS.get(self.kind)
        return AgreementError(self.sentence) if same is None else same(f"rank {self.rank}: {self.message}")

    def same_as(self, error: BaseException) -> bool:
        """Whether ``error``, raised elsewhere, says the same: then nobody needs to know where it came from first."""
        return self.kind == type(error).__name__ and self.message == str(error)
