"""Random lives of tagged virtual memory, with faults: nothing leaks, contents and addresses keep their promises."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from onebudget.buffers import (
    Buffer,
    BufferManager,
    MemoryKind,
    RestoreMode,
    memory_counters,
    virtual_memory_manager,
    virtual_memory_scope,
)
from onebudget.device import open_device
from onebudget.device.sample import round_to_sector
from onebudget.errors import AllocationError, DeviceError, StateError
from onebudget.units import align_up

TAGS = st.sampled_from(["model", "kv"])
MODES = st.sampled_from(list(RestoreMode))
GRANULE = 8192
CAPACITY = 40 * GRANULE
POISON = 0xDD


@dataclass
class Model:
    """What is promised about one buffer."""

    tag: str
    mode: RestoreMode
    address: int
    nbytes: int
    awake: bool = True
    lost: bool = False
    backed_up: bool = False
    value: int = POISON
    """Every byte; undefined ones are poisoned."""

    @property
    def aligned_bytes(self) -> int:
        return align_up(self.nbytes, GRANULE)


class VirtualMachine(RuleBasedStateMachine):
    kind = "fake"
    buffers: Bundle[Buffer] = Bundle("buffers")

    @initialize()
    def open(self) -> None:
        self.device = open_device(self.kind, capacity_bytes=CAPACITY, granularity_bytes=GRANULE)
        self.manager = BufferManager(self.device.create_stream())
        self.models: dict[Buffer, Model] = {}
        self.bad: set[int] = set()
        self.values = 0
        self.gpu_before = memory_counters.current(MemoryKind.GPU)
        self.device.poison = POISON

    def teardown(self) -> None:
        if hasattr(self, "device"):
            for buffer in self.models:
                buffer.release()
            counts = self.device.vmm.counts()
            assert (counts.reservations, counts.handles, counts.mappings) == (0, 0, 0)
            assert self.device.used_bytes() == self.device.host_bytes == 0
            virtual_memory_manager().take_bad_handles()
            self.device.close()

    @rule(target=buffers, tag=TAGS, mode=MODES, sizes=st.lists(st.integers(1, 5 * GRANULE), min_size=1, max_size=4))
    def allocate(self, tag: str, mode: RestoreMode, sizes: list[int]) -> object:
        made = []
        for nbytes in sizes:
            with virtual_memory_scope(tag, mode):
                try:
                    buffer = self.manager.gpu(nbytes, owner=tag)
                except AllocationError:
                    assert self.awake_bytes() + align_up(nbytes, GRANULE) > CAPACITY
                    break
            self.models[buffer] = Model(tag, mode, buffer.data_ptr, nbytes)
            made.append(buffer)
        return multiple(*made)

    @rule(buffer=buffers)
    def write(self, buffer: Buffer) -> None:
        model = self.models.get(buffer)
        if model is not None and model.awake and not model.lost:
            self.values = self.values % 255 + 1
            model.value = self.values
            self.fill(buffer, self.values)

    @rule(buffer=consumes(buffers))
    def release(self, buffer: Buffer) -> None:
        del self.models[buffer]
        buffer.release()

    @rule(tag=TAGS)
    def sleep(self, tag: str) -> None:
        going = [model for model in self.tagged(tag) if model.awake]
        assert virtual_memory_manager().release_with_tag(tag) == len(going)
        for model in going:
            self.went_to_sleep(model)

    @rule(tag=TAGS)
    def wake(self, tag: str) -> None:
        coming = [model for model in self.tagged(tag) if not model.awake]
        room = CAPACITY - self.awake_bytes()
        try:
            assert virtual_memory_manager().materialize_with_tag(tag) == len(coming)
        except AllocationError:
            fitting = 0
            while sum(model.aligned_bytes for model in coming[: fitting + 1]) <= room:
                fitting += 1
            self.was_lost(coming[fitting])
            self.rolled_back(coming[:fitting])
        else:
            for model in coming:
                self.woke_up(model)

    @rule(tag=TAGS, operation=st.sampled_from(["create", "map", "access"]), skip=st.integers(0, 4))
    def wake_with_a_fault(self, tag: str, operation: str, skip: int) -> None:
        coming = [model for model in self.tagged(tag) if not model.awake]
        if len(coming) <= skip or sum(m.aligned_bytes for m in coming) + self.awake_bytes() > CAPACITY:
            return
        with self.device.faults.armed(operation, skip=skip), pytest.raises(DeviceError):
            virtual_memory_manager().materialize_with_tag(tag)
        self.was_lost(coming[skip])
        self.rolled_back(coming[:skip])

    @rule(tag=TAGS, skip=st.integers(0, 4))
    def sleep_with_a_fault(self, tag: str, skip: int) -> None:
        """A backup that fails: that chunk is lost, the others go to sleep."""
        going = [model for model in self.tagged(tag) if model.awake]
        copying = [model for model in going if model.mode.keeps_contents]
        if len(copying) <= skip:
            return
        with self.device.faults.armed("copy", skip=skip), pytest.raises(DeviceError):
            virtual_memory_manager().release_with_tag(tag)
        for model in going:
            if model is copying[skip]:
                self.was_lost(model)
            else:
                self.went_to_sleep(model)

    @invariant()
    def physical_bytes_are_those_awake(self) -> None:
        if not hasattr(self, "device"):
            return
        awake = [model for model in self.models.values() if model.awake and not model.lost]
        assert self.device.used_bytes() == self.awake_bytes()
        assert self.device.sample().alloc_live == sum(round_to_sector(model.nbytes) for model in awake)
        counts = self.device.vmm.counts()
        assert (counts.reservations, counts.handles, counts.mappings) == (len(self.models), len(awake), len(awake))
        assert memory_counters.current(MemoryKind.GPU) - self.gpu_before == self.awake_bytes()

    @invariant()
    def host_bytes_are_the_backups(self) -> None:
        if hasattr(self, "device"):
            backups = [model.nbytes for model in self.models.values() if model.backed_up]
            assert self.device.host_bytes == sum(backups)

    @invariant()
    def lost_chunks_are_reported_once(self) -> None:
        if hasattr(self, "device"):
            assert set(virtual_memory_manager().take_bad_handles()) == self.bad
            self.bad = set()

    @invariant()
    def buffers_tell_what_they_are(self) -> None:
        if not hasattr(self, "device"):
            return
        for buffer, model in self.models.items():
            if model.awake and not model.lost:
                assert buffer.data_ptr == model.address
                self.check(buffer, model.value)
            else:
                with pytest.raises(StateError, match="lost" if model.lost else "asleep"):
                    buffer.as_tensor()

    def tagged(self, tag: str) -> list[Model]:
        return [model for model in self.models.values() if model.tag == tag and not model.lost]

    def awake_bytes(self) -> int:
        return sum(model.aligned_bytes for model in self.models.values() if model.awake and not model.lost)

    def went_to_sleep(self, model: Model) -> None:
        model.awake = False
        model.backed_up = model.mode.keeps_contents

    def woke_up(self, model: Model) -> None:
        model.awake = True
        if model.mode is RestoreMode.MEMSET:
            model.value = 0
        elif model.mode is RestoreMode.NONE:
            model.value = POISON
        elif model.mode in (RestoreMode.CPU_ON_DEMAND, RestoreMode.PINNED_ON_DEMAND):
            model.backed_up = False

    def rolled_back(self, models: list[Model]) -> None:
        for model in models:
            self.woke_up(model)
            self.went_to_sleep(model)

    def was_lost(self, model: Model) -> None:
        model.lost = True
        model.awake = model.backed_up = False
        self.bad.add(model.address)

    def fill(self, buffer: Buffer, value: int) -> None:
        self.manager.set_mem(buffer, value)

    def check(self, buffer: Buffer, value: int) -> None: ...


class HostVirtualMachine(VirtualMachine):
    """The same with real bytes."""

    kind = "host"

    def check(self, buffer: Buffer, value: int) -> None:
        assert (buffer.as_numpy() == value).all()

    @invariant()
    def pages_are_within_the_books(self) -> None:
        if hasattr(self, "device"):
            assert self.device.resident_bytes() <= self.device.used_bytes()  # type: ignore[attr-defined]


TestFakeVirtual = VirtualMachine.TestCase
TestHostVirtual = HostVirtualMachine.TestCase
TestFakeVirtual.settings = settings(stateful_step_count=30)
TestHostVirtual.settings = settings(stateful_step_count=30)


@pytest.mark.long
class TestFakeVirtualLong(VirtualMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=2000, stateful_step_count=60, derandomize=False)


@pytest.mark.long
class TestHostVirtualLong(HostVirtualMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=2000, stateful_step_count=60, derandomize=False)
