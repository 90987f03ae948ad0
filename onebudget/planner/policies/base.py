"""What every sizing policy answers: where an engine puts the bytes of a card it was given.

A policy knows its engine's versions: what its memory fraction is a fraction of, what the profiling run executes, what
lives outside the budget, and how bytes become blocks and tokens. It takes facts and settings and returns a ``Ledger``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from onebudget.budget.ledger import Basis, Ledger

if TYPE_CHECKING:
    from datetime import date

    from onebudget.planner.catalogue.gpus import GpuFacts
    from onebudget.planner.source import ModelSource
    from onebudget.planner.weights import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """One question to a policy: this model, this card, these settings by the engine's own names.

    ``engine_version`` None means the newest version known before ``as_of``, or the newest of all. ``total_bytes`` and
    ``free_bytes`` override the facts of the GPU: what the driver reports as total, and what was free when the engine
    started (other processes hold the difference, beyond the context). ``stage_total_bytes``: one total per pipeline
    stage, where stages run on unlike cards. ``host_memory_bytes``: what the machine has, where that is to be checked;
    on a card of unified memory it bounds the card too. ``use`` says how the engine is started where defaults depend on
    it: ``"server"`` or ``"offline"``. ``offline`` True: the hub is not asked for the facts of a draft.
    """

    model: ModelSource
    gpu: GpuFacts
    n_gpus: int
    layout: ParallelLayout
    engine_version: str | None = None
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    as_of: date | None = None
    total_bytes: int | None = None
    stage_total_bytes: tuple[int, ...] | None = None
    free_bytes: int | None = None
    host_memory_bytes: int | None = None
    use: str = "server"
    offline: bool = True


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes that are not known exactly: the best guess, bounds that hold it nine times out of ten, and the formula."""

    bytes: int
    low_bytes: int
    high_bytes: int
    basis: Basis = "modelled"
    why: str = ""

    @classmethod
    def exact(cls, nbytes: int, why: str = "", basis: Basis = "exact") -> Figure:
        """A figure without a range."""
        return cls(nbytes, nbytes, nbytes, basis, why)


class EnginePolicy(ABC):
    """One engine. ``known_settings`` maps each setting's own name to one line about it; a setting under another name
    is refused with near matches."""

    name: ClassVar[str]
    known_settings: ClassVar[Mapping[str, str]]

    @abstractmethod
    def plan(self, request: PlanRequest) -> Ledger:
        """The ledger of the rank that governs the pool.

        A plan that does not fit comes back with ``fits`` False and the shortfall; it does not raise. Raises
        ``ConfigError`` for settings, versions and layouts that contradict each other or the model.
        """

    def widened(self, request: PlanRequest, ledger: Ledger) -> Ledger:
        """``ledger``, the plan of ``request``, with a range that also holds where the request leaves open what an
        engine is told by nobody else, as its version."""
        del request
        return ledger
