"""The application: one command per file, and one way to say that the command line itself was wrong."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from onebudget.cli import buckets, emit, explain, gpus, models, plan, probe, run, simulate, sweep
from onebudget.cli.boundary import INTERRUPTED, UNUSABLE_INPUT, say
from onebudget.cli.suggest import usage_sentence


class Application(TyperGroup):
    """Typer's group with usage errors as one paragraph on stderr and exit status 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        leave = extra.pop("standalone_mode", True)
        extra["standalone_mode"] = False  # otherwise typer prints the error in its own way and exits
        try:
            status = super().main(*args, **extra)
        except typer.TyperException as error:
            say(usage_sentence(error))
            status = UNUSABLE_INPUT
        except typer.Abort:
            status = INTERRUPTED
        if leave:
            sys.exit(status or 0)
        return status


app = typer.Typer(
    cls=Application,
    name="onebudget",
    help="Cut an accelerator's memory into shares that add up, and serve a model within them.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"onebudget {version('onebudget')}")
        except PackageNotFoundError:
            print("onebudget (not installed: run from its source folder)")
        raise typer.Exit


@app.callback()
def _application(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""


app.command("run", help=run.HELP)(run.run)
app.command("plan", help=plan.HELP)(plan.plan)
app.command("explain", help=explain.HELP)(explain.explain)
app.command("probe", help=probe.HELP)(probe.probe)
app.command("simulate", help=simulate.HELP)(simulate.simulate)
app.command("buckets", help=buckets.HELP)(buckets.buckets)
app.command("gpus", help=gpus.HELP)(gpus.gpus)
app.command("models", help=models.HELP)(models.models)
app.command("emit", help=emit.HELP)(emit.emit)
app.command("sweep", help=sweep.HELP)(sweep.sweep)
