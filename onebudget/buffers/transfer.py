"""Copies and fills between buffers: what may be copied, and when it happens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from onebudget.buffers.buffer import Buffer
from onebudget.buffers.kinds import MemoryKind
from onebudget.device.streams import Stream
from onebudget.errors import ConfigError


def copy_buffer(source: Buffer, target: Buffer, stream: Stream) -> None:
    """Copy all bytes of ``source`` to ``target``.

    Between two host buffers at once; otherwise in the order of ``stream``. A copy between the card and pageable memory
    blocks in a driver, which ``device.pageable_copies`` counts. ``ConfigError`` unless dtype and size agree.
    """
    source.check_use()
    target.check_use()
    _check_device(source, stream)
    _check_device(target, stream)
    if source.dtype != target.dtype:
        raise ConfigError(f"copy needs equal dtypes: source is {source.dtype}, target is {target.dtype}")
    if source.nbytes != target.nbytes:
        raise ConfigError(f"copy needs equal sizes: source has {source.nbytes} B, target {target.nbytes} B")
    if not source.nbytes:
        return
    at_once = source.kind.on_host and target.kind.on_host
    if not at_once and MemoryKind.CPU in (source.kind, target.kind):
        source.device.pageable_copies += 1
    touches = (*source.touches(), *target.touches())
    source.device.copy(target.data_ptr, source.data_ptr, source.nbytes, None if at_once else stream, touches)


def fill_buffer(buffer: Buffer, value: int, stream: Stream) -> None:
    """Set every byte to ``value`` (0..255): on the host at once, on the card in the order of ``stream``."""
    buffer.check_use()
    _check_device(buffer, stream)
    if not 0 <= value <= 255:
        raise ConfigError.for_field("value", value, "a byte, 0 to 255")
    if buffer.nbytes:
        at_once = buffer.kind.on_host
        order = None if at_once else stream
        buffer.device.fill(buffer.data_ptr, value, buffer.nbytes, order, buffer.touches())


def _check_device(buffer: Buffer, stream: Stream) -> None:
    if buffer.device is not stream.device:
        raise ConfigError(f"{buffer!r} is on device {buffer.device.name}, the stream on another: {stream.device.name}")


@dataclass(frozen=True, slots=True)
class HostData:
    """Contiguous bytes of an object of somebody else's, which ``keep`` holds."""

    address: int
    shape: tuple[int, ...]
    dtype: Any
    keep: object

    @classmethod
    def of(cls, source: Any) -> Self:
        """From a NumPy array or a CPU tensor; ``ConfigError`` for anything else."""
        if hasattr(source, "data_ptr") and getattr(getattr(source, "device", None), "type", "") == "cpu":
            source = source.detach().contiguous()
            return cls(source.data_ptr(), tuple(source.shape), source.dtype, source)
        if hasattr(source, "__array_interface__"):
            import numpy as np

            array = np.ascontiguousarray(source)
            return cls(array.ctypes.data, tuple(source.shape), array.dtype, array)
        raise ConfigError.for_field("source", type(source).__name__, "a Buffer, a NumPy array or a CPU tensor")


def copy_from_host(data: HostData, target: Buffer, stream: Stream) -> None:
    """Copy pageable host data into ``target`` and wait for it, since the data belongs to somebody else."""
    if not target.nbytes:
        return
    if not target.kind.on_host:
        target.device.pageable_copies += 1
    target.device.copy(target.data_ptr, data.address, target.nbytes, stream, target.touches())
    stream.drain()
