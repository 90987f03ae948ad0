"""Which rules apply: an engine's version as a number, read from text people write, or the newest before a date."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Number = tuple[int, int, int]

HALF_A_YEAR = timedelta(days=183)

_NUMBER = re.compile(r"(?<![\w.-])v?(\d+)\.(\d+|x)(?:\.(\d+|x))?", re.IGNORECASE)
_DATE = re.compile(r"(?<!\d)(20\d\d)[-.](\d\d)(?:[-.](\d\d))?(?!\d)")
_WORKER = re.compile(r"\bV([012])\b")


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """A version and what else its text says. ``worker``: the engine core a text like ``"0.8.3 (V0)"`` names; ``given``
    False where no version was named, and ``before`` the day that decided then; ``candidate`` for release candidates and
    development builds.
    """

    number: Number
    worker: str | None = None
    given: bool = True
    candidate: bool = False
    before: date | None = None

    @property
    def is_open(self) -> bool:
        """Whether neither a version nor a date was named: the newest stands for whatever may be meant."""
        return not self.given and self.before is None

    def __str__(self) -> str:
        return _text(self.number)

    def at_least(self, *number: int) -> bool:
        """Whether this version has what came with ``number``."""
        return self.number >= (*number, 0, 0)[:3]


@cache
def releases(engine: str) -> Mapping[Number, date]:
    """Known releases of an engine and the day each could be installed, oldest first."""
    text = (resources.files(__package__) / "releases.toml").read_text(encoding="utf-8")
    known = tomllib.loads(text).get(engine, {})
    return dict(sorted((_numbers(name), day) for name, day in known.items()))


def newest(engine: str, before: date | None = None) -> Number:
    """The newest known release, or the newest that existed on the day ``before``."""
    known = releases(engine)
    fitting = [number for number, day in known.items() if before is None or day <= before]
    return max(fitting, default=min(known))


def recent(engine: str) -> tuple[str, ...]:
    """The last release of each line within half a year before the newest: what somebody who names none may run."""
    known = releases(engine)
    since = known[newest(engine)] - HALF_A_YEAR
    lines = {number[:2]: number for number, day in known.items() if day >= since}
    return tuple(_text(number) for number in lines.values())


def read_version(engine: str, text: str | None, as_of: date | None = None) -> EngineVersion:
    """The version ``text`` names; where it names a date instead, or nothing, the newest release before that date.

    ``x`` in place of a number means the newest of that line. Development builds numbered below every release count as
    unnamed. Raises ``ConfigError`` for a version newer than any that is known by more than a major number.
    """
    worker = _WORKER.search(text or "")
    core = f"V{worker[1]}" if worker else None
    day = _day(text) or as_of
    bare = _DATE.sub(" ", text or "")
    found = _NUMBER.search(bare)
    candidate = bool(re.search(r"rc\d|\.?dev\d", bare))
    number = _line_number(engine, found) if found else None
    if number is None or (candidate and number < min(releases(engine))) or _is_development(engine, number, bare):
        return EngineVersion(newest(engine, day), core, given=False, before=day)
    if number[0] > newest(engine)[0] + 1:
        raise ConfigError.for_field("engine_version", text, f"a version of {engine}, like {_newest_text(engine)}")
    return EngineVersion(number, core, candidate=candidate)


def _is_development(engine: str, number: Number, text: str) -> bool:
    """Nightly builds count from 0.1 whatever they are built from."""
    return engine == "vllm" and number[:2] == (0, 1) and "dev" in text


def _line_number(engine: str, found: re.Match[str]) -> Number:
    parts = list(found.groups())
    if parts[1] in (None, "x", "X") or parts[2] in ("x", "X"):
        fixed = tuple(int(part) for part in parts if part and part.isdigit())
        line = [number for number in releases(engine) if number[: len(fixed)] == fixed]
        return max(line, default=(fixed[0], fixed[1] if len(fixed) > 1 else 0, 0))
    major, minor, patch = parts
    return (int(major), int(minor), int(patch or 0))


def _day(text: str | None) -> date | None:
    found = _DATE.search(text or "")
    if not found:
        return None
    year, month, day = int(found[1]), int(found[2]), int(found[3] or 28)
    try:
        return date(year, month, day)
    except ValueError:
        return None


def _numbers(name: str) -> Number:
    major, minor, patch = (int(part) for part in name.split("."))
    return (major, minor, patch)


def _newest_text(engine: str) -> str:
    return _text(newest(engine))


def _text(number: Number) -> str:
    return ".".join(str(part) for part in number)
