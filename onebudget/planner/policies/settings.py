"""Settings by an engine's own names: unknown names are refused with near matches, values are read as numbers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from onebudget.errors import ConfigError


def check_settings(engine: str, given: Mapping[str, object], known: Mapping[str, str]) -> dict[str, Any]:
    """The settings under their known names, without those that are None; dashes and underscores mean the same.

    Raises ``ConfigError`` for a name the engine doesn't have, with near matches.
    """
    checked: dict[str, Any] = {}
    for name, value in given.items():
        plain = name.lstrip("-").replace("-", "_")
        if plain not in known:
            near = difflib.get_close_matches(plain, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}."
            raise ConfigError(f"{engine} has no setting {name!r} that sizes memory; {hint}", field=name, value=value)
        if value is not None:
            checked[plain] = value
    return checked


def whole(settings: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """A setting as a whole number of at least 0, or the default. ``8k`` and ``8K`` are 8000 and 8192."""
    value = settings.get(name)
    if value is None:
        return default
    number = _whole_number(value)
    if number is None or number < 0:
        raise ConfigError.for_field(name, value, "a whole number of at least 0, like 8192 or 8k")
    if number > 2**40:
        raise ConfigError.for_field(name, value, "a number that a machine can hold")
    return number


def _whole_number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    text = str(value).strip().replace(",", "").replace("_", "")
    factor = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    digits = text[:-1] if factor != 1 else text
    return int(digits) * factor if digits.isdigit() else None


def fraction(settings: Mapping[str, Any], name: str, default: float) -> float:
    """A setting as a share above 0 and at most 1, or the default."""
    value = settings.get(name)
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0 < number <= 1:
        raise ConfigError.for_field(name, value, "above 0 and at most 1")
    return number


def size_bytes(settings: Mapping[str, Any], name: str, unit_bytes: int, default: int = 0) -> int:
    """A setting in units of ``unit_bytes``, as bytes."""
    value = settings.get(name)
    if value is None:
        return default * unit_bytes
    try:
        nbytes = int(Fraction(str(value)) * unit_bytes)
    except ValueError as error:
        raise ConfigError.for_field(name, value, "a number of at least 0") from error
    if isinstance(value, bool) or nbytes < 0:
        raise ConfigError.for_field(name, value, "a number of at least 0")
    return nbytes


def switch(settings: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A setting as on or off, or the default."""
    value = settings.get(name)
    if value is None:
        return default
    text = str(value).strip().lower()
    if text in ("1", "true", "on", "yes"):
        return True
    if text in ("0", "false", "off", "no", "none"):
        return False
    raise ConfigError.for_field(name, value, "on or off")
