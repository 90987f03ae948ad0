"""A clock out of measurements: rows of tokens (and requests) of a step, and the seconds it took."""

from __future__ import annotations

import csv
import io
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebudget.errors import ConfigError
from onebudget.planner.simulate.clock import StepWork

KNOWN_FORMS = (
    "a CSV with the columns tokens, seconds and perhaps batch (requests of the step), or a JSON list of objects with "
    "these names"
)
FORMULA = "straight lines between the rows; copies between tiers of the KV cache take no time"
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class TableClock:
    """Straight lines between the rows; beyond the last row the last line goes on, before the first row its time holds.

    ``curves`` holds for each number of requests in a step, ascending, the points ``(tokens, seconds)``. Between two
    numbers of requests the times are blended; without a ``batch`` column there is one curve for all. What the host
    takes is part of the times, and copies between tiers take none.
    """

    source: str
    curves: tuple[tuple[float, tuple[tuple[float, float], ...]], ...]

    def host_seconds(self, work: StepWork) -> float:
        return 0.0

    def card_seconds(self, work: StepWork) -> float:
        points = [(batch, _on_curve(curve, work.tokens)) for batch, curve in self._around(work.requests)]
        return _on_curve(points, work.requests)

    def _around(self, requests: int) -> Sequence[tuple[float, Curve]]:
        """The curves on either side of this number of requests; only the nearest beyond the ends."""
        at = bisect_right([batch for batch, _ in self.curves], requests)
        return self.curves[max(0, at - 1) : at + 1]

    def stated(self) -> dict[str, Any]:
        rows = [
            {"batch": batch, "tokens": tokens, "seconds": seconds}
            for batch, curve in self.curves
            for tokens, seconds in curve
        ]
        return {"kind": "table", "formula": FORMULA, "source": self.source, "rows": rows}


def _on_curve(points: Curve, at: float) -> float:
    """The height of the line through ``points`` at ``at``; never below 0."""
    index = bisect_right([x for x, _ in points], at)
    if index == 0 or len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = points[index - 1 : index + 1] if index < len(points) else points[-2:]
    return max(0.0, y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def read_step_table(path: Path) -> TableClock:
    """The table in ``path``. ``ConfigError`` with file, row and what is wrong there."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror or error}.", field="step_times", value=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise _unusable(path, "it is not text in UTF-8") from error
    rows = _json_rows(path, text) if text.lstrip().startswith(("[", "{")) else _csv_rows(path, text)
    curves: dict[float, dict[float, float]] = {}
    for number, row in enumerate(rows, start=1):
        batch = _number(path, number, row, "batch") if row.get("batch") not in (None, "") else 0.0
        tokens, seconds = (_number(path, number, row, name) for name in ("tokens", "seconds"))
        if tokens in curves.setdefault(batch, {}):
            raise _unusable(path, f"row {number} gives a second time for {tokens:g} tokens and batch {batch:g}")
        curves[batch][tokens] = seconds
    if not curves:
        raise _unusable(path, "it has no row")
    return TableClock(str(path), tuple((batch, tuple(sorted(curves[batch].items()))) for batch in sorted(curves)))


def _csv_rows(path: Path, text: str) -> Sequence[Mapping[str, Any]]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    names = {name.strip() for name in reader.fieldnames or ()}
    if not {"tokens", "seconds"} <= names or not names <= {"batch", "tokens", "seconds"}:
        raise _unusable(path, f"its first line names {', '.join(sorted(names)) or 'nothing'}")
    try:
        return list(reader)
    except csv.Error as error:
        raise _unusable(path, f"its CSV is broken: {error}") from error


def _json_rows(path: Path, text: str) -> Sequence[Mapping[str, Any]]:
    try:
        rows = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _unusable(path, "it is not JSON") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _unusable(path, "it is not a list of objects")
    return rows


def _number(path: Path, row_number: int, row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else -1.0
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e15:
        raise _unusable(path, f"row {row_number} has {name} = {value!r}, which has to be a number of at least 0")
    return number


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a usable table of step times: {reason}. It has to be {KNOWN_FORMS}.",
        field="step_times",
        value=str(path),
        allowed=KNOWN_FORMS,
    )
