"""Evicted blocks on their way down: from the device to the first tier, from there to the second, and back up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from onebudget.resources.kv.node import Node
from onebudget.resources.kv.order import EvictionOrder

if TYPE_CHECKING:
    from onebudget.resources.kv.counters import KVCounters
    from onebudget.resources.kv.store import KVStore
    from onebudget.resources.kv.tier import BlockTier


class Shelf:
    """Slots of one tier: which are free, and whose contents go first."""

    def __init__(self, tier: BlockTier) -> None:
        self.tier = tier
        self.order = EvictionOrder()
        self._recycled: list[int] = []
        self._fresh = 0
        self.stopped = False

    @property
    def free_slots(self) -> int:
        return 0 if self.stopped else len(self._recycled) + self.tier.num_slots - self._fresh

    @property
    def used_slots(self) -> int:
        return self._fresh - len(self._recycled)

    def take(self, count: int) -> list[int]:
        """The caller has checked ``free_slots``."""
        keep = max(0, len(self._recycled) - count)
        slots = self._recycled[keep:]
        del self._recycled[keep:]
        first, self._fresh = self._fresh, self._fresh + count - len(slots)
        return [*slots, *range(first, self._fresh)]

    def give_back(self, slots: list[int]) -> None:
        self.tier.discard(slots)
        self._recycled += slots

    def stop(self, slots: list[int]) -> None:
        """The tier takes nothing more; what it holds stays readable."""
        self.give_back(slots)
        self.stopped = True

    def reset(self) -> None:
        self.tier.discard(range(self._fresh))
        self._recycled.clear()
        self._fresh = 0
        self.order.clear()


class Spill:
    """One tier or two below the device. Runs of blocks leave from their end, so a node's parts stay in the order
    device, near tier, far tier. What finds no room is dropped with everything behind it."""

    def __init__(
        self,
        store: KVStore,
        near: BlockTier,
        far: BlockTier | None,
        cut: Callable[[Node, int], None],
        counters: KVCounters,
    ) -> None:
        """``cut(node, keep)`` drops a node's blocks from index ``keep`` on and all nodes under it."""
        self._store = store
        self.near = Shelf(near)
        self.far = None if far is None else Shelf(far)
        self._cut = cut
        self._counters = counters

    def list_(self, node: Node) -> None:
        """A node that nobody holds any more, with what it has below the device."""
        if node.near_end > node.device_end:
            self.near.order.append(node)
        if self.far is not None and len(node.blocks) > node.near_end:
            self.far.order.append(node)

    def unlist(self, node: Node) -> None:
        self.near.order.discard(node)
        if self.far is not None:
            self.far.order.discard(node)

    def take_over(self, node: Node, start: int, blocks: list[int]) -> int:
        """Keep device blocks, which are those of ``node`` from ``start`` to its ``device_end``; returns how many, from
        the first on, found a slot. The caller lists the node."""
        self._make_room(len(blocks))
        count = min(len(blocks), self.near.free_slots)
        if count == 0:
            return 0
        slots = self.near.take(count)
        if not self._store.offload(blocks[:count], self.near.tier, slots):
            self.near.stop(slots)
            return 0
        node.blocks[start : start + count] = slots
        self._counters.offloaded += count
        if not self.near.tier.in_memory:
            self._counters.disk_written += count
        return count

    def park(self, blocks: list[int]) -> list[int] | None:
        """Copy a sequence's blocks to near slots that are its own; None when there are too few, or none in memory."""
        if not self.near.tier.in_memory or not self._make_room(len(blocks)):
            return None
        slots = self.near.take(len(blocks))
        if not self._store.offload(blocks, self.near.tier, slots):
            self.near.stop(slots)
            return None
        return slots

    def unpark(self, slots: list[int], blocks: list[int]) -> None:
        """Copy them back; memory forgets nothing."""
        filled = self._store.onboard(self.near.tier, slots, blocks)
        assert filled == len(slots)
        self.near.give_back(slots)

    def _make_room(self, count: int) -> bool:
        """Have ``count`` free near slots, at the cost of what was unused for longest."""
        while self.near.free_slots < count:
            victim = None if self.near.stopped else self.near.order.first()
            if victim is None:
                return False
            self._demote(victim, count - self.near.free_slots)
        return True

    def _demote(self, node: Node, wanted: int) -> None:
        """Move the last near slots of a node to the far tier, or drop them."""
        end = node.near_end
        start = max(node.device_end, end - wanted)
        slots = node.blocks[start:end]
        lower = self._copy_down(slots)
        kept = len(lower)
        if kept < len(slots):
            self._counters.dropped += len(slots) - kept
            self._cut(node, start + kept)
        if kept:
            node.blocks[start : start + kept] = lower
            node.near_end = start
            self.near.give_back(slots[:kept])
            assert self.far is not None
            self.far.order.append(node)
        if node.near_end == node.device_end:
            self.near.order.discard(node)

    def _copy_down(self, slots: list[int]) -> list[int]:
        """Slots of the far tier that hold now what ``slots`` hold; as many as it had room for."""
        if self.far is None or self.far.stopped:
            return []
        self._make_room_below(self.far, len(slots))
        lower = self.far.take(min(len(slots), self.far.free_slots))
        for index, (source, target) in enumerate(zip(slots, lower, strict=False)):
            data = self.near.tier.read(source)
            if data is None or not self.far.tier.write(target, data):
                self.far.stop(lower[index:])
                return lower[:index]
        self._counters.disk_written += len(lower)
        return lower

    def _make_room_below(self, far: Shelf, count: int) -> None:
        while far.free_slots < count:
            victim = far.order.first()
            if victim is None:
                return
            keep = max(victim.near_end, len(victim.blocks) - (count - far.free_slots))
            self._counters.dropped += len(victim.blocks) - keep
            self._cut(victim, keep)

    def bring_back(self, node: Node, blocks: list[int]) -> int:
        """Fill device blocks with the first parts of a node that are below the device; returns how many, from the first
        on, hold what they should. The node stands on those from then on."""
        near = node.blocks[node.device_end : node.near_end][: len(blocks)]
        good = self._fill(self.near, near, blocks)
        if good == len(near) < len(blocks) and self.far is not None:
            far = node.blocks[node.near_end :][: len(blocks) - good]
            good += self._fill(self.far, far, blocks[good:])
        start = node.device_end
        node.blocks[start : start + good] = blocks[:good]
        node.device_end = start + good
        node.near_end = max(node.near_end, node.device_end)
        self._counters.onboarded += good
        return good

    def _fill(self, shelf: Shelf, slots: list[int], blocks: list[int]) -> int:
        good = self._store.onboard(shelf.tier, slots, blocks[: len(slots)])
        shelf.give_back(slots[:good])
        if not shelf.tier.in_memory:
            self._counters.disk_read += good
            self._counters.disk_lost += good < len(slots)
        return good

    def relist(self, node: Node) -> None:
        """Slots of a listed node were dropped."""
        if node.near_end == node.device_end:
            self.near.order.discard(node)
        if self.far is not None and len(node.blocks) == node.near_end:
            self.far.order.discard(node)

    def return_slots(self, node: Node, start: int) -> None:
        """The slots of a node's blocks from index ``start`` on are no longer wanted."""
        self.near.give_back(node.blocks[max(start, node.device_end) : node.near_end])
        if self.far is not None:
            self.far.give_back(node.blocks[max(start, node.near_end) :])

    def reset(self) -> None:
        """Forget everything; nobody may be between a claim and its onboarding."""
        self.near.reset()
        if self.far is not None:
            self.far.reset()

    def release(self) -> None:
        self.near.tier.release()
        if self.far is not None:
            self.far.tier.release()
