"""Signals of a rank: launchers end all ranks when one has died, and people interrupt all of them at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from onebudget.errors import AgreementError

_LEAVE_SECONDS = 10


class Terminated(AgreementError):
    """A launcher ends this rank (SIGTERM), as it does when another rank has died."""


class TerminationSignal:
    """Lets SIGTERM unwind this process with a sentence, unless somebody else handles it.

    Once the rank leaves by itself (``leaving``) the signal that a launcher sends meanwhile is not needed: it would cut
    off the message and the exit status.
    """

    def __init__(self) -> None:
        self._leaving_since: float | None = None
        in_main = threading.current_thread() is threading.main_thread()
        self._installed = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._installed:
            signal.signal(signal.SIGTERM, self._receive)

    def leaving(self) -> None:
        self._leaving_since = time.monotonic()

    def restore(self) -> None:
        """Back to the default, unless somebody has taken the signal over. Only the main thread can."""
        in_main = threading.current_thread() is threading.main_thread()
        if self._installed and in_main and signal.getsignal(signal.SIGTERM) == self._receive:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._leaving_since is None:
            raise Terminated("this rank was told to end (SIGTERM), as launchers do when another rank has died.")
        if time.monotonic() - self._leaving_since > _LEAVE_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class HeldInterrupt:
    """Inside, Ctrl-C is only noted in ``seen``; in a thread other than the main one it never arrives."""

    def __init__(self) -> None:
        self.seen = False
        self._before: object = None

    def __enter__(self) -> HeldInterrupt:
        self.seen = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
