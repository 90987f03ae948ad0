"""``onebudget simulate``: a request trace through the real scheduler and managers, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebudget.cli.boundary import ANSWER_IS_NO, DONE
from onebudget.cli.options import command, knobs_from
from onebudget.cli.output import Output, write_text
from onebudget.cli.reports import check_report_path
from onebudget.config import KNOBS, BudgetConfig
from onebudget.errors import ConfigError
from onebudget.units import parse_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.planner.simulate import CountedPool, SimulationResult, StepLoad, Trace

HELP = "Replay a request trace through the scheduler and the cache managers, on a card that exists only as books."
SIMULATED_KNOBS = (
    "max_seq_len", "max_batch_size", "max_num_tokens", "tokens_per_block", "kv_cache_manager", "enable_block_reuse",
    "enable_chunked_prefill", "scheduler_policy", "batch_wait", "overlap", "max_util_for_resume", "host_cache_bytes",
    "disk_cache_bytes",
)  # fmt: skip
SYNTHETIC = "synthetic"


@command
@knobs_from({name: KNOBS[name] for name in SIMULATED_KNOBS})
def simulate(
    trace: Annotated[
        str, typer.Argument(help="CSV or JSON lines of requests, or the word synthetic.", metavar="TRACE")
    ],
    *,
    plan: Annotated[Path | None, typer.Option(help="Ledger whose KV cache serves the requests.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to plan for, with --gpu, where there is no ledger.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Card of the catalogue: its rates, and its plan with --model.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV cache, instead of a plan's.", min=1)] = None,
    cp: Annotated[
        int, typer.Option(help="Ranks that share every request (helix); the KV cache is that of the first.", min=1)
    ] = 1,
    step_times: Annotated[
        Path | None, typer.Option(help="Measured seconds of steps: CSV or JSON of tokens, seconds, perhaps batch.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Size of the weights a step reads.", metavar="SIZE")] = None,
    parameters: Annotated[int | None, typer.Option(help="Weights that one token meets.", min=1)] = None,
    kv_bytes_per_token: Annotated[int | None, typer.Option(help="KV cache of one token.", min=1)] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes per second of the card's memory, like 3352GB.", metavar="SIZE")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="10^12 operations per second of the card.")] = None,
    rate: Annotated[float, typer.Option(help="Requests per second as a multiple of the trace's.")] = 1.0,
    limit: Annotated[int | None, typer.Option(help="Take only the first requests.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of a synthetic trace.", min=0)] = 0,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no hub about the model.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page about the simulation.")] = None,
    knobs: Mapping[str, Any],
    output: Output,
) -> int:
    """Serve a trace and say what came of it."""
    check_report_path(report)
    given = GivenLoad(
        plan, model, gpu, kv_blocks, step_times, weights, parameters, kv_bytes_per_token, bandwidth, tflops
    )
    requests = open_trace(trace, limit=limit, seed=seed).at_rate(rate)
    result = serve(requests, given, knobs, cp_size=cp, offline=offline, output=output)
    _present(result, report, output)
    return ANSWER_IS_NO if result.requests.refused or result.requests.failed else DONE


@dataclass(frozen=True, slots=True)
class GivenLoad:
    """The options that say on what a trace runs, as they were given."""

    plan: Path | None = None
    model: str | None = None
    gpu: str | None = None
    kv_blocks: int | None = None
    step_times: Path | None = None
    weights: str | None = None
    parameters: int | None = None
    kv_bytes_per_token: int | None = None
    bandwidth: str | None = None
    tflops: float | None = None

    def steps(self) -> StepLoad:
        from onebudget.planner.simulate import StepLoad

        return StepLoad(
            gpu=self.gpu or "custom",
            weight_bytes=_size("--weights", self.weights),
            parameters=self.parameters,
            kv_bytes_per_token=self.kv_bytes_per_token,
            bandwidth_bytes_per_s=_size("--bandwidth", self.bandwidth),
            peak_flops=None if self.tflops is None else self.tflops * 1e12,
        )


def serve(
    requests: Trace, given: GivenLoad, knobs: Mapping[str, Any], *, cp_size: int = 1, offline: bool, output: Output
) -> SimulationResult:
    """The trace through the simulator, on the card and with the knobs that were given."""
    from onebudget.planner.simulate import read_step_table, roofline, simulate
    from onebudget.planner.simulate.context_parallel import first_rank, rank_config
    from onebudget.progress import open_progress

    config = rank_config(_config(knobs, requests), first_rank(cp_size))
    ledger = _ledger(given, config, offline=offline, output=output)
    load, notes = _load(given.model, ledger, given.steps(), offline=offline)
    pools = _pools(given.kv_blocks, ledger, load, config)
    clock, assumed = (read_step_table(given.step_times), ()) if given.step_times is not None else roofline(load)
    return simulate(
        requests,
        kv_blocks=pools,
        clock=clock,
        config=config,
        attended_tokens_cap=ledger.admission.attended_tokens_cap if ledger is not None else None,
        cp_size=cp_size,
        notes=(*notes, *assumed),
        progress=open_progress(quiet=output.quiet),
    )


def _ledger(given: GivenLoad, config: BudgetConfig, *, offline: bool, output: Output) -> Ledger | None:
    """The ledger that was given, or our engine's plan of the model on the card where nothing else says how large the
    KV cache is."""
    from onebudget.budget.ledger import Ledger
    from onebudget.report.document import read_document

    if given.plan is not None:
        return Ledger.from_dict(read_document(given.plan))
    if given.kv_blocks is not None or given.model is None or given.gpu is None:
        return None
    from onebudget.planner.plan import plan
    from onebudget.progress import open_progress

    knobs = {name: getattr(config, name) for name in config.given}
    return plan(given.model, given.gpu, offline=offline, progress=open_progress(quiet=output.quiet), **knobs)


def open_trace(name: str, *, limit: int | None, seed: int = 0) -> Trace:
    """The requests of a file, or synthetic ones."""
    from onebudget.planner.simulate import SyntheticLoad, read_trace, synthetic_trace

    if name == SYNTHETIC:
        return synthetic_trace(seed, SyntheticLoad() if limit is None else SyntheticLoad(requests=limit))
    return read_trace(Path(name), limit=limit)


def _config(knobs: Mapping[str, Any], requests: Trace) -> BudgetConfig:
    """The knobs that were given; ``max_seq_len`` takes the longest request unless it was."""
    return BudgetConfig(**{"max_seq_len": requests.longest_tokens, **knobs})


def _size(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError.for_field(option, text, "a size such as 16GB") from error


def _load(
    model: str | None, ledger: Ledger | None, given: StepLoad, *, offline: bool
) -> tuple[StepLoad, tuple[str, ...]]:
    """What is known of the steps: the model's facts, over them the ledger's, the card's, and what was given."""
    from onebudget.planner.simulate import StepLoad, load_of_gpu, load_of_ledger, load_of_model

    load = StepLoad()
    notes: tuple[str, ...] = ()
    if model is not None:
        from onebudget.planner.source import resolve_model

        load, notes = load_of_model(resolve_model(model, offline=offline))
    if ledger is not None:
        load = load.beneath(load_of_ledger(ledger))
    if given.gpu != "custom":
        load = load.beneath(load_of_gpu(given.gpu, known=given))
    elif load.gpu != "custom":
        load = load.beneath(_rates_if_known(load.gpu))
    return load.beneath(replace(given, gpu=load.gpu)), notes


