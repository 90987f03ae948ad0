"""All virtual chunks of the process by handle and by tag; tags are taken away and brought back together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from onebudget.buffers.virtual.chunk import Chunk, ChunkStatus, Configurator, Creator
from onebudget.device.base import Device
from onebudget.device.streams import Stream
from onebudget.errors import ConfigError, StateError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    handle: int
    tag: str
    chunk: Chunk
    back_stream: Stream | None = None
    device: Device | None = None


class VirtualMemoryManager:
    """Chunks by handle (their address) and by tag, each in order of arrival.

    One mutex. It is not held while a new chunk is set up, so a slow physical allocation blocks nobody; the entry is
    visible as released meanwhile. Call the tag operations at step boundaries only: nothing may be using the memory.
    """

    def __init__(self) -> None:
        # Re-entrant: creating physical memory may first free buffers that were dropped, which removes their chunks.
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._tags: dict[str, dict[int, Entry]] = {}
        self._bad_handles: list[int] = []

    def add(
        self,
        handle: int,
        tag: str,
        chunk: Chunk | None = None,
        *,
        creator: Creator | None = None,
        configurators: Sequence[Configurator] = (),
        back_stream: Stream | None = None,
        device: Device | None = None,
    ) -> Chunk:
        """Register a chunk that exists (released or materialised), or make one and materialise it.

        ``StateError`` for a handle in use. When materialising fails, what was built is given back, both entries go,
        and the error is raised.
        """
        if (chunk is None) == (creator is None):
            raise ConfigError("add() takes either a chunk or a creator with configurators")
        fresh = chunk is None
        chunk = chunk or Chunk(creator, configurators)
        if chunk.status not in (ChunkStatus.RELEASED, ChunkStatus.MATERIALIZED):
            raise StateError(f"only released or materialised chunks can be added, not {chunk!r}")
        if device is not None:
            device.at_close(self.remove_device)
        self._insert(Entry(handle, tag, chunk, back_stream, device))
        if fresh:
            self._materialize_new(handle, chunk)
        return chunk

    def remove(self, handle: int) -> Chunk:
        """Forget a chunk and give everything of it back. An unknown handle yields an empty (invalid) chunk."""
        with self._lock:
            entry = self._erase(handle)
        if entry is None:
            return Chunk()
        entry.chunk.destroy()
        return entry.chunk

    def remove_device(self, device: Device) -> None:
        """Give back everything that lies on a device which is about to close."""
        with self._lock:
            handles = [handle for handle, entry in self._entries.items() if entry.device is device]
        for handle in handles:
            self.remove(handle)

    def release_with_tag(self, tag: str, *, discard: bool = False) -> int:
        """Take the physical memory of every materialised chunk of ``tag`` away and return how many were tried.

        ``discard`` gives contents up, and with them the host memory of backups, even where the mode would keep them.
        All are tried. A chunk that fails is bad: erased, its handle kept for ``take_bad_handles``, and the last error
        is raised at the end. An unknown tag is 0.
        """
        tried, error = 0, None
        with self._lock:
            for entry in self._of_tag(tag):
                if entry.chunk.status is not ChunkStatus.MATERIALIZED:
                    continue
                tried += 1
                try:
                    entry.chunk.release(destructing=discard)
                except Exception as raised:
                    if error is not None:
                        log.error("tag %r: releasing went on after this error", tag, exc_info=error)
                    error = raised
                    self._condemn(entry)
        if error is not None:
            raise error
        return tried

    def materialize_with_tag(self, tag: str) -> int:
        """Bring every released chunk of ``tag`` back and return how many came.

        At the first failure the chunks that this call brought up are released again, the failing one is bad (erased,
        its handle in ``take_bad_handles``), and the error is raised. Restores may still be running on back streams
        afterwards: ``synchronize`` waits for them.
        """
        came: list[Entry] = []
        with self._lock:
            for entry in self._of_tag(tag):
                if entry.chunk.status is not ChunkStatus.RELEASED:
                    continue
                try:
                    entry.chunk.materialize()
                except Exception:
                    self._condemn(entry)
                    self._roll_back(came)
                    raise
                came.append(entry)
        return len(came)

    def synchronize(self, tag: str) -> None:
        """Wait for the back streams of a tag's chunks."""
        with self._lock:
            streams = {entry.back_stream for entry in self._of_tag(tag) if entry.back_stream is not None}
        for stream in streams:
            stream.synchronize()

    def take_bad_handles(self) -> list[int]:
        """Handles of chunks that were lost, each reported once. Their buffers must be treated as lost."""
        with self._lock:
            bad, self._bad_handles = self._bad_handles, []
            return bad

    def status(self, handle: int) -> ChunkStatus:
        """``INVALID`` for a handle that is unknown or was lost."""
        with self._lock:
            entry = self._entries.get(handle)
            return ChunkStatus.INVALID if entry is None else entry.chunk.status

    def tags(self) -> dict[str, int]:
        """Number of chunks per tag."""
        with self._lock:
            return {tag: len(entries) for tag, entries in self._tags.items()}

    def _insert(self, entry: Entry) -> None:
        with self._lock:
            if entry.handle in self._entries:
                raise StateError(f"virtual memory handle {entry.handle:#x} is in use")
            self._entries[entry.handle] = entry
            self._tags.setdefault(entry.tag, {})[entry.handle] = entry

    def _erase(self, handle: int) -> Entry | None:
        entry = self._entries.pop(handle, None)
        if entry is not None:
            del self._tags[entry.tag][handle]
            if not self._tags[entry.tag]:
                del self._tags[entry.tag]
        return entry

    def _of_tag(self, tag: str) -> list[Entry]:
        return list(self._tags.get(tag, {}).values())

    def _materialize_new(self, handle: int, chunk: Chunk) -> None:
        try:
            chunk.materialize()
        except BaseException:
            with self._lock:
                self._erase(handle)
            _destroy_quietly(chunk)
            raise

    def _roll_back(self, came: list[Entry]) -> None:
        for entry in reversed(came):
            try:
                entry.chunk.release()
            except Exception:
                log.exception("tag %r: rolling back %#x failed", entry.tag, entry.handle)
                self._condemn(entry)

    def _condemn(self, entry: Entry) -> None:
        self._erase(entry.handle)
        self._bad_handles.append(entry.handle)
        _destroy_quietly(entry.chunk)


def _destroy_quietly(chunk: Chunk) -> None:
    """For a chunk that is given up because of an error already on its way."""
    try:
        chunk.destroy()
    except Exception:
        log.exception("giving back a failed chunk left something behind")


_manager = VirtualMemoryManager()


def virtual_memory_manager() -> VirtualMemoryManager:
    """The manager of this process."""
    return _manager
