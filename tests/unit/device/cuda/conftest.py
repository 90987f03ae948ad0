"""A stand-in for the CUDA driver: same functions, same structures, no GPU.

It keeps what a driver keeps (memory, pools, reservations, handles, mappings, streams, events, contexts), refuses what a
driver refuses, and can be told to fail. It has no contents. Every test runs twice: with structures and enumerations
made up here, and with the real ones of cuda-bindings where that is installed.
"""

# ruff: noqa: N802, N803  (names and arguments are the driver's)
from __future__ import annotations

import ctypes
import itertools
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from onebudget.buffers import BufferManager
from onebudget.device.cuda import CudaDevice
from onebudget.device.cuda_driver import CudaDriver
from onebudget.device.cuda_facts import Processes
from onebudget.units import GIB, MIB

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, NOT_READY = 0, 1, 2, 101, 600
NAMES = {
    INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    INVALID_DEVICE: "CUDA_ERROR_INVALID_DEVICE",
    NOT_READY: "CUDA_ERROR_NOT_READY",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
}
CONTEXT = 0xC0DE
GRANULE = 2 * MIB
UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")
STRUCTURES = {
    "CUmemPoolProps": lambda: SimpleNamespace(location=SimpleNamespace()),
    "CUmemAllocationProp": lambda: SimpleNamespace(location=SimpleNamespace()),
    "CUmemAccessDesc": lambda: SimpleNamespace(location=SimpleNamespace()),
    "CUhostFn": int,
    "cuuint64_t": int,
}
VALUES_WHEN_FAILED = {"cuMemGetInfo": 2, "cuDeviceGetAttribute": 1, "cuPointerGetAttribute": 1}


class Status(int):
    @property
    def name(self) -> str:
        return NAMES[int(self)]


class Names:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


