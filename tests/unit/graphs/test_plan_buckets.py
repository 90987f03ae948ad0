from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.errors import ConfigError
from onebudget.graphs.buckets import default_graph_batch_sizes, hit_rate, padded_tokens
from onebudget.graphs.plan_buckets import capture_ladder, plan_buckets

Cost = Callable[[int], int]


def brute_force(
    histogram: Mapping[int, int], allowance: int, bytes_for: Cost, largest: int | None
) -> tuple[int, int, int, tuple[int, ...]]:
    """(missed weight, padding, bytes, list) of the best list, by trying all."""
    keys = [size for size in sorted(histogram) if largest is None or size <= largest]
    best = sum(histogram.values()), 0, 0, ()
    for chosen in (chosen for count in range(1, len(keys) + 1) for chosen in combinations(keys, count)):
        nbytes = sum(map(bytes_for, chosen))
        if nbytes <= allowance:
            met = {size: weight for size, weight in histogram.items() if size <= chosen[-1]}
            missed = sum(histogram.values()) - sum(met.values())
            padding = sum(weight * (chosen[bisect_left(chosen, size)] - size) for size, weight in met.items())
            best = min(best, (missed, padding, nbytes, chosen)) if best[3] else (missed, padding, nbytes, chosen)
    return best


def costs(kind: int, rng: random.Random) -> Mapping[int, int]:
    """Bytes per size: all equal, growing, growing beside a fixed part, anything, or mostly nothing."""
    return {size: (7, size, 20 + 3 * size, rng.randint(0, 40), rng.choice([0, 0, 1]))[kind] for size in range(1, 40)}


@pytest.mark.parametrize("seed", range(200))
def test_nothing_beats_it(seed: int) -> None:
    rng = random.Random(seed)
    histogram = {size: rng.randint(0, 5) for size in rng.sample(range(1, 30), rng.randint(1, 8))}
    bytes_of = costs(seed % 5, rng)
    allowance = rng.randint(0, sum(bytes_of[size] for size in histogram) + 2)
    largest = rng.choice([None, None, rng.randint(1, 30)])
    plan = plan_buckets(histogram, allowance_bytes=allowance, bytes_for=bytes_of.__getitem__, max_batch_size=largest)
    missed, padding, nbytes, chosen = brute_force(histogram, allowance, bytes_of.__getitem__, largest)
    total = sum(histogram.values())
    if not total:
        assert plan.sizes == ()
        return
    assert (plan.sizes, plan.graph_bytes, plan.padded_tokens) == (chosen, nbytes, padding)
    assert plan.hit_rate == (total - missed) / total


WEIGHTS = st.dictionaries(st.integers(1, 400), st.floats(0, 1e9), min_size=1, max_size=60)


@given(WEIGHTS, st.integers(0, 2000), st.integers(1, 50), st.integers(0, 3))
def test_what_it_says_of_its_list_is_true(
    histogram: dict[int, float], allowance: int, fixed: int, per_request: int
) -> None:
    def bytes_for(size: int) -> int:
        return fixed + per_request * size

    plan = plan_buckets(histogram, allowance_bytes=allowance, bytes_for=bytes_for)
    assert list(plan.sizes) == sorted(set(plan.sizes)) and set(plan.sizes) <= set(histogram)
    assert plan.graph_bytes == sum(map(bytes_for, plan.sizes)) <= allowance
    assert plan.padded_tokens == pytest.approx(padded_tokens(plan.sizes, histogram))
    assert plan.hit_rate == pytest.approx(hit_rate(plan.sizes, histogram))
    assert plan.capture_order == tuple(sorted(plan.sizes, reverse=True))


@given(st.dictionaries(st.integers(1, 256), st.integers(1, 1000), min_size=20, max_size=80), st.integers(1, 256))
def test_never_worse_than_the_default_list_at_its_bytes(histogram: dict[int, int], largest: int) -> None:
    def bytes_for(size: int) -> int:
        return 100 + size

    default = default_graph_batch_sizes(largest)
    plan = plan_buckets(
        histogram, allowance_bytes=sum(map(bytes_for, default)), bytes_for=bytes_for, max_batch_size=largest
    )
    assert plan.hit_rate == pytest.approx(hit_rate(default, histogram))
    assert plan.padded_tokens <= padded_tokens(default, histogram)


