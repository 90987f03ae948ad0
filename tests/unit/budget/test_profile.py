from __future__ import annotations

import pytest

from onebudget.budget.profile import ProfileResult
from onebudget.errors import ConfigError
from onebudget.units import GIB


def profile(**changes: int | bool) -> ProfileResult:
    values = {
        "model_bytes": 40 * GIB,
        "torch_peak_bytes": 50 * GIB,
        "torch_used_bytes": 43 * GIB,
        "device_used_bytes": 49 * GIB,
        "allocated_bytes": 2 * GIB,
    }
    return ProfileResult(**(values | changes))  # type: ignore[arg-type]


def test_worked_figures() -> None:
    result = profile()
    assert result.activation_bytes == 10 * GIB
    assert result.extra_cost_bytes == 6 * GIB
    assert result.peak_bytes == 56 * GIB


def test_memory_of_a_graph_pool_is_extra_cost_and_no_activation() -> None:
    before, after = profile(), profile(device_used_bytes=50 * GIB)
    assert after.extra_cost_bytes - before.extra_cost_bytes == GIB
    assert after.activation_bytes == before.activation_bytes


def test_extra_cost_is_never_negative() -> None:
    assert profile(device_used_bytes=40 * GIB).extra_cost_bytes == 0


def test_without_a_probe_the_peak_is_what_the_device_uses() -> None:
    result = ProfileResult.without_probe(model_bytes=40 * GIB, device_used_bytes=43 * GIB)
    assert result.peak_bytes == 43 * GIB
    assert (result.activation_bytes, result.allocated_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_bytes", -1),
        ("device_used_bytes", 1.5),
        ("torch_used_bytes", True),
        ("torch_peak_bytes", 39 * GIB),
        ("allocated_bytes", 16 * GIB + 1),
    ],
)
def test_impossible_samples_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        profile(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
