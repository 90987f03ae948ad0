"""One command carried out by several processes: rank 0 speaks, and all end with the same status."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from onebudget.cli.boundary import status_for
from onebudget.engine.ranks import RankGroup, close_ranks, open_ranks
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.cli.output import Output


def together(work: Callable[[RankGroup, Output], int], *, device: str, output: Output) -> int:
    """The status of ``work``, the same on all ranks that torchrun started; just its status in a process alone.

    A rank other than 0 prints nothing; what it raises is printed by rank 0, unless that has gone.
    """
    ranks = _ranks(device)
    if not ranks.shared:
        return work(ranks, output)
    try:
        with ranks.guard("command"):
            status = work(ranks, output) if ranks.leads else _silently(work, ranks, output)
            return ranks.broadcast(status)
    except BaseException as error:
        if ranks.speaks:
            raise
        return status_for(error)
    finally:
        _end_undisturbed()
        close_ranks()


def _ranks(device: str) -> RankGroup:
    try:
        return open_ranks(device)
    except ModuleNotFoundError as error:
        raise ConfigError(f"Several ranks need {error.name}: pip install 'onebudget[run]' brings it.") from error


def _end_undisturbed() -> None:
    """All ranks are on their way out; a launcher that sees the first one gone must not cut off the status of others."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _silently(work: Callable[[RankGroup, Output], int], ranks: RankGroup, output: Output) -> int:
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        return work(ranks, output.silenced(nowhere))
