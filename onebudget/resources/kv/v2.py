"""The KV cache manager that keeps a byte quota: blocks are taken while the scheduler decides, and a sequence can leave
the device and come back."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from onebudget.errors import ConfigError
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.resources.kv.group import KVGroup


@dataclass(slots=True)
class _Parked:
    """A sequence below the device: slots of each group's near tier, and how many front blocks it had returned."""

    slots: list[list[int]]
    returned: list[int]


class KVCacheManagerV2(KVCacheManager):
    """Quota in bytes, several tiers, suspension.

    ``resize`` takes blocks inside the scheduler's loop; what a step still lacks when it is prepared is taken then.
    A suspended sequence is kept in the near tier, whole, and comes back only while no more than
    ``max_util_for_resume`` of the blocks would be in use, or when it would be alone on the device.
    """

    def __init__(self, *args: Any, max_util_for_resume: Fraction | float = Fraction(95, 100), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.max_util_for_resume = Fraction(str(max_util_for_resume))
        if not 0 < self.max_util_for_resume <= 1:
            raise ConfigError.for_field("max_util_for_resume", max_util_for_resume, "above 0 and at most 1")
        self._parked: dict[int, _Parked] = {}

    def kv_block_budget_applies(self) -> bool:
        return self._counts_exactly

    def suspend(self, request: Request) -> bool:
        """Move a sequence to the near tier; False, with nothing changed, when that has no room, and under helix, where
        the scheduler would let nobody back whose whole sequence is larger than this rank's pool."""
        if self.helix is not None:
            return False
        if request.id in self._parked or any(request.id not in group.sequences for group in self.groups):
            return False
        parked = _Parked([], [])
        for group in self.groups:
            sequence = group.sequences[request.id]
            slots = None if sequence.pretends or group.blocks.spill is None else self._park(group, request)
            if slots is None:
                self._unpark_slots(parked)
                return False
            parked.slots.append(slots)
            parked.returned.append(sequence.returned)
        self._prefixes.store(request)
        for group in self.groups:
            group.close(request.id)
        self._parked[request.id] = parked
        self.counters.suspended += 1
        return True

    def _park(self, group: KVGroup, request: Request) -> list[int] | None:
        assert group.blocks.spill is not None
        return group.blocks.spill.park(group.kept_blocks(group.sequences[request.id]))

    def _unpark_slots(self, parked: _Parked) -> None:
        for group, slots in zip(self.groups, parked.slots, strict=False):
            assert group.blocks.spill is not None
            group.blocks.spill.near.give_back(slots)

    def is_suspended(self, request: Request) -> bool:
        return request.id in self._parked

    def resume(self, request: Request) -> bool:
        parked = self._parked.get(request.id)
        if parked is None or not self._may_resume(request, parked):
            return False
        for number, group in enumerate(self.groups):
            assert group.blocks.spill is not None
            slots = parked.slots[number]
            blocks = group.blocks.take(len(slots))
            group.blocks.spill.unpark(slots, blocks)
            group.reopen(request.id, blocks, parked.returned[number], self._prefixes.space(request))
        del self._parked[request.id]
        self.counters.resumed += 1
        return True

    def _may_resume(self, request: Request, parked: _Parked) -> bool:
        ahead = ceil_div(request.computed_tokens + 1 + self._extra, self.tokens_per_block)
        for group, slots, returned in zip(self.groups, parked.slots, parked.returned, strict=True):
            needed = len(slots) + max(0, ahead - returned - len(slots))
            if needed > group.free_blocks:
                return False
            others = group.used_blocks - group.set_aside_blocks
            if others > 0 and others + needed > group.num_blocks * self.max_util_for_resume:
                return False
        return True

    def free(self, request: Request, pin_on_release: bool = False) -> list[int]:
        parked = self._parked.pop(request.id, None)
        if parked is not None:
            self._unpark_slots(parked)
        return super().free(request, pin_on_release)

    def least_blocks(self, group: KVGroup) -> int:
        """The fewest blocks that the group's pool can have now: as many as are in use, and pinned ones stay where they
        are."""
        pinned = [block for pin in self._pins.values() if pin.group is group for block in pin.private]
        return max(group.used_blocks, 1 + max(pinned, default=-1))

    def pools_resized(self) -> None:
        """Pools have other sizes now: one that no longer serves any batch is counted from here on."""
        self._counted = [group for group in self.groups if not group.serves_any_batch] or [self.groups[0]]

    def shutdown(self) -> None:
        self._parked.clear()
        super().shutdown()


def index_slots(
    *, max_batch_size: int, pp_size: int = 1, is_disaggregated: bool = False, reserved_slots: int = 0
) -> int:
    """Sequences that tables are kept for at once: seats of all stages, twice where they are handed over, and
    ``reserved_slots`` for dummies."""
    return max_batch_size * pp_size * (2 if is_disaggregated else 1) + reserved_slots
