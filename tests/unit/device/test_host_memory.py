"""The host device really takes memory from the machine, and gives it back."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebudget.buffers import (
    Buffer,
    BufferManager,
    materialize_with_tag,
    release_with_tag,
    virtual_memory_manager,
    virtual_memory_scope,
)
from onebudget.device import libc, open_device
from onebudget.device.host import HostDevice
from onebudget.errors import AllocationError, DeviceError
from onebudget.units import MIB

NBYTES = 3 * MIB + 12_345
PAGES = 3 * MIB + 16_384


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with open_device("host", capacity_bytes=64 * MIB) as device:
        assert isinstance(device, HostDevice)
        yield device


@pytest.fixture
def manager(device: HostDevice) -> BufferManager:
    return BufferManager(device.create_stream())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_ranges() -> list[tuple[int, int, str, str]]:
    """Start, end, protection and name of everything mapped in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)", line) for line in lines]
    return [(int(m[1], 16), int(m[2], 16), m[3], m[4]) for m in found if m]


def mapped_file_bytes() -> int:
    return sum(end - start for start, end, _, name in mapped_ranges() if "memfd:onebudget" in name)


def reserved_bytes() -> int:
    """Anonymous inaccessible address space, which is what reservations are."""
    return sum(end - start for start, end, mode, name in mapped_ranges() if mode == "---p" and not name)


def touch(buffer: Buffer) -> Buffer:
    buffer.as_numpy()[:] = 1
    return buffer


@pytest.mark.parametrize("kind", ["gpu", "gpu_sync", "managed"])
def test_pages_exist_while_touched_and_go_with_the_memory(
    device: HostDevice, manager: BufferManager, kind: str
) -> None:
    buffer = getattr(manager, kind)(NBYTES)
    assert device.resident_bytes() == 0
    touch(buffer)
    assert device.resident_bytes() == device.used_bytes() == PAGES
    buffer.release()
    manager.pool_trim_to(0)
    assert device.resident_bytes() == device.used_bytes() == 0


def test_sleep_gives_pages_back_and_wake_takes_them(device: HostDevice, manager: BufferManager) -> None:
    with virtual_memory_scope("kv", "none"):
        buffer = touch(manager.gpu(NBYTES))
    assert device.resident_bytes() == PAGES
    release_with_tag("kv")
    assert device.resident_bytes() == 0
    materialize_with_tag("kv")
    assert not buffer.as_numpy().any()
    touch(buffer)
    assert device.resident_bytes() == PAGES
    buffer.release()
    assert device.resident_bytes() == 0


def test_trimming_punches_only_idle_pages(device: HostDevice, manager: BufferManager) -> None:
    blocks = [touch(manager.gpu(1 * MIB)) for _ in range(4)]
    blocks[1].release()
    blocks[3].release()
    manager.pool_trim_to(0)
    assert device.resident_bytes() == 2 * MIB
    assert all((block.as_numpy() == 1).all() for block in (blocks[0], blocks[2]))


def test_one_descriptor_serves_a_device(device: HostDevice, manager: BufferManager) -> None:
    before = open_files()
    with virtual_memory_scope("many", "cpu"):
        buffers = [manager.gpu(10_000) for _ in range(50)]
    buffers += [manager.gpu_sync(10_000) for _ in range(50)]
    release_with_tag("many")
    assert open_files() == before
    for buffer in buffers:
        buffer.release()


def test_closing_returns_pages_and_descriptor() -> None:
    before_files, before_mapped = open_files(), mapped_file_bytes()
    device = open_device("host", capacity_bytes=8 * MIB)
    assert isinstance(device, HostDevice)
    manager = BufferManager(device.create_stream())
    kept = touch(manager.gpu(1 * MIB))
    view = kept.as_numpy()
    blocking = touch(manager.gpu_sync(1 * MIB))
    assert open_files() == before_files + 1
    assert mapped_file_bytes() - before_mapped == 8 * MIB + 1 * MIB
    device.close()
    assert open_files() == before_files
    assert not view.any()  # still mapped, but its page went back to the machine
    del view, kept, blocking, manager, device
    gc.collect()
    assert mapped_file_bytes() == before_mapped


