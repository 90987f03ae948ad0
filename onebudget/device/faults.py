"""Faults on demand: make the n-th call of a device operation fail, to prove that nothing leaks when it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from onebudget.errors import ConfigError, DeviceError

OPERATIONS: Final = (
    "reserve", "free_address", "create", "release", "map", "unmap", "access",
    "copy", "fill", "host", "host_free", "blocking", "pool", "pool_grow",
)  # fmt: skip
"""Places where a device asks its platform for something and can be made to fail."""


class Faults:
    """Armed faults of one device. ``check`` costs one attribute read while nothing is armed."""

    __slots__ = ("_armed", "_lock", "active", "calls")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: dict[str, list[tuple[int, BaseException | None]]] = {}
        self.active = False
        self.calls: dict[str, int] = {}

    def arm(self, operation: str, *, skip: int = 0, error: BaseException | None = None) -> None:
        """Let ``skip`` more calls of ``operation`` pass, then fail one. ``error`` defaults to a ``DeviceError``."""
        if operation not in OPERATIONS:
            raise ConfigError.for_field("operation", operation, f"one of {', '.join(OPERATIONS)}")
        if skip < 0:
            raise ConfigError.for_field("skip", skip, "zero or more")
        with self._lock:
            self._armed.setdefault(operation, []).append((self.calls.get(operation, 0) + skip, error))
            self.active = True

    def clear(self) -> None:
        with self._lock:
            self._armed.clear()
            self.active = False

    @contextmanager
    def armed(self, operation: str, *, skip: int = 0, error: BaseException | None = None) -> Iterator[Faults]:
        """``arm`` for the length of a ``with`` block."""
        self.arm(operation, skip=skip, error=error)
        try:
            yield self
        finally:
            self.clear()

    def check(self, operation: str) -> None:
        """Called by the device just before it acts; raises when this call was chosen to fail."""
        if not self.active:
            return
        with self._lock:
            number = self.calls.get(operation, 0)
            self.calls[operation] = number + 1
            chosen = [entry for entry in self._armed.get(operation, ()) if entry[0] == number]
            if not chosen:
                return
            self._armed[operation].remove(chosen[0])
        raise chosen[0][1] or DeviceError("injected fault", call=operation)
