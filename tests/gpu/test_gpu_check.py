"""The report of the GPU run, from result files as pytest writes them. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", HERE / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(folder: Path, *cases: str) -> Path:
    body = "".join(
        f'<testcase classname="t" name="n{number}" time="0.5">{case}</testcase>' for number, case in enumerate(cases)
    )
    file = folder / "junit.xml"
    file.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    return file


def test_counts_and_messages(check: ModuleType, tmp_path: Path) -> None:
    failure, error = '<failure message="assert 1">trace</failure>', '<error message="broke">at set-up</error>'
    report = check.read_results(results(tmp_path, "", failure, '<skipped message="no"/>', error), 1)
    assert report["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert report["outcome"] == "failed"
    assert [test["outcome"] for test in report["tests"]] == ["passed", "failed", "skipped", "failed"]
    assert report["tests"][1] == {
        "name": "t::n1", "outcome": "failed", "seconds": 0.5, "message": "assert 1", "details": "trace",
    }  # fmt: skip


def test_only_passing_is_success(check: ModuleType, tmp_path: Path) -> None:
    assert check.read_results(results(tmp_path, "", ""), 0)["outcome"] == "passed"
    assert check.read_results(results(tmp_path, ""), 1)["outcome"] == "failed"
    assert check.read_results(results(tmp_path, '<skipped message="no"/>'), 0)["outcome"] == "failed"
    assert check.read_results(tmp_path / "none.xml", 2)["reason"].endswith("left no results")


def test_the_command_on_a_machine_without_a_gpu(check: ModuleType, tmp_path: Path) -> None:
    if check.gpu_in_sight():
        pytest.skip("this machine has a GPU")
    target = tmp_path / "report.json"
    done = subprocess.run([sys.executable, HERE / "check.py", target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The GPU tests were skipped: ")
    report = json.loads(target.read_text())
    assert (report["outcome"], report["counts"]) == ("skipped", {"passed": 0, "failed": 0, "skipped": 0})
    assert report["versions"]["python"]
