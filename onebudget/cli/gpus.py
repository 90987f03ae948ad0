"""``onebudget gpus``: the cards that can be planned for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from onebudget.cli.boundary import DONE
from onebudget.cli.options import command
from onebudget.cli.output import Output
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from onebudget.planner.catalogue.gpus import GpuFacts

HELP = "List the cards that can be planned for: what their drivers report, not what their boxes say."


@command
def gpus(
    name: Annotated[str | None, typer.Argument(help="Only this card, by name or alias.")] = None,
    *,
    output: Output,
) -> int:
    """List the catalogue of cards."""
    from onebudget.planner.catalogue.gpus import all_gpus, find_gpu

    cards = all_gpus() if name is None else (find_gpu(name),)
    output.document({"gpus": [asdict(card) for card in cards]})
    output.show(_table(cards))
    return DONE


def _table(cards: Sequence[GpuFacts]) -> Table:
    from rich.table import Table

    table = Table()
    for column in ("card", "total", "nvidia-smi", "context", "SM", "SMs", "GB/s", "TFLOP/s"):
        table.add_column(column, justify="left" if column == "card" else "right", no_wrap=column == "card")
    table.add_column("seen in", overflow="fold")
    for card in cards:
        table.add_row(
            card.name, format_bytes(card.total_bytes), _size(card.smi_bytes), _size(card.context_bytes),
            _number(card.sm), _number(card.sms), _number(card.bandwidth_bytes_per_s, 10**9),
            _number(card.flops, 10**12), card.source,
        )  # fmt: skip
    return table


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def _number(value: int | None, unit: int = 1) -> str:
    return "" if value is None else f"{value // unit:,}"
