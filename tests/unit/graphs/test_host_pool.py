"""Segments of a private pool: descending captures need the largest, ascending ones the sum."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest

pytest.importorskip("torch")

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import AllocationError
from onebudget.graphs.host_pool import SegmentPool
from onebudget.units import MIB


@pytest.fixture(params=["fake", "host"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(request.param, capacity_bytes=32 * MIB) as device:
        yield device


@pytest.mark.parametrize(("sizes", "mib"), [((8, 4, 2), 8), ((2, 4, 8), 14), ((4, 8, 2), 12)])
def test_order_of_captures(device: Device, sizes: tuple[int, ...], mib: int) -> None:
    """Three captures that need 8, 4 and 2 MiB of temporaries, each free again when its capture ends."""
    pool = SegmentPool(BufferManager(device.create_stream()))
    for size in sizes:
        assert pool.place(size * MIB).numel() == size * MIB
    assert pool.allocated_bytes == mib * MIB
    assert device.used_by_owner() == {"graphs": mib * MIB}
    pool.release()
    device.empty_cache()
    assert device.used_bytes() == 0


def test_no_order_takes_less_than_the_descending_one(device: Device) -> None:
    def peak(order: tuple[int, ...]) -> int:
        pool = SegmentPool(BufferManager(device.create_stream()))
        for size in order:
            pool.place(size * 1024)
        held = pool.allocated_bytes
        pool.release()
        return held

    sizes = (1, 3, 3, 7, 12)
    assert min(map(peak, permutations(sizes))) == peak(tuple(sorted(sizes, reverse=True))) == 12 * 1024


def test_addresses_stay(device: Device) -> None:
    pool = SegmentPool(BufferManager(device.create_stream()))
    first = pool.place(4096).data_ptr()
    pool.place(8192)
    assert pool.place(4096).data_ptr() == first
    pool.release()


def test_a_full_device_leaves_the_pool_as_it_was(device: Device) -> None:
    pool = SegmentPool(BufferManager(device.create_stream()))
    pool.place(8 * MIB)
    with pytest.raises(AllocationError):
        pool.place(30 * MIB)
    assert pool.allocated_bytes == 8 * MIB
    pool.release()