def test_a_byte_decides() -> None:
    histogram = {1: 5, 8: 1}
    tight = plan_buckets(histogram, allowance_bytes=8, bytes_for=lambda size: size)
    assert (tight.sizes, tight.graph_bytes, tight.padded_tokens, tight.hit_rate) == ((8,), 8, 35, 1)
    roomy = plan_buckets(histogram, allowance_bytes=9, bytes_for=lambda size: size)
    assert (roomy.sizes, roomy.graph_bytes, roomy.padded_tokens) == ((1, 8), 9, 0)
    poor = plan_buckets(histogram, allowance_bytes=7, bytes_for=lambda size: size)
    assert (poor.sizes, poor.hit_rate) == ((1,), 5 / 6)


def test_a_cap_leaves_its_batches_unmet() -> None:
    plan = plan_buckets({4: 3, 16: 1}, allowance_bytes=99, bytes_for=lambda size: 1, max_batch_size=8)
    assert (plan.sizes, plan.hit_rate) == ((4,), 0.75)


@pytest.mark.parametrize("bytes_for", [lambda size: 50, lambda size: 2**23 + size * 2**17], ids=["equal", "growing"])
def test_every_batch_size_up_to_1024_with_many_equal_answers(bytes_for: Cost) -> None:
    histogram = dict.fromkeys(range(1, 1025), 1)
    default = default_graph_batch_sizes(1024)
    plan = plan_buckets(histogram, allowance_bytes=sum(map(bytes_for, default)), bytes_for=bytes_for)
    assert plan.sizes[-1] == 1024
    assert plan.padded_tokens < padded_tokens(default, histogram)


def test_equal_bytes_and_uniform_load_cut_into_equal_parts() -> None:
    plan = plan_buckets(dict.fromkeys(range(1, 1025), 1), allowance_bytes=16, bytes_for=lambda size: 1)
    assert plan.sizes == tuple(range(64, 1025, 64))


def test_no_load_or_no_room_is_an_empty_list() -> None:
    for histogram in ({}, {4: 0.0}):
        assert plan_buckets(histogram, allowance_bytes=10, bytes_for=lambda size: 1).sizes == ()
    plan = plan_buckets({4: 1.0}, allowance_bytes=3, bytes_for=lambda size: size)
    assert (plan.sizes, plan.graph_bytes, plan.padded_tokens, plan.hit_rate) == ((), 0, 0, 0)


@pytest.mark.parametrize(
    ("histogram", "allowance", "nbytes", "field"),
    [
        ({0: 1.0}, 1, 1, "histogram"),
        ({True: 1.0}, 1, 1, "histogram"),
        ({2: -1.0}, 1, 1, r"histogram\[2\]"),
        ({2: float("nan")}, 1, 1, r"histogram\[2\]"),
        ({2: float("inf")}, 1, 1, r"histogram\[2\]"),
        ({2: 1.0}, -1, 1, "allowance_bytes"),
        ({2: 1.0}, 1, -1, r"bytes_for\(2\)"),
        ({2: 1.0}, 1, 0.5, r"bytes_for\(2\)"),
    ],
)
def test_unusable_arguments(histogram: dict[int, float], allowance: int, nbytes: int, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        plan_buckets(histogram, allowance_bytes=allowance, bytes_for=lambda size: nbytes)


def test_a_ladder_is_cut_where_the_floor_would_be_touched() -> None:
    fits = capture_ladder([1, 2, 4, 8], free_bytes=115, floor_bytes=100, bytes_for=lambda size: size)
    assert (fits.sizes, fits.dropped, fits.free_after_bytes) == ((8, 4, 2, 1), (), 100)
    cut = capture_ladder([8, 4, 2, 1], free_bytes=114, floor_bytes=100, bytes_for=lambda size: size)
    assert (cut.sizes, cut.dropped, cut.free_after_bytes) == ((8, 4, 2), (1,), 100)
    top = capture_ladder([1, 2, 4, 8], free_bytes=107, floor_bytes=100, bytes_for=lambda size: size)
    assert (top.sizes, top.dropped) == ((4, 2, 1), (8,))
    assert capture_ladder([4], free_bytes=103, floor_bytes=100, bytes_for=lambda size: size).sizes == ()
