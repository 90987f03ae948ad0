"""When scratch may shrink, and to what. Pure arithmetic."""

from __future__ import annotations

from onebudget.errors import ConfigError

WINDOW = 3
"""Underfilled forwards in a row before scratch shrinks: the demand of one forward is noisy, and shrinking at once would
swing between long and short requests."""


class WorkspaceShrinkPolicy:
    """Watches the demand of forwards and proposes a smaller capacity after ``window`` underfilled ones.

    Underfilled: something was demanded, less than there is, while there is more than the floor and nothing had to
    grow. The proposal is the largest demand in the window, never below ``floor_bytes``. A forward without demand
    neither counts nor breaks a window. ``remaining`` and ``window_max_bytes`` are the state.
    """

    def __init__(self, floor_bytes: int, *, window: int = WINDOW) -> None:
        if floor_bytes < 0:
            raise ConfigError.for_field("floor_bytes", floor_bytes, "at least 0")
        if window < 1:
            raise ConfigError.for_field("window", window, "at least 1")
        self.floor_bytes = floor_bytes
        self.window = window
        self.reset()

    def reset(self) -> None:
        """Forget the forwards seen so far."""
        self.remaining = self.window
        self.window_max_bytes = 0

    def finish_forward(self, required_bytes: int, capacity_bytes: int, *, grew: bool) -> int | None:
        """Note one forward; the bytes to shrink to, or None. ``ConfigError``, and nothing noted, for impossible sizes.

        ``capacity_bytes``: held at the end of the forward. ``grew``: more than at its beginning.
        """
        if required_bytes < 0:
            raise ConfigError.for_field("required_bytes", required_bytes, "at least 0")
        least = max(required_bytes, self.floor_bytes)
        if capacity_bytes < least:
            allowed = f"at least {least}, the demand of this forward and the floor"
            raise ConfigError.for_field("capacity_bytes", capacity_bytes, allowed)
        if required_bytes == 0:
            return None
        if grew or capacity_bytes in (self.floor_bytes, required_bytes):
            self.reset()
            return None
        self.window_max_bytes = max(self.window_max_bytes, required_bytes)
        self.remaining -= 1
        if self.remaining:
            return None
        target = max(self.floor_bytes, self.window_max_bytes)
        self.reset()
        return target
