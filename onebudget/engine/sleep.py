"""Sleep and wake: the engine's memory leaves the device between steps and comes back at the same addresses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.buffers.virtual import materialize_with_tag, release_with_tag
from onebudget.engine.stages import SLEEPING_STAGES
from onebudget.errors import AllocationError, ConfigError, StateError
from onebudget.models.load import host_model
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from onebudget.buffers import Buffer
    from onebudget.engine.executor import Executor
    from onebudget.engine.station import Station


@dataclass(frozen=True, slots=True)
class SleepReport:
    """What a sleep gave back, and what the device still holds, by owner."""

    released_bytes: int
    backup_bytes: int
    still_held_bytes: dict[str, int]


class Sleeper:
    """Puts one engine's stages to sleep and wakes them, all or some.

    Level 1 keeps the weights in host memory, level 2 drops them and reads them from their files again. The KV cache is
    dropped either way, and with it every reusable prefix. When waking fails, what this call brought up goes back to
    sleep; a stage whose memory was lost on the way is made anew by the next ``wake``.
    """

    def __init__(self, station: Station, executor: Executor, folder: Path) -> None:
        self._station = station
        self._executor = executor
        self._folder = folder
        self._asleep: dict[str, int] = {}  # stage -> level

    @property
    def asleep(self) -> tuple[str, ...]:
        return tuple(self._asleep)

    @property
    def backup_bytes(self) -> int:
        """Host memory that holds the weights meanwhile."""
        return self._station.model.weight_bytes if self._asleep.get("model") == 1 else 0

    def require_awake(self) -> None:
        if self._asleep:
            raise StateError(f"the engine sleeps ({', '.join(self._asleep)}): call wake() first")

    def sleep(self, level: int, stages: Iterable[str] | None) -> SleepReport:
        """``StateError`` while requests are inside or when the engine was not built for sleeping."""
        if level not in (1, 2):
            raise ConfigError.for_field("level", level, "1 (weights kept in host memory) or 2 (weights dropped too)")
        chosen = [stage for stage in _known(stages) if stage not in self._asleep]
        if not self._station.stages.sleepable:
            raise StateError("this engine can't sleep: build it with enable_sleep=True")
        if self._executor.has_work:
            raise StateError("requests are running: let them finish or abort them before sleep()")
        device = self._station.device
        device.synchronize()
        before = device.used_bytes()
        for stage in chosen:
            release_with_tag(self._station.stages.tag(stage), discard=stage != "model" or level == 2)
            self._asleep[stage] = level
        device.empty_cache()
        return SleepReport(before - device.used_bytes(), self.backup_bytes, device.used_by_owner())

    def wake(self, stages: Iterable[str] | None) -> None:
        """``AllocationError`` with the numbers when the device has no room; everything sleeps on then."""
        chosen = [stage for stage in _known(stages) if stage in self._asleep]
        self._check_room(chosen)
        came: list[str] = []
        try:
            for stage in chosen:
                self._bring_back(stage)
                came.append(stage)
        except BaseException:
            for stage in reversed(came):
                release_with_tag(self._station.stages.tag(stage), discard=stage != "model" or self._asleep[stage] == 2)
            raise
        for stage in chosen:
            del self._asleep[stage]

    def _bring_back(self, stage: str) -> None:
        materialize_with_tag(self._station.stages.tag(stage))
        lost = self._lost(stage)
        if stage == "model" and (lost or self._asleep[stage] == 2):
            self._read_weights(anew=lost)
        elif lost:
            self._executor.rebuild(stage, self._station.stages)
        if stage == "kv_cache":
            self._executor.kv.reset_reuse()
            self._executor.runner.renew_padding()

    def _lost(self, stage: str) -> bool:
        return not all(_usable(buffer) for buffer in self._executor.buffers_of(stage, self._station.model))

    def _read_weights(self, *, anew: bool) -> None:
        """Fill the weights from their files; into new memory where the old is lost."""
        module = host_model(self._folder, self._station.model.dtype)
        if anew:
            self._executor.runner.drop_graphs()
            with self._station.stages.open("model"):
                self._station.model.place_anew(module, self._station.manager)
        else:
            self._station.model.refill(module)

    def _check_room(self, stages: Iterable[str]) -> None:
        sizes = {
            stage: sum(buffer.capacity_bytes for buffer in self._executor.buffers_of(stage, self._station.model))
            for stage in stages
        }
        self._station.device.empty_cache()
        free = self._station.device.free_bytes()
        if sum(sizes.values()) > free:
            listed = ", ".join(f"{stage} {format_bytes(size)}" for stage, size in sizes.items())
            raise AllocationError(
                sum(sizes.values()),
                free,
                owner="wake",
                detail=f"Asked for: {listed}. Wake stages one by one, or free others.",
            )


def _usable(buffer: Buffer) -> bool:
    try:
        buffer.check_use()
    except StateError:
        return False
    return True


def _known(stages: Iterable[str] | None) -> list[str]:
    chosen = list(SLEEPING_STAGES) if stages is None else [stages] if isinstance(stages, str) else list(stages)
    unknown = [stage for stage in chosen if stage not in SLEEPING_STAGES]
    if unknown:
        raise ConfigError.for_field("tags", unknown[0], f"among {', '.join(SLEEPING_STAGES)}")
    return [stage for stage in SLEEPING_STAGES if stage in chosen]
