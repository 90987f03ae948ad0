"""Calls of the CUDA driver: statuses become exceptions, and every call runs in the right context.

The functions and structures come from ``cuda.bindings.driver``, or from a stand-in of the same shape.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from onebudget.errors import AllocationError, DeviceError

T = TypeVar("T")

OUT_OF_MEMORY = 2
NOT_READY = 600
LEGACY_STREAM = 0
"""The null stream: it waits for the blocking streams of its context, and they wait for it."""


class DriverOutOfMemoryError(AllocationError):
    """The driver said out of memory. Whoever knows for whom the memory was raises a fuller one from it."""

    def __init__(self, call: str, free_bytes: int) -> None:
        super().__init__(0, free_bytes, detail=f"{call} returned CUDA_ERROR_OUT_OF_MEMORY.")
        self.call = call


class CudaDriver:
    """``call(name, *args)`` returns what the driver function returns besides its status.

    A status other than success is ``AllocationError`` when memory ran out, otherwise ``DeviceError`` with the status's
    name and code and the function. ``api`` is also where enumerations and structures are.
    """

    def __init__(self, api: Any) -> None:
        self.api = api

    def call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self.api, name)(*args)
        if status:
            raise self._error(name, status)
        return values[0] if len(values) == 1 else tuple(values)

    def ready(self, name: str, *args: Any) -> bool:
        """For queries: ``False`` while the driver says "not ready"."""
        (status,) = getattr(self.api, name)(*args)
        if status and int(status) != NOT_READY:
            raise self._error(name, status)
        return not status

    def _error(self, name: str, status: Any) -> Exception:
        if int(status) == OUT_OF_MEMORY:
            return DriverOutOfMemoryError(name, self._free_bytes())
        return DeviceError(getattr(status, "name", f"CUDA_ERROR_{int(status)}"), int(status), name)

    def _free_bytes(self) -> int:
        status, free, _ = self.api.cuMemGetInfo()
        return 0 if status else int(free)


class CudaContext:
    """The primary context of one device, which torch uses too. Held from here to ``close``."""

    def __init__(self, driver: CudaDriver, device: Any) -> None:
        self.driver = driver
        self.device = device
        self._handle = driver.call("cuDevicePrimaryCtxRetain", device)
        self._address = int(self._handle)

    def call(self, name: str, *args: Any) -> Any:
        """``CudaDriver.call`` with this context current; what the thread had before is current again afterwards."""
        driver = self.driver
        if int(driver.call("cuCtxGetCurrent")) == self._address:
            return driver.call(name, *args)
        driver.call("cuCtxPushCurrent", self._handle)
        try:
            return driver.call(name, *args)
        finally:
            driver.call("cuCtxPopCurrent")

    def close(self) -> None:
        self.driver.call("cuDevicePrimaryCtxRelease", self.device)


def load_driver() -> CudaDriver:
    """The machine's driver, initialised. ``DeviceError`` with what is missing where there is none."""
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings can't be imported here ({error}): pip install 'onebudget[cuda]'", call="open_device"
        ) from error
    return initialize(api)


def initialize(api: Any) -> CudaDriver:
    driver = CudaDriver(api)
    try:
        driver.call("cuInit", 0)
    except RuntimeError as error:  # the bindings' own error where libcuda is absent, and DeviceError
        raise DeviceError(
            f"no usable NVIDIA driver here ({error}): use device 'host', or a machine where nvidia-smi answers",
            getattr(error, "code", None),
            "cuInit",
        ) from error
    return driver


def find_device(driver: CudaDriver, index: int) -> Any:
    """The driver's handle of a device by its ordinal. ``DeviceError`` saying how many there are."""
    count = int(driver.call("cuDeviceGetCount"))
    if index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else ""
        raise DeviceError(f"cuda:{index} does not exist: the driver shows {count} devices{hint}", call="cuDeviceGet")
    return driver.call("cuDeviceGet", index)


def twice(act: Callable[[], T], reclaim: Callable[[], None], failed: Callable[[], AllocationError]) -> T:
    """``act``, and when the driver is out of memory once more after ``reclaim``; then ``failed`` is raised."""
    try:
        return act()
    except DriverOutOfMemoryError:
        reclaim()
    try:
        return act()
    except DriverOutOfMemoryError as error:
        raise failed() from error
