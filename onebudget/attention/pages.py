"""Which pages a layer reads: the cache is cut into groups of layers, each with a pool and block tables of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.resources.kv.manager import KVCacheManager
    from onebudget.resources.kv.pool import KVLayout, KVPool, PagePart


class PageGroup(Protocol):
    """Layers that share one block table per request. A table's first ``first_block(request)`` entries are 0: those
    blocks were given back."""

    @property
    def layers(self) -> Sequence[int]: ...

    @property
    def store(self) -> KVPool: ...

    def block_table(self, request: Request) -> list[int]: ...

    def first_block(self, request: Request) -> int: ...


class LayerPages:
    """Finds a layer's group and its pages. Nothing of a pool is kept: its memory may be replaced."""

    def __init__(self, groups: Sequence[PageGroup]) -> None:
        self._groups = groups
        self._places = {
            layer: (number, local) for number, group in enumerate(groups) for local, layer in enumerate(group.layers)
        }

    def group_of(self, layer: int) -> int:
        return self._places[layer][0]

    def window_of(self, layer: int, own: int | None) -> int | None:
        """How far back a layer looks: its own window, or its group's where settings narrowed that."""
        number, _ = self._places[layer]
        narrowed: int | None = getattr(self._groups[number], "window_tokens", None)
        return own if narrowed is None else min(narrowed, own or narrowed)

    def parts(self, layer: int) -> list[PagePart]:
        number, local = self._places[layer]
        return self._groups[number].store.parts[local]

    def layout(self, group: int) -> KVLayout:
        return self._groups[group].store.layout


def page_groups(kv: KVCacheManager) -> Sequence[PageGroup]:
    """The manager's groups; a manager without any is one group of all layers."""
    groups: Sequence[PageGroup] = getattr(kv, "groups", ()) or (_WholeCache(kv),)
    return groups


class _WholeCache:
    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    @property
    def layers(self) -> Sequence[int]:
        return range(self.store.layout.num_layers)

    @property
    def store(self) -> KVPool:
        return self._kv.pool

    def block_table(self, request: Request) -> list[int]:
        return self._kv.block_table(request)

    def first_block(self, request: Request) -> int:
        return 0
