"""The books of one card: who holds physical bytes, who was handed bytes, and the high-water marks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from onebudget.device.allocators import Allocation

TENSOR_OWNER: Final = "tensors"


class OwnerBytes:
    """Live bytes of one owner and their high-water mark."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = 0
        self.peak = 0


class Account:
    """Counts a card's bytes; every method with ``_locked`` in its name wants ``lock`` held.

    Two columns that must not be mixed up. *Physical*: bytes nobody else can have (pool reserve, blocking memory,
    physical handles, framework tensors, other processes). *Live*: bytes handed out to tensors and buffers. Physical
    is at least live, because pools keep idle memory and granules round up.

    ``total_bytes=None`` counts without a ceiling, for devices whose driver decides by itself.
    """

    __slots__ = (
        "__weakref__", "_refunds", "_returns", "blocking_bytes", "buffer_bytes", "lock", "mapped_bytes", "others_bytes",
        "owners", "peak_bytes", "pool_bytes", "requested_bytes", "tensor_bytes", "total_bytes", "used_bytes",
    )  # fmt: skip

    def __init__(self, total_bytes: int | None, others_bytes: int = 0) -> None:
        self.lock = threading.Lock()
        self.total_bytes = total_bytes
        self.others_bytes = others_bytes
        self.used_bytes = others_bytes
        self.pool_bytes = self.blocking_bytes = self.mapped_bytes = self.tensor_bytes = 0
        self.buffer_bytes = 0
        self.requested_bytes = 0
        """What pools have handed out, before rounding."""
        self.peak_bytes = 0
        self.owners: dict[str, OwnerBytes] = {}
        self._refunds: deque[tuple[int, str]] = deque()
        self._returns: list[tuple[deque[Allocation], Callable[[], None]]] = []

    @property
    def live_bytes(self) -> int:
        return self.tensor_bytes + self.buffer_bytes

    @property
    def free_bytes(self) -> int:
        return 0 if self.total_bytes is None else self.total_bytes - self.used_bytes

    def fits_locked(self, nbytes: int) -> bool:
        return self.total_bytes is None or self.used_bytes + nbytes <= self.total_bytes

    def charge_pool_locked(self, nbytes: int) -> None:
        """Add to the pool's reserve; negative gives back."""
        self.pool_bytes += nbytes
        self.used_bytes += nbytes

    def try_charge_blocking(self, nbytes: int) -> bool:
        with self.lock:
            if not self.fits_locked(nbytes):
                return False
            self.blocking_bytes += nbytes
            self.used_bytes += nbytes
            return True

    def refund_blocking(self, nbytes: int) -> None:
        with self.lock:
            self.blocking_bytes -= nbytes
            self.used_bytes -= nbytes

    def try_charge_mapped(self, nbytes: int) -> bool:
        with self.lock:
            if not self.fits_locked(nbytes):
                return False
            self.mapped_bytes += nbytes
            self.used_bytes += nbytes
            return True

    def refund_mapped(self, nbytes: int) -> None:
        with self.lock:
            self.mapped_bytes -= nbytes
            self.used_bytes -= nbytes

    def try_charge_tensor(self, nbytes: int, owner: str = TENSOR_OWNER) -> bool:
        """Charge a framework tensor in both columns; ``False`` and nothing charged when it does not fit."""
        with self.lock:
            if self._refunds:
                self._settle_locked()
            if not self.fits_locked(nbytes):
                return False
            self.used_bytes += nbytes
            self.tensor_bytes += nbytes
            self._raise_marks_locked(nbytes, owner)
            return True

    def refund_tensor(self, nbytes: int, owner: str = TENSOR_OWNER) -> None:
        """Give a tensor's bytes back. Finalizers may call this wherever the collector runs, even inside a locked
        section of their own thread: then the refund is noted, and ``settle`` books it."""
        self._refunds.append((nbytes, owner))
        if self.lock.acquire(blocking=False):
            try:
                self._settle_locked()
            finally:
                self.lock.release()

    def watch_returns(self, returns: deque[Allocation], book_locked: Callable[[], None]) -> None:
        """Let a pool only note its frees in ``returns``: ``book_locked`` runs before anybody reads or raises a mark."""
        self._returns.append((returns, book_locked))

    def settle(self) -> None:
        """Book what was only noted: refunds of tensors, and frees of pools."""
        if self._refunds or any(returns for returns, _ in self._returns):
            with self.lock:
                self._settle_locked()

    def _settle_locked(self) -> None:
        self._book_returns_locked()
        while self._refunds:
            nbytes, owner = self._refunds.popleft()
            self.used_bytes -= nbytes
            self.tensor_bytes -= nbytes
            self.owners[owner].live -= nbytes

    def _book_returns_locked(self) -> None:
        for returns, book_locked in self._returns:
            if returns:
                book_locked()

    def hand_out(self, nbytes: int, owner: str) -> None:
        with self.lock:
            self.hand_out_locked(nbytes, owner)

    def hand_out_locked(self, nbytes: int, owner: str) -> None:
        """Buffer bytes go to ``owner``; their physical side was charged before."""
        self.buffer_bytes += nbytes
        self._raise_marks_locked(nbytes, owner)

    def take_back(self, nbytes: int, owner: str) -> None:
        with self.lock:
            self.take_back_locked(nbytes, owner)

    def take_back_locked(self, nbytes: int, owner: str) -> None:
        self.buffer_bytes -= nbytes
        self.owners[owner].live -= nbytes

    def _raise_marks_locked(self, nbytes: int, owner: str) -> None:
        self._book_returns_locked()
        entry = self.owners.get(owner)
        if entry is None:
            entry = self.owners[owner] = OwnerBytes()
        entry.live += nbytes
        if entry.live > entry.peak:
            entry.peak = entry.live
        live = self.tensor_bytes + self.buffer_bytes
        if live > self.peak_bytes:
            self.peak_bytes = live

    def reset_peak(self) -> None:
        """High-water marks fall to what is live now; owners that hold nothing are forgotten."""
        with self.lock:
            self._settle_locked()
            self.peak_bytes = self.live_bytes
            self.owners = {name: entry for name, entry in self.owners.items() if entry.live}
            for entry in self.owners.values():
                entry.peak = entry.live

    def read_requested_bytes(self) -> int:
        with self.lock:
            self._settle_locked()
            return self.requested_bytes

    def live_by_owner(self) -> dict[str, int]:
        with self.lock:
            self._settle_locked()
            return {name: entry.live for name, entry in self.owners.items() if entry.live}

    def peak_by_owner(self) -> dict[str, int]:
        with self.lock:
            return {name: entry.peak for name, entry in self.owners.items() if entry.peak}
