from __future__ import annotations

import threading

from onebudget.buffers.counters import MemoryCounters
from onebudget.buffers.kinds import MemoryKind


def test_current_and_last_change_per_kind() -> None:
    counters = MemoryCounters()
    counters.add(MemoryKind.GPU, 100)
    counters.add(MemoryKind.GPU, -30)
    counters.add(MemoryKind.PINNED, 7)
    assert (counters.current(MemoryKind.GPU), counters.delta(MemoryKind.GPU)) == (70, -30)
    assert counters.snapshot() == {**dict.fromkeys(MemoryKind, 0), MemoryKind.GPU: 70, MemoryKind.PINNED: 7}


def test_notes_count_at_the_next_reading() -> None:
    counters = MemoryCounters()
    counters.add(MemoryKind.CPU, 100)
    counters.note(MemoryKind.CPU, -100)
    assert counters.current(MemoryKind.CPU) == 0


def test_threads_lose_nothing() -> None:
    counters = MemoryCounters()

    def count() -> None:
        for _ in range(500):
            counters.add(MemoryKind.UVM, 3)
            counters.add(MemoryKind.MANAGED, -3)

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.current(MemoryKind.MANAGED) == 0
