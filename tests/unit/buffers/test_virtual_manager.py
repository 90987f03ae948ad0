from __future__ import annotations

import threading

import pytest

from onebudget.buffers.virtual.chunk import Chunk, ChunkStatus
from onebudget.buffers.virtual.manager import VirtualMemoryManager
from onebudget.errors import ConfigError, StateError


class Memory:
    """A creator without memory; ``broken`` names the method that fails."""

    def __init__(self) -> None:
        self.held = 0
        self.broken = ""
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def create(self) -> int:
        self.entered.set()
        self.go_on.wait()
        if self.broken == "create":
            raise OSError("create")
        self.held += 1
        return 1

    def release(self, handle: int) -> None:
        if self.broken == "release":
            raise OSError("release")
        self.held -= 1


@pytest.fixture
def manager() -> VirtualMemoryManager:
    return VirtualMemoryManager()


def test_add_materialises_and_remove_destroys(manager: VirtualMemoryManager) -> None:
    memory = Memory()
    chunk = manager.add(10, "kv", creator=memory)
    assert (chunk.status, memory.held, manager.tags()) == (ChunkStatus.MATERIALIZED, 1, {"kv": 1})
    assert manager.remove(10) is chunk
    assert (chunk.status, memory.held, manager.tags()) == (ChunkStatus.INVALID, 0, {})


def test_a_used_handle_changes_nothing(manager: VirtualMemoryManager) -> None:
    manager.add(10, "kv", creator=Memory())
    other = Memory()
    with pytest.raises(StateError, match="in use"):
        manager.add(10, "model", creator=other)
    assert (other.held, manager.tags()) == (0, {"kv": 1})


def test_existing_chunks_keep_their_state(manager: VirtualMemoryManager) -> None:
    awake, asleep = Chunk(Memory()), Chunk(Memory())
    awake.materialize()
    manager.add(1, "kv", awake)
    manager.add(2, "kv", asleep)
    assert asleep.status is ChunkStatus.RELEASED
    assert manager.release_with_tag("kv") == 1
    assert manager.materialize_with_tag("kv") == 2
    for refused in (Chunk(),):
        with pytest.raises(StateError, match="invalid"):
            manager.add(3, "kv", refused)
    for arguments in ({}, {"chunk": Chunk(Memory()), "creator": Memory()}):
        with pytest.raises(ConfigError):
            manager.add(3, "kv", **arguments)  # type: ignore[arg-type]


def test_removing_an_unknown_handle_gives_an_empty_chunk(manager: VirtualMemoryManager) -> None:
    assert manager.remove(99).status is ChunkStatus.INVALID


def test_a_failed_add_leaves_no_entry(manager: VirtualMemoryManager) -> None:
    memory = Memory()
    memory.broken = "create"
    with pytest.raises(OSError, match="create"):
        manager.add(1, "kv", creator=memory)
    assert manager.tags() == {}
    assert manager.take_bad_handles() == []
    memory.broken = ""
    manager.add(1, "kv", creator=memory)


def test_release_tries_all_and_raises_the_last_error(manager: VirtualMemoryManager) -> None:
    memories = [Memory() for _ in range(4)]
    for handle, memory in enumerate(memories):
        manager.add(handle, "kv", creator=memory)
    memories[1].broken = memories[2].broken = "release"
    with pytest.raises(OSError, match="release"):
        manager.release_with_tag("kv")
    assert manager.take_bad_handles() == [1, 2]
    assert [memory.held for memory in memories] == [0, 1, 1, 0]
    assert manager.tags() == {"kv": 2}


def test_roll_back_spares_chunks_that_were_awake_before(manager: VirtualMemoryManager) -> None:
    memories = [Memory() for _ in range(4)]
    for handle, memory in enumerate(memories):
        manager.add(handle, "kv", creator=memory)
    manager.release_with_tag("kv")
    memories[1].broken = "create"
    awake = Memory()
    manager.add(-1, "kv", creator=awake)
    manager._tags["kv"] = {-1: manager._tags["kv"].pop(-1), **manager._tags["kv"]}  # first in order
    with pytest.raises(OSError, match="create"):
        manager.materialize_with_tag("kv")
    assert awake.held == 1
    assert [memory.held for memory in memories] == [0, 0, 0, 0]
    assert manager.take_bad_handles() == [1]
    assert manager.materialize_with_tag("kv") == 3


def test_tags_are_apart(manager: VirtualMemoryManager) -> None:
    kv, model = Memory(), Memory()
    manager.add(1, "kv", creator=kv)
    manager.add(2, "model", creator=model)
    assert manager.release_with_tag("kv") == 1
    assert (kv.held, model.held) == (0, 1)
    assert manager.status(1) is ChunkStatus.RELEASED
    assert manager.status(2) is ChunkStatus.MATERIALIZED
    assert manager.status(3) is ChunkStatus.INVALID


def test_a_slow_first_materialise_blocks_nobody(manager: VirtualMemoryManager) -> None:
    slow = Memory()
    slow.go_on.clear()
    adding = threading.Thread(target=lambda: manager.add(1, "kv", creator=slow))
    adding.start()
    slow.entered.wait()
    manager.add(2, "kv", creator=Memory())
    assert manager.status(1) is ChunkStatus.RELEASED
    assert manager.release_with_tag("kv") == 1  # skips the one that is not up yet
    slow.go_on.set()
    adding.join()
    assert manager.status(1) is ChunkStatus.MATERIALIZED
