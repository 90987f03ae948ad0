"""Calls of the C library that Python's own modules don't offer: mapping at a fixed address, giving pages back."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Final

from onebudget.errors import AllocationError, DeviceError

PROT_NONE: Final = 0
PROT_READ_WRITE: Final = 3
MAP_SHARED: Final = 0x01
MAP_PRIVATE: Final = 0x02
MAP_FIXED: Final = 0x10
MAP_ANONYMOUS: Final = 0x20
MAP_NORESERVE: Final = 0x4000
MAP_FIXED_NOREPLACE: Final = 0x100000
_MLOCK_ONFAULT: Final = 0x01
FALLOC_FL_KEEP_SIZE: Final = 0x01
FALLOC_FL_PUNCH_HOLE: Final = 0x02
_FAILED: Final = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    size, offset, pointer = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
    library.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset)
    library.mmap.restype = pointer
    library.munmap.argtypes = library.mlock.argtypes = library.munlock.argtypes = (pointer, size)
    library.mprotect.argtypes = (pointer, size, ctypes.c_int)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, offset, offset)
    return library


def mmap(address: int, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """Map and return the address. ``AllocationError`` when the kernel has no room, else ``DeviceError``."""
    if not 0 < nbytes < 2**63:
        raise AllocationError(nbytes, 0, kind="host", detail="The address space is smaller than that.")
    result: int | None = _libc().mmap(address or None, nbytes, protection, flags, fd, offset)
    if result is None or result == _FAILED:
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            raise AllocationError(nbytes, 0, kind="host", detail="The kernel refused to map that much.")
        raise _error("mmap", code)
    return result


def munmap(address: int, nbytes: int) -> None:
    _check("munmap", _libc().munmap(address, nbytes))


def mprotect(address: int, nbytes: int, protection: int) -> None:
    _check("mprotect", _libc().mprotect(address, nbytes, protection))


def punch_hole(fd: int, offset: int, nbytes: int) -> None:
    """Free the pages of part of a memory file; its size stays."""
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    _check("fallocate(PUNCH_HOLE)", _libc().fallocate(fd, mode, offset, nbytes))


def mlock(address: int, nbytes: int) -> bool:
    """Lock pages into memory; ``False`` when the limits of this process don't allow it."""
    if _libc().mlock(address, nbytes) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return False
    raise _error("mlock", code)


def may_lock(nbytes: int) -> bool:
    """Whether this process may lock so many bytes beside what it has locked. Nothing is taken for it."""
    lock = getattr(_libc(), "mlock2", None)
    try:
        address = mmap(0, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
    except (AllocationError, DeviceError):
        return False
    try:
        return lock is not None and lock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MLOCK_ONFAULT) == 0
    finally:
        munmap(address, nbytes)


def munlock(address: int, nbytes: int) -> None:
    _check("munlock", _libc().munlock(address, nbytes))


def _check(call: str, status: int) -> None:
    if status:
        raise _error(call, ctypes.get_errno())


def _error(call: str, code: int) -> DeviceError:
    return DeviceError(os.strerror(code), code, call)
