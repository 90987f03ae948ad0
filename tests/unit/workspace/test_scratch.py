from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import AllocationError, StateError
from onebudget.workspace import ScratchBuffer

KIB = 1024


@pytest.fixture(params=["host", "fake"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(request.param, capacity_bytes=64 * KIB) as device:
        yield device


@pytest.fixture
def scratch(device: Device) -> ScratchBuffer:
    return ScratchBuffer(BufferManager(device.create_stream()))


def test_nothing_is_held_before_the_first_demand(device: Device, scratch: ScratchBuffer) -> None:
    assert (scratch.capacity_bytes, scratch.logical_bytes, scratch.peak_bytes) == (0, 0, 0)
    scratch.release()
    assert device.sample().alloc_live == 0


def test_the_largest_demand_not_the_sum(device: Device, scratch: ScratchBuffer) -> None:
    for demand, so_far in ((3 * KIB, 3 * KIB), (5 * KIB, 5 * KIB), (2 * KIB, 5 * KIB), (5 * KIB, 5 * KIB)):
        view = scratch.require(demand)
        assert tuple(view.shape) == (demand,)
        assert scratch.logical_bytes == so_far
    assert scratch.capacity_bytes == scratch.peak_bytes == device.used_by_owner()["fixed_workspace"] == 5 * KIB
    assert scratch.grow_count == 2


def test_storage_stays_while_the_demand_fits() -> None:
    with open_device("host", capacity_bytes=64 * KIB) as device:
        scratch = ScratchBuffer(BufferManager(device.create_stream()))
        first = scratch.require(4 * KIB).data_ptr()
        assert scratch.require(KIB).data_ptr() == scratch.require(4 * KIB).data_ptr() == first


def test_growing_never_holds_old_and_new_together(device: Device, scratch: ScratchBuffer) -> None:
    scratch.require(40 * KIB)
    scratch.require(64 * KIB)
    assert device.sample().alloc_peak == 64 * KIB


def test_a_byte_beyond_the_card_fails_and_a_smaller_demand_still_works(device: Device, scratch: ScratchBuffer) -> None:
    scratch.require(8 * KIB)
    with pytest.raises(AllocationError) as full:
        scratch.require(64 * KIB + 1)
    assert full.value.owner == "fixed_workspace"
    assert full.value.requested_bytes == 64 * KIB + 1
    assert device.sample().alloc_live == 0
    assert scratch.require(64 * KIB).numel() == 64 * KIB


def test_release_twice_is_release_once(device: Device, scratch: ScratchBuffer) -> None:
    scratch.require(KIB)
    scratch.release()
    scratch.release()
    assert (device.sample().alloc_live, scratch.capacity_bytes) == (0, 0)
    scratch.require(KIB)
    assert scratch.peak_bytes == KIB


@given(st.lists(st.integers(1, 80 * KIB), max_size=20))
def test_any_demands(demands: list[int]) -> None:
    with open_device("fake", capacity_bytes=64 * KIB) as device:
        scratch = ScratchBuffer(BufferManager(device.create_stream()))
        met = 0
        for demand in demands:
            if demand <= 64 * KIB:
                scratch.require(demand)
                met = max(met, demand)
            else:
                with pytest.raises(AllocationError):
                    scratch.require(demand)
        assert scratch.peak_bytes == met
        scratch.release()
        assert device.sample().alloc_live == 0


def test_the_logical_size_forgets_only_when_told(scratch: ScratchBuffer) -> None:
    """Three layers ask 40, 90 and 60: the demand is their maximum, once the last forward's is forgotten."""
    scratch.require(400)
    for demand in (40, 90, 60):
        scratch.require(demand)
    assert scratch.logical_bytes == 400
    scratch.resize(0)
    for demand, so_far in ((40, 40), (90, 90), (60, 90)):
        scratch.require(demand)
        assert scratch.logical_bytes == so_far
    assert (scratch.capacity_bytes, scratch.grow_count) == (400, 1)


def test_a_sealed_buffer_stays_where_it_is(device: Device, scratch: ScratchBuffer) -> None:
    scratch.require(4 * KIB)
    scratch.seal()
    address = scratch.data_ptr
    scratch.resize(0)
    scratch.require(4 * KIB)
    with pytest.raises(StateError, match="graph scratch moved"):
        scratch.require(4 * KIB + 1)
    assert (scratch.data_ptr, scratch.capacity_bytes) == (address, 4 * KIB)
    scratch.release()
    assert (device.sample().alloc_live, scratch.sealed) == (0, False)
    scratch.require(5 * KIB)
