"""The private pools of one virtual-memory scope."""

from __future__ import annotations

from onebudget.device.base import Device
from onebudget.device.private_pool import PrivatePool
from onebudget.errors import StateError


class ScopePools:
    """What a scope yields: the private pools that framework allocations went to while it was innermost.

    Keep it for as long as those allocations live: a pool that dies frees live memory.
    """

    def __init__(self, tag: str, device: Device | None) -> None:
        self.tag = tag
        self.pools: list[PrivatePool] = []
        self._device = device

    @property
    def live(self) -> int:
        """Buffers made in this scope that are not released yet."""
        return sum(pool.live for pool in self.pools)

    @property
    def current(self) -> PrivatePool:
        return self.pools[-1]

    def enter(self) -> None:
        """Route framework allocations to a new pool; a pool is entered once in its life."""
        pool = PrivatePool(self.tag) if self._device is None else self._device.make_private_pool(self.tag)
        pool.enter()
        self.pools.append(pool)

    def leave(self) -> None:
        self.current.leave()

    @property
    def inside(self) -> bool:
        return bool(self.pools) and self.current.inside

    def drop(self) -> None:
        """Let the pools go. ``StateError`` while buffers made in the scope are alive."""
        if self.live:
            raise StateError(f"scope {self.tag!r} still has {self.live} live buffers; release them before its pools")
        for pool in self.pools:
            pool.close()
        self.pools.clear()
