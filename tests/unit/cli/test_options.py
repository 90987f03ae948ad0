from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import typer

from onebudget.cli.app import Application
from onebudget.cli.options import ENGINE_KNOBS, command, engine_knobs
from onebudget.cli.output import Output
from onebudget.config import KNOBS, UNBUILT_KNOBS
from onebudget.errors import BudgetError, ConfigError, ModelError, RequestError


def call(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Status, and what a command got, when it is called with these arguments."""
    seen: dict[str, Any] = {}

    @command
    @engine_knobs
    def probe(*, knobs: Mapping[str, Any], output: Output) -> int:
        seen.update(knobs=dict(knobs), output=output)
        return 0

    app = typer.Typer(cls=Application, rich_markup_mode=None)
    app.callback()(lambda: None)
    app.command("go")(probe)
    with pytest.raises(SystemExit) as left:
        app(["go", *arguments])
    return int(left.value.code or 0), seen


def test_a_knob_that_is_not_given_is_not_passed() -> None:
    assert call()[1]["knobs"] == {}


def test_none_and_zero_are_not_the_same_as_not_given() -> None:
    knobs = call("--kv-max-tokens", "none", "--context-kv-len-cap", "0", "--no-enable-block-reuse")[1]["knobs"]
    assert knobs == {"kv_max_tokens": None, "context_kv_len_cap": 0, "enable_block_reuse": False}


def test_knobs_arrive_in_their_own_types() -> None:
    knobs = call(
        "--max-gpu-total-bytes", "1GiB", "--free-gpu-memory-fraction", "0.5", "--max-seq-len", "128",
        "--dtype", "float32", "--skip-estimation", "--offline", "--revision", "main",
    )[1]["knobs"]  # fmt: skip
    assert knobs == {
        "max_gpu_total_bytes": 2**30, "free_gpu_memory_fraction": 0.5, "max_seq_len": 128, "dtype": "fp32",
        "skip_estimation": True, "offline": True, "revision": "main",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(KNOBS) - UNBUILT_KNOBS))
def test_every_knob_that_the_engine_acts_on_is_an_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help")[0] == 0
    assert "--" + name.replace("_", "-") in capsys.readouterr().out
    assert name in ENGINE_KNOBS


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-gpu-total-bytes", "0"), ("--max-gpu-total-bytes", "lots"), ("--kv-max-tokens", "-1"),
        ("--free-gpu-memory-fraction", "1.5"), ("--max-seq-len", "0"), ("--kv-cache-dtype", "int3"),
        ("--tokens-per-block", "2.5"), ("--dtype", "int3"),
    ],
)  # fmt: skip
def test_a_bad_value_is_status_2_and_names_the_knob(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, seen = call(option, value)
    out, err = capsys.readouterr()
    assert (status, seen, out) == (2, {}, "")
    assert len(err.splitlines()) == 1
    assert option.removeprefix("--").replace("-", "_") in err
    assert value in err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no"), 2),
        (ModelError("no"), 2),
        (BudgetError("no"), 1),
        (RequestError("no"), 1),
        (KeyboardInterrupt(), 130),
        (RuntimeError("boom\nsecond line"), 1),
    ],
)
def test_errors_become_one_line_and_a_status(
    error: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    @command
    def fails(*, output: Output) -> int:
        raise error

    with pytest.raises(typer.Exit) as left:
        fails(as_json=False, json_file=None, quiet=False, log_level="warning")
    out, err = capsys.readouterr()
    assert left.value.exit_code == status
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err


def test_an_unexpected_error_is_named_and_its_traceback_needs_debug(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def fails(*, output: Output) -> int:
        raise ZeroDivisionError("by nothing")

    for level, traceback in (("warning", False), ("debug", True)):
        with pytest.raises(typer.Exit):
            fails(as_json=False, json_file=None, quiet=False, log_level=level)
        err = capsys.readouterr().err
        assert "ZeroDivisionError: by nothing" in err
        assert "--log-level debug" in err
        assert ("Traceback" in err) == traceback
