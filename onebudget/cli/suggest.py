"""Sentences about a command line that can't be used, with the names that were probably meant."""

from __future__ import annotations

import difflib
from typing import Any

import typer


def usage_sentence(error: typer.TyperException) -> str:
    """One sentence on what is wrong, and where to read more."""
    context: Any = getattr(error, "ctx", None)
    wrong = getattr(error, "option_name", None)
    message = error.format_message().rstrip(".")
    if wrong and message.lower().startswith("no such option"):
        message = f"There is no option {wrong}{_near(wrong, context)}"
    where = f"{context.command_path} --help" if context is not None else "onebudget --help"
    joint = "" if message.endswith(("?", "!")) else "."
    return f"{message}{joint} `{where}` lists what there is."


def _near(wrong: str, context: Any) -> str:
    """The existing options closest to ``wrong``, as a question."""
    known = (
        [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)] if context else []
    )
    near = difflib.get_close_matches(wrong, [name for name in known if name.startswith("--")], n=3, cutoff=0.55)
    return f"; did you mean {' or '.join(near)}?" if near else ""
