"""What a device is: public methods check, account and raise; underscored hooks do the platform's act."""

from __future__ import annotations

import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Self

from onebudget.device.account import TENSOR_OWNER, Account
from onebudget.device.allocators import BlockingAllocator, HostAllocator, Pool
from onebudget.device.facts import DeviceFacts
from onebudget.device.faults import Faults
from onebudget.device.multicast import Multicast
from onebudget.device.private_pool import PrivatePool
from onebudget.device.sample import MemorySample
from onebudget.device.streams import Stream, Touchable
from onebudget.device.vmm import VirtualMemory
from onebudget.errors import AllocationError, ConfigError, DeviceError, StateError
from onebudget.units import align_up, format_bytes

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

MAX_DEVICE_INDEX = 63
_UNTRIED = object()


class Device(ABC):
    """One card. Opened with ``open_device``; a context manager; ``close`` is idempotent.

    A subclass fills the hooks at the end of this class. Hooks never touch the books: the methods around them do.
    """

    kind: ClassVar[str]
    has_contents: ClassVar[bool] = True
    host_addressable: ClassVar[bool] = False
    accounts_exactly: ClassVar[bool] = False
    """Whether used memory is all our own doing, so that what is used but not handed out is rounding alone."""

    def __init__(self, facts: DeviceFacts, *, torch_device: str, account: Account, index: int = 0) -> None:
        self.facts = facts
        self.name = facts.name
        self.index = index
        self.torch_device = torch_device
        self.total_bytes = facts.total_bytes
        self.account = account
        self.faults = Faults()
        self.closed = False
        self.poison: int | None = None
        self.pageable_copies = 0
        self.host_bytes = 0
        self.blocking = BlockingAllocator(self)
        self.managed = BlockingAllocator(self, "managed")
        self.cpu = HostAllocator(self, "cpu")
        self.pinned = HostAllocator(self, "pinned")
        self.orphans: deque[Callable[[], None]] = deque()
        self._pool: Pool | object | None = _UNTRIED
        self._pool_lock = threading.Lock()
        self._vmm: VirtualMemory | None = None
        self._host_lock = threading.Lock()
        self._closers: list[Callable[[Device], None]] = []
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, total={format_bytes(self.total_bytes)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # readings ---------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Bytes nobody holds: total minus ``used_bytes()``."""
        self.collect()
        return self._free_bytes()

    def used_bytes(self) -> int:
        """Physical bytes held by anybody: pool reserve, blocking and mapped memory, tensors, other processes."""
        self.collect()
        return self._used_bytes()

    def sample(self) -> MemorySample:
        """Total, free, bytes handed out now, and their peak since ``reset_peak``."""
        self.collect()
        return self._sample()

    def reset_peak(self) -> None:
        """Let ``alloc_peak`` and ``peak_by_owner`` start again from what is live now."""
        self.collect()
        self.account.reset_peak()

    def used_by_owner(self) -> dict[str, int]:
        """Bytes handed out per owner label, each allocation rounded up to 512 B; their sum is ``alloc_live``."""
        self.collect()
        return self.account.live_by_owner()

    def peak_by_owner(self) -> dict[str, int]:
        """High-water mark per owner since ``reset_peak``. Peaks of two owners need not fall on the same moment."""
        return self.account.peak_by_owner()

    # framework tensors ------------------------------------------------------------------------------------------

    def charge_tensor_bytes(self, nbytes: int, owner: str = TENSOR_OWNER) -> None:
        """A framework tensor of ``nbytes`` (already rounded to 512 B) appeared.

        Thread-safe. ``AllocationError``, and nothing charged, when it would not fit on the card.
        """
        if not self.account.try_charge_tensor(nbytes, owner):
            self.reclaim()
            if not self.account.try_charge_tensor(nbytes, owner):
                raise self.out_of_memory(nbytes, owner=owner)

    def refund_tensor_bytes(self, nbytes: int, owner: str = TENSOR_OWNER) -> None:
        """The tensor charged with the same arguments died. Thread-safe."""
        self.account.refund_tensor(nbytes, owner)

    # physical memory --------------------------------------------------------------------------------------------

    def charge_blocking(self, nbytes: int, *, owner: str, kind: str = "gpu") -> int:
        """Charge ``nbytes`` rounded up to the granule and return that; gives idle pool memory back before it fails."""
        self.check_open()
        self.collect()
        physical = align_up(nbytes, self.facts.granularity_bytes)
        if not self.account.try_charge_blocking(physical):
            self.reclaim()
            if not self.account.try_charge_blocking(physical):
                raise self.out_of_memory(nbytes, owner=owner, kind=kind)
        return physical

    def primary_pool(self) -> Pool | None:
        """The pool all buffer managers of this device share, or ``None``.

        Made at the first call, in one attempt per device object whatever the number of threads. A device without pool
        support, or a failed attempt (logged), leaves ``None`` for good and callers allocate blocking memory instead.
        """
        pool = self._pool
        if pool is _UNTRIED:
            with self._pool_lock:
                if self._pool is _UNTRIED:
                    self._pool = self._try_create_pool()
                pool = self._pool
        return pool  # type: ignore[return-value]

    def _try_create_pool(self) -> Pool | None:
        self.check_open()
        if self.index > MAX_DEVICE_INDEX:
            raise ConfigError.for_field("device index", self.index, f"at most {MAX_DEVICE_INDEX}")
        if not self.facts.pool_supported:
            log.info("%s: no memory pools (%s); device memory is allocated blocking", self.name,
                     self.facts.source("pool_supported"))  # fmt: skip
            return None
        try:
            self.faults.check("pool")
            return self._create_pool()
        except Exception:
            log.exception("%s: the memory pool could not be created; device memory is allocated blocking", self.name)
            return None

    @property
    def existing_pool(self) -> Pool | None:
        """The primary pool when it was made already; never makes one."""
        return None if self._pool is _UNTRIED else self._pool  # type: ignore[return-value]

    @property
    def vmm(self) -> VirtualMemory:
        """Address reservations, physical handles and mappings. ``DeviceError`` where the device has none."""
        if self._vmm is None:
            self.check_open()
            if not self.facts.vmm_supported:
                raise DeviceError(f"{self.name} has no virtual memory management", call="vmm")
            with self._pool_lock:
                self._vmm = self._vmm or self._create_vmm()
        return self._vmm

    def host_free_bytes(self) -> int:
        """Bytes of host memory that an allocation of this device may still take."""
        return self._host_limit_bytes() - self.host_bytes

    def count_host(self, nbytes: int) -> None:
        with self._host_lock:
            self.host_bytes += nbytes

    def reclaim(self) -> None:
        """Last resort before out-of-memory: let issued frees take effect, then give idle pool memory back."""
        self.collect()
        self.drain_streams()
        pool = self.existing_pool
        if pool is not None:
            pool.trim_to(0)

    def collect(self) -> None:
        """Free what was dropped without ``release()``; finalizers only leave a note here, because they run anywhere."""
        self.account.settle()
        while self.orphans:
            try:
                self.orphans.popleft()()
            except IndexError:
                return
            except Exception:
                log.exception("%s: memory dropped without release() could not be freed", self.name)

    def out_of_memory(
        self, requested_bytes: int, *, owner: str | None = None, kind: str = "gpu", tag: str | None = None
    ) -> AllocationError:
        """The error to raise when ``requested_bytes`` don't fit, naming the largest holder."""
        held = sorted(self.account.live_by_owner().items(), key=lambda item: -item[1])
        detail = f"{self.name} has {format_bytes(self.total_bytes)}"
        if held:
            detail += f"; the largest holder is {held[0][0]} with {format_bytes(held[0][1])}"
        return AllocationError(
            requested_bytes, max(self._free_bytes(), 0), kind=kind, tag=tag, owner=owner, detail=detail + "."
        )

    # streams and transfers --------------------------------------------------------------------------------------

    def create_stream(self) -> Stream:
        self.check_open()
        stream = self._create_stream()
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def streams(self) -> list[Stream]:
        """The streams of this device that somebody still holds."""
        with self._streams_lock:
            return list(self._streams)

    def copy(
        self, target: int, source: int, nbytes: int, stream: Stream | None, touches: tuple[Touchable, ...] = ()
    ) -> None:
        """Copy between two addresses, in stream order; without a stream, at once. ``nbytes`` > 0."""
        self.faults.check("copy")
        self._copy(target, source, nbytes, stream, touches)

    def fill(
        self, address: int, value: int, nbytes: int, stream: Stream | None, touches: tuple[Touchable, ...] = ()
    ) -> None:
        """Set ``nbytes`` > 0 bytes to ``value`` (0..255), in stream order; without a stream, at once."""
        self.faults.check("fill")
        self._fill(address, value, nbytes, stream, touches)

    def tensor(self, address: int, dtype: str, shape: tuple[int, ...], nbytes: int, kind: str, keep: object) -> Tensor:
        """A torch tensor over ``nbytes`` at ``address`` without a copy; ``keep`` stays referenced by its storage."""
        return self._tensor(address, dtype, shape, nbytes, kind, keep)

    def make_private_pool(self, tag: str) -> PrivatePool:
        """A pool that framework allocations go to while a virtual-memory scope is innermost."""
        return PrivatePool(tag)

    def make_multicast(self) -> Multicast:
        """This rank's part of memory shared with other ranks. ``DeviceError`` where the device can't share."""
        self.check_open()
        if not self.facts.multicast_supported:
            raise DeviceError(f"{self.name} has no multicast memory", call="make_multicast")
        return self._make_multicast()

    def synchronize(self) -> None:
        """Wait for every stream; the first error of queued work is raised."""
        self.check_open()
        self._synchronize()

    def empty_cache(self) -> None:
        """Give idle pool memory back."""
        self.collect()
        pool = self.existing_pool
        if pool is not None:
            pool.trim_to(0)
        self._empty_cache()

    def close(self) -> None:
        """Drain the streams and give everything back. Buffers still alive refuse from then on. Idempotent."""
        if self.closed:
            return
        self.collect()
        self.drain_streams()
        for closer in self._closers:
            closer(self)
        self.closed = True
        for stream in self.streams():
            stream.close()
        self._close()

    def at_close(self, closer: Callable[[Device], None]) -> None:
        """Call ``closer(device)`` when the device closes, before it gives anything back; once per function."""
        if closer not in self._closers:
            self._closers.append(closer)

    def check_open(self) -> None:
        if self.closed:
            raise StateError(f"device {self.name} is closed")

    def drain_streams(self) -> None:
        """Wait for every stream but the one whose work is calling; errors stay for ``synchronize``."""
        for stream in self.streams():
            if not stream.runs_here():
                stream.drain()

    # hooks ------------------------------------------------------------------------------------------------------

    def _free_bytes(self) -> int:
        return self.account.free_bytes

    def _used_bytes(self) -> int:
        return self.account.used_bytes

    def _sample(self) -> MemorySample:
        account = self.account
        with account.lock:
            return MemorySample(
                total=self.total_bytes,
                free=account.free_bytes,
                alloc_live=account.live_bytes,
                alloc_peak=account.peak_bytes,
            )

    @abstractmethod
    def _create_stream(self) -> Stream: ...

    @abstractmethod
    def _create_pool(self) -> Pool: ...

    @abstractmethod
    def _create_vmm(self) -> VirtualMemory: ...

    @abstractmethod
    def _allocate_blocking(self, nbytes: int, kind: str) -> tuple[int, object]:
        """Address of ``nbytes`` (a multiple of the granule) and the object that keeps them mapped."""

    @abstractmethod
    def _free_blocking(self, address: int, nbytes: int, memory: object) -> None: ...

    @abstractmethod
    def _allocate_host(self, nbytes: int, kind: str) -> tuple[int, object]:
        """Address of ``nbytes`` of host memory, ``kind`` "cpu" or "pinned", and the object that keeps it."""

    @abstractmethod
    def _free_host(self, address: int, nbytes: int, memory: object, kind: str) -> None: ...

    @abstractmethod
    def _host_limit_bytes(self) -> int: ...

    @abstractmethod
    def _copy(self, target: int, source: int, nbytes: int, stream: Stream | None,
              touches: tuple[Touchable, ...]) -> None: ...  # fmt: skip

    @abstractmethod
    def _fill(self, address: int, value: int, nbytes: int, stream: Stream | None,
              touches: tuple[Touchable, ...]) -> None: ...  # fmt: skip

    def _synchronize(self) -> None:
        first: Exception | None = None
        for stream in self.streams():
            try:
                stream.synchronize()
            except Exception as error:  # the others are waited for all the same
                first = first or error
        if first is not None:
            raise first

    def _empty_cache(self) -> None:
        """Give back idle memory of the framework's own allocator, where it has one."""

    @abstractmethod
    def _tensor(self, address: int, dtype: str, shape: tuple[int, ...], nbytes: int, kind: str,
                keep: object) -> Tensor: ...  # fmt: skip

    def _make_multicast(self) -> Multicast:
        raise NotImplementedError

    @abstractmethod
    def _close(self) -> None: ...
