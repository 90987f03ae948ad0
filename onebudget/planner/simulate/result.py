"""What a simulated trace came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onebudget.planner.simulate.timeline import TimelinePoint

SCHEMA = "onebudget.simulation/1"
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A set of durations in seconds: their mean, some percentiles (the smallest value that many percent do not exceed),
    and the largest."""

    count: int
    mean: float
    percentiles: tuple[tuple[int, float], ...]
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None when there is nothing to speak of."""
        if not values:
            return None
        ordered = sorted(values)
        ranks = [(percent, max(0, math.ceil(percent * len(ordered) / 100) - 1)) for percent in PERCENTILES]
        shares = tuple((percent, ordered[rank]) for percent, rank in ranks)
        return cls(len(ordered), math.fsum(ordered) / len(ordered), shares, ordered[-1])

    def to_dict(self) -> dict[str, float]:
        named = {f"p{percent}": round(value, 6) for percent, value in self.percentiles}
        return {"count": self.count, "mean": round(self.mean, 6), **named, "max": round(self.largest, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """``finished`` got all their tokens; ``refused`` could never run; ``failed`` lost their blocks."""

    submitted: int
    finished: int
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """``decode`` steps compute no prompt, so that a graph could replay them. ``trimmed`` tokens were put off by the
    token fit, ``deferred`` requests by a cap on what a step attends to, ``skipped`` to wait for a prefix that is being
    computed; ``paused`` requests gave their blocks back and started over."""

    total: int
    decode: int
    context_tokens: int
    generation_tokens: int
    deferred: int = 0
    skipped: int = 0
    paused: int = 0
    trimmed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUse:
    """The KV pool, and what prefixes saved. ``mean_used_blocks`` is weighted by time. Blocks kept only for reuse are
    not used blocks. ``reused_blocks`` and ``missed_blocks`` are prompt blocks found and not found in the cache when
    their request began; the manager's own ``counters`` include what paused requests found when they began again.
    """

    blocks: int
    tokens_per_block: int
    peak_used_blocks: int
    mean_used_blocks: float
    prompt_tokens: int
    reused_tokens: int
    reused_blocks: int = 0
    missed_blocks: int = 0
    counters: Mapping[str, int]

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in the cache."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A whole trace through scheduler and managers under a virtual clock.

    ``virtual_s`` is when the last request ended. ``time_to_first_token`` counts from arrival; ``time_per_token`` is,
    per request, the mean gap between its later tokens. ``batch_size_histogram`` says how many decode steps had how many
    requests.
    """

    trace: str
    requests: RequestCounts
    steps: StepCounts
    kv: KVUse
    virtual_s: float
    time_to_first_token: Spread | None
    time_per_token: Spread | None
    time_to_last_token: Spread | None
    batch_size_histogram: Mapping[int, float]
    timeline: tuple[TimelinePoint, ...]
    clock: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per virtual second."""
        return self.steps.generation_tokens / self.virtual_s if self.virtual_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        kv = asdict(self.kv) | {"hit_rate": round(self.kv.hit_rate, 6)}
        kv["mean_used_blocks"] = round(self.kv.mean_used_blocks, 3)
        spreads = {
            name: getattr(self, name) for name in ("time_to_first_token", "time_per_token", "time_to_last_token")
        }
        return {
            "schema": SCHEMA,
            "trace": self.trace,
            "requests": asdict(self.requests),
            "steps": asdict(self.steps),
            "kv": kv,
            "virtual_s": round(self.virtual_s, 6),
            "tokens_per_s": round(self.tokens_per_s, 3),
            **{f"{name}_s": None if spread is None else spread.to_dict() for name, spread in spreads.items()},
            "batch_size_histogram": {str(size): count for size, count in sorted(self.batch_size_histogram.items())},
            "timeline": [point.to_dict() for point in self.timeline],
            "clock": dict(self.clock),
            "settings": dict(self.settings),
            "notes": list(self.notes),
        }
