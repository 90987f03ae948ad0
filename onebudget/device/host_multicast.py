"""Memory shared by several processes of one machine, at an address they agreed on."""

from __future__ import annotations

import os

from onebudget.device import libc
from onebudget.device.multicast import Multicast
from onebudget.errors import DeviceError

# Between the heap and the libraries of a 64-bit process there are tens of terabytes that nobody uses.
_FIRST_ADDRESS = 0x6000_0000_0000
_STEP = 2**36


class HostMulticast(Multicast):
    """A memory file that the other ranks open through ``/proc/<pid>/fd``; mappings keep it alive.

    This rank's mapping goes when nothing refers to the object any more, tensors included.
    """

    def __init__(self) -> None:
        self._fd = -1

    def create(self, nbytes: int) -> object:
        self.nbytes = nbytes
        self._fd = os.memfd_create("onebudget-multicast")
        os.ftruncate(self._fd, nbytes)
        return os.getpid(), self._fd

    def join(self, ticket: object, nbytes: int) -> None:
        assert isinstance(ticket, tuple)
        pid, fd = ticket
        self.nbytes = nbytes
        try:
            self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(
                f"can't open the shared memory of process {pid}: ranks need one machine, user and pid namespace",
                error.errno, "open",
            ) from error  # fmt: skip

    def propose_address(self, attempt: int) -> int:
        return _FIRST_ADDRESS + _STEP * (os.getpid() % 251) + attempt * (self.nbytes + _STEP)

    def try_map(self, address: int) -> bool:
        flags = libc.MAP_SHARED | libc.MAP_NORESERVE | libc.MAP_FIXED_NOREPLACE
        try:
            mapped = libc.mmap(address, self.nbytes, libc.PROT_READ_WRITE, flags, self._fd)
        except DeviceError:
            return False
        if mapped != address:  # a kernel that doesn't know the flag takes the address for a hint
            libc.munmap(mapped, self.nbytes)
            return False
        self.address = address
        return True

    def unmap(self) -> None:
        address, self.address = self.address, 0
        if address:
            libc.munmap(address, self.nbytes)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()
        self.unmap()
