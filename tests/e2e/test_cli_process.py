"""The command line as a process: exit status, streams, and what is imported. Nothing here needs a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN_FILE = Path(__file__).parents[1] / "unit" / "report" / "data" / "run.json"


def onebudget(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onebudget.cli", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False)


def assert_unusable(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")


def test_unusable_input_is_one_line_and_status_2(tmp_path: Path) -> None:
    assert_unusable(onebudget("run", "--max-seq-length", "7"))
    assert_unusable(onebudget("explain", tmp_path / "none.json"))
    assert_unusable(onebudget("run", "--prompts", "-", stdin="\n"))


def test_a_model_that_is_not_one_is_status_2(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert_unusable(onebudget("run", tmp_path / "none", "--prompt", "a", "--quiet", "--offline"))
    (tmp_path / "config.json").write_text("{")
    assert_unusable(onebudget("run", tmp_path, "--prompt", "a", "--quiet"))


def test_explain_as_json_is_pure() -> None:
    done = onebudget("explain", RUN_FILE, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ledger"]["model"] == "example/llama-70b"


def test_a_closed_pipe_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "onebudget.cli", "explain", str(RUN_FILE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_commands_without_a_model_import_no_framework() -> None:
    code = (
        "import sys; from onebudget.cli.app import app\n"
        "try: app(['explain', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'plotly', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(RUN_FILE)], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
