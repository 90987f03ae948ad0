"""The stand-in takes what the real driver functions take, so that a call that passes here has the right arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import onebudget.device.cuda

driver = pytest.importorskip("cuda.bindings.driver")


def called_functions() -> list[str]:
    """Driver functions named anywhere in the CUDA modules."""
    folder = Path(onebudget.device.cuda.__file__).parent
    words = " ".join(file.read_text() for file in folder.glob("cuda*.py")).replace("(", " ").replace(".", " ")
    return sorted({word for word in words.replace('"', " ").replace(",", " ").split() if _is_function(word)})


def _is_function(word: str) -> bool:
    return word[:2] == "cu" and word[2:3].isupper() and word.isalnum()


def parameters(function: Any) -> list[str]:
    """Parameter names of a compiled function, from the first line of its documentation."""
    line = function.__doc__.splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(")")]
    while "[" in inside:
        start = inside.rindex("[")
        inside = inside[:start] + inside[inside.index("]", start) + 1 :]
    return [part.split(":")[0].split()[-1] for part in inside.split(",") if part.strip()]


def test_every_function_is_in_the_stand_in(api: Any) -> None:
    named = called_functions()
    assert len(named) > 40
    assert [name for name in named if not hasattr(type(api), f"do_{name}")] == []


@pytest.mark.parametrize("name", called_functions())
def test_the_real_function_takes_the_same_arguments(api: Any, name: str) -> None:
    ours = list(inspect.signature(getattr(api, f"do_{name}")).parameters)
    assert ours == parameters(getattr(driver, name))
