"""Streams and events of the CUDA driver."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from onebudget.device.cuda_driver import CudaContext
from onebudget.device.streams import Event, Stream, Touchable
from onebudget.errors import DeviceError, StateError

if TYPE_CHECKING:
    from onebudget.device.base import Device

_BLOCKING_STREAM = 0
_DISABLE_TIMING = 2


class CudaEvent(Event):
    __slots__ = ("_context", "_handle")

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._handle: Any = None
        self._handle = context.call("cuEventCreate", _DISABLE_TIMING)

    def record(self, stream: Any) -> None:
        self._context.call("cuEventRecord", self._handle, stream)

    def hold(self, stream: Any) -> None:
        """Let work submitted to ``stream`` from now on wait for this point."""
        self._context.call("cuStreamWaitEvent", stream, self._handle, 0)

    def query(self) -> bool:
        return self._context.driver.ready("cuEventQuery", self._handle)

    def synchronize(self) -> None:
        self._context.call("cuEventSynchronize", self._handle)

    def __del__(self) -> None:
        if self._handle is not None:
            self._context.driver.api.cuEventDestroy(self._handle)


class CudaStream(Stream):
    """A blocking stream: ordered with the legacy default stream, on which torch works unless told otherwise.

    Tensors made from buffers can therefore be used by torch without events. Give ``as_torch()`` to
    ``torch.cuda.stream`` to run torch's work on this very stream.
    """

    __slots__ = ("__weakref__", "_closed", "_context", "_error", "device", "handle", "stream_id")

    def __init__(self, device: Device, context: CudaContext) -> None:
        self._closed = True
        self.device = device
        self._context = context
        self._error: BaseException | None = None
        self.handle = context.call("cuStreamCreate", _BLOCKING_STREAM)
        self.stream_id = int(self.handle)
        self._closed = False

    def __repr__(self) -> str:
        return f"CudaStream({self.stream_id:#x}{', closed' if self._closed else ''})"

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pending(self) -> int:
        """1 while anything submitted is not done: the driver doesn't count."""
        return 0 if self._closed or self._context.driver.ready("cuStreamQuery", self.handle) else 1

    def open_handle(self) -> Any:
        """The driver's handle; ``StateError`` after ``close``."""
        self._check_open()
        return self.handle

    def as_torch(self) -> Any:
        """This stream as torch sees it."""
        import torch

        self._check_open()
        return torch.cuda.ExternalStream(self.stream_id, device=self.device.torch_device)

    def launch(self, work: Callable[[], None], touches: Iterable[Touchable] = ()) -> None:
        self._check_open()
        _calls.submit(self._context, self, work, tuple(touches))

    def record_event(self) -> CudaEvent:
        self._check_open()
        event = CudaEvent(self._context)
        event.record(self.handle)
        return event

    def wait_event(self, event: Event) -> None:
        self._check_open()
        if isinstance(event, CudaEvent):
            event.hold(self.handle)
        elif not event.query():
            self.launch(event.synchronize)

    def synchronize(self) -> None:
        self.drain()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def drain(self) -> None:
        if self.runs_here():
            raise StateError(f"stream {self.stream_id}: work running on a stream can't wait for that stream")
        if self._closed:
            return
        try:
            self._context.call("cuStreamSynchronize", self.handle)
        except DeviceError as error:
            self.keep_error(error)

    def runs_here(self) -> bool:
        return getattr(_running, "stream", None) is self

    def close(self) -> None:
        if not self._closed:
            self.drain()
            self._closed = True
            self._context.call("cuStreamDestroy", self.handle)

    def __del__(self) -> None:
        if not self._closed:  # the driver lets queued work finish first
            self._context.driver.api.cuStreamDestroy(self.handle)

    def keep_error(self, error: BaseException) -> None:
        """Keep the first error of queued host work for ``synchronize``."""
        self._error = self._error or error

    def _check_open(self) -> None:
        if self._closed:
            raise StateError(f"stream {self.stream_id} is closed")


_Call = tuple[CudaStream, Callable[[], None], tuple[Touchable, ...]]
_running = threading.local()


class _HostCalls:
    """Python functions waiting in streams. The driver gets one C function and a number; it runs them on its own thread,
    where no function may call the driver."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Call] = {}
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.run)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value

    def submit(
        self, context: CudaContext, stream: CudaStream, work: Callable[[], None], touches: tuple[Touchable, ...]
    ) -> None:
        number = next(self._numbers)
        self._waiting[number] = (stream, work, touches)
        try:
            function = context.driver.api.CUhostFn(self._address)
            context.call("cuLaunchHostFunc", stream.handle, function, number)
        except BaseException:
            del self._waiting[number]
            raise

    def run(self, number: int) -> None:
        stream, work, touches = self._waiting.pop(number)
        _running.stream = stream
        try:
            for memory in touches:
                memory.check_use()
            work()
        except BaseException as error:
            stream.keep_error(error)
        finally:
            _running.stream = None


_calls = _HostCalls()
