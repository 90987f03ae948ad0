from __future__ import annotations

import pytest

from onebudget.buffers.virtual.config import BACKGROUND, ConfigStack
from onebudget.buffers.virtual.restore import RestoreMode
from onebudget.errors import StateError


def test_push_and_pop_restore_the_very_object() -> None:
    stack = ConfigStack()
    assert stack.current is BACKGROUND
    assert not stack.current
    first = stack.push("model", "pinned")
    assert first
    second = stack.push("kv")
    assert (first.mode, second.mode, len(stack)) == (RestoreMode.PINNED, RestoreMode.NONE, 2)
    assert stack.pop() is second
    assert stack.current is first
    assert stack.pop() is first
    assert stack.current is BACKGROUND
    with pytest.raises(StateError, match="push"):
        stack.pop()


def test_equal_configurations_are_still_two() -> None:
    stack = ConfigStack()
    first, second = stack.push("kv"), stack.push("kv")
    stack.remove(first)
    assert stack.current is second
    stack.remove(second)
    assert (stack.current, len(stack)) == (BACKGROUND, 0)
