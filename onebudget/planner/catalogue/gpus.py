"""Facts of graphics cards, by the names people use for them."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from onebudget.errors import ConfigError
from onebudget.planner.catalogue.user_files import user_folder
from onebudget.units import GIB, MIB

_ROUNDING = {"exact": MIB, "log": GIB // 200, "estimate": None}
_ESTIMATE_PERMILLE = 5


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One product. Sizes in bytes; None is unknown.

    ``total_bytes`` is what the driver reports, true to ``total_error_bytes``; ``smi_bytes`` what nvidia-smi reports;
    ``context_bytes`` what is gone as soon as a context exists; ``other_totals`` further totals seen for the product.
    ``sm`` is the compute capability times ten, ``flops`` dense 16-bit operations per second. ``unified``: its memory is
    the machine's.
    """

    name: str
    total_bytes: int
    total_error_bytes: int = 0
    aliases: tuple[str, ...] = ()
    other_totals: tuple[int, ...] = ()
    smi_bytes: int | None = None
    context_bytes: int | None = None
    sm: int | None = None
    sms: int | None = None
    bandwidth_bytes_per_s: int | None = None
    flops: int | None = None
    unified: bool = False
    parent: str | None = None
    source: str = ""

    @property
    def known(self) -> bool:
        """Whether more is known than the size."""
        return bool(self.source)


def all_gpus() -> tuple[GpuFacts, ...]:
    """The catalogue, the user's own entries first: those replace ours of the same name."""
    own = _user_gpus()
    names = {_plain(gpu.name) for gpu in own}
    return (*own, *(gpu for gpu in _built_in() if _plain(gpu.name) not in names))


def find_gpu(name: str, *, total_bytes: int | None = None) -> GpuFacts:
    """Facts of a card by name or alias, spelt in any way: ``h100``, ``NVIDIA H100 80GB HBM3``, ``rtx 4090``.

    ``total_bytes`` replaces the catalogue's size. A card nobody knows is accepted with it, and refused without:
    ``ConfigError`` with near matches.
    """
    found = _lookup(name)
    if found is not None:
        return found if total_bytes is None else replace(found, total_bytes=total_bytes, total_error_bytes=0)
    if total_bytes is not None:
        return GpuFacts(name=name or "custom", total_bytes=total_bytes)
    near = _near(name)
    hint = f"Did you mean {' or '.join(near)}?" if near else "`onebudget gpus` lists what is known."
    raise ConfigError(
        f"No card is called {name!r}. {hint} A card that is not in the catalogue can be planned for by its size: "
        "onebudget plan --gpu-total 24GiB.",
        field="gpu",
        value=name,
    )


def parse_gpu(text: str) -> tuple[str, int]:
    """``H100-SXM-80GBx8`` or ``8xH100`` as name and number of cards."""
    text = text.strip()
    behind = re.fullmatch(r"(.+?)\s*[x*×]\s*(\d+)", text)
    before = re.fullmatch(r"(\d+)\s*[x*×]\s*(.+)", text)
    name, count = (behind[1], behind[2]) if behind else (before[2], before[1]) if before else (text, "1")
    if not 1 <= int(count) <= 10_000:
        raise ConfigError.for_field("gpu", text, "a number of cards from 1 to 10000")
    return name, int(count)


def _lookup(name: str) -> GpuFacts | None:
    wanted = _plain(name)
    gpus = all_gpus()
    exact = [gpu for gpu in gpus if wanted in (_plain(gpu.name), *map(_plain, gpu.aliases))]
    if exact:
        return exact[0]
    beginning = [gpu for gpu in gpus if wanted and _plain(gpu.name).startswith(wanted)]
    return beginning[0] if len(beginning) == 1 else None


def _near(name: str) -> list[str]:
    wanted = _plain(name)
    by_plain = {_plain(each): gpu.name for gpu in all_gpus() for each in (gpu.name, *gpu.aliases)}
    parts = [gpu.name for plain, gpu in ((_plain(gpu.name), gpu) for gpu in all_gpus()) if wanted and wanted in plain]
    close = [by_plain[plain] for plain in difflib.get_close_matches(wanted, by_plain, n=4, cutoff=0.5)]
    return list(dict.fromkeys([*parts, *close]))[:4]


def _plain(name: str) -> str:
    text = name.lower().replace("nvidia", "").replace("geforce", "").replace("tesla", "")
    return re.sub(r"[^a-z0-9]", "", text)


@cache
def _built_in() -> tuple[GpuFacts, ...]:
    text = resources.files("onebudget.planner.catalogue").joinpath("gpus.toml").read_text(encoding="utf-8")
    return _read(tomllib.loads(text))


def _user_gpus() -> tuple[GpuFacts, ...]:
    folder = user_folder()
    path = None if folder is None else folder / "gpus.toml"
    return () if path is None or not path.is_file() else _read_user(path)


def _read_user(path: Path) -> tuple[GpuFacts, ...]:
    try:
        return _read(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no list of cards: {error}. Each [[gpu]] needs a name and total_bytes.", field=str(path)
        ) from error


def _read(document: Mapping[str, Any]) -> tuple[GpuFacts, ...]:
    cards = {entry["name"]: _card(entry) for entry in document.get("gpu", [])}
    slices = [_slice(entry, cards.get(entry["parent"])) for entry in document.get("mig", [])]
    return (*cards.values(), *slices)


def _card(entry: Mapping[str, Any]) -> GpuFacts:
    total = int(entry["total_bytes"])
    contexts = entry.get("context_gib") or [None]
    flops = entry.get("bf16_tflops")
    return GpuFacts(
        name=str(entry["name"]),
        total_bytes=total,
        total_error_bytes=_total_error(entry.get("total_kind", "exact"), total),
        aliases=tuple(entry.get("aliases", ())),
        other_totals=tuple(round(gib * GIB) for gib in entry.get("other_totals_gib", ())),
        smi_bytes=int(entry.get("smi_mib", 0)) * MIB or None,
        context_bytes=None if contexts[0] is None else round(contexts[0] * GIB),
        sm=int(entry.get("sm", 0)) or None,
        sms=int(entry.get("sms", 0)) or None,
        bandwidth_bytes_per_s=int(entry.get("bandwidth_gbps", 0) * 10**9) or None,
        flops=int(flops * 10**12) if flops else None,
        unified=bool(entry.get("unified", False)),
        source=str(entry.get("source", "the user's file")) or "catalogue",
    )


def _total_error(kind: str, total: int) -> int:
    rounding = _ROUNDING.get(kind)
    return total * _ESTIMATE_PERMILLE // 1000 if rounding is None else rounding


def _slice(entry: Mapping[str, Any], parent: GpuFacts | None) -> GpuFacts:
    """A MIG slice is a card of its own to the runtime, while nvidia-smi shows the whole one."""
    return GpuFacts(
        name=f"{entry['parent']}-{entry['profile']}",
        total_bytes=int(entry["total_bytes"]),
        total_error_bytes=int(entry["total_bytes"]) * _ESTIMATE_PERMILLE // 1000,
        context_bytes=parent.context_bytes if parent else None,
        smi_bytes=None,
        sm=parent.sm if parent else None,
        sms=int(entry.get("sms", 0)) or None,
        parent=str(entry["parent"]),
        source=str(entry.get("source", "")) or "catalogue",
    )
