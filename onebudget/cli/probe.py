"""``onebudget probe``: what is known about this machine's devices, and where it was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebudget.cli.boundary import DONE
from onebudget.cli.options import command
from onebudget.cli.output import Output
from onebudget.errors import OneBudgetError

if TYPE_CHECKING:
    from rich.table import Table

    from onebudget.device.base import Device

HELP = "Show the facts of this machine's devices that a budget depends on, each with its source."
Fact = Mapping[str, Any]


@command
def probe(
    device: Annotated[str | None, typer.Option(help="Only this one: host, or cuda[:N].")] = None,
    *,
    output: Output,
) -> int:
    """List device facts."""
    with output.clean_stdout():
        devices = [_describe(name) for name in ([device] if device is not None else _names())]
    output.document({"devices": devices})
    for description in devices:
        output.show(_table(description))
    return DONE


def _names() -> Iterator[str]:
    yield "host"
    try:
        import torch
    except ModuleNotFoundError:
        return
    yield from (f"cuda:{index}" for index in range(torch.cuda.device_count()))


def _describe(name: str) -> dict[str, Any]:
    from onebudget.config import DEFAULT_HOST_MEMORY_BYTES
    from onebudget.device import open_device

    options = {"capacity_bytes": DEFAULT_HOST_MEMORY_BYTES} if name == "host" else {}
    with open_device(name, **options) as device:
        return {"device": name, "facts": {**_facts(device), **(_cpu_facts() if name == "host" else {})}}


def _facts(device: Device) -> dict[str, Fact]:
    """Every field of the device's facts, whatever fields there are, and what is free now."""
    facts = device.facts
    names = [item.name for item in fields(facts) if item.name != "sources"]
    known = {name: {"value": getattr(facts, name), "source": facts.source(name)} for name in names}
    try:
        free: Fact = {"value": device.free_bytes(), "source": "the device, now"}
    except OneBudgetError as error:
        free = {"value": None, "source": str(error)}
    return {**known, "free_bytes": free}


def _cpu_facts() -> dict[str, Fact]:
    from onebudget.cli.cpu import dtype_features

    features, source = dtype_features()
    return {"cpu_dtype_features": {"value": features, "source": source}}


def _table(description: Mapping[str, Any]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=description["device"], title_justify="left")
    table.add_column("fact", no_wrap=True)
    table.add_column("value")
    table.add_column("read from", style="dim")
    for name, fact in description["facts"].items():
        table.add_row(Text(name), Text(_text(name, fact["value"])), Text(str(fact["source"])))
    return table


def _text(name: str, value: object) -> str:
    from onebudget.report.words import size

    if value is None:
        return "no limit" if "limit" in name else "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return size(value) if isinstance(value, int) and name.endswith("_bytes") else str(value)