@dataclass
class StandIn:
    """``cuda.bindings.driver`` without a GPU. ``do_X`` is the driver function ``X`` without its status."""

    real: Any = None
    total_bytes: int = 1 * GIB
    others_bytes: int = 100 * MIB
    abilities: dict[str, int] = field(
        default_factory=lambda: {
            "MEMORY_POOLS_SUPPORTED": 1,
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "MULTICAST_SUPPORTED": 0,
            "INTEGRATED": 0,
        }
    )
    device_name: str = "Imaginary 1000"
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    failures: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    retained: int = 0
    current: list[int] = field(default_factory=lambda: [0])
    memory: dict[int, tuple[str, int]] = field(default_factory=dict)
    pools: dict[int, Any] = field(default_factory=dict)
    reservations: dict[int, int] = field(default_factory=dict)
    handles: dict[int, int] = field(default_factory=dict)
    mappings: dict[int, tuple[int, bool]] = field(default_factory=dict)
    streams: dict[int, list[Callable[[], None]]] = field(default_factory=lambda: {0: []})
    events: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and name != "cuuint64_t":
            return lambda *args: self._call(name, *args)
        if self.real is not None:
            return getattr(self.real, name)
        return STRUCTURES.get(name, Names())

    def fail(self, name: str, status: int = INVALID_VALUE, *, skip: int = 0) -> None:
        """Let ``skip`` more calls of a function pass and the next one return ``status``."""
        self.failures[name] = [SUCCESS] * skip + [status]

    def names(self) -> list[str]:
        """Functions called so far that change something."""
        looks = ("Get", "Query", "cuInit", "Synchronize", "Current")
        return [call[0] for call in self.calls if not any(look in call[0] for look in looks)]

    def left(self) -> dict[str, int]:
        """What was not given back."""
        counts = Counter(kind for kind, _ in self.memory.values())
        counts["pools"] = len(self.pools)
        counts["reservations"], counts["handles"] = len(self.reservations), len(self.handles)
        counts["mappings"], counts["streams"] = len(self.mappings), len(self.streams) - 1
        counts["events"], counts["contexts"] = len(self.events), self.retained
        return {what: count for what, count in counts.items() if count}

    @property
    def free_bytes(self) -> int:
        held = sum(nbytes for kind, nbytes in self.memory.values() if kind in ("device", "managed"))
        held += sum(pool.reserved for pool in self.pools.values()) + sum(self.handles.values())
        return self.total_bytes - self.others_bytes - held

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        self.calls.append((name, *args))
        queue = self.failures[name]
        status = queue.pop(0) if queue else SUCCESS
        if status == SUCCESS:
            result = getattr(self, f"do_{name}")(*args)
            if not isinstance(result, Status):
                return (self._status(SUCCESS), *(() if result is None else result))
            status = int(result)
        return (self._status(status), *[None] * VALUES_WHEN_FAILED.get(name, 0))

    def _status(self, code: int) -> Any:
        return Status(code) if self.real is None else self.real.CUresult(code)

    def _new(self) -> int:
        return next(self._numbers) * 0x1000_0000

    def _name(self, value: Any) -> str:
        return str(getattr(value, "name", value))

    # device and context

    def do_cuInit(self, Flags: int) -> None: ...

    def do_cuDeviceGetCount(self) -> Any:
        return (1,)

    def do_cuDeviceGet(self, ordinal: int) -> Any:
        return (ordinal,)

    def do_cuDeviceGetName(self, length: int, dev: Any) -> Any:
        return (self.device_name.encode().ljust(length, b"\0"),)

    def do_cuDeviceGetUuid(self, dev: Any) -> Any:
        return (SimpleNamespace(bytes=UUID.bytes),)

    def do_cuDriverGetVersion(self) -> Any:
        return (13020,)

    def do_cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> Any:
        # Not by the member's name: some attributes have two, and the real enumeration answers with the other one.
        for name, value in self.abilities.items():
            if getattr(self.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}") == attrib:
                return (value,)
        return Status(INVALID_VALUE)

    def do_cuDevicePrimaryCtxGetState(self, dev: Any) -> Any:
        return (0, int(self.retained > 0))

    def do_cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        self.retained += 1
        return (CONTEXT,)

    def do_cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        self.retained -= 1

    def do_cuCtxGetCurrent(self) -> Any:
        return (self.current[-1],)

    def do_cuCtxPushCurrent(self, ctx: Any) -> None:
        self.current.append(int(ctx))

    def do_cuCtxPopCurrent(self) -> Any:
        return (self.current.pop(),)

    def do_cuCtxSynchronize(self) -> None:
        for stream in list(self.streams):
            self.do_cuStreamSynchronize(stream)

    def do_cuMemGetInfo(self) -> Any:
        return (self.free_bytes, self.total_bytes)

    # memory

    def _allocate(self, kind: str, nbytes: int) -> Any:
        if kind != "host" and nbytes > self.free_bytes:
            return Status(OUT_OF_MEMORY)
        address = self._new()
        self.memory[address] = (kind, nbytes)
        return (address,)

    def _free(self, address: int, *kinds: str) -> Any:
        if self.memory.get(address, ("", 0))[0] not in kinds:
            return Status(INVALID_VALUE)
        kind, nbytes = self.memory.pop(address)
        if kind == "pool":
            next(iter(self.pools.values())).used -= nbytes
        return None

    def do_cuMemAlloc(self, bytesize: int) -> Any:
        return self._allocate("device", bytesize)

    def do_cuMemAllocManaged(self, bytesize: int, flags: int) -> Any:
        return self._allocate("managed", bytesize)

    def do_cuMemFree(self, dptr: int) -> Any:
        return self._free(dptr, "device", "managed", "pool")

    def do_cuMemHostAlloc(self, bytesize: int, Flags: int) -> Any:
        return self._allocate("host", bytesize)

    def do_cuMemFreeHost(self, p: int) -> Any:
        return self._free(p, "host")

    def do_cuPointerGetAttribute(self, attribute: Any, ptr: int) -> Any:
        assert self._name(attribute) == "CU_POINTER_ATTRIBUTE_MEMORY_TYPE"
        kind = self.memory.get(ptr, ("unknown", 0))[0]
        return Status(INVALID_VALUE) if kind == "unknown" else (1 if kind == "host" else 2,)

    def do_cuMemcpyAsync(self, dst: int, src: int, ByteCount: int, hStream: Any) -> Any:
        return None if int(hStream) in self.streams else Status(INVALID_VALUE)

    def do_cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: Any) -> Any:
        return None if int(hStream) in self.streams else Status(INVALID_VALUE)

    # pool

    def do_cuMemPoolCreate(self, poolProps: Any) -> Any:
        handle = self._new()
        self.pools[handle] = SimpleNamespace(props=poolProps, used=0, reserved=0, attributes={})
        return (handle,)

    def do_cuMemPoolDestroy(self, pool: Any) -> None:
        assert self.pools.pop(pool).used == 0

    def do_cuMemPoolSetAttribute(self, pool: Any, attr: Any, value: Any) -> None:
        self.pools[pool].attributes[self._name(attr)] = int(value)

    def do_cuMemPoolGetAttribute(self, pool: Any, attr: Any) -> Any:
        name = self._name(attr)
        return (self.pools[pool].used if "USED" in name else self.pools[pool].reserved,)

    def do_cuMemPoolTrimTo(self, pool: Any, minBytesToKeep: int) -> None:
        state = self.pools[pool]
        state.reserved = max(-(-state.used // GRANULE) * GRANULE, min(state.reserved, minBytesToKeep))

    def do_cuMemAllocFromPoolAsync(self, bytesize: int, pool: Any, hStream: Any) -> Any:
        state = self.pools[pool]
        growth = max(0, -(-(state.used + bytesize) // GRANULE) * GRANULE - state.reserved)
        if int(hStream) not in self.streams:
            return Status(INVALID_VALUE)
        if growth > self.free_bytes:
            return Status(OUT_OF_MEMORY)
        state.reserved += growth
        state.used += bytesize
        address = self._new()
        self.memory[address] = ("pool", bytesize)
        return (address,)

    def do_cuMemFreeAsync(self, dptr: int, hStream: Any) -> Any:
        if int(hStream) not in self.streams or self.memory.get(dptr, ("", 0))[0] != "pool":
            return Status(INVALID_VALUE)
        self.streams[int(hStream)].append(lambda: self._free(dptr, "pool"))
        return None

    # virtual memory

    def do_cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> Any:
        assert "RECOMMENDED" in self._name(option)
        return (GRANULE,)

    def do_cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Any:
        address = self._new()
        self.reservations[address] = size
        return (address,)

    def do_cuMemAddressFree(self, ptr: int, size: int) -> Any:
        if self.reservations.get(ptr) != size or any(ptr <= at < ptr + size for at in self.mappings):
            return Status(INVALID_VALUE)
        del self.reservations[ptr]
        return None

    def do_cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        if size % GRANULE:
            return Status(INVALID_VALUE)
        if size > self.free_bytes:
            return Status(OUT_OF_MEMORY)
        handle = self._new()
        self.handles[handle] = size
        return (handle,)

    def do_cuMemRelease(self, handle: int) -> Any:
        if handle not in self.handles or any(mapped == handle for mapped, _ in self.mappings.values()):
            return Status(INVALID_VALUE)
        del self.handles[handle]
        return None

    def do_cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> Any:
        inside = any(start <= ptr and ptr + size <= start + length for start, length in self.reservations.items())
        if not inside or ptr in self.mappings or self.handles.get(handle) != size:
            return Status(INVALID_VALUE)
        self.mappings[ptr] = (handle, False)
        return None

    def do_cuMemSetAccess(self, ptr: int, size: int, desc: Any, count: int) -> Any:
        assert count == len(desc) == 1
        assert "READWRITE" in self._name(desc[0].flags)
        assert int(desc[0].location.id) == 0
        self.mappings[ptr] = (self.mappings[ptr][0], True)

    def do_cuMemUnmap(self, ptr: int, size: int) -> Any:
        return None if self.mappings.pop(ptr, None) else Status(INVALID_VALUE)

    # streams and events

    def do_cuStreamCreate(self, Flags: int) -> Any:
        handle = self._new()
        self.streams[handle] = []
        return (handle,)

    def do_cuStreamDestroy(self, hStream: Any) -> Any:
        return None if self.streams.pop(int(hStream), None) is not None else Status(INVALID_VALUE)

    def do_cuStreamQuery(self, hStream: Any) -> Any:
        return Status(NOT_READY) if self.streams[int(hStream)] else None

    def do_cuStreamSynchronize(self, hStream: Any) -> None:
        queue = self.streams[int(hStream)]
        while queue:
            queue.pop(0)()

    def do_cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        assert int(hEvent) in self.events

    def do_cuLaunchHostFunc(self, hStream: Any, fn: Any, userData: int) -> None:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(fn))
        self.streams[int(hStream)].append(lambda: function(userData))

    def do_cuEventCreate(self, Flags: int) -> Any:
        handle = self._new()
        self.events.add(handle)
        return (handle,)

    def do_cuEventDestroy(self, hEvent: Any) -> None:
        self.events.remove(int(hEvent))

    def do_cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        assert int(hEvent) in self.events
        assert int(hStream) in self.streams

    def do_cuEventQuery(self, hEvent: Any) -> Any:
        return Status(NOT_READY) if any(self.streams.values()) else None

    def do_cuEventSynchronize(self, hEvent: Any) -> None:
        self.do_cuCtxSynchronize()


@dataclass
class StandInNvml:
    """NVML that answers as told; an exception instead of an answer is raised."""

    mig: Any = False
    shown: Any = None
    version: Any = "580.65.06"

    def is_mig(self, device_uuid: uuid.UUID) -> bool:
        assert device_uuid == UUID
        return self._answer(self.mig)  # type: ignore[no-any-return]

    def processes(self, device_uuid: uuid.UUID) -> Processes:
        return self._answer(self.shown)  # type: ignore[no-any-return]

    def driver_version(self) -> str:
        return self._answer(self.version)  # type: ignore[no-any-return]

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(params=["stand-in", "cuda-bindings"])
def api(request: pytest.FixtureRequest) -> StandIn:
    """The driver of a 1 GiB device of which other processes hold 100 MiB."""
    real = None if request.param == "stand-in" else pytest.importorskip("cuda.bindings.driver")
    return StandIn(real)


@pytest.fixture
def nvml() -> StandInNvml:
    return StandInNvml(shown=Processes(924 * MIB, {}))


@pytest.fixture
def open_cuda(api: StandIn, nvml: StandInNvml) -> Iterator[Callable[[], CudaDevice]]:
    """Opens the device. At the end of the test it is closed, and the driver must have got everything back."""
    opened: list[CudaDevice] = []

    def open_device() -> CudaDevice:
        opened.append(CudaDevice(driver=CudaDriver(api), management=lambda: nvml))
        return opened[-1]

    yield open_device
    for device in opened:
        device.close()
    assert api.left() == {}
    assert api.current == [0]


@pytest.fixture
def device(open_cuda: Callable[[], CudaDevice]) -> CudaDevice:
    return open_cuda()


@pytest.fixture
def manager(device: CudaDevice) -> BufferManager:
    return BufferManager(device.create_stream())
