"""``onebudget plan``: what an engine will do with a card, without the card and without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebudget.cli.boundary import ANSWER_IS_NO, DONE
from onebudget.cli.options import ENGINE_KNOBS, command, knobs_from
from onebudget.cli.output import Output
from onebudget.cli.reports import check_report_path, show_ledger, write_report
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger

HELP = (
    "Plan a model on a card: every byte of it, how many tokens and requests fit, and what to change where they don't."
)
_NOT_HERE = ("offline", "revision", "device_memory")
PLAN_KNOBS = {name: knob for name, knob in ENGINE_KNOBS.items() if name not in _NOT_HERE}


@command
@knobs_from(PLAN_KNOBS)
def plan(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, config.json, .safetensors, .gguf, or a catalogue name.")
    ] = None,
    *,
    gpu: Annotated[str | None, typer.Option(help="Card, as NAME or NAMExCOUNT; host for this machine's RAM.")] = None,
    engine: Annotated[str | None, typer.Option(help="onebudget, trtllm, vllm, sglang or llamacpp.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="Version of the engine [default: newest known]")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks that share every layer [default: all cards]")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages [default: 1]")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share the experts [default: 1]")] = None,
    dp: Annotated[int | None, typer.Option(help="Replicas [default: 1]")] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8, int4, awq, gptq, nvfp4, … [default: what the config says]")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="auto, bf16, fp16, fp8, nvfp4 [default: auto]")] = None,
    gpu_total: Annotated[
        str | None, typer.Option(help="Memory of a card as its driver reports it.", metavar="SIZE")
    ] = None,
    gpu_free: Annotated[
        str | None, typer.Option(help="What is free of it at start: others hold the rest.", metavar="SIZE")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of a host, to be checked too.", metavar="SIZE")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting by the engine's own name; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    target_seq_len: Annotated[int | None, typer.Option(help="Length of requests that must fit.")] = None,
    target_concurrency: Annotated[int | None, typer.Option(help="Requests that must fit at once.")] = None,
    from_flags: Annotated[
        str | None, typer.Option(help='A serving command to plan for, like "vllm serve MODEL …".', metavar="COMMAND")
    ] = None,
    use: Annotated[str, typer.Option(help="server or offline, where an engine's defaults depend on it.")] = "server",
    quick: Annotated[bool, typer.Option("--quick", help="Closed forms instead of a dry run.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no hub.")] = False,
    revision: Annotated[str | None, typer.Option(help="Revision of the model on the hub.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page about the plan.")] = None,
    knobs: Mapping[str, Any],
    output: Output,
) -> int:
    """Plan once and print the ledger with its answers."""
    from onebudget.planner.plan import plan as make_plan
    from onebudget.planner.request import parse_settings
    from onebudget.progress import open_progress

    check_report_path(report)
    given = {
        "engine": engine, "tp": tp, "pp": pp, "ep": ep, "dp": dp, "weights_dtype": weights_dtype, "revision": revision,
    }  # fmt: skip
    asked, name, notes = _asked(from_flags, model, {key: value for key, value in given.items() if value is not None})
    if gpu is None:
        raise ConfigError("Which card? Give --gpu NAME (`onebudget gpus` lists them), or --gpu host.", field="--gpu")
    settings = {**asked.pop("settings", {}), **parse_settings(setting or ())}
    with output.clean_stdout():
        ledger = make_plan(
            name, gpu, **asked, engine_version=engine_version, kv_dtype=kv_dtype, gpu_total=gpu_total,
            gpu_free=gpu_free, host_memory=host_memory, settings=_merged(settings, knobs, asked),
            target_seq_len=target_seq_len, target_concurrency=target_concurrency, quick=quick, use=_use(use),
            offline=offline, progress=open_progress(quiet=output.quiet),
        )  # fmt: skip
    present_plan(ledger.replace(notes=(*ledger.notes, *notes)), report, output)
    return status_of_plan(ledger)


def present_plan(ledger: Ledger, report: Path | None, output: Output) -> None:
    """A plan in every form that was asked for."""
    document = ledger.to_dict()
    output.document(document)
    show_ledger(document, output)
    if output.for_people:
        from onebudget.report.plan_view import plan_view

        output.show("", *plan_view(document))
    write_report(document, report, output)


def status_of_plan(ledger: Ledger) -> int:
    """Whether the answer is yes: it fits, and meets its target where there is one."""
    met = ledger.fits and (ledger.answers is None or ledger.answers.meets_target)
    return DONE if met else ANSWER_IS_NO


def _asked(
    command_line: str | None, model: str | None, given: dict[str, Any]
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """What a serving command says, under what was given beside it."""
    if command_line is None:
        if model is None:
            raise ConfigError("Which model? Give a hub id, a folder, or a name that `onebudget models` lists.")
        return given, model, ()
    from onebudget.planner.flags import read_command

    read = read_command(command_line)
    if model is not None and model != read.model:
        raise ConfigError(f"The command serves {read.model}, and {model} was named: which one?", field="MODEL")
    said = {name: value for name, value in read.arguments().items() if value is not None}
    if given.get("engine", read.engine) != read.engine:
        raise ConfigError(f"The command starts {read.engine}, not {given['engine']}.", field="--engine")
    return {**said, **given}, read.model, read.notes


def _merged(settings: dict[str, object], knobs: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, object]:
    """Knobs of our own engine beside ``--set``; another engine's settings come by its own names only."""
    engine = asked.get("engine", "onebudget")
    if knobs and engine != "onebudget":
        name = next(iter(knobs))
        raise ConfigError(
            f"--{name.replace('_', '-')} is a knob of our own engine; {engine}'s settings are given by its own names, "
            "like --set max_model_len=8192.",
            field=name,
        )
    return {**settings, **knobs}


def _use(text: str) -> str:
    if text not in ("server", "offline"):
        raise ConfigError.for_field("--use", text, "server or offline")
    return text
