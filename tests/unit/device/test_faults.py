from __future__ import annotations

import pytest

from onebudget.device.faults import OPERATIONS, Faults
from onebudget.errors import ConfigError, DeviceError


def test_the_chosen_call_fails_and_no_other() -> None:
    faults = Faults()
    faults.arm("map", skip=1)
    faults.check("map")
    faults.check("unmap")
    with pytest.raises(DeviceError, match="map"):
        faults.check("map")
    faults.check("map")


def test_an_error_of_ones_own() -> None:
    faults = Faults()
    with faults.armed("create", error=MemoryError("mine")), pytest.raises(MemoryError, match="mine"):
        faults.check("create")
    faults.check("create")
    assert not faults.active


def test_skip_counts_from_arming() -> None:
    faults = Faults()
    for _ in range(2):
        with faults.armed("copy", skip=2):
            faults.check("copy")
            faults.check("copy")
            with pytest.raises(DeviceError):
                faults.check("copy")


@pytest.mark.parametrize(("operation", "skip"), [("mmap", 0), ("map", -1)])
def test_nonsense_is_refused(operation: str, skip: int) -> None:
    with pytest.raises(ConfigError):
        Faults().arm(operation, skip=skip)
    assert "map" in OPERATIONS
