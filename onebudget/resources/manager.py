"""The dispatcher: every manager's hooks in one fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from onebudget.errors import UnknownKeyError

if TYPE_CHECKING:
    from onebudget.core import Request, ScheduledBatch
    from onebudget.resources.base import BaseResourceManager, ResourceKind


class ResourceManager:
    """Runs ``prepare`` and ``update`` in registration order and ``free`` backwards."""

    def __init__(self, managers: Mapping[ResourceKind, BaseResourceManager]) -> None:
        self._managers = dict(managers)

    def __call__(self, kind: ResourceKind) -> BaseResourceManager:
        if kind not in self._managers:
            raise UnknownKeyError(f"no manager of kind {kind.value!r}; there are {[k.value for k in self._managers]}")
        return self._managers[kind]

    def __iter__(self) -> Iterator[BaseResourceManager]:
        return iter(self._managers.values())

    def prepare(self, batch: ScheduledBatch) -> None:
        for manager in self:
            manager.prepare(batch)

    def update(self, batch: ScheduledBatch) -> None:
        for manager in self:
            manager.update(batch)

    def free(self, request: Request) -> None:
        for manager in reversed(self._managers.values()):
            manager.free(request)

    def shutdown(self) -> None:
        for manager in reversed(self._managers.values()):
            manager.shutdown()
