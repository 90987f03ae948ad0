"""What the driver and NVML say about a CUDA device, and where each fact was read."""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from onebudget.device.cuda_driver import CudaContext, CudaDriver
from onebudget.device.cuda_vmm import memory_properties
from onebudget.device.facts import DeviceFacts, read_host_facts
from onebudget.units import MIB

log = logging.getLogger(__name__)

_ATTRIBUTE = "cuDeviceGetAttribute"
_BLOCK_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Processes:
    """What NVML shows of one device: free bytes of all of it, and bytes used by processes it can tell apart."""

    free_bytes: int
    used_by_pid: dict[int, int]


class Management(Protocol):
    """The part of NVML that is used here; every method may fail with any exception."""

    def is_mig(self, device_uuid: uuid.UUID) -> bool: ...

    def processes(self, device_uuid: uuid.UUID) -> Processes: ...

    def driver_version(self) -> str: ...


class Nvml:
    """NVML through ``cuda.core.system``."""

    def __init__(self) -> None:
        self._system: Any = importlib.import_module("cuda.core.system")

    def is_mig(self, device_uuid: uuid.UUID) -> bool:
        return bool(self._device(device_uuid).mig.is_mig_device)

    def processes(self, device_uuid: uuid.UUID) -> Processes:
        device = self._device(device_uuid)
        used = {int(one.pid): int(one.used_gpu_memory) for one in device.compute_running_processes}
        return Processes(int(device.memory_info.free), used)

    def driver_version(self) -> str:
        return ".".join(str(part) for part in self._system.get_kernel_mode_driver_version())

    def _device(self, device_uuid: uuid.UUID) -> Any:
        """NVML names the same device with a prefix that tells whole cards and MIG instances apart."""
        try:
            return self._system.Device(uuid=f"GPU-{device_uuid}")
        except Exception:
            return self._system.Device(uuid=f"MIG-{device_uuid}")


def device_uuid(driver: CudaDriver, device: Any) -> uuid.UUID:
    return uuid.UUID(bytes=bytes(driver.call("cuDeviceGetUuid", device).bytes))


def ask(management: Callable[[], Management], question: Callable[[Management], Any]) -> tuple[Any, str]:
    """The answer and ``""``, or ``None`` and why NVML did not give one: it is absent in many containers."""
    try:
        return question(management()), ""
    except Exception as error:
        log.debug("NVML did not answer", exc_info=True)
        return None, f"NVML did not answer: {error}"


def read_cuda_facts(context: CudaContext, index: int, management: Callable[[], Management]) -> DeviceFacts:
    """Name, sizes and abilities of the device.

    ``total_bytes`` is what the driver offers to programs, which is less than the label says.
    """
    driver, device = context.driver, context.device
    host = read_host_facts()
    _, total_bytes = context.call("cuMemGetInfo")
    vmm_supported = has_ability(driver, device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
    granularity_bytes, granularity_source = _granularity(context, index, vmm_supported)
    mig, mig_source = _mig(driver, device, management)
    version, version_source = _version(driver, management)
    return DeviceFacts(
        name=_name(driver, device),
        total_bytes=int(total_bytes),
        granularity_bytes=granularity_bytes,
        pool_supported=has_ability(driver, device, "MEMORY_POOLS_SUPPORTED"),
        vmm_supported=vmm_supported,
        multicast_supported=has_ability(driver, device, "MULTICAST_SUPPORTED"),
        unified=has_ability(driver, device, "INTEGRATED"),
        mig=mig,
        driver=version,
        **host.as_device_fields(),
        sources={
            **host.sources(),
            "name": "cuDeviceGetName",
            "total_bytes": "cuMemGetInfo",
            "granularity_bytes": granularity_source,
            "pool_supported": f"{_ATTRIBUTE}(MEMORY_POOLS_SUPPORTED)",
            "vmm_supported": f"{_ATTRIBUTE}(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)",
            "multicast_supported": f"{_ATTRIBUTE}(MULTICAST_SUPPORTED)",
            "unified": f"{_ATTRIBUTE}(INTEGRATED)",
            "mig": mig_source,
            "driver": version_source,
        },
    )


def processes_before(driver: CudaDriver, device: Any, management: Callable[[], Management]) -> Processes | None:
    """What NVML shows while this process has no context on the device; ``None`` when it has one, or NVML is silent."""
    _, active = driver.call("cuDevicePrimaryCtxGetState", device)
    return None if active else _processes(driver, device, management)


def others_bytes(
    context: CudaContext, total_bytes: int, before: Processes | None, management: Callable[[], Management]
) -> int | None:
    """Bytes that other processes hold; ``None`` when that can't be told.

    ``before`` is the reading without a context of ours: then all that is not free belongs to others. Otherwise this
    process's own share is subtracted, which needs NVML to know its pid (in a container with its own process numbers it
    does not).
    """
    if before is not None:
        return max(total_bytes - before.free_bytes, 0)
    now = _processes(context.driver, context.device, management)
    own = None if now is None else now.used_by_pid.get(os.getpid())
    if own is None or own > total_bytes:  # NVML says "unknown" with the largest number there is
        return None
    return max(total_bytes - int(context.call("cuMemGetInfo")[0]) - own, 0)


def has_ability(driver: CudaDriver, device: Any, name: str) -> bool:
    """A yes-or-no attribute. Drivers older than an attribute say invalid value, which is a no."""
    attribute = getattr(driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    status, value = driver.api.cuDeviceGetAttribute(attribute, device)
    return not status and bool(value)


def _processes(driver: CudaDriver, device: Any, management: Callable[[], Management]) -> Processes | None:
    answer: Processes | None = ask(management, lambda nvml: nvml.processes(device_uuid(driver, device)))[0]
    return answer


def _granularity(context: CudaContext, index: int, vmm_supported: bool) -> tuple[int, str]:
    if not vmm_supported:
        return _BLOCK_BYTES, "assumed: the block in which drivers take memory, there being no virtual memory to ask"
    api = context.driver.api
    option = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    properties = memory_properties(api, index)
    return int(context.call("cuMemGetAllocationGranularity", properties, option)), "cuMemGetAllocationGranularity"


def _mig(driver: CudaDriver, device: Any, management: Callable[[], Management]) -> tuple[bool, str]:
    answer, why = ask(management, lambda nvml: nvml.is_mig(device_uuid(driver, device)))
    if answer is not None:
        return answer, "NVML"
    return " MIG " in f"{_name(driver, device)} ", f"the device's name ({why})"


def _version(driver: CudaDriver, management: Callable[[], Management]) -> tuple[str, str]:
    major, minor = divmod(int(driver.call("cuDriverGetVersion")), 1000)
    cuda = f"CUDA {major}.{minor // 10}"
    kernel, _ = ask(management, lambda nvml: nvml.driver_version())
    return (f"{kernel}, {cuda}", "NVML and cuDriverGetVersion") if kernel else (cuda, "cuDriverGetVersion")


def _name(driver: CudaDriver, device: Any) -> str:
    raw: bytes | Sequence[int] = driver.call("cuDeviceGetName", 256, device)
    return bytes(raw).split(b"\0", 1)[0].decode(errors="replace")
