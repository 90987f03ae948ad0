"""Options that are made from tables: those every command shares, and the engine's knobs.

A command takes ``output: Output`` (and ``knobs: Mapping[str, object]``) as keyword arguments; the decorators replace
those by single options in the signature that typer reads, so that ``--help`` lists them all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from onebudget.cli.boundary import guarded
from onebudget.cli.output import Output
from onebudget.config import KNOBS, UNBUILT_KNOBS, Knob

Command = Callable[..., int]

_SHARED: Mapping[str, tuple[Any, Any]] = {
    "as_json": (
        Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")],
        False,
    ),
    "json_file": (Annotated[Path | None, typer.Option(help="Write the JSON document to this file as well.")], None),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")], False),
    "log_level": (Annotated[str, typer.Option(help="debug, info, warning, error or critical.")], "warning"),
}
_EXTRA_KNOBS: Mapping[str, Knob] = {
    "offline": Knob(False, lambda name, value: value, "use only files that are on this machine"),
    "revision": Knob(None, lambda name, value: value, "revision of the model on the hub"),
}
ENGINE_KNOBS: Mapping[str, Knob] = {
    **{name: knob for name, knob in KNOBS.items() if name not in UNBUILT_KNOBS},
    **_EXTRA_KNOBS,
}


def command(function: Command) -> Callable[..., None]:
    """Give a command the shared options and turn what it raises into a paragraph and an exit status."""

    def with_output(**given: Any) -> None:
        output = Output(**{name: given.pop(name) for name in _SHARED})

        def work() -> int:
            output.prepare()
            return function(output=output, **given)

        raise typer.Exit(guarded(work))

    reshaped: Callable[..., None] = _reshape(function, with_output, "output", _SHARED)
    return reshaped


def knobs_from(table: Mapping[str, Knob]) -> Callable[[Command], Command]:
    """Give a command every knob of ``table`` as an option; only the knobs that were given reach it, checked."""

    def decorate(function: Command) -> Command:
        def with_knobs(**given: Any) -> int:
            texts = {name: given.pop(name) for name in table}
            knobs = {name: table[name].clean(name, text) for name, text in texts.items() if text is not None}
            return function(knobs=knobs, **given)

        options = {name: knob_option(name, knob) for name, knob in table.items()}
        reshaped: Command = _reshape(function, with_knobs, "knobs", options)
        return reshaped

    return decorate


engine_knobs = knobs_from(ENGINE_KNOBS)
"""Give a command every knob of the engine."""


def knob_option(name: str, knob: Knob) -> tuple[Any, None]:
    """A knob as an option whose value is None when it was not given; ``none`` says None explicitly."""
    flag = "--" + name.replace("_", "-")
    help_text = f"{knob.about} [default: {_default_text(knob.default)}]"
    if isinstance(knob.default, bool):
        negative = f"/--no-{flag[2:]}" if knob.default else ""
        return Annotated[bool | None, typer.Option(flag + negative, help=help_text, show_default=False)], None
    return Annotated[str | None, typer.Option(flag, help=help_text, metavar="VALUE", show_default=False)], None


def _default_text(default: object) -> str:
    return (
        {None: "none", True: "on", False: "off"}[default]
        if default is None or isinstance(default, bool)
        else str(default)
    )


def _reshape(
    function: Command, wrapper: Callable[..., Any], replaced: str, options: Mapping[str, tuple[Any, Any]]
) -> Any:
    """``wrapper`` with the signature of ``function``, the parameter ``replaced`` swapped for ``options``."""
    signature = inspect.signature(function, eval_str=True)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != replaced]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]
    shaped: Any = wraps(function)(wrapper)
    shaped.__signature__ = signature.replace(parameters=[*kept, *added])
    shaped.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *added]}
    return shaped
