from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.config import BudgetConfig
from onebudget.engine.assembly import build_executor
from onebudget.engine.probe import measure, probe_batches, run_dummies
from onebudget.engine.station import Station, fake_station
from onebudget.errors import AllocationError, BudgetError
from onebudget.progress import SilentProgress

CONFIG = BudgetConfig(max_seq_len=64, max_num_tokens=100, max_batch_size=4)


@pytest.mark.parametrize(
    ("tokens", "longest", "seats", "batches"),
    [
        (100, 64, 4, [[63, 37], [25, 25, 25, 25]]),
        (100, 200, 1, [[100]]),
        (100, 64, 1, [[63]]),
        (3, 64, 8, [[3], [1, 1, 1]]),
        (10, 64, 4, [[10], [3, 3, 2, 2]]),
        (1, 1, 1, [[1]]),
    ],
)
def test_batches_of_worked_cases(tokens: int, longest: int, seats: int, batches: list[list[int]]) -> None:
    assert probe_batches(BudgetConfig(max_num_tokens=tokens, max_seq_len=longest, max_batch_size=seats)) == batches


@given(tokens=st.integers(1, 300), longest=st.integers(1, 200), seats=st.integers(1, 12))
def test_every_batch_uses_up_the_step_as_far_as_requests_can(tokens: int, longest: int, seats: int) -> None:
    config = BudgetConfig(max_num_tokens=tokens, max_seq_len=longest, max_batch_size=seats)
    batches = probe_batches(config)
    most = min(tokens, seats * max(1, longest - 1))
    for lengths in batches:
        assert sum(lengths) == most
        assert len(lengths) <= seats
        assert all(1 <= length <= max(1, longest - 1) for length in lengths)
    assert max(map(len, batches)) == min(seats, most)


@pytest.fixture
def station(tiny: Callable[[str], Path]) -> Station:
    return fake_station(tiny("gqa"), "float32", capacity_bytes=2**22)


def test_the_device_is_as_before_a_profile(station: Station) -> None:
    device = station.device
    before = device.used_bytes(), device.used_by_owner()
    profile, rounding = measure(station, CONFIG, SilentProgress())
    assert (device.used_bytes(), device.used_by_owner()) == before
    assert profile.model_bytes == before[1]["weights"]
    assert profile.torch_peak_bytes > profile.model_bytes + profile.allocated_bytes
    assert rounding >= 0
    station.close()


def test_a_profile_is_the_same_again(station: Station) -> None:
    first = measure(station, CONFIG, SilentProgress())
    assert measure(station, CONFIG, SilentProgress()) == first
    station.close()


@pytest.mark.parametrize("room_bytes", [0, 2**12, 2**16, 2**18])
def test_the_device_is_as_before_a_profile_that_does_not_fit(station: Station, room_bytes: int) -> None:
    device = station.device
    device.charge_tensor_bytes((device.free_bytes() - room_bytes) & -512, "somebody")
    before = device.used_bytes(), device.used_by_owner()
    with pytest.raises((AllocationError, BudgetError)):
        measure(station, CONFIG, SilentProgress())
    assert (device.used_bytes(), device.used_by_owner()) == before
    station.close()


def test_an_executor_that_does_not_fit_leaves_nothing(station: Station) -> None:
    device = station.device
    before = device.used_bytes()
    for blocks in range(1, 400, 7):
        try:
            build_executor(station, CONFIG, blocks, metered=True).shutdown()
        except AllocationError:
            device.empty_cache()
            assert device.used_bytes() == before
    device.empty_cache()
    assert device.used_bytes() == before
    with pytest.raises(AllocationError):
        build_executor(station, CONFIG, 10**6, metered=True)
    station.close()


def test_dummies_that_fail_say_why(station: Station) -> None:
    executor = build_executor(station, CONFIG, 8, metered=True)

    def broken(*_: object) -> None:
        raise ValueError("in the middle")

    executor.runner.forward = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="the profiling run failed: ValueError: in the middle") as failed:
        run_dummies(executor, [3, 4])
    assert isinstance(failed.value.__cause__, ValueError)
    executor.shutdown()
    station.close()
