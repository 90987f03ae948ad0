"""A buffer: typed bytes on one device, freed through the allocator that made them, in the order of their stream."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from onebudget.buffers.counters import memory_counters
from onebudget.buffers.dtypes import in_numpy
from onebudget.buffers.kinds import MemoryKind
from onebudget.device.allocators import Allocation, Allocator
from onebudget.errors import ConfigError, StateError, UseAfterFreeError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from onebudget.device.base import Device
    from onebudget.device.streams import Stream


class Buffer:
    """Made by a ``BufferManager``. A context manager that releases at the end.

    ``data_ptr`` and the views (``as_tensor``, ``as_numpy``, DLPack) are the only ways to the bytes and refuse while
    the bytes aren't there: after ``release()``, after the device closed, and while virtual memory is asleep.

    A view must not be used after ``release()``: pool memory then belongs to the next buffer, and touching a range
    whose pages were taken away ends the process. Dropping the last name of a buffer is safe: views keep it alive, and
    it frees itself when they are gone.
    """

    __slots__ = ("__weakref__", "_allocation", "_itemsize", "_released", "_source", "_stream", "_uses",
                 "capacity_bytes", "device", "dtype", "kind", "owner", "shape", "size")  # fmt: skip

    def __init__(
        self, device: Device, kind: MemoryKind, source: Allocator, stream: Stream | None, owner: str,
        shape: tuple[int, ...], size: int, element: tuple[str, int],
    ) -> None:  # fmt: skip
        self._allocation: Allocation | None = None
        self.dtype, self._itemsize = element
        self.capacity_bytes = nbytes = size * element[1]
        self.device = device
        self.kind = kind
        self.owner = owner
        self.shape = shape
        self.size = size
        self._source = source
        self._stream = stream
        self._uses: list[Stream] | None = None
        self._released = False
        if nbytes:
            self._allocation = source.allocate(nbytes, stream, owner)
            if source.counted_by_account:
                memory_counters.deltas[kind] = nbytes
            else:
                _count(source, kind, nbytes)

    def __repr__(self) -> str:
        state = ", released" if self._released else ""
        what = f"{self.kind}, {self.dtype}{list(self.shape)}, {format_bytes(self.nbytes)}, {self.owner!r}"
        return f"Buffer({what}{state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._released:
            self.release()

    def __del__(self) -> None:
        if self._allocation is None:
            return
        source = self._source
        if self.device.closed:
            if not (source.counted_by_kind or source.counted_by_account):
                memory_counters.note(self.kind, -self.capacity_bytes)
            return
        later = _FreeLater(source, self._allocation, self._stream, self.kind, self.capacity_bytes)
        self.device.orphans.append(later)

    @property
    def nbytes(self) -> int:
        """``size`` elements in bytes; at most ``capacity_bytes``."""
        return self.size * self._itemsize

    @property
    def itemsize(self) -> int:
        return self._itemsize

    @property
    def stream(self) -> Stream | None:
        """The stream whose order decides when a free takes effect; ``None`` for memory freed at once."""
        return self._stream

    @property
    def released(self) -> bool:
        return self._released

    @property
    def data_ptr(self) -> int:
        """Address of the first byte; 0 when the buffer is empty."""
        self.check_use()
        return self._allocation.address if self._allocation else 0

    def check_use(self) -> None:
        """Raise unless the bytes are there: ``UseAfterFreeError`` after release, ``StateError`` while asleep."""
        if self._released:
            raise UseAfterFreeError(f"{self!r} was released")
        if self.device.closed:
            raise StateError(f"device {self.device.name} is closed: {self!r} is gone")
        if self._allocation is not None:
            self._allocation.check_use()

    def touches(self) -> tuple[Allocation, ...]:
        """What queued work has to check before it uses this buffer."""
        return (self._allocation,) if self._allocation else ()

    def as_tensor(self) -> Tensor:
        """A torch tensor of this shape and dtype over the same bytes. On a device without contents it is ``meta``."""
        address = self.data_ptr
        if not address:
            import torch

            device = "cpu" if self.kind.on_host and self.device.has_contents else self.device.torch_device
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)
        assert self._allocation is not None
        keep = (self, self._allocation.memory)
        return self.device.tensor(address, self.dtype, self.shape, self.nbytes, self.kind.value, keep)

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """A NumPy array over the same bytes, where the host can address them and NumPy knows the dtype."""
        import numpy as np

        from onebudget.device.tensors import byte_view

        address = self.data_ptr
        if not self.device.has_contents or not (self.kind.on_host or self.device.host_addressable):
            raise StateError(f"{self!r} has no bytes that the host can read: device {self.device.name}")
        if not in_numpy(self.dtype):
            raise ConfigError.for_field("dtype", self.dtype, "a dtype NumPy has; use as_tensor()")
        if not address:
            return np.empty(self.shape, dtype=self.dtype)
        assert self._allocation is not None
        view = byte_view(address, self.nbytes, (self, self._allocation.memory))
        return np.frombuffer(view, dtype=self.dtype).reshape(self.shape)

    def __dlpack__(self, **options: Any) -> Any:
        return self.as_tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.as_tensor().__dlpack_device__()

    def record_use(self, stream: Stream) -> None:
        """Work already submitted to ``stream`` uses these bytes: a later ``release`` waits for it in stream order."""
        self.check_use()
        if stream is not self._stream:
            self._uses = [*(self._uses or ()), stream]

    def resize(self, size: int | Sequence[int]) -> None:
        """Become ``size`` elements (or a shape) of the same dtype.

        Within ``capacity_bytes`` the storage stays. Beyond it new storage is taken from the same allocator: contents
        are lost and the address may change. When that fails the buffer is as before.
        """
        self.check_use()
        shape, count = parse_shape(size)
        nbytes = count * self._itemsize
        if nbytes > self.capacity_bytes:
            fresh = self._source.allocate(nbytes, self._stream, self.owner)
            self._give_back()
            _count(self._source, self.kind, nbytes)
            self._allocation = fresh
            self.capacity_bytes = nbytes
        self.shape, self.size = shape, count

    def release(self) -> None:
        """Give the bytes back, in the order of the owning stream. A second call is a ``UseAfterFreeError``."""
        if self._released:
            raise UseAfterFreeError(f"double free: {self!r}")
        self._released = True
        allocation = self._allocation
        if allocation is None or self._uses or self.device.closed:
            self._give_back()
            return
        self._allocation = None  # from here on what _give_back does, without its calls: this is the hot path
        source = self._source
        if source.counted_by_account:
            memory_counters.deltas[self.kind] = -self.capacity_bytes
        else:
            _count(source, self.kind, -self.capacity_bytes)
        source.deallocate(allocation, self._stream)

    def _give_back(self) -> None:
        allocation, self._allocation = self._allocation, None
        if allocation is None:
            return
        _count(self._source, self.kind, -self.capacity_bytes)
        if self.device.closed:
            return
        if self._uses:
            self._join_uses()
        self._source.deallocate(allocation, self._stream)

    def _join_uses(self) -> None:
        uses, self._uses = self._uses or [], None
        for other in uses:
            if self._stream is None:
                other.drain()
            else:
                self._stream.wait_event(other.record_event())


class _FreeLater:
    """Frees what a finalizer found, when the device next looks; holds no reference to the buffer."""

    __slots__ = ("allocation", "kind", "nbytes", "source", "stream")

    def __init__(
        self, source: Allocator, allocation: Allocation, stream: Stream | None, kind: MemoryKind, nbytes: int
    ) -> None:
        self.source = source
        self.allocation = allocation
        self.stream = stream
        self.kind = kind
        self.nbytes = nbytes

    def __call__(self) -> None:
        _count(self.source, self.kind, -self.nbytes)
        self.source.deallocate(self.allocation, self.stream)


def _count(source: Allocator, kind: MemoryKind, nbytes: int) -> None:
    """Count a change per kind, unless the allocator does: in the device's books, or by itself."""
    if source.counted_by_account:
        memory_counters.deltas[kind] = nbytes
    elif not source.counted_by_kind:
        memory_counters.add(kind, nbytes)


def parse_shape(size: int | Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Shape and number of elements of an int or a sequence of ints; ``ConfigError`` when negative or no number."""
    try:
        shape = tuple(map(operator.index, size if isinstance(size, Sequence) else (size,)))
    except TypeError:
        shape = (-1,)
    if any(length < 0 for length in shape) or isinstance(size, bool):
        raise ConfigError.for_field("size", size, "a number of elements or a shape, zero or more in every place")
    return shape, math.prod(shape)
