"""Where a command's results go: tables for people, or exactly one JSON document on stdout."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
WIDTH_WITHOUT_TERMINAL = 160


@dataclass(frozen=True, slots=True)
class Output:
    """The options that every command shares, and the ways to print that follow from them.

    With ``as_json`` everything but ``document`` stays silent on stdout.
    """

    as_json: bool = False
    json_file: Path | None = None
    quiet: bool = False
    log_level: str = "warning"
    stdout: TextIO = field(default_factory=lambda: sys.stdout)

    def prepare(self) -> None:
        """Set up logging and refuse an output file that can't be written, before any work."""
        if self.log_level.lower() not in LOG_LEVELS:
            raise ConfigError.for_field("--log-level", self.log_level, f"one of {', '.join(LOG_LEVELS)}")
        logging.basicConfig(level=self.log_level.upper(), stream=sys.stderr, format="%(name)s: %(message)s", force=True)
        if self.json_file is not None:
            check_writable(self.json_file, "--json-file")

    def silenced(self, nowhere: TextIO) -> Output:
        """For a process that must not speak: no files, and everything else to ``nowhere``."""
        return Output(quiet=True, log_level=self.log_level, stdout=nowhere)

    @property
    def for_people(self) -> bool:
        return not self.as_json

    def show(self, *parts: RenderableType) -> None:
        """Print for people; nothing with ``--json``."""
        if self.for_people:
            self.console().print(*parts, sep="\n")

    def console(self) -> Console:
        from rich.console import Console

        width = None if self.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
        return Console(file=self.stdout, width=width, highlight=False, soft_wrap=False)

    def document(self, document: Mapping[str, Any]) -> None:
        """The command's JSON document, to stdout and to the file as far as they were asked for."""
        text = json.dumps(document, indent=2, allow_nan=False)
        if self.json_file is not None:
            write_text(self.json_file, text + "\n")
        if self.as_json:
            print(text, file=self.stdout, flush=True)

    @contextlib.contextmanager
    def clean_stdout(self) -> Iterator[None]:
        """While libraries work: what they print must not reach a stdout that holds JSON."""
        with contextlib.redirect_stdout(sys.stderr) if self.as_json else contextlib.nullcontext():
            yield


def check_writable(path: Path, option: str) -> None:
    """Raise ``ConfigError`` when ``path`` can't become a file: found out before the work, not after it."""
    if path.is_dir():
        raise ConfigError.for_field(option, str(path), "a file, and this is a folder")
    if not path.absolute().parent.is_dir():
        raise ConfigError.for_field(
            option, str(path), f"in a folder that exists, and {path.absolute().parent} does not"
        )


def write_text(path: Path, text: str) -> None:
    """Write a result file; ``ConfigError`` when the operating system refuses."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror or error}.", field="file", value=str(path)
        ) from error
