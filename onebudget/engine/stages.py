"""The stages of an engine's life: each has a tag for sleeping, and a sentence for the day its memory does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.buffers.virtual import RestoreMode, maybe_virtual_memory_scope
from onebudget.errors import AllocationError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.device.base import Device

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Stage:
    """``sleep_mode``: what becomes of its contents while it sleeps; None for memory that is gone before service."""

    name: str
    sleep_mode: RestoreMode | None
    cure: str


STAGES = {
    stage.name: stage
    for stage in (
        Stage("model", RestoreMode.PINNED_ON_DEMAND, "a smaller dtype, a larger device, or sharding over ranks"),
        Stage("profile", None, "a lower max_num_tokens"),
        Stage("kv_cache", RestoreMode.NONE, "a lower free_gpu_memory_fraction"),
        Stage("workspace", RestoreMode.NONE, "a lower max_batch_size or max_seq_len"),
        Stage("warm_up", None, "a lower max_num_tokens"),
    )
}
SLEEPING_STAGES = tuple(name for name, stage in STAGES.items() if stage.sleep_mode is not None)


@dataclass(frozen=True, slots=True)
class _Record:
    stage: str
    free_before_bytes: int
    free_after_bytes: int


class Stages:
    """Opens the stages of one engine and keeps what each took.

    With ``sleepable`` the memory of the sleeping stages is virtual, under tags of this engine alone. Out of memory
    inside a stage becomes an ``AllocationError`` that names the stage, what was free before it, what every earlier
    stage took, and what to change; other errors pass untouched.
    """

    def __init__(self, device: Device, *, sleepable: bool = False) -> None:
        self._device = device
        self.sleepable = sleepable
        self._number = next(_numbers)
        self._records: list[_Record] = []

    def tag(self, name: str) -> str:
        return f"{name}@{self._number}"

    @contextmanager
    def open(self, name: str) -> Iterator[None]:
        stage, before = STAGES[name], self._device.free_bytes()
        virtual = self.sleepable and stage.sleep_mode is not None
        try:
            with maybe_virtual_memory_scope(virtual, self.tag(name), stage.sleep_mode or RestoreMode.NONE):
                yield
        except AllocationError as error:
            raise self._explained(error, stage, before) from error
        self._records.append(_Record(name, before, self._device.free_bytes()))

    def _explained(self, error: AllocationError, stage: Stage, before: int) -> AllocationError:
        took = [
            f"{record.stage} {format_bytes(record.free_before_bytes)} -> {format_bytes(record.free_after_bytes)}"
            for record in self._records
        ]
        earlier = f" Free memory before and after earlier stages: {', '.join(took)}." if took else ""
        return AllocationError(
            error.requested_bytes,
            error.free_bytes,
            kind=error.kind,
            tag=error.tag,
            owner=error.owner,
            detail=f"This was in stage {stage.name}, which found {format_bytes(before)} free of "
            f"{format_bytes(self._device.total_bytes)}.{earlier} What helps: {stage.cure}.",
        )