def test_a_view_outlives_its_buffer_without_a_crash(manager: BufferManager) -> None:
    for kind in ("gpu", "gpu_sync", "cpu", "pinned"):
        buffer = touch(getattr(manager, kind)(NBYTES))
        view = buffer.as_numpy()
        tensor = buffer.as_tensor()
        buffer.release()
        manager.pool_trim_to(0)
        gc.collect()
        assert view.sum() == int(tensor.sum()) in (0, NBYTES)


@pytest.mark.parametrize("mode", ["none", "memset", "cpu", "pinned", "cpu_on_demand"])
@pytest.mark.parametrize("operation", ["create", "map", "access", "copy", "fill"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_faults_leave_no_file_mapping_or_address(
    device: HostDevice, manager: BufferManager, mode: str, operation: str, index: int
) -> None:
    manager.gpu(1).release()
    files, mapped, reserved = open_files(), mapped_file_bytes(), reserved_bytes()
    with virtual_memory_scope("kv", mode):
        buffers = [touch(manager.gpu(NBYTES)) for _ in range(3)]
    addresses = [buffer.data_ptr for buffer in buffers]
    assert mapped_file_bytes() - mapped == 3 * PAGES
    release_with_tag("kv")
    assert (mapped_file_bytes(), reserved_bytes() - reserved) == (mapped, 3 * PAGES)
    device.faults.arm(operation, skip=index)
    try:
        materialize_with_tag("kv")
    except DeviceError:
        assert virtual_memory_manager().take_bad_handles() == [addresses[index]]
        assert (mapped_file_bytes(), reserved_bytes() - reserved) == (mapped, 3 * PAGES)
        assert device.resident_bytes() == 0
    device.faults.clear()
    for buffer in buffers:
        buffer.release()
    assert (open_files(), mapped_file_bytes(), reserved_bytes()) == (files, mapped, reserved)
    assert device.resident_bytes() == device.host_bytes == 0


def test_addresses_are_aligned_to_the_granule() -> None:
    with open_device("host", capacity_bytes=64 * MIB, granularity_bytes=2 * MIB) as device:
        manager = BufferManager(device.create_stream())
        with virtual_memory_scope("kv"):
            virtual = manager.gpu(1)
        for buffer in (manager.gpu(1), manager.gpu_sync(1), virtual):
            assert buffer.data_ptr % (2 * MIB) == 0
            buffer.release()


def test_pinned_memory_is_locked_where_the_limit_allows(device: HostDevice, manager: BufferManager) -> None:
    def locked_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        match = re.search(r"VmLck:\s+(\d+) kB", status)
        assert match
        return int(match[1]) * 1024

    before = locked_bytes()
    buffer = manager.pinned(16_384)
    if locked_bytes() == before:
        pytest.skip("this process may not lock memory")
    assert locked_bytes() - before == 16_384
    buffer.release()
    assert locked_bytes() == before


def test_pinned_memory_that_can_not_be_locked_warns_once(
    manager: BufferManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libc, "mlock", lambda address, nbytes: False)
    with caplog.at_level(logging.WARNING), manager.pinned(5000) as first, manager.pinned(5000) as second:
        touch(first)
        touch(second)
    assert len([record for record in caplog.records if "not locked" in record.message]) == 1


def test_a_card_larger_than_the_machine_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_device("host", capacity_bytes=2**50):
        assert "kill the process" in caplog.text


def test_the_kernel_refusing_is_an_allocation_error() -> None:
    with pytest.raises(AllocationError, match="host memory"):
        libc.mmap(0, 2**60, libc.PROT_READ_WRITE, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS)
    with pytest.raises(AllocationError):
        libc.mmap(0, 2**70, libc.PROT_NONE, libc.MAP_PRIVATE | libc.MAP_ANONYMOUS)
    with pytest.raises(DeviceError, match="mmap"):
        libc.mmap(0, 4096, libc.PROT_NONE, 0)
    with pytest.raises(DeviceError, match="fallocate"):
        libc.punch_hole(-1, 0, 4096)
