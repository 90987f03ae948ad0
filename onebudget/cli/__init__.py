"""The command line. ``main`` is the console script; every command is a thin call of the public Python names."""

from __future__ import annotations


def main() -> None:
    """Run the command line and leave the process with its exit status."""
    from onebudget.cli.app import app

    app(prog_name="onebudget")
