"""Where engines are built: a device, the buffer manager of its stream, and the model placed on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onebudget.engine.ranks import RankGroup

if TYPE_CHECKING:
    from pathlib import Path

    from onebudget.buffers import BufferManager
    from onebudget.device.base import Device
    from onebudget.engine.encoder import MultimodalEncoder
    from onebudget.engine.stages import Stages
    from onebudget.models.load import LoadedModel


@dataclass(slots=True)
class Station:
    model: LoadedModel
    device: Device
    manager: BufferManager
    stages: Stages
    ranks: RankGroup = field(default_factory=RankGroup)
    encoder: MultimodalEncoder | None = None

    def close(self) -> None:
        """Weights, then buffers, then the device. Safe after a failure."""
        self.model.release()
        self.manager.close()
        self.device.close()


def fake_station(
    folder: Path,
    dtype: str,
    *,
    ranks: int = 1,
    attention_dp: bool = False,
    capacity_bytes: int = 2**60,
    granularity_bytes: int | None = None,
) -> Station:
    """The model's shapes on an accounting-only device: what runs there costs no memory and reads no weights.

    With several ``ranks`` they are those of this rank's part; it exchanges nothing with the others. With
    ``attention_dp`` all of them are taken to compute as many tokens as this one.
    """
    from onebudget.buffers import BufferManager
    from onebudget.device import open_device
    from onebudget.engine.stages import Stages
    from onebudget.models.load import meta_model, place_weights, read_facts
    from onebudget.models.tensor_parallel import facts_of_rank

    device = open_device("fake", capacity_bytes=capacity_bytes, granularity_bytes=granularity_bytes)
    manager = BufferManager(device.create_stream())
    facts = facts_of_rank(folder, read_facts(folder), ranks, attention_dp=attention_dp)
    model = place_weights(meta_model(folder, dtype), facts, dtype, manager)
    return Station(model, device, manager, Stages(device))
