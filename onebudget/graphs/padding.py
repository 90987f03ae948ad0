"""Requests that fill a batch up to a captured size: one per draft length, repeated as often as needed. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.resources.base import BaseResourceManager

logger = logging.getLogger(__name__)

FIRST_DUMMY_ID = 2**64 - 1


def dummy_id(draft_len: int) -> int:
    """The id of the dummy for one draft length: the highest unsigned 64-bit numbers, which no request reaches."""
    return FIRST_DUMMY_ID - draft_len


class PaddingDummies:
    """Made from the managers that hold something per sequence, the KV manager first, and released from all of them.

    A dummy stands behind a prompt of one token. Made at the end of warm-up: later the cache may be full for good, and
    every padded batch would then run eagerly.
    """

    def __init__(self, managers: Sequence[BaseResourceManager]) -> None:
        self._managers = managers
        self._dummies: dict[int, Request] = {}
        self._warned = False

    def __len__(self) -> int:
        return len(self._dummies)

    def get(self, draft_len: int = 0) -> Request | None:
        """The dummy of this draft length; tries to make it, and warns once where that fails."""
        if draft_len not in self._dummies:
            self._make(draft_len)
        return self._dummies.get(draft_len)

    def _make(self, draft_len: int) -> None:
        made: list[Request] | None = None
        asked: list[BaseResourceManager] = []
        for manager in self._managers:
            got = manager.add_dummy_requests([dummy_id(draft_len)], tokens=2 + draft_len, generation=True)
            if got is None:
                for earlier in asked:
                    earlier.free(made[0])  # type: ignore[index]
                self._warn(manager)
                return
            made = made or got
            asked.append(manager)
        if made:
            self._dummies[draft_len] = made[0]

    def _warn(self, manager: BaseResourceManager) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "no room for a padding dummy in %s: batches that match no captured size run eagerly",
                type(manager).__name__,
            )

    @contextmanager
    def fill(self, rows: list[Request], size: int, draft_len: int = 0) -> Iterator[list[Request]]:
        """``rows`` with dummies appended up to ``size``, and as before at the end, whatever happened inside."""
        live = len(rows)
        if size > live:
            dummy = self.get(draft_len)
            assert dummy is not None, "the padded size was chosen without a dummy"
            rows.extend([dummy] * (size - live))
        try:
            yield rows
        finally:
            del rows[live:]

    def release(self) -> None:
        """Let every manager forget them. Safe to call again."""
        for dummy in self._dummies.values():
            for manager in self._managers:
                manager.free(dummy)
        self._dummies.clear()
        self._warned = False
