"""Statuses become exceptions, contexts are as before, and absence is a sentence."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from onebudget.device import open_device
from onebudget.device.cuda_driver import CudaContext, CudaDriver, DriverOutOfMemoryError, find_device, initialize, twice
from onebudget.errors import AllocationError, DeviceError
from onebudget.units import MIB


def test_results_come_without_their_status(api: Any) -> None:
    driver = CudaDriver(api)
    assert driver.call("cuMemGetInfo") == (924 * MIB, 1024 * MIB)
    assert driver.call("cuDeviceGetCount") == 1
    assert driver.call("cuInit", 0) == ()


def test_a_status_is_an_error_with_name_code_and_call(api: Any) -> None:
    api.fail("cuMemAlloc", 700)
    with pytest.raises(DeviceError) as failure:
        CudaDriver(api).call("cuMemAlloc", 10)
    error = failure.value
    assert (error.name, error.code, error.call) == ("CUDA_ERROR_ILLEGAL_ADDRESS", 700, "cuMemAlloc")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700) in cuMemAlloc" in str(error)


@pytest.mark.parametrize("name", ["cuStreamCreate", "cuEventCreate", "cuMemSetAccess", "cuDevicePrimaryCtxRetain"])
def test_out_of_memory_anywhere_is_an_allocation_error(api: Any, name: str) -> None:
    api.fail(name, 2)
    with pytest.raises(AllocationError, match=f"{name} returned CUDA_ERROR_OUT_OF_MEMORY") as failure:
        CudaDriver(api).call(name)
    assert failure.value.free_bytes == 924 * MIB


def test_queries_tell_not_ready_from_failed(api: Any) -> None:
    driver = CudaDriver(api)
    assert driver.ready("cuStreamQuery", 0)
    api.streams[0].append(lambda: None)
    assert not driver.ready("cuStreamQuery", 0)
    api.fail("cuStreamQuery", 700)
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        driver.ready("cuStreamQuery", 0)


def test_calls_run_in_the_context_and_leave_the_threads_own(api: Any) -> None:
    context = CudaContext(CudaDriver(api), 0)
    context.call("cuMemAlloc", 512)
    assert [call[0] for call in api.calls][-4:] == [
        "cuCtxGetCurrent",
        "cuCtxPushCurrent",
        "cuMemAlloc",
        "cuCtxPopCurrent",
    ]
    api.fail("cuMemAlloc")
    with pytest.raises(DeviceError):
        context.call("cuMemAlloc", 512)
    assert api.current == [0]
    api.current.append(0xC0DE)
    context.call("cuMemAlloc", 512)
    assert [call[0] for call in api.calls][-2:] == ["cuCtxGetCurrent", "cuMemAlloc"]
    context.close()
    assert api.retained == 0


def test_twice_reclaims_once_and_then_gives_up() -> None:
    steps: list[str] = []

    def act() -> int:
        steps.append("act")
        if len(steps) < need:
            raise DriverOutOfMemoryError("cuMemAlloc", 0)
        return 7

    def reclaim() -> None:
        steps.append("reclaim")

    def failed() -> AllocationError:
        return AllocationError(1, 0)

    need = 1
    assert twice(act, reclaim, failed) == 7
    assert steps == ["act"]
    steps.clear()
    need = 3
    assert twice(act, reclaim, failed) == 7
    assert steps == ["act", "reclaim", "act"]
    steps.clear()
    need = 9
    with pytest.raises(AllocationError) as failure:
        twice(act, reclaim, failed)
    assert failure.value.requested_bytes == 1
    assert steps == ["act", "reclaim", "act"]


def test_a_device_that_is_not_there_says_how_many_are(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert find_device(CudaDriver(api), 0) == 0
    with pytest.raises(DeviceError, match=r"cuda:1 does not exist: the driver shows 1 .*'3'"):
        find_device(CudaDriver(api), 1)


def test_a_driver_that_cannot_start_is_a_sentence(api: Any) -> None:
    api.fail("cuInit", 700)
    with pytest.raises(DeviceError, match="no usable NVIDIA driver") as failure:
        initialize(api)
    assert (failure.value.code, failure.value.call) == (700, "cuInit")


def test_a_missing_library_is_a_sentence(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise RuntimeError("libcuda.so.1 is not here")

    monkeypatch.setattr(api, "do_cuInit", missing)
    with pytest.raises(DeviceError, match=r"no usable NVIDIA driver here \(libcuda"):
        initialize(api)


def test_missing_packages_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "cuda.bindings.driver":
            raise ModuleNotFoundError("No module named 'cuda'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DeviceError, match=r"cuda-bindings can't be imported here .*onebudget\[cuda\]"):
        open_device("cuda:0")


def test_opening_on_a_machine_without_a_driver_is_a_sentence() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    with pytest.raises(DeviceError, match=r"NVIDIA driver|cuda-bindings"):
        open_device("cuda:0")
