"""A grid of questions: every combination of models, cards, engines, layouts, formats and settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onebudget.errors import ConfigError
from onebudget.planner.policies import policy_for
from onebudget.planner.request import plain_value
from onebudget.planner.source import ModelSource

MOST_POINTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPoint:
    """One question of a sweep, plain enough to be sent to another process. ``quick``: closed forms, no dry run."""

    model: ModelSource
    gpu: str
    engine: str
    engine_version: str | None = None
    tp: int | None = None
    pp: int = 1
    ep: int = 1
    dp: int = 1
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    settings: tuple[tuple[str, object], ...] = ()
    total_bytes: int | None = None
    target_seq_len: int | None = None
    quick: bool = True

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``make_request``, the model and the card left out."""
        names = (
            "engine", "engine_version", "tp", "pp", "ep", "dp", "weights_dtype", "kv_dtype", "total_bytes",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {"settings": dict(self.settings)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The axes. ``settings``: a setting's own name, with ``engine.`` before it where only that engine has it, and the
    values to try."""

    models: Sequence[ModelSource]
    gpus: Sequence[str]
    engines: Sequence[str] = ("onebudget",)
    engine_version: str | None = None
    tp: Sequence[int | None] = (None,)
    pp: Sequence[int] = (1,)
    ep: Sequence[int] = (1,)
    dp: Sequence[int] = (1,)
    weights_dtypes: Sequence[str | None] = (None,)
    kv_dtypes: Sequence[str | None] = (None,)
    settings: Mapping[str, Sequence[object]] = field(default_factory=dict)
    total_bytes: int | None = None
    target_seq_len: int | None = None
    quick: bool = True

    def points(self) -> tuple[GridPoint, ...]:
        """Every combination. ``ConfigError`` for an empty axis, an unknown engine, or more than ``MOST_POINTS``."""
        engines = [policy_for(engine).name for engine in self.engines]
        count = 1
        axes = (
            self.models, self.gpus, self.tp, self.pp, self.ep, self.dp, self.weights_dtypes, self.kv_dtypes,
        )  # fmt: skip
        for values in (*axes, engines, *self.settings.values()):
            count *= len(values)
        if not 1 <= count <= MOST_POINTS:
            raise ConfigError(
                f"A sweep of {count:,} points is not possible: name at least one model and one card, and at most "
                f"{MOST_POINTS:,} combinations.",
                field="sweep",
                value=count,
            )
        return tuple(
            GridPoint(
                model=model, gpu=gpu, engine=engine, engine_version=self.engine_version, tp=tp, pp=pp, ep=ep, dp=dp,
                weights_dtype=weights, kv_dtype=cache, settings=settings, total_bytes=self.total_bytes,
                target_seq_len=self.target_seq_len, quick=self.quick,
            )
            for engine in dict.fromkeys(engines)
            for settings in _combinations(_settings_of(engine, self.settings))
            for model, gpu, tp, pp, ep, dp, weights, cache in itertools.product(*axes)
        )  # fmt: skip


def _settings_of(engine: str, settings: Mapping[str, Sequence[object]]) -> dict[str, Sequence[object]]:
    """Settings meant for all engines, and those with this engine's name before them."""
    chosen: dict[str, Sequence[object]] = {}
    for name, values in settings.items():
        owner, dot, own = name.partition(".")
        if not dot:
            chosen[name] = values
        elif policy_for(owner).name == engine:
            chosen[own] = values
    return chosen


def _combinations(settings: Mapping[str, Sequence[object]]) -> list[tuple[tuple[str, object], ...]]:
    return [tuple(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]


def parse_axes(texts: Iterable[str]) -> dict[str, list[object]]:
    """``KEY=V1,V2`` texts as values to try; commas inside brackets and braces do not separate."""
    axes: dict[str, list[object]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        words = _split(values)
        if not equals or not name or not all(words):
            raise ConfigError(f"--set {text!r} is not usable: it must be KEY=VALUE or KEY=VALUE,VALUE.",
                              field="--set", value=text)  # fmt: skip
        if name in axes:
            raise ConfigError(f"--set {name} is given twice.", field="--set", value=text)
        axes[name] = [plain_value(word) for word in words]
    return axes


def _split(text: str) -> list[str]:
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words]
