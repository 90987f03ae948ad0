"""Facts with their sources, and the bytes of other processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from onebudget.device.cuda import CudaDevice
from onebudget.device.cuda_facts import Processes
from onebudget.units import MIB


def test_facts_are_read_from_the_driver(device: CudaDevice) -> None:
    facts = device.facts
    assert (facts.name, device.name, device.torch_device) == ("Imaginary 1000", "Imaginary 1000", "cuda:0")
    assert facts.total_bytes == device.total_bytes == 1024 * MIB
    assert facts.granularity_bytes == 2 * MIB
    assert (facts.pool_supported, facts.vmm_supported, facts.multicast_supported) == (True, True, False)
    assert (facts.unified, facts.mig) == (False, False)
    assert facts.driver == "580.65.06, CUDA 13.2"
    read = ("name", "total_bytes", "granularity_bytes", "pool_supported", "vmm_supported", "multicast_supported",
            "unified", "mig", "driver", "wsl", "os_page_bytes")  # fmt: skip
    assert all(facts.source(name) != "assumed" for name in read)


def test_an_attribute_the_driver_does_not_know_is_a_no(api: Any, open_cuda: Callable[[], CudaDevice]) -> None:
    del api.abilities["MULTICAST_SUPPORTED"], api.abilities["VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"]
    facts = open_cuda().facts
    assert (facts.multicast_supported, facts.vmm_supported) == (False, False)
    assert facts.source("granularity_bytes").startswith("assumed:")


def test_unified_is_integrated(api: Any, open_cuda: Callable[[], CudaDevice]) -> None:
    api.abilities["INTEGRATED"] = 1
    assert open_cuda().facts.unified


@pytest.mark.parametrize(
    ("answer", "name", "mig", "source"),
    [
        (True, "GPU", True, "NVML"),
        (False, "GPU", False, "NVML"),
        (RuntimeError("absent"), "GPU MIG 1g.10gb", True, "name (NVML did not answer: absent)"),
        (RuntimeError("absent"), "GPU", False, "name (NVML did not answer: absent)"),
    ],
)
def test_mig(api: Any, nvml: Any, open_cuda: Any, answer: Any, name: str, mig: bool, source: str) -> None:
    nvml.mig, api.device_name = answer, name
    facts = open_cuda().facts
    assert facts.mig is mig
    assert source in facts.source("mig")


def test_without_nvml_the_driver_still_opens(nvml: Any, open_cuda: Callable[[], CudaDevice]) -> None:
    nvml.mig = nvml.shown = nvml.version = RuntimeError("absent")
    device = open_cuda()
    assert device.facts.driver == "CUDA 13.2"
    assert (device.account.others_bytes, device.others_known) == (0, False)


def test_before_our_context_all_that_is_not_free_is_somebody_elses(device: CudaDevice) -> None:
    assert (device.account.others_bytes, device.others_known) == (100 * MIB, True)


@pytest.mark.parametrize(
    ("used_by_pid", "others"),
    [
        ({os.getpid(): 30 * MIB, 1: 70 * MIB}, 70 * MIB),
        ({1: 70 * MIB}, None),  # a container: our pid is not ours out there
        ({os.getpid(): 2**64 - 1}, None),  # NVML's word for unknown
    ],
)
def test_with_a_context_our_share_is_subtracted(
    api: Any, nvml: Any, open_cuda: Any, used_by_pid: dict[int, int], others: int | None
) -> None:
    api.retained = 1  # torch was here first
    nvml.shown = Processes(924 * MIB, used_by_pid)
    device = open_cuda()
    assert (device.account.others_bytes, device.others_known) == (others or 0, others is not None)
    device.close()
    api.retained -= 1


def test_opening_that_fails_leaves_nothing(api: Any, open_cuda: Callable[[], CudaDevice]) -> None:
    api.fail("cuDeviceGetName", 700)
    with pytest.raises(RuntimeError, match="cuDeviceGetName"):
        open_cuda()
    assert api.left() == {}
