"""Every error this package raises on purpose.

::

    OneBudgetError
      ConfigError(ValueError)         wrong or contradictory setting or argument
      StateError(RuntimeError)        call in the wrong state or order
        UseAfterFreeError             memory touched after its free took effect
      AgreementError(RuntimeError)    ranks disagree
      BudgetError(MemoryError)        the budget can't be met; carries the ledger
      AllocationError(MemoryError)    device or host memory ran out
      CapacityError(MemoryError)      blocks, slots or pages ran out
        NoFreeSlotsError
      RequestError(ValueError)        one request refused; the others go on
      DeviceError(RuntimeError)       a driver or system call failed
      ModelError(ValueError)          unusable model files
      UnknownKeyError(KeyError)       missing manager kind, unknown graph key
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger


class OneBudgetError(Exception):
    """Root of the tree: catch this to catch everything raised on purpose."""


class ConfigError(OneBudgetError, ValueError):
    """A setting or argument is wrong by itself or contradicts another one."""

    def __init__(
        self, message: str, *, field: str | None = None, value: object = None, allowed: str | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.allowed = allowed

    @classmethod
    def for_field(cls, field: str, value: object, allowed: str) -> ConfigError:
        """The usual sentence: which field, what was given, what is allowed."""
        return cls(
            f"{field} = {value!r} is not usable: it must be {allowed}.", field=field, value=value, allowed=allowed
        )


class StateError(OneBudgetError, RuntimeError):
    """A call in the wrong state or order (closed, released, popped once too often)."""


class UseAfterFreeError(StateError):
    """Memory was touched by work ordered after its free."""


class AgreementError(OneBudgetError, RuntimeError):
    """Ranks that must act alike did not."""


class BudgetError(OneBudgetError, MemoryError):
    """The budget can't be met. ``ledger`` holds the terms, the shortfall and the ways out."""

    def __init__(self, message: str, *, ledger: Ledger | None = None) -> None:
        super().__init__(message)
        self.ledger = ledger


class AllocationError(OneBudgetError, MemoryError):
    """Memory ran out: what was asked for, what was free, for whom."""

    def __init__(
        self,
        requested_bytes: int,
        free_bytes: int,
        *,
        kind: str = "gpu",
        tag: str | None = None,
        owner: str | None = None,
        detail: str = "",
    ) -> None:
        who = f" for {owner}" if owner else ""
        label = f", tag {tag!r}" if tag else ""
        super().__init__(
            f"out of {kind} memory{who}: {format_bytes(requested_bytes)} requested, "
            f"{format_bytes(free_bytes)} free{label}.{' ' + detail if detail else ''}"
        )
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.kind = kind
        self.tag = tag
        self.owner = owner


class CapacityError(OneBudgetError, MemoryError):
    """Blocks, slots or pages ran out for one request."""

    def __init__(self, message: str, *, request_id: int | None = None, needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.needed = needed
        self.free = free


class NoFreeSlotsError(CapacityError):
    """Every sequence slot is taken."""


class RequestError(OneBudgetError, ValueError):
    """One request is refused; the others go on."""


class DeviceError(OneBudgetError, RuntimeError):
    """A driver or system call failed for a reason other than memory."""

    def __init__(self, name: str, code: int | None = None, call: str = "") -> None:
        where = f" in {call}" if call else ""
        number = f" ({code})" if code is not None else ""
        super().__init__(f"device error {name}{number}{where}")
        self.name = name
        self.code = code
        self.call = call


class ModelError(OneBudgetError, ValueError):
    """Model files are missing, broken, or of a kind this engine can't run."""


class UnknownKeyError(OneBudgetError, KeyError):
    """A manager kind or graph key that does not exist."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""
