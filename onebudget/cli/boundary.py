"""Where errors become one paragraph on stderr and an exit status."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable

from onebudget.errors import ConfigError, ModelError, OneBudgetError

DONE, ANSWER_IS_NO, UNUSABLE_INPUT, INTERRUPTED = 0, 1, 2, 130


def say(message: str) -> None:
    """An error for people: one paragraph on stderr, whatever line breaks came with it."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def guarded(work: Callable[[], int]) -> int:
    """The status of ``work()``. An exception becomes its paragraph and status; its traceback needs log level debug."""
    try:
        return work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except OneBudgetError as error:
        _show_traceback()
        say(str(error))
        return status_for(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        _show_traceback()
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        say(f"Something unexpected went wrong: {reason}. `--log-level debug` shows where.")
        return ANSWER_IS_NO


def status_for(error: BaseException) -> int:
    """The exit status that goes with an error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return UNUSABLE_INPUT if isinstance(error, (ConfigError, ModelError)) else ANSWER_IS_NO


def _show_traceback() -> None:
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        traceback.print_exc()
