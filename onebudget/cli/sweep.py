"""``onebudget sweep``: a grid of plans, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebudget.cli.boundary import ANSWER_IS_NO, DONE
from onebudget.cli.options import command
from onebudget.cli.output import Output, write_text
from onebudget.cli.reports import check_report_path
from onebudget.errors import ConfigError
from onebudget.units import parse_bytes

if TYPE_CHECKING:
    from onebudget.planner.sweep import Runner

HELP = "Plan a grid of models, cards, layouts and settings, and say which points no other beats."
Many = list[str] | None


@command
def sweep(
    models: Annotated[list[str], typer.Argument(help="Models, as for plan.", metavar="MODEL...")],
    *,
    gpu: Annotated[list[str], typer.Option(help="Card of the catalogue, NAME or NAMExN; may be repeated.")],
    engine: Annotated[Many, typer.Option(help="Engine, may be repeated. [default: onebudget]")] = None,
    engine_version: Annotated[str | None, typer.Option(help="Version of the engine.")] = None,
    tp: Annotated[str | None, typer.Option(help="Tensor-parallel sizes, like 1,2,4.")] = None,
    pp: Annotated[str, typer.Option(help="Pipeline-parallel sizes.")] = "1",
    ep: Annotated[str, typer.Option(help="Expert-parallel sizes.")] = "1",
    dp: Annotated[str, typer.Option(help="Data-parallel sizes.")] = "1",
    weights_dtype: Annotated[str | None, typer.Option(help="Formats of weights, like bf16,fp8.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Formats of the KV cache, like auto,fp8.")] = None,
    settings: Annotated[
        Many, typer.Option("--set", help="KEY=VALUE,VALUE by the engine's own name; ENGINE.KEY for one engine's.")
    ] = None,
    gpu_total: Annotated[str | None, typer.Option(help="Memory of a card, like 24GiB.", metavar="SIZE")] = None,
    target_seq_len: Annotated[int | None, typer.Option(help="Length that concurrency is counted at.", min=1)] = None,
    price: Annotated[Many, typer.Option(help="GPU=USD per hour of a card; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="Closed forms instead of dry runs (only onebudget makes any).")] = True,
    ray: Annotated[str | None, typer.Option(help="Plan on the Ray cluster at this address.", metavar="ADDRESS")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes. [default: all cores]", min=1)] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no hub about the models.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page about the sweep.")] = None,
    output: Output,
) -> int:
    """Plan every combination."""
    from onebudget.planner.grid import Grid, parse_axes
    from onebudget.planner.source import resolve_model
    from onebudget.planner.sweep import check_cards, sweep_document
    from onebudget.planner.sweep import sweep as plan_all
    from onebudget.progress import open_progress
    from onebudget.report.sweep import sweep_view

    check_report_path(report)
    total = None if gpu_total is None else _size(gpu_total)
    check_cards(gpu, total)
    grid = Grid(
        models=[resolve_model(name, offline=offline) for name in dict.fromkeys(models)], gpus=gpu,
        engines=_words(",".join(engine or ["onebudget"])), engine_version=engine_version,
        tp=[None] if tp is None else _sizes("--tp", tp), pp=_sizes("--pp", pp), ep=_sizes("--ep", ep),
        dp=_sizes("--dp", dp), weights_dtypes=[None] if weights_dtype is None else _words(weights_dtype),
        kv_dtypes=[None] if kv_dtype is None else _words(kv_dtype), settings=parse_axes(settings or ()),
        total_bytes=total, target_seq_len=target_seq_len, quick=quick,
    )  # fmt: skip
    with output.clean_stdout():
        rows = plan_all(
            grid.points(), prices=_prices(price or ()), runner=_runner(ray, jobs),
            progress=open_progress(quiet=output.quiet),
        )  # fmt: skip
    document = sweep_document(rows)
    output.document(document)
    output.show(*sweep_view(document))
    if report is not None:
        from onebudget.report.sweep_page import sweep_page

        write_text(report, sweep_page(document))
        output.show(f"report: {report.absolute()}")
    return DONE if document["fitting"] else ANSWER_IS_NO


def _runner(ray: str | None, jobs: int | None) -> Runner | None:
    from onebudget.planner.sweep import in_process, on_cores, on_ray

    if ray is not None:
        return on_ray(ray)
    return None if jobs is None else in_process if jobs == 1 else on_cores(jobs)


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _sizes(option: str, text: str) -> list[int]:
    words = _words(text)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError.for_field(option, text, "whole numbers of at least 1 with commas, like 1,2,4")
    return [int(word) for word in words]


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--gpu-total: {error}.", field="--gpu-total", value=text) from error


def _prices(texts: Sequence[str]) -> dict[str, float]:
    prices: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = -1.0
        if not name or not 0 <= prices[name] < float("inf"):
            raise ConfigError.for_field("--price", text, "GPU=USD per hour, like H100-SXM-80GB=2.49")
    return prices
