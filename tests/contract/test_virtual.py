"""Virtual memory: stable addresses, contents by mode, roll-back, scopes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from onebudget.buffers import (
    Buffer,
    BufferManager,
    MemoryKind,
    materialize_with_tag,
    maybe_virtual_memory_scope,
    memory_counters,
    preserve_contents,
    release_with_tag,
    virtual_memory_manager,
    virtual_memory_scope,
)
from onebudget.buffers.virtual import ChunkStatus, RestoreMode, VirtualAllocator, config_stack
from onebudget.device.base import Device
from onebudget.device.vmm import VirtualCounts
from onebudget.errors import AllocationError, ConfigError, DeviceError, StateError
from onebudget.units import MIB

MODES = [mode.value for mode in RestoreMode]
EMPTY = VirtualCounts(0, 0, 0, 0)


def chunks(
    manager: BufferManager, tag: str, mode: str = "none", count: int = 3, nbytes: int = 5_000_000
) -> list[Buffer]:
    with virtual_memory_scope(tag, mode):
        return [manager.gpu(nbytes, owner=tag) for _ in range(count)]


@pytest.fixture
def coarse(make_device: Callable[..., Device]) -> BufferManager:
    """A manager on a device with 2 MiB granules, where 5,000,000 B take 6,291,456."""
    return BufferManager(make_device(granularity_bytes=2 * MIB).create_stream())


def test_sizes_are_rounded_to_granules_and_live_bytes_are_not(coarse: BufferManager) -> None:
    [buffer] = chunks(coarse, "kv", count=1)
    device = coarse.device
    assert device.vmm.alignment_bytes == 2 * MIB
    assert device.account.mapped_bytes == device.used_bytes() == 6_291_456
    assert device.vmm.counts() == VirtualCounts(1, 1, 1, 6_291_456)
    assert device.used_by_owner() == {"kv": 5_000_192}
    assert buffer.data_ptr % (2 * MIB) == 0
    buffer.release()
    assert device.vmm.counts() == EMPTY
    assert device.used_bytes() == 0


@pytest.mark.parametrize("mode", MODES)
def test_addresses_are_stable_and_physical_bytes_come_and_go(coarse: BufferManager, mode: str) -> None:
    device = coarse.device
    buffers = chunks(coarse, "kv", mode)
    addresses = [buffer.data_ptr for buffer in buffers]
    for _ in range(2):
        assert device.used_bytes() == 3 * 6_291_456
        assert release_with_tag("kv") == 3
        assert device.used_bytes() == 0
        assert device.sample().alloc_live == 0
        assert release_with_tag("kv") == 0
        assert materialize_with_tag("kv") == 3
        assert materialize_with_tag("kv") == 0
        assert [buffer.data_ptr for buffer in buffers] == addresses
    for buffer in buffers:
        buffer.release()
    assert device.used_bytes() == 0
    assert device.host_bytes == 0
    assert device.vmm.counts() == EMPTY


@pytest.mark.parametrize("mode", MODES)
def test_sleeping_memory_is_somebody_elses(make_device: Callable[..., Device], mode: str) -> None:
    device = make_device(capacity_bytes=8 * MIB)
    manager = BufferManager(device.create_stream())
    buffers = chunks(manager, "model", mode, count=2, nbytes=4 * MIB)
    with pytest.raises(AllocationError):
        manager.gpu(1)
    release_with_tag("model")
    guest = manager.gpu(6 * MIB)
    with pytest.raises(AllocationError) as failure:
        materialize_with_tag("model")
    assert (failure.value.tag, failure.value.owner, failure.value.requested_bytes) == ("model", "model", 4 * MIB)
    # no room: the first chunk cannot come up, is lost, and the second stays asleep
    assert virtual_memory_manager().take_bad_handles() == [buffers[0]._allocation.address]  # type: ignore[union-attr]
    guest.release()
    assert materialize_with_tag("model") == 1
    for buffer in buffers:
        buffer.release()
    assert device.host_bytes == 0


def test_unknown_tags_are_zero(device: Device) -> None:
    assert release_with_tag("never used") == 0
    assert materialize_with_tag("never used") == 0


@pytest.mark.parametrize("kind", ["cpu", "pinned"])
def test_backups_are_counted_and_kept_unless_on_demand(coarse: BufferManager, kind: str) -> None:
    counted = MemoryKind(kind)
    for mode, kept in ((kind, 5_000_000), (f"{kind}_on_demand", 0)):
        [buffer] = chunks(coarse, "model", mode, count=1)
        assert memory_counters.current(MemoryKind.GPU) == 6_291_456
        release_with_tag("model")
        assert memory_counters.current(counted) == coarse.device.host_bytes == 5_000_000
        assert memory_counters.current(MemoryKind.GPU) == 0
        materialize_with_tag("model")
        assert memory_counters.current(counted) == coarse.device.host_bytes == kept
        buffer.release()
        assert memory_counters.current(counted) == coarse.device.host_bytes == 0


def test_a_device_without_virtual_memory_says_so(make_device: Callable[..., Device]) -> None:
    manager = BufferManager(make_device(vmm_supported=False).create_stream())
    with virtual_memory_scope("kv"), pytest.raises(DeviceError, match="virtual memory"):
        manager.gpu(10)


def test_resize_inside_a_tag_stays_in_it(manager: BufferManager) -> None:
    with virtual_memory_scope("kv"):
        buffer = manager.gpu(1000)
    buffer.resize(100_000)
    assert virtual_memory_manager().tags() == {"kv": 1}
    assert release_with_tag("kv") == 1
    buffer.release()


def test_a_closing_device_takes_its_chunks_along(make_device: Callable[..., Device]) -> None:
    device = make_device()
    buffers = chunks(BufferManager(device.create_stream()), "kv", "cpu")
    release_with_tag("kv")
    device.close()
    assert virtual_memory_manager().tags() == {}
    assert device.host_bytes == 0
    with pytest.raises(StateError, match="closed"):
        buffers[0].as_tensor()


class TestContents:
    """What bytes hold after sleep, on a device that has bytes."""

    @pytest.fixture
    def sleeper(self, any_device: Device) -> BufferManager:
        if not any_device.has_contents or not any_device.facts.vmm_supported:
            pytest.skip(f"{any_device.name} has no contents or no virtual memory")
        return BufferManager(any_device.create_stream())

    @pytest.mark.parametrize("mode", ["cpu", "pinned", "cpu_on_demand", "pinned_on_demand"])
    def test_backups_are_bit_equal(self, sleeper: BufferManager, mode: str) -> None:
        with virtual_memory_scope("model", mode):
            buffer = sleeper.gpu(100_003)
        tensor = buffer.as_tensor()
        for seed in range(3):
            data = torch.randint(0, 256, (100_003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
            tensor.copy_(data)
            release_with_tag("model")
            materialize_with_tag("model")
            assert torch.equal(tensor.cpu(), data)
        buffer.release()

    @pytest.mark.parametrize("mode", ["cpu", "pinned", "pinned_on_demand"])
    def test_discarded_contents_do_not_come_back(self, sleeper: BufferManager, mode: str) -> None:
        with virtual_memory_scope("model", mode):
            buffer = sleeper.gpu(100_003)
        tensor = buffer.as_tensor()
        tensor.fill_(1)
        release_with_tag("model")
        materialize_with_tag("model")
        address = buffer.data_ptr
        assert release_with_tag("model", discard=True) == 1
        assert sleeper.device.host_bytes == 0
        assert materialize_with_tag("model") == 1
        assert buffer.data_ptr == address
        tensor.fill_(2)
        release_with_tag("model")
        materialize_with_tag("model")
        assert bool((tensor == 2).all())
        buffer.release()

    def test_memset_zeros_from_the_second_time_on(self, sleeper: BufferManager) -> None:
        with virtual_memory_scope("state", "memset"):
            fills = sleeper.device.faults.calls.get("fill", 0)
            buffer = sleeper.gpu(100_003)
            assert sleeper.device.faults.calls.get("fill", 0) == fills
        tensor = buffer.as_tensor()
        tensor.fill_(7)
        release_with_tag("state")
        materialize_with_tag("state")
        assert not bool(tensor.any())
        buffer.release()

    def test_none_promises_nothing_and_poison_shows_it(self, make_device: Callable[..., Device]) -> None:
        device = make_device()
        if not device.has_contents:
            pytest.skip("the fake device holds no contents")
        device.poison = 0xDD
        manager = BufferManager(device.create_stream())
        for mode in ("none", "memset"):
            with virtual_memory_scope("kv", mode):
                buffer = manager.gpu(5000)
            assert bool((buffer.as_tensor() == 0xDD).all())
            buffer.as_tensor().fill_(1)
            release_with_tag("kv")
            materialize_with_tag("kv")
            assert bool((buffer.as_tensor() == (0xDD if mode == "none" else 0)).all())
            buffer.release()

    def test_restores_run_on_the_back_stream(self, make_device: Callable[..., Device]) -> None:
        device = make_device()
        if not device.has_contents:
            pytest.skip("the fake device holds no contents")
        manager, back = BufferManager(device.create_stream()), device.create_stream()
        with virtual_memory_scope("model", "cpu", back_stream=back):
            buffer = manager.gpu(100)
        buffer.as_tensor().fill_(9)
        release_with_tag("model")
        gate = threading.Event()
        back.launch(lambda: gate.wait() and None)  # type: ignore[func-returns-value]
        virtual_memory_manager().materialize_with_tag("model")
        assert not bool(buffer.as_tensor().any())
        gate.set()
        virtual_memory_manager().synchronize("model")
        assert bool((buffer.as_tensor() == 9).all())
        buffer.release()

    def test_preserved_metadata_survives_a_scope_that_forgets(self, sleeper: BufferManager) -> None:
        with virtual_memory_scope("kv", "none"):
            cache = sleeper.gpu(5000)
            with preserve_contents():
                table = sleeper.gpu(100, "int32")
            after = sleeper.gpu(10)
        table.as_tensor().fill_(5)
        address = table.data_ptr
        assert release_with_tag("kv") == 3
        assert materialize_with_tag("kv") == 3
        assert table.data_ptr == address
        assert bool((table.as_tensor() == 5).all())
        for buffer in (cache, table, after):
            buffer.release()


class TestFaults:
    def test_trace_of_a_map_that_fails(self, coarse: BufferManager) -> None:
        device = coarse.device
        buffers = chunks(coarse, "kv")
        addresses = [buffer.data_ptr for buffer in buffers]
        before = device.used_bytes()
        assert release_with_tag("kv") == 3
        assert before - device.used_bytes() == 18_874_368
        with device.faults.armed("map", skip=1), pytest.raises(DeviceError, match="map"):
            materialize_with_tag("kv")
        assert device.used_bytes() == 0
        status = virtual_memory_manager().status
        assert [status(address) for address in addresses] == [
            ChunkStatus.RELEASED, ChunkStatus.INVALID, ChunkStatus.RELEASED,
        ]  # fmt: skip
        assert virtual_memory_manager().take_bad_handles() == [addresses[1]]
        assert virtual_memory_manager().take_bad_handles() == []
        assert materialize_with_tag("kv") == 2
        with pytest.raises(StateError, match="lost"):
            buffers[1].as_tensor()
        assert [buffers[0].data_ptr, buffers[2].data_ptr] == [addresses[0], addresses[2]]
        for buffer in buffers:
            buffer.release()
        assert device.vmm.counts() == EMPTY

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("operation", ["create", "map", "access", "copy", "fill"])
    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_failing_to_come_back_leaks_nothing(
        self, coarse: BufferManager, mode: str, operation: str, index: int
    ) -> None:
        device = coarse.device
        buffers = chunks(coarse, "kv", mode)
        addresses = [buffer.data_ptr for buffer in buffers]
        release_with_tag("kv")
        asleep_host_bytes = device.host_bytes
        reached = operation in ("create", "map", "access") or (operation == "fill") == (mode == "memset")
        if mode == "none" and operation in ("copy", "fill"):
            reached = False
        with device.faults.armed(operation, skip=index):
            if reached:
                with pytest.raises(DeviceError):
                    materialize_with_tag("kv")
            else:
                materialize_with_tag("kv")
                release_with_tag("kv")
        assert device.used_bytes() == 0
        assert device.vmm.counts() == VirtualCounts(3, 0, 0, 0)
        bad = virtual_memory_manager().take_bad_handles()
        assert bad == ([addresses[index]] if reached else [])
        backup = 5_000_000 if RestoreMode(mode).keeps_contents else 0
        assert asleep_host_bytes == 3 * backup
        assert device.host_bytes == (3 - len(bad)) * backup
        assert materialize_with_tag("kv") == 3 - len(bad)
        for buffer in buffers:
            buffer.release()
        assert device.vmm.counts() == EMPTY
        assert device.host_bytes == 0

    @pytest.mark.parametrize("mode", ["cpu", "pinned_on_demand"])
    @pytest.mark.parametrize("operation", ["copy", "host", "unmap", "release"])
    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_failing_to_go_tries_the_others_and_marks_the_bad_one(
        self, coarse: BufferManager, mode: str, operation: str, index: int
    ) -> None:
        device = coarse.device
        buffers = chunks(coarse, "kv", mode)
        addresses = [buffer.data_ptr for buffer in buffers]
        last_error = StateError if operation == "unmap" else DeviceError  # a handle that is mapped can't be released
        with device.faults.armed(operation, skip=index), pytest.raises(last_error):
            release_with_tag("kv")
        assert virtual_memory_manager().take_bad_handles() == [addresses[index]]
        if operation in ("copy", "host"):  # contents lost, but nothing is held
            assert device.used_bytes() == 0
            assert device.vmm.counts() == VirtualCounts(3, 0, 0, 0)
        else:  # the platform refused to take it back: it is still charged, because it is still there
            assert device.used_bytes() == 6_291_456
        assert device.host_bytes == 2 * 5_000_000
        assert release_with_tag("kv") == 0
        assert materialize_with_tag("kv") == 2
        with pytest.raises(StateError, match="lost"):
            buffers[index].as_tensor()
        for number, buffer in enumerate(buffers):
            if number == index and operation == "unmap":
                with pytest.raises(StateError, match="mappings"):
                    buffer.release()
            else:
                buffer.release()

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("operation", ["reserve", "create", "map", "access"])
    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_failing_to_allocate_leaks_nothing(
        self, coarse: BufferManager, mode: str, operation: str, index: int
    ) -> None:
        device = coarse.device
        made: list[Buffer] = []
        with device.faults.armed(operation, skip=index), virtual_memory_scope("kv", mode), pytest.raises(DeviceError):
            made.extend(coarse.gpu(5_000_000) for _ in range(3))
        assert len(made) == index
        assert device.vmm.counts() == VirtualCounts(index, index, index, index * 6_291_456)
        assert device.used_bytes() == index * 6_291_456
        for buffer in made:
            buffer.release()
        assert device.vmm.counts() == EMPTY

    def test_a_roll_back_that_fails_is_bad_too(self, coarse: BufferManager) -> None:
        device = coarse.device
        buffers = chunks(coarse, "kv")
        addresses = [buffer.data_ptr for buffer in buffers]
        release_with_tag("kv")
        device.faults.arm("map", skip=2)
        device.faults.arm("release", skip=1)  # the failing chunk's own release passes, the first roll-back does not
        with pytest.raises(DeviceError, match="map"):
            materialize_with_tag("kv")
        device.faults.clear()
        assert sorted(virtual_memory_manager().take_bad_handles()) == sorted([addresses[2], addresses[1]])
        assert materialize_with_tag("kv") == 1
        for buffer in buffers:
            buffer.release()


class TestScopes:
    def test_nesting_restores_the_very_configuration(self, coarse: BufferManager) -> None:
        background = config_stack.current
        with virtual_memory_scope("model", "pinned") as outer:
            model = config_stack.current
            x = coarse.gpu(10)
            first = outer.pools[0]
            assert first.inside
            with virtual_memory_scope("kv") as inner:
                assert (config_stack.current.tag, len(config_stack)) == ("kv", 2)
                y = coarse.gpu(10)
                assert (first.inside, inner.pools[0].inside) == (False, True)
            assert config_stack.current is model
            assert not inner.pools[0].inside
            z = coarse.gpu(10)
            assert len(outer.pools) == 2
            assert outer.pools[1] is not first
        assert config_stack.current is background
        assert not background
        assert [pool.live for pool in outer.pools] == [1, 1]
        assert (outer.live, inner.live) == (2, 1)
        assert virtual_memory_manager().tags() == {"model": 2, "kv": 1}
        with pytest.raises(StateError, match="2 live"):
            outer.drop()
        for buffer in (x, y, z):
            buffer.release()
        outer.drop()
        inner.drop()

    def test_scopes_end_in_reverse_order_on_an_exception(self, coarse: BufferManager) -> None:
        with pytest.raises(KeyError), virtual_memory_scope("a"), virtual_memory_scope("b"):
            raise KeyError("inside")
        assert len(config_stack) == 0
        with coarse.gpu(10):
            assert coarse.device.account.mapped_bytes == 0

    def test_maybe(self, coarse: BufferManager) -> None:
        for enable in (True, False):
            with maybe_virtual_memory_scope(enable, "kv") as scope, coarse.gpu(10):
                assert bool(coarse.device.account.mapped_bytes) is enable
                assert (scope is not None) is enable

    def test_preserve_contents_changes_nothing_elsewhere(self, coarse: BufferManager) -> None:
        with preserve_contents() as scope:
            assert scope is None
            assert len(config_stack) == 0
        with virtual_memory_scope("model", "pinned"), preserve_contents() as scope:
            assert scope is None
            assert config_stack.current.mode is RestoreMode.PINNED

    def test_pop_needs_a_push(self) -> None:
        with pytest.raises(StateError, match="push"):
            config_stack.pop()

    def test_modes_have_names(self) -> None:
        with pytest.raises(ConfigError, match="memset"), virtual_memory_scope("kv", "keep"):
            pass
        assert len(config_stack) == 0

    def test_a_push_counts_in_every_thread(self, coarse: BufferManager) -> None:
        seen: list[str] = []
        with virtual_memory_scope("everywhere"):
            thread = threading.Thread(target=lambda: seen.append(config_stack.current.tag))
            thread.start()
            thread.join()
        assert seen == ["everywhere"]


class TestCallerOwnedAddresses:
    def test_the_reservation_survives_sleep(self, coarse: BufferManager) -> None:
        device = coarse.device
        vmm = device.vmm
        address = vmm.reserve(4 * MIB)
        with virtual_memory_scope("own", "cpu"):
            allocator = VirtualAllocator(device, config_stack.current, coarse.stream)
        allocation = allocator.map(address, 3_000_000, "mine")
        assert device.used_by_owner() == {"mine": 3_000_320}
        assert release_with_tag("own") == 1
        with pytest.raises(StateError, match="asleep"):
            allocation.check_use()
        assert materialize_with_tag("own") == 1
        allocation.check_use()
        with pytest.raises(StateError, match="mappings"):
            vmm.free_address(address)
        allocator.unmap(address)
        vmm.free_address(address)
        assert vmm.counts() == EMPTY


class TestDriverRules:
    """Order of calls of the virtual-memory contract itself."""

    def test_undoing_in_the_wrong_order_is_refused(self, device: Device) -> None:
        vmm, page = device.vmm, device.vmm.alignment_bytes
        address, handle = vmm.reserve(2 * page), vmm.create(page, owner="rules")
        for refused in (
            lambda: vmm.unmap(address),
            lambda: vmm.set_access(address),
            lambda: vmm.map(address + 2 * page, handle),
            lambda: vmm.free_address(address + page),
            lambda: vmm.release(handle + 10**6),
        ):
            with pytest.raises(StateError):
                refused()
        vmm.map(address, handle)
        other = vmm.create(2 * page, owner="rules")
        for refused in (
            lambda: vmm.map(address + page, handle),  # one place at a time
            lambda: vmm.map(address, other),  # overlaps
            lambda: vmm.map(address + page, other),  # reaches beyond
            lambda: vmm.release(handle),
            lambda: vmm.free_address(address),
        ):
            with pytest.raises(StateError):
                refused()
        vmm.unmap(address)
        vmm.release(handle)
        vmm.release(other)
        vmm.free_address(address)
        assert vmm.counts() == EMPTY

    @pytest.mark.parametrize("nbytes", [0, -4096, 100])
    def test_sizes_are_positive_multiples(self, device: Device, nbytes: int) -> None:
        for refused in (device.vmm.reserve, lambda n: device.vmm.create(n, owner="rules")):
            with pytest.raises(ConfigError, match="multiple"):
                refused(nbytes)

    def test_one_handle_fills_part_of_a_reservation(self, device: Device) -> None:
        vmm, page = device.vmm, device.vmm.alignment_bytes
        address = vmm.reserve(3 * page)
        handles = [vmm.create(page, owner="parts") for _ in range(3)]
        for number, handle in enumerate(handles):
            vmm.map(address + number * page, handle)
            vmm.set_access(address + number * page)
        device.fill(address, 1, 3 * page, None)
        vmm.unmap(address + page)
        vmm.map(address + page, handles[1])
        vmm.set_access(address + page)


def churn(device: Device, count: int, errors: list[BaseException]) -> None:
    manager = BufferManager(device.create_stream())
    sizes = itertools.cycle([512, 5000, 70_000])
    try:
        live: list[Buffer] = []
        for number in range(count):
            live.append(manager.gpu(next(sizes), owner=f"thread {number % 3}"))
            if len(live) > 4:
                live.pop(0).release()
        for buffer in live:
            buffer.release()
        manager.stream.synchronize()
    except BaseException as error:
        errors.append(error)
        raise


def run_churn(device: Device, threads: int, count: int) -> None:
    """``threads`` allocate and free while this one pushes and pops configurations."""
    errors: list[BaseException] = []
    workers = [threading.Thread(target=churn, args=(device, count, errors)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        with virtual_memory_scope("churn", "none"):
            workers[0].join(0.001)
        workers[-1].join(0.001)
    assert errors == []
    device.empty_cache()
    assert device.used_bytes() == 0
    assert device.used_by_owner() == {}
    assert device.vmm.counts() == EMPTY
    assert memory_counters.current(MemoryKind.GPU) == 0


def test_threads_under_push_and_pop_end_at_zero(device: Device) -> None:
    run_churn(device, threads=8, count=60)


@pytest.mark.long
def test_16_threads_of_1000_operations_under_push_and_pop_end_at_zero(device: Device) -> None:
    run_churn(device, threads=16, count=1000)


def test_scopes_of_several_threads_leave_nothing_behind(device: Device) -> None:
    errors: list[BaseException] = []

    def scoped(tag: str) -> None:
        manager = BufferManager(device.create_stream())
        try:
            for _ in range(30):
                with virtual_memory_scope(tag):
                    manager.gpu(1000).release()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=scoped, args=(f"thread {number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(config_stack) == 0
    device.empty_cache()
    assert device.used_bytes() == 0
