"""Random lives of the pool: what it hands out never overlaps, and it refuses only what really does not fit."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from onebudget.buffers import Buffer, BufferManager
from onebudget.device import open_device
from onebudget.device.sample import round_to_sector
from onebudget.device.streams import QueueEvent
from onebudget.errors import AllocationError
from onebudget.units import align_down, align_up

SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 40_000), st.sampled_from([512, 4096, 8192, 65_536]))


class PoolMachine(RuleBasedStateMachine):
    """A model of who holds what, beside a small device."""

    kind = "fake"
    smallest_granule = 512
    buffers: Bundle[Buffer] = Bundle("buffers")

    @initialize(granules=st.integers(4, 24), granule=st.sampled_from([512, 4096, 16_384]))
    def open(self, granules: int, granule: int) -> None:
        self.granule = granule = max(granule, self.smallest_granule)
        self.device = open_device(self.kind, capacity_bytes=granules * granule, granularity_bytes=granule)
        self.manager = BufferManager(self.device.create_stream())
        self.live: dict[Buffer, int] = {}
        self.waiting: list[Buffer] = []
        self.held: list[tuple[int, int]] = []
        self.blocking: dict[Buffer, int] = {}
        self.tensor_bytes = 0
        self.gate: QueueEvent | None = None
        self.marks = 0

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        self.open_gate()
        for buffer in [*self.live, *self.blocking]:
            buffer.release()
        self.refund_tensors()
        self.device.empty_cache()
        assert self.device.used_bytes() == 0
        with self.manager.gpu(self.device.total_bytes):
            assert self.device.free_bytes() == 0
        self.device.close()

    @rule(target=buffers, size=SIZES)
    def allocate(self, size: int) -> object:
        if not self.device.account.fits_locked(align_up(size, self.granule)):
            self.open_gate()  # under pressure the pool waits for issued frees
        try:
            buffer = self.manager.gpu(size)
        except AllocationError:
            assert self.least_physical() + align_up(size, self.granule) > self.device.total_bytes
            return multiple()
        self.marks = self.marks % 255 + 1
        self.live[buffer] = self.marks
        self.mark(buffer, self.marks)
        return buffer

    @rule(buffer=consumes(buffers))
    def release(self, buffer: Buffer) -> None:
        self.check_mark(buffer, self.live.pop(buffer))
        if self.gate is not None:
            self.held.append((buffer.data_ptr, round_to_sector(buffer.nbytes)))
        buffer.release()

    @rule()
    def close_gate(self) -> None:
        if self.gate is None:
            self.gate = QueueEvent()
            self.manager.stream.wait_event(self.gate)

    @rule()
    def open_gate(self) -> None:
        if self.gate is not None:
            self.gate.set()
            self.gate = None
            self.manager.stream.synchronize()
            self.held.clear()

    @rule(nbytes=st.integers(0, 100_000))
    def trim(self, nbytes: int) -> None:
        before = self.manager.pool_stats().reserved
        self.manager.pool_trim_to(nbytes)
        assert self.manager.pool_stats().reserved >= min(before, nbytes)

    @rule()
    def trim_everything(self) -> None:
        self.manager.pool_trim_to(0)
        assert self.manager.pool_stats().reserved == self.touched_granules() * self.granule

    @rule(sectors=st.integers(1, 64))
    def charge_tensor(self, sectors: int) -> None:
        self.open_gate()
        try:
            self.device.charge_tensor_bytes(sectors * 512)
        except AllocationError:
            assert self.least_physical() + sectors * 512 > self.device.total_bytes
        else:
            self.tensor_bytes += sectors * 512

    @rule()
    def refund_tensors(self) -> None:
        if self.tensor_bytes:
            self.device.refund_tensor_bytes(self.tensor_bytes)
            self.tensor_bytes = 0

    @rule(size=SIZES)
    def allocate_blocking(self, size: int) -> None:
        self.open_gate()
        try:
            self.blocking[self.manager.gpu_sync(size)] = align_up(size, self.granule)
        except AllocationError:
            assert self.least_physical() + align_up(size, self.granule) > self.device.total_bytes

    @rule()
    def release_blocking(self) -> None:
        while self.blocking:
            self.blocking.popitem()[0].release()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "device"):
            return
        stats = self.manager.pool_stats()
        assert stats.used == sum(nbytes for _, nbytes in self.spans())
        assert stats.reserved % self.granule == 0
        assert self.touched_granules() * self.granule <= stats.reserved
        assert stats.free == stats.reserved - stats.used
        assert self.device.used_bytes() == stats.reserved + sum(self.blocking.values()) + self.tensor_bytes
        assert 0 <= self.device.free_bytes() <= self.device.total_bytes
        sample = self.device.sample()
        assert sample.alloc_live <= self.device.used_bytes()
        assert sample.alloc_live <= sample.alloc_peak

    @invariant()
    def nothing_overlaps(self) -> None:
        if not hasattr(self, "device"):
            return
        end = 0
        for start, nbytes in sorted(self.spans()):
            assert start >= end
            end = start + nbytes

    @invariant()
    def contents_stand(self) -> None:
        if hasattr(self, "device"):
            for buffer, mark in self.live.items():
                self.check_mark(buffer, mark)

    def spans(self) -> list[tuple[int, int]]:
        return [(buffer.data_ptr, round_to_sector(buffer.nbytes)) for buffer in self.live] + self.held

    def touched_granules(self) -> int:
        touched: set[int] = set()
        for start, nbytes in self.spans():
            first = align_down(start, self.granule)
            touched.update(range(first, align_up(start + nbytes, self.granule), self.granule))
        return len(touched)

    def least_physical(self) -> int:
        """What can't be given back: granules under live buffers, blocking memory, tensors."""
        return self.touched_granules() * self.granule + sum(self.blocking.values()) + self.tensor_bytes

    def mark(self, buffer: Buffer, mark: int) -> None: ...

    def check_mark(self, buffer: Buffer, mark: int) -> None: ...


class HostPoolMachine(PoolMachine):
    """The same with real bytes: each live buffer keeps the value it was filled with."""

    kind = "host"
    smallest_granule = 4096

    def mark(self, buffer: Buffer, mark: int) -> None:
        buffer.as_numpy()[:] = mark

    def check_mark(self, buffer: Buffer, mark: int) -> None:
        assert (buffer.as_numpy() == mark).all()

    @invariant()
    def pages_are_within_the_books(self) -> None:
        if hasattr(self, "device"):
            assert self.device.resident_bytes() <= self.device.used_bytes()  # type: ignore[attr-defined]


TestFakePool = PoolMachine.TestCase
TestHostPool = HostPoolMachine.TestCase
TestFakePool.settings = settings(stateful_step_count=40)
TestHostPool.settings = settings(stateful_step_count=30)


@pytest.mark.long
class TestFakePoolLong(PoolMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=2000, stateful_step_count=60, derandomize=False)


@pytest.mark.long
class TestHostPoolLong(HostPoolMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=2000, stateful_step_count=60, derandomize=False)
