from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Invoke = Callable[..., Any]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["Missing command", "`onebudget --help`"]),
        (["rum"], ["'rum'", "Did you mean 'run'?"]),
        (["run", "--max-sequence-len", "3"], ["no option --max-sequence-len", "did you mean --max-seq-len"]),
        (["run", "--kv-max-token", "3"], ["did you mean --kv-max-tokens", "`onebudget run --help`"]),
        (["run", "--enable-block-resue"], ["did you mean --enable-block-reuse"]),
        (["run", "--zzzzzzz"], ["no option --zzzzzzz."]),
        (["run", "--max-seq-len"], ["--max-seq-len"]),
        (["run", "a", "b"], ["b"]),
        (["explain"], ["LEDGER.json"]),
        (["--jsn"], ["no option --jsn"]),
        (["run", "--temperature", "warm"], ["--temperature"]),
        (["run", "--max-tokens", "1.5"], ["--max-tokens"]),
    ],
)
def test_a_wrong_command_line_is_one_paragraph(invoke: Invoke, arguments: list[str], words: list[str]) -> None:
    result = invoke(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert [word for word in words if word not in result.paragraph] == []


@pytest.mark.parametrize("command", [[], ["run"], ["explain"], ["probe"]])
def test_help_is_on_stdout(invoke: Invoke, command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.status == 0
    assert result.err == ""
    assert "--help" in result.out


def test_version(invoke: Invoke) -> None:
    result = invoke("--version")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("onebudget ")


@pytest.mark.parametrize("command", ["run", "explain", "probe"])
def test_every_command_has_the_shared_options(invoke: Invoke, command: str) -> None:
    text = invoke(command, "--help").out
    assert [name for name in ("--json ", "--json-file", "--quiet", "--log-level") if name not in text] == []
