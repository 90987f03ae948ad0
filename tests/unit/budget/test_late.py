from __future__ import annotations

import pytest

from onebudget.budget.late import LateAllocation, LateAllocations, penalty_tables
from onebudget.errors import ConfigError
from onebudget.units import MIB


def registry(*items: LateAllocation) -> LateAllocations:
    late = LateAllocations()
    for item in items:
        late.register(item)
    return late


def test_reserves_of_registered_buffers() -> None:
    late = registry(
        penalty_tables(num_sequences=8, max_beam_width=1, vocab_size=49_152),
        LateAllocation("logprob rows", MIB, "a request with prompt_logprobs"),
        LateAllocation("grammar masks", 3, "the first constrained request"),
        LateAllocation("debug buffer", 99, "tracing", reserve=False),
        LateAllocation("nothing", 0, "never"),
    )
    lines = {line.name: line for line in late.reserve_lines()}
    assert {name: line.bytes for name, line in lines.items()} == {
        "penalty_workspace": 8 * 49_152 * 5,
        "late_allocations": MIB + 3,
    }
    assert all(line.kind == "adds_to_peak" for line in lines.values())
    assert "logprob rows 1.00 MiB with a request with prompt_logprobs" in lines["late_allocations"].reason
    assert late.notes() == ("Not reserved: debug buffer, up to 99 B with tracing.",)
    assert len(late) == 5


def test_an_empty_registry() -> None:
    assert registry().reserve_lines() == ()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="grammar"):
        registry(LateAllocation("grammar", 1, "x"), LateAllocation("grammar", 2, "y"))


@pytest.mark.parametrize("bad", [-1, 0.5])
def test_bytes_are_whole(bad: object) -> None:
    with pytest.raises(ConfigError):
        LateAllocation("x", bad, "y")  # type: ignore[arg-type]
