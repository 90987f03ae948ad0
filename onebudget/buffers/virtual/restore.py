"""What happens to contents while physical memory is away."""

from __future__ import annotations

from enum import StrEnum

from onebudget.buffers.counters import memory_counters
from onebudget.buffers.kinds import MemoryKind
from onebudget.buffers.virtual.chunk import Configurator
from onebudget.device.allocators import Allocation
from onebudget.device.base import Device
from onebudget.device.streams import Stream
from onebudget.errors import ConfigError


class RestoreMode(StrEnum):
    """Contents across release and materialise.

    ``NONE``: undefined afterwards. ``MEMSET``: zeros from the second materialise on, undefined at the first.
    ``CPU`` and ``PINNED``: bit-equal, from a backup in pageable or page-locked host memory that is kept for the next
    time. The ``ON_DEMAND`` kinds drop the backup after each restore, which then blocks.
    """

    NONE = "none"
    MEMSET = "memset"
    CPU = "cpu"
    PINNED = "pinned"
    CPU_ON_DEMAND = "cpu_on_demand"
    PINNED_ON_DEMAND = "pinned_on_demand"

    @property
    def keeps_contents(self) -> bool:
        return self not in (RestoreMode.NONE, RestoreMode.MEMSET)

    @classmethod
    def parse(cls, mode: RestoreMode | str) -> RestoreMode:
        try:
            return cls(mode)
        except ValueError:
            raise ConfigError.for_field("mode", mode, f"one of {', '.join(cls)}") from None


class ZeroRestore:
    """Zeros the bytes, in the order of the back stream, at every materialise but the first."""

    def __init__(self, device: Device, address: int, nbytes: int, back_stream: Stream | None) -> None:
        self._device = device
        self._address = address
        self._nbytes = nbytes
        self._back_stream = back_stream
        self._first = True

    def setup(self, handle: int) -> None:
        if not self._first:
            self._device.fill(self._address, 0, self._nbytes, self._back_stream)
        self._first = False

    def teardown(self, handle: int, *, destructing: bool) -> None:
        pass

    def drop(self) -> None:
        pass


class BackupRestore:
    """Copies the bytes to host memory on release and back on materialise.

    The copy out blocks, because the pages go right after it; the copy back runs on the back stream and the host
    buffer stays for the next time. ``on_demand``: the copy back blocks and the host buffer goes.
    """

    def __init__(
        self, device: Device, address: int, nbytes: int, back_stream: Stream | None,
        *, kind: MemoryKind, on_demand: bool, owner: str,
    ) -> None:  # fmt: skip
        self._device = device
        self._address = address
        self._nbytes = nbytes
        self._back_stream = back_stream
        self._kind = kind
        self._on_demand = on_demand
        self._owner = owner
        self._source = device.pinned if kind is MemoryKind.PINNED else device.cpu
        self._backup: Allocation | None = None
        self._holds_contents = False

    def setup(self, handle: int) -> None:
        if self._backup is None or not self._holds_contents:
            return
        stream = None if self._on_demand else self._back_stream
        self._device.copy(self._address, self._backup.address, self._nbytes, stream, (self._backup,))
        if self._on_demand:
            self.drop()

    def teardown(self, handle: int, *, destructing: bool) -> None:
        if destructing:
            self.drop()
            return
        if self._backup is None:
            self._backup = self._source.allocate(self._nbytes, None, self._owner)
            memory_counters.add(self._kind, self._nbytes)
        self._device.drain_streams()
        self._holds_contents = False
        self._device.copy(self._backup.address, self._address, self._nbytes, None)
        self._holds_contents = True

    def drop(self) -> None:
        backup, self._backup = self._backup, None
        if backup is not None:
            memory_counters.add(self._kind, -self._nbytes)
            self._source.deallocate(backup, None)


def restore_step(
    mode: RestoreMode, device: Device, address: int, nbytes: int, back_stream: Stream | None, owner: str
) -> Configurator | None:
    """The step that keeps the promise of ``mode`` for the first ``nbytes`` at ``address``; ``None`` for ``NONE``."""
    if mode is RestoreMode.NONE:
        return None
    if mode is RestoreMode.MEMSET:
        return ZeroRestore(device, address, nbytes, back_stream)
    pinned = mode in (RestoreMode.PINNED, RestoreMode.PINNED_ON_DEMAND)
    on_demand = mode in (RestoreMode.CPU_ON_DEMAND, RestoreMode.PINNED_ON_DEMAND)
    kind = MemoryKind.PINNED if pinned else MemoryKind.CPU
    return BackupRestore(device, address, nbytes, back_stream, kind=kind, on_demand=on_demand, owner=owner)
