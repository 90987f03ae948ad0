from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onebudget.cli.app import app

RUN_FILE = Path(__file__).parents[1] / "report" / "data" / "run.json"


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def paragraph(self) -> str:
        """What stderr says, which has to be one line starting with ``error:``."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Iterator[Invoke]:
    """Run the application in this process with the given arguments."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)

    def invoke(*arguments: object) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            app([str(argument) for argument in arguments], prog_name="onebudget")
        out, err = capsys.readouterr()
        return Result(int(left.value.code or 0), out, err)

    yield invoke
    root.setLevel(before[0])
    root.handlers[:] = before[1]


@pytest.fixture
def run_document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RUN_FILE.read_text())
    return document
