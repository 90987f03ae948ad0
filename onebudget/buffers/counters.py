"""Bytes per kind of memory held by buffers of this process."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING
from weakref import WeakSet

from onebudget.buffers.kinds import MemoryKind

if TYPE_CHECKING:
    from onebudget.device.account import Account


class MemoryCounters:
    """Current bytes per kind and the last change. One instance counts for the whole process: ``memory_counters``.

    What pools hand out is in the books of their device already and is read there (``watch``); buffers from pools only
    write their change into ``deltas``.
    """

    __slots__ = ("_accounts", "_bytes", "_lock", "_noted", "deltas")

    def __init__(self) -> None:
        self.deltas = dict.fromkeys(MemoryKind, 0)
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(MemoryKind, 0)
        self._accounts: WeakSet[Account] = WeakSet()
        self._noted: deque[tuple[MemoryKind, int]] = deque()

    def add(self, kind: MemoryKind, nbytes: int) -> None:
        """Count ``nbytes`` more of ``kind``; negative when they go."""
        with self._lock:
            self._bytes[kind] += nbytes
            self.deltas[kind] = nbytes

    def note(self, kind: MemoryKind, nbytes: int) -> None:
        """``add`` for finalizers, which must not wait for a lock; counted at the next reading."""
        self._noted.append((kind, nbytes))

    def current(self, kind: MemoryKind) -> int:
        """Bytes of ``kind`` held now."""
        return self.snapshot()[kind]

    def delta(self, kind: MemoryKind) -> int:
        """The last change of ``kind``, signed."""
        return self.deltas[kind]

    def snapshot(self) -> dict[MemoryKind, int]:
        self._settle()
        with self._lock:
            held, accounts = dict(self._bytes), list(self._accounts)
        held[MemoryKind.GPU] += sum(account.read_requested_bytes() for account in accounts)
        return held

    def watch(self, account: Account) -> None:
        """Count what the pools of a device hand out, from now until its books are gone."""
        with self._lock:
            self._accounts.add(account)

    def _settle(self) -> None:
        while self._noted:
            self.add(*self._noted.popleft())


memory_counters = MemoryCounters()
