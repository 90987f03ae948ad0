"""Multicast buffers: the same bytes at the same address on every listed rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from onebudget.buffers.agreement import RankGroup, machine_name
from onebudget.buffers.buffer import parse_shape
from onebudget.buffers.dtypes import element_type
from onebudget.device.allocators import Allocation, Allocator
from onebudget.device.base import Device
from onebudget.device.multicast import Multicast
from onebudget.device.sample import round_to_sector
from onebudget.device.streams import Stream
from onebudget.errors import AgreementError

_ATTEMPTS = 16


class NvlsAllocator(Allocator):
    """Allocates with the other ranks of ``group``; freeing is local, and the memory lives until all have freed.

    Every rank is charged for its own copy, as on cards where each contributes its physical memory.
    """

    kind = "nvls"

    def __init__(self, device: Device, group: RankGroup) -> None:
        self.device = device
        self._group = group

    def allocate(self, nbytes: int, stream: Stream | None, owner: str) -> Allocation:
        device, group = self.device, self._group
        with ExitStack() as undo:
            [physical, *_] = group.together("reserving memory", lambda: self._charge(nbytes, owner, undo))
            multicast = device.make_multicast()
            undo.callback(multicast.close)
            tickets = group.together("creating memory", lambda: multicast.create(physical) if group.leads else None)
            group.together("joining memory", lambda: None if group.leads else multicast.join(tickets[0], physical))
            self._map_everywhere(multicast)
            undo.pop_all()
        device.account.hand_out(round_to_sector(nbytes), owner)
        return Allocation(multicast.address, round_to_sector(nbytes), owner, multicast, physical)

    def deallocate(self, allocation: Allocation, stream: Stream | None) -> None:
        allocation.begin_free()
        allocation.freed = True
        multicast, physical = allocation.memory, allocation.detail
        assert isinstance(multicast, Multicast)
        assert isinstance(physical, int)
        self.device.drain_streams()
        multicast.close()
        self.device.account.take_back(allocation.nbytes, allocation.owner)
        self.device.account.refund_blocking(physical)

    def _charge(self, nbytes: int, owner: str, undo: ExitStack) -> int:
        physical = self.device.charge_blocking(nbytes, owner=owner, kind=self.kind)
        undo.callback(self.device.account.refund_blocking, physical)
        return physical

    def _map_everywhere(self, multicast: Multicast) -> None:
        group = self._group
        for attempt in range(_ATTEMPTS):
            address = group.exchange(multicast.propose_address(attempt))[0]
            if all(group.exchange(multicast.try_map(address))):
                return
            multicast.unmap()
        raise AgreementError(
            f"ranks {group.ranks} found no address that is free on all of them in {_ATTEMPTS} attempts"
        )


def agree_on_request(group: RankGroup, shape: int | Sequence[int], dtype: Any) -> None:
    """Refuse on every rank unless all ask for the same shape, dtype and ranks, on one machine."""
    group.agree(
        "ipc_nvls", lambda: (group.ranks, parse_shape(shape)[0], element_type(dtype)[0], machine_name())
    )  # fmt: skip
