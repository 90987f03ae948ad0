from __future__ import annotations

import io

import pytest

from onebudget.progress import PlainProgress, RichProgress, SilentProgress, open_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_stream_decides() -> None:
    assert isinstance(open_progress(stream=io.StringIO()), PlainProgress)
    assert isinstance(open_progress(stream=Terminal()), RichProgress)
    assert isinstance(open_progress(quiet=True, stream=Terminal()), SilentProgress)


def test_plain_progress_is_one_line_per_stage() -> None:
    out = io.StringIO()
    progress = open_progress(stream=out)
    with progress.stage("load", 3) as stage:
        stage.advance(1)
        stage.advance(2)
    with progress.stage("profile", None):
        pass
    assert out.getvalue() == "load (3) ...\nprofile ...\n"


def test_silent_progress_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress(quiet=True).stage("load", 3) as stage:
        stage.advance(3)
    assert capsys.readouterr() == ("", "")


def test_rich_stages_nest_and_end_even_when_the_work_fails() -> None:
    progress = RichProgress(Terminal())

    def fail() -> None:
        with progress.stage("outer", 1), progress.stage("inner", None) as stage:
            stage.advance(1)
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with progress.stage("again", 2) as stage:
        stage.advance(2)
    assert progress.open_stages == 0
