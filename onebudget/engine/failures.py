"""What a failed step means for the others: classes of errors, an error budget, and what to try when memory runs out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from onebudget.errors import AllocationError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.device.sample import MemorySample

logger = logging.getLogger(__name__)

Severity = Literal["fatal", "severe", "transient"]

_FATAL = ("cudaerrorillegaladdress", "cudaerrorlaunchfailure", "device-side assert", "unrecoverable")
_SEVERE = ("cuda out of memory", "cuda error", "nccl error")
_COSTS_PERCENT: dict[Severity, int] = {"fatal": 100, "severe": 50, "transient": 10}
_FULL_PERCENT = 100
_REGAINED_PERCENT = 5
REPEAT_STEPS = 100
"""Running out of memory again within so many steps halves the context tokens of a step; as many good ones double
them."""


def classify(error: BaseException) -> Severity:
    """By what the message says, because driver errors come in many classes; running out of memory is severe."""
    text = f"{type(error).__name__}: {error}".lower()
    if any(pattern in text for pattern in _FATAL):
        return "fatal"
    if isinstance(error, AllocationError) or is_out_of_memory(error) or any(pattern in text for pattern in _SEVERE):
        return "severe"
    return "transient"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no room, ours or torch's word for it."""
    return isinstance(error, AllocationError) or type(error).__name__ == "OutOfMemoryError"


class ErrorBudget:
    """1.0 at the start and at most. A transient error costs 0.1, a severe one 0.5, a good step gives 0.05 back; at 0
    the engine stops. In whole per cent, so that ten transient errors are exactly too many."""

    def __init__(self) -> None:
        self._left_percent = _FULL_PERCENT

    @property
    def left(self) -> float:
        return self._left_percent / 100

    @property
    def exhausted(self) -> bool:
        return self._left_percent <= 0

    def charge(self, severity: Severity) -> None:
        self._left_percent -= _COSTS_PERCENT[severity]

    def regain(self) -> None:
        """After a good step."""
        self._left_percent = min(_FULL_PERCENT, self._left_percent + _REGAINED_PERCENT)


@dataclass(frozen=True, slots=True)
class Relief:
    """What the device held when memory ran out, by owner, and what giving caches back freed."""

    sample: MemorySample
    owners: dict[str, int]
    freed_bytes: int

    def __str__(self) -> str:
        held = ", ".join(f"{owner} {format_bytes(nbytes)}" for owner, nbytes in sorted(self.owners.items()) if nbytes)
        return (
            f"{format_bytes(self.sample.free)} of {format_bytes(self.sample.total)} were free; held by: {held}. "
            f"Emptying caches freed {format_bytes(self.freed_bytes)}."
        )


def may_retry(error: BaseException, relief: Relief, *, kv_written: bool) -> bool:
    """Whether the same batch may run once more: nothing was written to the cache, and what came free is enough.

    A framework's own error does not say how much it asked for, so there anything that came free counts.
    """
    needed = error.requested_bytes if isinstance(error, AllocationError) else 1
    return not kv_written and relief.freed_bytes >= needed > 0


@dataclass(slots=True)
class ContextLimit:
    """Context tokens of a step, halved when memory runs out again soon, down to one block; good steps bring them back.

    Smaller steps are a delay, a lost step is not.
    """

    max_tokens: int
    tokens_per_block: int
    tokens: int = field(init=False)
    _last_failure: int | None = field(init=False, default=None)
    _good_steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.tokens = self.max_tokens

    @property
    def lowered(self) -> bool:
        return self.tokens < self.max_tokens

    def failed(self, step: int) -> bool:
        """Memory ran out in this step; whether that lowered the limit."""
        repeated = self._last_failure is not None and step - self._last_failure <= REPEAT_STEPS
        self._last_failure, self._good_steps = step, 0
        if not repeated or self.tokens <= self.tokens_per_block:
            return False
        self.tokens = max(self.tokens_per_block, self.tokens // 2)
        logger.warning(
            "memory ran out again within %d steps: a step computes at most %d context tokens from now on (of %d)",
            REPEAT_STEPS,
            self.tokens,
            self.max_tokens,
        )
        return True

    def passed(self) -> None:
        """A step went well."""
        if not self.lowered:
            return
        self._good_steps += 1
        if self._good_steps >= REPEAT_STEPS:
            self._good_steps = 0
            self.tokens = min(self.max_tokens, self.tokens * 2)
