"""How far a long piece of work has come, said on stderr: bars in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO


class Stage(Protocol):
    """One piece of work inside ``Progress.stage``."""

    def advance(self, n: int = 1) -> None:
        """``n`` more units are done."""


class Progress(Protocol):
    """What the engine reports to. Stages may nest; each ends when its context does."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]:
        """Begin a stage of ``total`` units; None when nobody knows how many."""


class _NoStage:
    def advance(self, n: int = 1) -> None:
        return None


class SilentProgress:
    """Says nothing."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        yield _NoStage()


class PlainProgress:
    """One line when a stage begins, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        size = f" ({total:,})" if total is not None else ""
        print(f"{name}{size} ...", file=self._stream, flush=True)
        yield _NoStage()


class RichProgress:
    """Live bars for a terminal; they disappear when the last stage ends."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        counts = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *counts)
        self._bars = Bars(*columns, console=Console(file=stream), transient=True)
        self.open_stages = 0

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        if self.open_stages == 0:
            self._bars.start()
        self.open_stages += 1
        task = self._bars.add_task(name, total=total)
        try:
            yield _RichStage(self._bars, task)
        finally:
            self._bars.remove_task(task)
            self.open_stages -= 1
            if self.open_stages == 0:
                self._bars.stop()


class _RichStage:
    def __init__(self, bars: object, task: int) -> None:
        self._bars, self._task = bars, task

    def advance(self, n: int = 1) -> None:
        from rich.progress import Progress as Bars
        from rich.progress import TaskID

        assert isinstance(self._bars, Bars)
        self._bars.advance(TaskID(self._task), n)


def open_progress(*, quiet: bool = False, stream: TextIO | None = None) -> Progress:
    """The progress that suits ``stream`` (stderr when left out)."""
    stream = sys.stderr if stream is None else stream
    if quiet:
        return SilentProgress()
    return RichProgress(stream) if stream.isatty() else PlainProgress(stream)
