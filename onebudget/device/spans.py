"""Spans of a pool's address space and the index that finds a free one by size."""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum
from typing import Any


class SpanState(Enum):
    USED = "used"
    IDLE = "idle"
    """Free with physical memory behind it."""
    BARE = "bare"
    """Address space only."""


class Span:
    """A run of addresses in one arena; spans of an arena form a list without gaps, ordered by address."""

    __slots__ = ("arena", "nbytes", "next", "prev", "start", "state")

    def __init__(self, arena: Any, start: int, nbytes: int, state: SpanState) -> None:
        self.arena = arena
        self.start = start
        self.nbytes = nbytes
        self.state = state
        self.prev: Span | None = None
        self.next: Span | None = None

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def split(self, head_bytes: int) -> Span:
        """Keep the first ``head_bytes`` and return the rest as a new span of the same state."""
        tail = Span(self.arena, self.start + head_bytes, self.nbytes - head_bytes, self.state)
        tail.prev, tail.next = self, self.next
        if self.next is not None:
            self.next.prev = tail
        self.next = tail
        self.nbytes = head_bytes
        return tail

    def unlink_all(self) -> None:
        """Take the list apart from here on."""
        span: Span | None = self
        while span is not None:
            following, span.prev, span.next = span.next, None, None
            span = following

    def absorb_next(self) -> None:
        """Take the following span's addresses."""
        gone = self.next
        assert gone is not None
        assert gone.arena is self.arena
        self.nbytes += gone.nbytes
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self


class SpanIndex:
    """Free spans by size. Exact hits are one dictionary access; best fit is a binary search over the sizes seen."""

    __slots__ = ("_bins", "_sizes")

    def __init__(self) -> None:
        self._bins: dict[int, dict[Span, None]] = {}
        self._sizes: list[int] = []

    def add(self, span: Span) -> None:
        bin_ = self._bins.get(span.nbytes)
        if bin_ is None:
            bin_ = self._bins[span.nbytes] = {}
            insort(self._sizes, span.nbytes)
        bin_[span] = None

    def remove(self, span: Span) -> None:
        del self._bins[span.nbytes][span]

    def pop_exact(self, nbytes: int) -> Span | None:
        """The span of this size that was added last, marked as used."""
        bin_ = self._bins.get(nbytes)
        if not bin_:
            return None
        span, _ = bin_.popitem()
        span.state = SpanState.USED
        return span

    def pop_best(self, nbytes: int) -> Span | None:
        """One of the smallest spans of at least ``nbytes``, marked as used."""
        sizes = self._sizes
        at = bisect_left(sizes, nbytes)
        while at < len(sizes):
            span = self.pop_exact(sizes[at])
            if span is not None:
                return span
            del self._bins[sizes[at]]
            del sizes[at]
        return None

    def spans(self) -> list[Span]:
        """All spans, largest first."""
        return [span for size in reversed(self._sizes) for span in self._bins[size]]
