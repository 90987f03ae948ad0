"""``onebudget emit``: a plan as another engine's serving command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebudget.cli.boundary import DONE
from onebudget.cli.options import command
from onebudget.cli.output import Output, check_writable, write_text

if TYPE_CHECKING:
    from onebudget.planner.emit import EmittedCommand

HELP = "Print the flags, and the YAML where there is one, that make an engine do what a plan says."


@command
def emit(
    plan: Annotated[Path, typer.Argument(help="JSON that `onebudget plan --json` printed.", metavar="PLAN.json")],
    *,
    engine: Annotated[
        str | None, typer.Option("--for", help="vllm, sglang or trtllm; the plan's own engine when left out.")
    ] = None,
    options_file: Annotated[Path | None, typer.Option(help="Write the YAML here and let the command read it.")] = None,
    output: Output,
) -> int:
    """Turn a plan into a command."""
    from onebudget.planner.emit import emit as emit_plan
    from onebudget.report.document import read_document

    if options_file is not None:
        check_writable(options_file, "--options-file")
    emitted = emit_plan(read_document(plan), engine)
    if options_file is not None:
        emitted = emitted.with_file(str(options_file))
        for path, text in emitted.files.items():
            write_text(Path(path), text)
    output.document(emitted.to_dict())
    _show(emitted, output, written=options_file is not None)
    return DONE


def _show(emitted: EmittedCommand, output: Output, *, written: bool) -> None:
    """Lines as they are: a command that was wrapped to fit a terminal would be another one."""
    if not output.for_people:
        return
    print(emitted.text, file=output.stdout)
    for path, text in emitted.files.items():
        print(f"\noptions: {path}" if written else f"\n# {path}\n{text.rstrip()}", file=output.stdout)
    for note in emitted.notes:
        print(f"\nnote: {note}", file=output.stdout)
