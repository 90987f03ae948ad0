"""Where figures of steps that are only imagined come from: a model's shapes on a device that keeps books."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from onebudget.engine.graph_budget import declare_graphs
from onebudget.engine.probe import measure
from onebudget.engine.station import fake_station
from onebudget.progress import SilentProgress

if TYPE_CHECKING:
    from pathlib import Path

    from onebudget.budget.profile import ProfileResult
    from onebudget.config import BudgetConfig
    from onebudget.engine.graph_budget import GraphDeclaration
    from onebudget.models.facts import ModelFacts


class DryRuns(Protocol):
    """Profiles and graph declarations of one model under any settings, without memory and without weights."""

    def profile(self, dtype: str, config: BudgetConfig) -> ProfileResult: ...

    def graphs(self, dtype: str, config: BudgetConfig) -> GraphDeclaration | None: ...


class WholeModel:
    """Dry runs of all layers of the model in ``folder``."""

    def __init__(self, folder: Path, facts: ModelFacts) -> None:
        self._folder = folder
        self._facts = facts

    def profile(self, dtype: str, config: BudgetConfig) -> ProfileResult:
        facts = self._facts
        return dry_profile(self._folder, dtype, config, ranks=facts.ranks, attention_dp=facts.attention_dp)

    def graphs(self, dtype: str, config: BudgetConfig) -> GraphDeclaration | None:
        return declare_graphs(self._folder, self._facts, dtype, config)


def dry_profile(
    folder: Path,
    dtype: str,
    config: BudgetConfig,
    *,
    ranks: int = 1,
    attention_dp: bool = False,
    granularity_bytes: int | None = None,
) -> ProfileResult:
    """The profile of the same steps on meta tensors: no memory, no weights, the same bytes."""
    station = fake_station(folder, dtype, ranks=ranks, attention_dp=attention_dp, granularity_bytes=granularity_bytes)
    try:
        return measure(station, config, SilentProgress())[0]
    finally:
        station.close()
