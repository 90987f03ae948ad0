"""Bytes and how people write them. Inside the package bytes are plain ``int``; text happens at the edge."""

from __future__ import annotations

import re

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNIT_BYTES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": 2**40, "tib": 2**40, "tb": 1000**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9][0-9_]*)(?:\.([0-9]+))?\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """``"512MiB"``, ``"1GiB"``, ``"80GB"`` or plain bytes as an exact integer.

    ``MiB`` is 2**20 and ``MB`` is 10**6; a bare letter means the binary unit.
    Raises ``ValueError`` with the accepted forms when the text is no size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    unit = _UNIT_BYTES.get(match[3].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: write plain bytes or a number with MiB, GiB, MB or GB, like 512MiB")
    decimals = match[2] or ""
    whole = int(match[1] + decimals) * unit
    return int(whole // 10 ** len(decimals))


def format_bytes(nbytes: int) -> str:
    """A size for people: the largest binary unit with two decimals, and exact bytes below 1 KiB."""
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for name, unit in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= unit:
            return f"{sign}{size / unit:,.2f} {name}"
    return f"{sign}{size} B"


def ceil_div(numerator: int, denominator: int) -> int:
    """Integer division rounded up."""
    return -(-numerator // denominator)


def align_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``nbytes``."""
    return ceil_div(nbytes, alignment) * alignment


def align_down(nbytes: int, alignment: int) -> int:
    """The largest multiple of ``alignment`` that is at most ``nbytes``."""
    return nbytes // alignment * alignment
