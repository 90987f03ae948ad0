from __future__ import annotations

from collections.abc import Iterator

import pytest

from onebudget.buffers.virtual.restore import RestoreMode, restore_step
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import ConfigError


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("fake", capacity_bytes=1 << 20) as device:
        device.faults.active = True  # count calls
        yield device


def copies(device: Device) -> int:
    return device.faults.calls.get("copy", 0)


def test_names() -> None:
    assert RestoreMode.parse("cpu") is RestoreMode.CPU
    assert [mode for mode in RestoreMode if mode.keeps_contents] == [
        RestoreMode.CPU, RestoreMode.PINNED, RestoreMode.CPU_ON_DEMAND, RestoreMode.PINNED_ON_DEMAND,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="memset"):
        RestoreMode.parse("disk")


def test_none_needs_no_step(device: Device) -> None:
    assert restore_step(RestoreMode.NONE, device, 4096, 100, None, "x") is None


@pytest.mark.parametrize("mode", [RestoreMode.CPU, RestoreMode.PINNED_ON_DEMAND])
def test_no_backup_is_taken_for_good(device: Device, mode: RestoreMode) -> None:
    step = restore_step(mode, device, 4096, 100, None, "x")
    assert step is not None
    step.setup(1)
    assert copies(device) == 0
    step.teardown(1, destructing=True)
    assert (copies(device), device.host_bytes) == (0, 0)
    step.drop()


def test_a_backup_is_made_once_and_reused(device: Device) -> None:
    step = restore_step(RestoreMode.CPU, device, 4096, 100, None, "x")
    assert step is not None
    for round_number in range(3):
        step.setup(1)
        step.teardown(1, destructing=False)
        assert copies(device) == 2 * round_number + 1
        assert device.faults.calls["host"] == 1
    step.drop()
    assert device.host_bytes == 0


def test_a_backup_that_failed_is_not_restored(device: Device) -> None:
    step = restore_step(RestoreMode.CPU, device, 4096, 100, None, "x")
    assert step is not None
    step.setup(1)
    with device.faults.armed("copy"), pytest.raises(RuntimeError):
        step.teardown(1, destructing=False)
    device.faults.active = True
    before = copies(device)
    step.setup(1)
    assert copies(device) == before
    step.drop()
