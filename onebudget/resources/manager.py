"""The dispatcher: every manager's hooks in one fixed order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError, UnknownKeyError
from onebudget.resources.base import BaseResourceManager, ResourceKind

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.resources.units import BlocksTotal

logger = logging.getLogger(__name__)

BATCH_LAST = (ResourceKind.KV, ResourceKind.CROSS_KV, ResourceKind.KV_COMPRESSION)
"""Kinds that run after all others, in this order: the cache may depend on the rest, and compression must see it
updated."""
KV_KINDS = (ResourceKind.KV, ResourceKind.DRAFT_KV, ResourceKind.CROSS_KV)

BatchHook = Callable[["ScheduledBatch"], object]


class ResourceManager:
    """Runs ``prepare`` and ``update`` in order and ``free`` backwards.

    After all have prepared, ``fit`` trims the batch to the token budget, then ``publish`` tells others about it: what
    is published is what will be computed. An exception of a hook goes through; managers that had their turn keep
    their state, and whoever catches it frees the request here, which reaches all of them.
    """

    def __init__(
        self,
        managers: Mapping[ResourceKind, BaseResourceManager],
        *,
        fit: BatchHook | None = None,
        publish: BatchHook | None = None,
        extra: Iterable[tuple[ResourceKind, BaseResourceManager]] = (),
    ) -> None:
        """``extra``: managers of users; they may not take the place of one of ``managers``."""
        given = dict(managers)
        for kind, manager in extra:
            if kind in given:
                raise ConfigError.for_field("extra", kind.value, f"a kind other than {_names(given)}")
            given[kind] = manager
        early = [kind for kind in given if kind not in BATCH_LAST]
        late = [kind for kind in BATCH_LAST if kind in given]
        self._managers = {kind: given[kind] for kind in (*early, *late)}
        self._fit = fit
        self._publish = publish
        self._warned: set[str] = set()

    def __call__(self, kind: ResourceKind) -> BaseResourceManager:
        if kind not in self._managers:
            raise UnknownKeyError(f"no manager of kind {kind.value!r}; there are {_names(self._managers)}")
        return self._managers[kind]

    def get(self, kind: ResourceKind) -> BaseResourceManager | None:
        return self._managers.get(kind)

    def __iter__(self) -> Iterator[BaseResourceManager]:
        return iter(self._managers.values())

    @property
    def order(self) -> tuple[ResourceKind, ...]:
        """Kinds in the order of ``prepare``."""
        return tuple(self._managers)

    def reorder(self, kinds: Iterable[ResourceKind]) -> None:
        """Run in this order from now on. ``ConfigError`` unless it names each present kind once."""
        wanted = list(kinds)
        if len(wanted) != len(self._managers) or set(wanted) != set(self._managers):
            allowed = f"each of {_names(self._managers)} once"
            raise ConfigError.for_field("order", [kind.value for kind in wanted], allowed)
        self._managers = {kind: self._managers[kind] for kind in wanted}

    def prepare(self, batch: ScheduledBatch) -> None:
        for manager in self:
            manager.prepare(batch)
        if self._fit is not None:
            self._fit(batch)
        if self._publish is not None:
            self._publish(batch)

    def update(self, batch: ScheduledBatch, attn_meta: object = None, kv_elem_bytes: int | None = None) -> None:
        """The two extra arguments go to the KV manager alone."""
        for kind, manager in self._managers.items():
            if kind is ResourceKind.KV:
                manager.update(batch, attn_meta, kv_elem_bytes)
            else:
                manager.update(batch)

    def free(self, request: Request) -> None:
        """Reaches every manager, also behind one that raises; the first error is raised at the end."""
        self._backwards(lambda manager: manager.free(request))

    def shutdown(self) -> None:
        self._backwards(lambda manager: manager.shutdown())

    def _backwards(self, call: Callable[[BaseResourceManager], object]) -> None:
        first: Exception | None = None
        for manager in reversed(self._managers.values()):
            try:
                call(manager)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def block_budgets(self, request: Request) -> list[tuple[ResourceKind, BlocksTotal, BlocksTotal]]:
        """``(kind, required, capacity)`` of each KV pool that knows exactly what the request needs."""
        budgets = []
        for kind in KV_KINDS:
            manager = self._managers.get(kind)
            if manager is None:
                continue
            answer = manager.request_kv_block_budget(request)
            if answer is not None:
                budgets.append((kind, *answer))
            else:
                self._warn_once(
                    kind.value,
                    f"the {kind.value} pool can't tell how many blocks a request needs: one that is too large waits "
                    "instead of being refused",
                )
        return budgets

    def unchecked_pools(self) -> list[ResourceKind]:
        """KV pools that refuse no request at submission."""
        return [k for k in KV_KINDS if k in self._managers and not self._managers[k].kv_block_budget_applies()]

    def warn_of_unchecked_pools(self, max_beam_width: int) -> None:
        """At start-up: with several beams, a request larger than an unchecked pool would wait for ever."""
        unchecked = self.unchecked_pools()
        if max_beam_width > 1 and unchecked:
            self._warn_once("unchecked", f"no request is refused for the size of these pools: {_names(unchecked)}")

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


def _names(kinds: Iterable[ResourceKind]) -> str:
    return ", ".join(kind.value for kind in kinds)
