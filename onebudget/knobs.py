"""Checks for single settings: each maker returns ``clean(name, value)``, which gives the usable value back or raises
``ConfigError`` with field, value and what is allowed. Texts are accepted because settings also come from command lines
and environment variables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from os import PathLike

from onebudget.errors import ConfigError
from onebudget.units import parse_bytes

Clean = Callable[[str, object], object]

DTYPE_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
}  # fmt: skip
_NONE_WORDS = ("none", "null", "")
_FLAG_WORDS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
RATIO_TOLERANCE = Fraction(1, 10**6)


def count(low: int, high: int | None = None, *, none: bool = False) -> Clean:
    """An integer in [low, high]."""
    allowed = _range_text("an integer", low, high, none)

    def clean(name: str, value: object) -> int | None:
        if _is_none(value, none):
            return None
        return _within(name, value, _as_int(name, value, allowed), low, high, allowed)

    return clean


def size(low: int, high: int | None = None, *, none: bool = False) -> Clean:
    """Bytes in [low, high], as an integer or a text such as ``1GiB``."""
    allowed = _range_text("a size in bytes such as 512MiB", low, high, none)

    def clean(name: str, value: object) -> int | None:
        if _is_none(value, none):
            return None
        if isinstance(value, str):
            try:
                nbytes = parse_bytes(value)
            except ValueError:
                raise ConfigError.for_field(name, value, allowed) from None
        else:
            nbytes = _as_int(name, value, allowed)
        return _within(name, value, nbytes, low, high, allowed)

    return clean


def fraction(*, none: bool = False, below_one: bool = False) -> Clean:
    """A number above 0 and at most 1 (below 1 with ``below_one``)."""
    allowed = f"a number above 0 and {'below' if below_one else 'at most'} 1" + (" or None" if none else "")

    def clean(name: str, value: object) -> float | None:
        if _is_none(value, none):
            return None
        number = _as_number(name, value, allowed)
        if not 0 < number <= 1 or (below_one and number == 1):
            raise ConfigError.for_field(name, value, allowed)
        return float(number)

    return clean


def choice(*names: str, aliases: Mapping[str, str] | None = None) -> Clean:
    """One of a few names; case does not matter, and aliases are turned into the name."""
    allowed = " or ".join(repr(name) for name in names)

    def clean(name: str, value: object) -> str:
        text = value.lower() if isinstance(value, str) else ""
        text = (aliases or {}).get(text, text)
        if text not in names:
            raise ConfigError.for_field(name, value, allowed)
        return text

    return clean


def flag() -> Clean:
    """True or False, also as on/off, yes/no, 1/0."""

    def clean(name: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower() if isinstance(value, (str, int)) else ""
        if word not in _FLAG_WORDS:
            raise ConfigError.for_field(name, value, "true or false (on/off, yes/no, 1/0)")
        return _FLAG_WORDS[word]

    return clean


def folder() -> Clean:
    """A path as text, or None."""

    def clean(name: str, value: object) -> str | None:
        if _is_none(value, True):
            return None
        if not isinstance(value, (str, PathLike)) or not str(value):
            raise ConfigError.for_field(name, value, "the path of a folder, or None")
        return str(value)

    return clean


def counts(low: int) -> Clean:
    """A non-empty list of integers of at least ``low``, or None; one integer is a list of one."""
    allowed = f"a non-empty list of integers of at least {low} or None"

    def clean(name: str, value: object) -> tuple[int, ...] | None:
        if _is_none(value, True):
            return None
        items = _as_items(name, value, allowed)
        return tuple(_within(name, value, _as_int(name, item, allowed), low, None, allowed) for item in items)

    return clean


def shares() -> Clean:
    """A list of positive numbers that sums to 1 within one millionth, or None."""
    allowed = "a list of positive numbers that sum to 1 (within 0.000001) or None"

    def clean(name: str, value: object) -> tuple[float, ...] | None:
        if _is_none(value, True):
            return None
        parts = [_as_number(name, item, allowed) for item in _as_items(name, value, allowed)]
        if any(part <= 0 for part in parts) or abs(sum(parts, Fraction(0)) - 1) > RATIO_TOLERANCE:
            raise ConfigError.for_field(name, value, allowed)
        return tuple(float(part) for part in parts)

    return clean


def patience() -> Clean:
    """``STEPS:RATIO`` or a pair of them: a number of steps of at least 1 and a share above 0 and at most 1; None, 0 and
    off switch it off."""
    allowed = "STEPS:RATIO with at least 1 step and a ratio above 0 and at most 1, such as 8:0.5, or None"

    def clean(name: str, value: object) -> tuple[int, float] | None:
        if _is_none(value, True) or value in (0, "0", "off"):
            return None
        parts = value.split(":") if isinstance(value, str) else value
        items = _as_items(name, parts, allowed)
        if len(items) != 2:
            raise ConfigError.for_field(name, value, allowed)
        steps, share = _as_int(name, items[0], allowed), _as_number(name, items[1], allowed)
        if steps < 1 or not 0 < share <= 1:
            raise ConfigError.for_field(name, value, allowed)
        return steps, float(share)

    return clean


def _is_none(value: object, none: bool) -> bool:
    return none and (value is None or (isinstance(value, str) and value.strip().lower() in _NONE_WORDS))


def _as_int(name: str, value: object, allowed: str) -> int:
    if isinstance(value, bool):
        raise ConfigError.for_field(name, value, allowed)
    try:
        return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError.for_field(name, value, allowed) from None


def _as_number(name: str, value: object, allowed: str) -> Fraction:
    """The exact decimal a person wrote: 0.1 is one tenth, not the nearest binary number."""
    if isinstance(value, (int, float, str, Decimal, Fraction)) and not isinstance(value, bool):
        try:
            return value if isinstance(value, Fraction) else Fraction(Decimal(str(value)))
        except (InvalidOperation, ValueError, OverflowError):
            pass
    raise ConfigError.for_field(name, value, allowed)


def _as_items(name: str, value: object, allowed: str) -> list[object]:
    if isinstance(value, str):
        value = [part.strip() for part in value.strip("[]() ").split(",")]
    elif not isinstance(value, Iterable):
        value = [value]
    items = list(value)
    if not items:
        raise ConfigError.for_field(name, value, allowed)
    return items


def _within(name: str, value: object, number: int, low: int, high: int | None, allowed: str) -> int:
    if number < low or (high is not None and number > high):
        raise ConfigError.for_field(name, value, allowed)
    return number


def _range_text(what: str, low: int, high: int | None, none: bool) -> str:
    if high is None:
        text = f"{what}, at least {low}"
    elif high == low:
        text = f"{low} (other values are not built yet)"
    else:
        text = f"{what} from {low} to {high}"
    return text + (", or None" if none else "")
