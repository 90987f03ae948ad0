"""A pool that framework allocations are routed to while a scope is active."""

from __future__ import annotations

import threading

from onebudget.errors import StateError


class PrivatePool:
    """Entered once, left once. Devices whose framework has its own allocator subclass it to route that allocator;
    here it only counts what is alive."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.live = 0
        self._lock = threading.Lock()
        self._entered = False
        self._inside = False

    def __repr__(self) -> str:
        return f"PrivatePool({self.tag!r}, live={self.live}, {'inside' if self._inside else 'left'})"

    @property
    def inside(self) -> bool:
        return self._inside

    def count(self, change: int) -> None:
        """One more (or one fewer) live allocation."""
        with self._lock:
            self.live += change

    def enter(self) -> None:
        if self._entered:
            raise StateError(f"the private pool of {self.tag!r} was entered before; a pool can be entered once")
        self._entered = self._inside = True
        self._enter()

    def leave(self) -> None:
        if not self._inside:
            raise StateError(f"the private pool of {self.tag!r} is not active")
        self._inside = False
        self._leave()

    def close(self) -> None:
        """Give the pool back. ``StateError`` while something in it is alive."""
        if self.live:
            raise StateError(f"the private pool of {self.tag!r} still holds {self.live} live buffers")
        self._close()

    def _enter(self) -> None: ...

    def _leave(self) -> None: ...

    def _close(self) -> None: ...
