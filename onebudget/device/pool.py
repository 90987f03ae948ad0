"""A stream-ordered pool over arenas of address space, shared by host and fake devices.

Freed bytes stay reserved, so the next request of that size costs no call of the platform. When bytes run out on the
card, idle ones are given back first, down to single granules inside arenas that are still in use: what the pool can
hand out never depends on the order of earlier requests, only on what is live.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Protocol

from onebudget.device.allocators import Allocation, Pool
from onebudget.device.base import Device
from onebudget.device.sample import PoolStats
from onebudget.device.spans import Span, SpanIndex, SpanState
from onebudget.device.streams import QueueStream, Stream
from onebudget.errors import ConfigError
from onebudget.units import align_down, align_up

_USED, _IDLE, _BARE = SpanState.USED, SpanState.IDLE, SpanState.BARE


class Arena(Protocol):
    """A range of addresses whose physical memory comes and goes."""

    address: int
    nbytes: int

    def decommit(self, start: int, nbytes: int) -> None:
        """Give the physical memory of this part back; the addresses stay valid."""

    def close(self) -> None:
        """Give everything back. The mapping itself lives until nothing refers to the arena."""


class ArenaSource(Protocol):
    def make_arena(self, nbytes: int) -> Arena: ...


class ArenaPool(Pool):
    """Best fit with splitting and merging, 512 B steps inside granules of the device."""

    kind = "gpu"

    def __init__(self, device: Device, source: ArenaSource) -> None:
        self.device = device
        self._source = source
        self._granule = device.facts.granularity_bytes
        self._account = device.account
        self._lock = device.account.lock
        self._orphans = device.orphans
        self._faults = device.faults
        self._idle = SpanIndex()
        self._bare = SpanIndex()
        self._heads: list[Span] = []
        self._reserved = 0
        self._used = 0
        self._requested = 0
        self._returned: deque[Allocation] = deque()
        """Freed and not booked yet. Appending needs no lock; what comes off is booked, or handed out again as it is."""
        self._account.watch_returns(self._returned, self._book_returned)

    def reserved_bytes(self) -> int:
        return self._reserved

    def used_bytes(self) -> int:
        self._account.settle()
        return self._used

    def stats(self) -> PoolStats:
        self.device.collect()
        with self._lock:
            return PoolStats(self._reserved, self._used, self._reserved - self._used)

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        if self._orphans:
            self.device.collect()
        size = (nbytes + 511) & -512
        again = self._last_returned(nbytes, size, owner) if self._returned else None
        if again is not None:
            return again
        with self._lock:
            self._book_returned()
            span = self._idle.pop_exact(size) or self._carve(size)
            if span is not None:
                return self._hand_out(span, nbytes, owner)
        return self._allocate_under_pressure(nbytes, size, owner)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        if allocation.free_issued:
            allocation.begin_free()
        allocation.free_issued = True
        if stream is None or not stream.pending:
            allocation.freed = True
            self._returned.append(allocation)
        else:
            assert isinstance(stream, QueueStream)
            with self._lock:
                self._count_requested(-allocation.requested_bytes)
                allocation.requested_bytes = 0
            stream.run(partial(self._take_back, allocation))

    def trim_to(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ConfigError.for_field("nbytes", nbytes, "zero or more")
        with self._lock:
            self._book_returned()
            for span in self._idle.spans():
                self._decommit(span, self._reserved - nbytes)

    def close(self) -> None:
        """Give all physical memory back, handed out or not."""
        with self._lock:
            self._book_returned()
            self._account.charge_pool_locked(-self._reserved)
            self._count_requested(-self._requested)
            self._reserved = 0
            for head in self._heads:
                head.arena.close()
                head.unlink_all()  # or the arena would stay mapped until the garbage collector comes by
            self._heads.clear()
            self._idle, self._bare = SpanIndex(), SpanIndex()

    def _hand_out(self, span: Span, nbytes: int, owner: str) -> Allocation:
        size = span.nbytes
        self._used += size
        self._count_requested(nbytes)
        self._account.hand_out_locked(size, owner)
        arena = span.arena
        return Allocation(arena.address + span.start, size, owner, arena, span, nbytes)

    def _count_requested(self, nbytes: int) -> None:
        self._requested += nbytes
        self._account.requested_bytes += nbytes

    def _take_back(self, allocation: Allocation) -> None:
        """The stream reached the free."""
        allocation.freed = True
        self._returned.append(allocation)

    def _last_returned(self, nbytes: int, size: int, owner: str) -> Allocation | None:
        """The bytes freed last, when they are as wanted: no book changes, so neither lock nor search is needed."""
        returned = self._returned
        try:
            last = returned[-1]
            if last.requested_bytes != nbytes or last.owner != owner or not self._heads:
                return None
            popped = returned.pop()
        except IndexError:  # booked by another thread
            return None
        if popped is last:
            return Allocation(last.address, size, owner, last.memory, last.detail, nbytes)
        returned.append(popped)
        return None

    def _book_returned(self) -> None:
        """Wants the lock."""
        while self._returned:
            allocation = self._returned.popleft()
            self._used -= allocation.nbytes
            self._account.take_back_locked(allocation.nbytes, allocation.owner)
            if self._heads:
                self._count_requested(-allocation.requested_bytes)
                self._add_free(allocation.detail, _IDLE)  # type: ignore[arg-type]

    def _allocate_under_pressure(self, nbytes: int, size: int, owner: str) -> Allocation:
        self.device.check_open()
        self.device.reclaim()
        with self._lock:
            span = self._carve(size) or self._extend(size)
            if span is not None:
                return self._hand_out(span, nbytes, owner)
        raise self.device.out_of_memory(nbytes, owner=owner)

    def _carve(self, size: int) -> Span | None:
        """A span of exactly ``size`` from idle memory, else from new physical memory; ``None`` when neither fits."""
        span = self._idle.pop_best(size)
        if span is None:
            span = self._grow(size)
        if span is not None and span.nbytes > size:
            self._add_free(span.split(size), _IDLE)
        return span

    def _grow(self, size: int) -> Span | None:
        """New physical memory at the end of what is in use, counting an idle tail that lies just before it."""
        if self.device.closed or size > self.device.total_bytes:
            return None
        self._faults.check("pool_grow")
        bare = self._bare.pop_best(align_up(size, self._granule)) or self._new_arena()
        before = bare.prev if bare.prev is not None and bare.prev.state is _IDLE else None
        span = self._commit(before, bare, size)
        if span is None:
            self._add_free(bare, _BARE)
        return span

    def _extend(self, size: int) -> Span | None:
        """Join any idle tail with new physical memory behind it, where a granule of its own would not fit."""
        for idle in self._idle.spans():
            bare = idle.next
            if bare is None or bare.state is not _BARE:
                continue
            self._bare.remove(bare)
            bare.state = _USED
            span = self._commit(idle, bare, size)
            if span is None:
                self._add_free(bare, _BARE)
                continue
            if span.nbytes > size:
                self._add_free(span.split(size), _IDLE)
            return span
        return None

    def _commit(self, before: Span | None, bare: Span, size: int) -> Span | None:
        """``size`` bytes or a little more from ``before`` (idle, may be none) and the granules behind it."""
        physical = align_up(size - (before.nbytes if before else 0), self._granule)
        if bare.nbytes < physical or not self._account.fits_locked(physical):
            return None
        if bare.nbytes > physical:
            self._add_free(bare.split(physical), _BARE)
        self._account.charge_pool_locked(physical)
        self._reserved += physical
        if before is None:
            return bare
        self._idle.remove(before)
        before.state = _USED
        before.absorb_next()
        return before

    def _new_arena(self) -> Span:
        arena = self._source.make_arena(align_up(self.device.total_bytes, self._granule))
        head = Span(arena, 0, arena.nbytes, _USED)
        self._heads.append(head)
        return head

    def _add_free(self, span: Span, state: SpanState) -> None:
        """Put a span into its index, merged with neighbours of the same state."""
        index = self._idle if state is _IDLE else self._bare
        span.state = state
        after, before = span.next, span.prev
        if after is not None and after.state is state:
            index.remove(after)
            span.absorb_next()
        if before is not None and before.state is state:
            index.remove(before)
            before.absorb_next()
            span = before
        index.add(span)

    def _decommit(self, span: Span, at_most: int) -> None:
        """Return up to ``at_most`` bytes of whole granules inside an idle span to the card."""
        start = align_up(span.start, self._granule)
        nbytes = min(align_down(span.end, self._granule) - start, align_down(at_most, self._granule))
        if nbytes <= 0:
            return
        self._idle.remove(span)
        span.arena.decommit(start, nbytes)
        if start > span.start:
            head, span = span, span.split(start - span.start)
            self._idle.add(head)
        if span.nbytes > nbytes:
            self._idle.add(span.split(nbytes))
        span.state = _USED
        self._account.charge_pool_locked(-nbytes)
        self._reserved -= nbytes
        self._add_free(span, _BARE)
