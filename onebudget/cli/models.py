"""``onebudget models``: the models whose facts come with the package, and the facts of any other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebudget.cli.boundary import DONE
from onebudget.cli.options import command
from onebudget.cli.output import Output
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

HELP = "List the models that can be planned for by name, or show the facts of one."


@command
def models(
    name: Annotated[str | None, typer.Argument(help="A name, hub id, folder, config.json, or weights file.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no hub.")] = False,
    *,
    output: Output,
) -> int:
    """List the catalogue of models."""
    from onebudget.planner.catalogue.models import model_names
    from onebudget.planner.source import resolve_model

    with output.clean_stdout():
        rows = [_facts(resolve_model(each, offline=True)) for each in model_names()] if name is None else []
        if name is not None:
            rows = [_facts(resolve_model(name, offline=offline))]
    output.document({"models": rows})
    output.show(_table(rows))
    return DONE


def _facts(source: Any) -> dict[str, Any]:
    from onebudget.planner.policies.dims import dims_from_config
    from onebudget.planner.policies.formats import weight_format
    from onebudget.planner.policies.weight_rules import Shard, weights_on_rank

    dims = dims_from_config(source.config, source.name)
    kind = weight_format(None, dims.quantization, source.name)
    cached = sum(layer.latent or layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in dims.layers)
    return {
        "name": source.name,
        "origin": source.origin,
        "revision": source.revision,
        "architecture": dims.family,
        "layers": len(dims.layers),
        "hidden_size": dims.hidden,
        "experts": dims.experts,
        "vocab_size": dims.vocab,
        "max_position": dims.max_len,
        "weights_format": kind.name,
        "weights_bytes": source.stored_bytes or weights_on_rank(dims, kind, Shard()).bytes,
        "weights_basis": "exact" if source.stored_bytes else "modelled",
        "kv_bytes_per_token": cached * dims.element_bytes,
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table()
    for column in ("model", "architecture", "layers", "hidden", "experts", "vocabulary", "weights", "KV per token"):
        table.add_column(column, justify="left" if column in ("model", "architecture") else "right")
    for row in rows:
        table.add_row(
            row["name"], row["architecture"], f"{row['layers']}", f"{row['hidden_size']:,}",
            f"{row['experts']}" if row["experts"] else "", f"{row['vocab_size']:,}",
            f"{format_bytes(row['weights_bytes'])} {row['weights_format']}", format_bytes(row["kv_bytes_per_token"]),
        )  # fmt: skip
    return table
