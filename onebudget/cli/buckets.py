"""``onebudget buckets``: batch sizes to capture as graphs, for a load and a memory allowance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebudget.cli.boundary import ANSWER_IS_NO, DONE
from onebudget.cli.options import command, knobs_from
from onebudget.cli.output import Output
from onebudget.cli.simulate import SIMULATED_KNOBS, GivenLoad, open_trace, serve
from onebudget.config import KNOBS
from onebudget.errors import ConfigError
from onebudget.units import parse_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.planner.bucket_advice import BucketAdvice, BucketCost

HELP = (
    "Choose the batch sizes whose graphs waste least for a load, and compare them with the engines' default lists. "
    "The load is a trace, served as `simulate` does with at most 256 requests in a step unless --max-batch-size says "
    "otherwise, or a histogram."
)
DEFAULT_MAX_BATCH_SIZE = 256


@command
@knobs_from({name: KNOBS[name] for name in SIMULATED_KNOBS})
def buckets(
    trace: Annotated[
        str | None, typer.Argument(help="CSV or JSON lines of requests, or the word synthetic.", metavar="TRACE")
    ] = None,
    *,
    histogram: Annotated[
        Path | None, typer.Option(help="Weights of decode batch sizes: JSON {size: weight} or CSV, in place of TRACE.")
    ] = None,
    allowance: Annotated[str | None, typer.Option(help="Memory that graphs may take.", metavar="SIZE")] = None,
    bytes_per_bucket: Annotated[
        str | None, typer.Option(help="Memory of one graph, as measured.", metavar="SIZE")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Ledger: its graphs' memory, and the KV cache that serves a trace.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model whose steps a trace takes, with --gpu.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Card of the catalogue that serves a trace.")] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV cache, instead of a plan's.", min=1)] = None,
    step_times: Annotated[
        Path | None, typer.Option(help="Measured seconds of steps: CSV or JSON of tokens, seconds, perhaps batch.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Size of the weights a step reads.", metavar="SIZE")] = None,
    kv_bytes_per_token: Annotated[int | None, typer.Option(help="KV cache of one token.", min=1)] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes per second of the card's memory, like 3352GB.", metavar="SIZE")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="10^12 operations per second of the card.")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second as a multiple of the trace's.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Take only the first requests.", min=1)] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no hub about the model.")] = False,
    knobs: Mapping[str, Any],
    output: Output,
) -> int:
    """Recommend a list, and show what the defaults waste."""
    from onebudget.budget.ledger import Ledger
    from onebudget.planner.bucket_advice import advise_buckets, read_histogram
    from onebudget.report.document import read_document

    if (trace is None) == (histogram is None):
        raise ConfigError("Give one load: a TRACE, or --histogram FILE.", field="TRACE")
    ledger = None if plan is None else Ledger.from_dict(read_document(plan))
    allowed = _size("--allowance", allowance)
    per_bucket = _size("--bytes-per-bucket", bytes_per_bucket)
    notes: tuple[str, ...] = ()
    if histogram is not None:
        load, weights_of = histogram.name, read_histogram(histogram)
        cap = knobs.get("max_batch_size") or max(weights_of)
    else:
        assert trace is not None
        given = GivenLoad(plan, model, gpu, kv_blocks, step_times, weights, None, kv_bytes_per_token, bandwidth, tflops)
        settings = {"max_batch_size": DEFAULT_MAX_BATCH_SIZE, **knobs}
        cap = settings["max_batch_size"]
        served = serve(open_trace(trace, limit=limit).at_rate(rate), given, settings, offline=offline, output=output)
        load, weights_of, notes = (
            f"{served.trace} at {rate:g} times its rate",
            dict(served.batch_size_histogram),
            served.notes,
        )
    allowed, basis = _allowance(allowed, ledger)
    advice = advise_buckets(
        weights_of, load=load, max_batch_size=cap, allowance_bytes=allowed, allowance_basis=basis,
        cost=_cost(per_bucket, ledger, cap), notes=notes,
    )  # fmt: skip
    return _present(advice, output)


def _allowance(given: int | None, ledger: Ledger | None) -> tuple[int | None, str]:
    if given is not None or ledger is None:
        return given, "given"
    held = sum(term.bytes for term in ledger.terms if term.name == "graphs")
    return (held, "the ledger's graphs") if held else (None, "")


def _cost(per_bucket: int | None, ledger: Ledger | None, cap: int) -> BucketCost:
    from onebudget.planner.bucket_advice import MODELLED, cost_of_ledger, equal_cost

    if per_bucket is not None:
        return equal_cost(per_bucket, "given with --bytes-per-bucket")
    return (None if ledger is None else cost_of_ledger(ledger, cap)) or MODELLED


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError.for_field(option, text, "a size such as 512MiB") from error


def _present(advice: BucketAdvice, output: Output) -> int:
    document = advice.to_dict()
    output.document(document)
    if output.for_people:
        from onebudget.report.buckets import buckets_view

        output.show(*buckets_view(document))
    return DONE if advice.recommended.sizes else ANSWER_IS_NO
