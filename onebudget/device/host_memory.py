"""Physical memory of the host device: one sparse memory file per device, of which ranges are handed out.

A range of the file is physical memory (pages appear when touched, punching a hole gives them back); mapping it shared
at a fixed address puts it into a reservation. Offsets are never used twice, so nothing has to be searched, and one
file descriptor serves a device however many handles it has.
"""

from __future__ import annotations

import mmap as python_mmap
import os
import threading

from onebudget.device import libc
from onebudget.units import align_up

_FILE_BYTES = 2**62


class PhysicalFile:
    """Hands out ranges of a memory file."""

    def __init__(self, name: str) -> None:
        self._fd = -1
        self._fd = os.memfd_create(f"onebudget-{name}")
        os.ftruncate(self._fd, _FILE_BYTES)
        self._next = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        """Offset of ``nbytes`` that were never handed out before and read as zeros. Page multiples only."""
        with self._lock:
            offset, self._next = self._next, self._next + nbytes
            return offset

    def map(self, offset: int, nbytes: int, *, address: int, protection: int = libc.PROT_READ_WRITE) -> None:
        """Map a range at a reserved address, replacing what is mapped there."""
        flags = libc.MAP_SHARED | libc.MAP_NORESERVE | libc.MAP_FIXED
        libc.mmap(address, nbytes, protection, flags, self._fd, offset)

    def punch(self, offset: int, nbytes: int) -> None:
        """Give the pages of a range back to the machine."""
        libc.punch_hole(self._fd, offset, nbytes)

    def resident_bytes(self) -> int:
        """Pages that really exist behind this file."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Give all pages back and close the descriptor. Ranges still mapped read as zeros."""
        if self._fd >= 0:
            if self._next:
                self.punch(0, self._next)
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def reserve_addresses(nbytes: int, alignment: int) -> int:
    """Address space without memory, aligned; both arguments are page multiples."""
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
    start = libc.mmap(0, nbytes + alignment, libc.PROT_NONE, flags)
    address = align_up(start, alignment)
    if address > start:
        libc.munmap(start, address - start)
    if start + alignment > address:
        libc.munmap(address + nbytes, start + alignment - address)
    return address


class HostArena:
    """A mapped range of a memory file. Unmapped when nothing refers to it any more, tensors included."""

    __slots__ = ("_file", "_offset", "address", "nbytes")

    def __init__(self, file: PhysicalFile, nbytes: int, alignment: int) -> None:
        self._file: PhysicalFile | None = file
        self.nbytes = nbytes
        self._offset = file.take(nbytes)
        self.address = 0
        self.address = reserve_addresses(nbytes, alignment)
        file.map(self._offset, nbytes, address=self.address)

    def decommit(self, start: int, nbytes: int) -> None:
        assert self._file is not None
        self._file.punch(self._offset + start, nbytes)

    def close(self) -> None:
        if self._file is not None:
            self._file.punch(self._offset, self.nbytes)
            self._file = None

    def __del__(self) -> None:
        if self.address:
            libc.munmap(self.address, self.nbytes)


class HostBlock:
    """Private anonymous host memory, optionally locked. Unmapped when nothing refers to it any more."""

    __slots__ = ("address", "locked", "nbytes")

    def __init__(self, nbytes: int, *, lock: bool) -> None:
        self.nbytes = align_up(nbytes, python_mmap.PAGESIZE)
        self.address = 0
        flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
        self.address = libc.mmap(0, self.nbytes, libc.PROT_READ_WRITE, flags)
        self.locked = lock and libc.mlock(self.address, self.nbytes)

    def __del__(self) -> None:
        if self.address:
            libc.munmap(self.address, self.nbytes)
