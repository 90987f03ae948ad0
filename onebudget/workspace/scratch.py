"""One grow-only scratch buffer for all attention layers: the largest demand, not the sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from onebudget.device.sample import round_to_sector
from onebudget.device.streams import Stream
from onebudget.errors import StateError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    import torch

    from onebudget.buffers import Buffer, BufferManager
    from onebudget.device.base import Device

OWNER = "fixed_workspace"


class ScratchBuffer:
    """Bytes that layers share one after the other.

    ``logical_bytes`` is what was asked for since ``resize(0)``, ``capacity_bytes`` what is held. Growing reallocates:
    the address changes and contents are lost, so views are valid until the next ``require``. ``peak_bytes`` is the
    largest demand so far. ``scope`` is entered around every allocation.

    After ``seal()`` the address stays: graphs have recorded it, so growing is a ``StateError`` until ``release()``.
    """

    def __init__(
        self, manager: BufferManager, *, scope: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._manager = manager
        self._scope = scope
        self._buffer: Buffer | None = None
        self._users: dict[int, Any] = {}
        self.sealed = False
        self.logical_bytes = 0
        self.peak_bytes = 0
        self.grow_count = 0

    @property
    def device(self) -> Device:
        return self._manager.device

    @property
    def stream(self) -> Stream:
        """The stream in whose order storage is freed."""
        return self._manager.stream

    @property
    def buffers(self) -> list[Buffer]:
        return [] if self._buffer is None else [self._buffer]

    @property
    def held_bytes(self) -> int:
        """What the device's books count for it: the capacity in whole sectors."""
        return round_to_sector(self.capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.capacity_bytes

    @property
    def data_ptr(self) -> int:
        """Address of the storage; 0 when there is none."""
        return 0 if self._buffer is None else self._buffer.data_ptr

    def require(self, nbytes: int, *, owner: str = OWNER) -> torch.Tensor:
        """A ``[nbytes]`` uint8 view; what was asked for before stays asked for.

        Raises ``AllocationError`` when the device has no room to grow. ``owner``: for whom the memory is counted, and
        whose name an error bears, if it has to grow.
        """
        if nbytes > self.logical_bytes or self._buffer is None:
            self.resize(nbytes, owner=owner)
        assert self._buffer is not None
        return self._buffer.as_tensor()[:nbytes]

    def resize(self, nbytes: int, *, owner: str = OWNER) -> None:
        """Set the logical size. Storage is kept while it suffices and reallocated otherwise; it never shrinks here."""
        if nbytes > self.capacity_bytes:
            self._grow(nbytes, owner)
        self.logical_bytes = nbytes
        self.peak_bytes = max(self.peak_bytes, nbytes)

    def _grow(self, nbytes: int, owner: str) -> None:
        if self.sealed:
            held = format_bytes(self.capacity_bytes)
            raise StateError(
                f"graph scratch moved: {format_bytes(nbytes)} are wanted and graphs recorded the address of {held}. "
                "Every shape has to run once before the first capture."
            )
        self.reallocate(nbytes, owner=owner)
        self.grow_count += 1

    def reallocate(self, nbytes: int, *, owner: str | None = None) -> None:
        """Storage of exactly ``nbytes``. The old one is freed first, so that both never exist together.

        When there is no room for the new one, nothing is held afterwards.
        """
        owner = owner or (self._buffer.owner if self._buffer else OWNER)
        self.release()
        if nbytes:
            with self._scope():
                self._buffer = self._manager.gpu(nbytes, owner=owner)

    def record_use(self, stream: Any) -> None:
        """Work on ``stream``, one of this package or torch's, uses the storage: it is not freed under that work."""
        if self._buffer is None or stream is self.stream:
            return
        if isinstance(stream, Stream):
            self._buffer.record_use(stream)
        else:
            self._users[hash(stream)] = stream

    def seal(self) -> None:
        """Called once every shape of every graph ran, before the first capture: the address may not change now."""
        self.sealed = True

    def start_anew(self) -> None:
        """As after construction: no storage, and no marks of what was wanted before."""
        self.release()
        self.forget_marks()

    def forget_marks(self) -> None:
        """Count growth and the largest demand from here on."""
        self.peak_bytes = self.grow_count = 0

    def release(self) -> None:
        """Give the storage back and end the seal; the next ``require`` allocates anew."""
        users, self._users = self._users, {}
        for stream in users.values():
            stream.synchronize()
        if self._buffer is not None:
            self._buffer.release()
            self._buffer = None
        self.logical_bytes = 0
        self.sealed = False
