"""What graphs cost: lines through samples, the first capture apart from the next, and who is told of differences."""

from __future__ import annotations

import logging
from fractions import Fraction

import pytest

from onebudget.errors import ConfigError
from onebudget.graphs.cost import BucketBytes, CaptureCost, sample_sizes, warn_beyond, warn_of_buckets


@pytest.mark.parametrize(
    ("sizes", "samples"),
    [([1], [1]), ([2, 1], [1, 2]), ([4, 2, 1], [1, 2, 4]), ([1, 2, 4, 8], [1, 4, 8]), ([8, 1, 16, 2, 4], [1, 4, 16])],
)
def test_sampled_sizes(sizes: list[int], samples: list[int]) -> None:
    assert sample_sizes(sizes) == samples


def test_bytes_between_and_beyond_samples() -> None:
    lines = BucketBytes({1: 100, 4: 400, 8: 1200})
    assert [lines.bytes_for(size) for size in (1, 2, 4, 6, 8, 10)] == [100, 200, 400, 800, 1200, 1600]
    assert BucketBytes({1: 0, 4: 1}).bytes_for(2) == 1  # never below the line
    assert BucketBytes({4: 10, 8: 50}).bytes_for(1) == 0  # nor below nothing
    assert BucketBytes({4: 10}).bytes_for(4) == 10
    with pytest.raises(ConfigError, match="at least two"):
        BucketBytes({4: 10}).bytes_for(5)


def test_the_first_capture_is_no_measure_of_the_next() -> None:
    cost = CaptureCost.from_growth([1000, 10, 20, 15])
    assert (cost.first_bytes, cost.marginal_bytes) == (1000, Fraction(15))
    assert [cost.ladder_bytes(count) for count in (0, 1, 2, 4)] == [0, 1000, 1015, 1045]
    assert CaptureCost.from_growth([8, 1, 0]).ladder_bytes(2) == 9  # half a byte is one
    assert str(cost) == "1000 B by the first capture, 15 B each next"
    with pytest.raises(ConfigError, match="at least 3"):
        CaptureCost.from_growth([1000, 10])


@pytest.mark.parametrize(("measured", "told"), [(1020, False), (980, False), (1021, True), (979, True)])
def test_a_warning_beyond_two_per_cent(measured: int, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert (warn_beyond(1000, measured) is not None) is told
    assert bool(caplog.records) is told


def test_batch_sizes_beyond_the_error_are_named(caplog: pytest.LogCaptureFixture) -> None:
    declared = {1: 1000, 2: 100_000, 4: 100_000, 8: 50}
    with caplog.at_level(logging.WARNING):
        assert warn_of_buckets(declared, {1: 1512, 2: 102_000, 4: 98_000}, 512) is None
        assert not caplog.records
        text = warn_of_buckets(declared, {1: 1513, 2: 102_001, 4: 98_000}, 512)
    assert text is not None
    assert "batch sizes 1 (1.48 KiB, declared 1000 B), 2 (" in text
    assert caplog.messages == [text]