def _rates_if_known(gpu: str) -> StepLoad:
    """A ledger's card may be one the catalogue does not have."""
    from onebudget.planner.simulate import StepLoad, load_of_gpu

    try:
        return load_of_gpu(gpu, known=StepLoad())
    except ConfigError:
        return StepLoad()


def _pools(
    kv_blocks: int | None, ledger: Ledger | None, load: StepLoad, config: BudgetConfig
) -> tuple[CountedPool, ...]:
    from onebudget.planner.simulate import CountedPool, pools_of_ledger

    if kv_blocks is not None:
        return (CountedPool(kv_blocks, None, load.kv_bytes_per_token or 0),)
    if ledger is None:
        raise ConfigError(
            "How many blocks the KV cache has is not known: give --plan FILE, --kv-blocks, or --model and --gpu.",
            field="--kv-blocks",
        )
    return pools_of_ledger(ledger, config)


def _present(result: SimulationResult, report: Path | None, output: Output) -> None:
    document = result.to_dict()
    output.document(document)
    if output.for_people:
        from onebudget.report.simulation import simulation_view

        output.show(*simulation_view(document))
    if report is not None:
        from onebudget.report.simulation_page import simulation_page

        write_text(report, simulation_page(document))
        output.show(f"report: {report.absolute()}")
