"""``onebudget run``: load a model, derive its budget, answer prompts, compare the plan with the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebudget.cli.answers import show_answers, status_of
from onebudget.cli.demo import Workload, demo_workload, texts_of_demo
from onebudget.cli.options import command, engine_knobs
from onebudget.cli.output import Output
from onebudget.cli.prompts import PromptLine, read_prompts
from onebudget.cli.ranks import together
from onebudget.cli.reports import check_report_path, present
from onebudget.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from onebudget import LLM
    from onebudget.engine.ranks import RankGroup

HELP = "Load a model, derive its memory budget, answer prompts, and set the plan beside what was measured."
SAMPLING_DEFAULTS: Mapping[str, Any] = {"max_tokens": 64, "temperature": 0.0}


@command
@engine_knobs
def run(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id. Left out: a small demo model.")] = None,
    *,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts: one per line, or JSON lines. - reads stdin.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens [default: 64]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy [default: 0]")] = None,
    top_p: Annotated[float | None, typer.Option(help="Smallest share of probability to draw from [default: 1]")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Number of likeliest tokens to draw from; 0: all [default: 0]")
    ] = None,
    device: Annotated[str, typer.Option(help="host, or cuda[:N].")] = "host",
    strict_memory: Annotated[bool, typer.Option("--strict-memory", help="Enforce the capacity in every step.")] = False,
    attention_dp: Annotated[
        bool, typer.Option("--attention-dp", help="Under torchrun: deal requests to the ranks, keep attention whole.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page about the run.")] = None,
    knobs: Mapping[str, Any],
    output: Output,
) -> int:
    """Serve prompts on one device within its budget, or on one device per rank under torchrun."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    engine = {"device": device, "strict_memory": strict_memory, "attention_dp": attention_dp}
    sampling = {name: value for name, value in given.items() if value is not None}

    def serve(ranks: RankGroup, output: Output) -> int:
        page = report if ranks.leads else None
        lines = ranks.lead(lambda: _prompt_lines(prompt, prompts))
        check_report_path(page)
        workload = _workload(model, lines, sampling)
        try:
            with output.clean_stdout(), _engine(model, output, {**engine, **knobs}) as llm:
                outputs = llm.generate(workload.prompts, workload.params, return_on_interrupt=True)
                document = workload.judge(llm.run_report(outputs), outputs)
                interrupted = llm.interrupted
        except BudgetError as error:
            if error.ledger is not None:
                present(error.ledger.to_dict(), page, output)
            raise
        show_answers(workload.prompts, outputs, output)
        present(document, page, output)
        return status_of(outputs, document, interrupted=interrupted, output=output)

    return together(serve, device=device, output=output)


def _prompt_lines(texts: list[str] | None, file: Path | None) -> list[PromptLine]:
    for text in texts or ():
        if not text.strip():
            raise ConfigError.for_field("--prompt", text, "a text that is not empty")
    return [*map(PromptLine, texts or ()), *(read_prompts(file) if file is not None else ())]


def _workload(model: str | None, lines: list[PromptLine], sampling: Mapping[str, Any]) -> Workload:
    defaults = {**SAMPLING_DEFAULTS, **sampling}
    if not lines and model is None:
        return demo_workload(sampling, defaults)
    lines = lines or [PromptLine(text) for text in texts_of_demo()]
    return Workload([line.prompt for line in lines], [line.params(defaults) for line in lines])


def _engine(model: str | None, output: Output, arguments: Mapping[str, Any]) -> LLM:
    from onebudget.progress import open_progress

    try:
        from onebudget import LLM
        from onebudget.models.demo import ensure_demo_model

        folder = model or ensure_demo_model(quiet=output.quiet, offline=bool(arguments.get("offline")))
    except ModuleNotFoundError as error:
        raise ConfigError(f"Running a model needs {error.name}: pip install 'onebudget[run]' brings it.") from error
    progress = open_progress(quiet=output.quiet)
    return LLM(folder, progress=progress, **arguments)
