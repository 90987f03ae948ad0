"""Put a request off for a step when the first block it would compute is just being computed by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.scheduling.cache import SchedulableCache


class PrefixSkip:
    """Knows which first new blocks become reusable at the end of the coming step.

    A request contributes in the steps that keep its blocks for reuse: its last chunk, or every chunk where the cache
    commits chunk by chunk. So whoever waits, waits for a request that runs in this very step. With ``overlap`` the
    blocks of a step are kept only after the next one was scheduled: whoever waits, waits for that one too.
    """

    def __init__(self, kv: SchedulableCache, *, overlap: bool = False) -> None:
        self._key = kv.first_new_block_key
        self._per_chunk = bool(getattr(kv, "commits_per_chunk", False))
        self._first_keys: dict[int, object] = {}
        self._coming: set[object] = set()
        self._launched: set[object] = set()
        self._overlap = overlap
        self.skipped = 0

    def begin_step(self) -> None:
        if self._overlap:
            self._launched, self._coming = self._coming, self._launched
        self._coming.clear()

    def started(self, request: Request) -> None:
        """Remember what a request that starts is about to compute first."""
        if not request.is_dummy:
            key = self._key(request)
            if key is not None:
                self._first_keys[request.id] = key

    def left(self, request: Request) -> None:
        self._first_keys.pop(request.id, None)

    def contributes(self, request: Request, *, is_last_chunk: bool) -> None:
        """A request that runs in this step."""
        if is_last_chunk or self._per_chunk:
            key = self._first_keys.get(request.id)
            if key is not None:
                self._coming.add(key)

    def announce(self, request: Request, *, is_last_chunk: bool) -> None:
        """A waiting request that will start in this step, unless a filter takes it out."""
        if is_last_chunk or self._per_chunk:
            key = self._key(request)
            if key is not None:
                self._coming.add(key)

    def puts_off(self, request: Request) -> bool:
        """Whether this waiting request had better come a step later."""
        if not (self._coming or self._launched) or request.is_dummy:
            return False
        key = self._key(request)
        if key not in self._coming and key not in self._launched:
            return False
        self.skipped += 1
        return True
