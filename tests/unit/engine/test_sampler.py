from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from onebudget.core import Request, SamplingParams
from onebudget.engine.sampler import Sampler

SAFE = 1e-5
"""How far a uniform number has to stay from the edge of a token's interval, so that float32 can't tip it over."""


def request(number: int = 0, *, produced: int = 0, end: tuple[int, ...] = (), **params: Any) -> Request:
    return Request(
        number, [1], SamplingParams(**params), max_new_tokens=99, end_token_ids=frozenset(end),
        output_token_ids=[1] * produced,
    )  # fmt: skip


def sample(rows: list[list[float]], requests: list[Request], sampler: Sampler | None = None) -> list[int]:
    return (sampler or Sampler()).sample(torch.tensor(rows), requests)


def kept(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """The textbook filters, one token after the other in float64: token -> probability, most probable first."""
    exact = torch.tensor(logits, dtype=torch.float64) / temperature
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    weights = torch.softmax(exact[order], 0).tolist()
    chosen: dict[int, float] = {}
    for token, weight in zip(order, weights, strict=True):
        if sum(chosen.values()) >= top_p:
            break
        chosen[token] = weight
    total = sum(chosen.values())
    return {token: weight / total for token, weight in chosen.items()}


# -- greedy -------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_equals() -> None:
    rows = [[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -8.0, -7.0, -7.0]]
    assert sample(rows, [request(number, temperature=0) for number in range(3)]) == [1, 0, 2]


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    assert sample([[0.0, 1.0, 0.9]], [request(temperature=50.0, top_k=1, seed=3)]) == [1]


def test_greedy_rows_beside_random_rows_stay_greedy() -> None:
    rows = [[0.0, 9.0, 0.0], [1.0, 1.0, 1.0], [7.0, 0.0, 0.0]]
    mixed = [request(0, temperature=0), request(1, seed=1), request(2, temperature=0)]
    tokens = sample(rows, mixed)
    assert (tokens[0], tokens[2]) == (1, 0)


def test_no_rows() -> None:
    assert Sampler().sample(torch.empty(0, 5), []) == []


# -- the distribution, by the interval of each token --------------------------------------------------------------


def intervals(probabilities: dict[int, float]) -> list[tuple[int, float, float]]:
    edges, low = [], 0.0
    for token, share in probabilities.items():
        edges.append((token, low, low + share))
        low += share
    return edges


def expected(uniform: float, probabilities: dict[int, float]) -> int | None:
    """The token whose interval holds ``uniform``; None where float32 rounding might decide."""
    for token, low, high in intervals(probabilities):
        if low + SAFE < uniform < high - SAFE:
            return token
    return None


def test_without_filters_the_cumulative_distribution_is_inverted_in_order_of_ids() -> None:
    shares = [0.125, 0.5, 0.25, 0.125]
    logits = [torch.log(torch.tensor(share)).item() for share in shares]
    seen = set()
    for seed in range(200):
        want = expected(random.Random(seed).random(), dict(enumerate(shares)))
        token = sample([logits], [request(seed=seed)])[0]
        assert want in (token, None)
        seen.add(token)
    assert seen == {0, 1, 2, 3}


@given(
    logits=st.lists(st.integers(-40, 40), min_size=3, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.6, 0.9, 0.99, 1.0]),
)
def test_filters_are_those_of_the_textbook(logits: list[int], temperature: float, top_k: int, top_p: float) -> None:
    scaled = [number / 10 for number in logits]
    probabilities = kept(scaled, temperature, top_k, top_p)
    # Where a cumulative sum lies on top_p itself, one token more or less is a matter of rounding.
    loose = kept(scaled, temperature, top_k, min(1.0, top_p + SAFE))
    exact = len(loose) == len(kept(scaled, temperature, top_k, top_p - SAFE))
    filtered = top_k or top_p < 1
    ordered = probabilities if filtered else dict(sorted(probabilities.items()))
    for seed in range(12):
        token = sample([scaled], [request(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p)])[0]
        assert token in loose
        if exact and top_k != 1:
            assert expected(random.Random(seed).random(), ordered) in (token, None)


def test_the_most_probable_token_always_survives() -> None:
    assert {sample([[0.0, 5.0, 1.0]], [request(seed=seed, top_p=1e-9)])[0] for seed in range(20)} == {1}


def test_top_k_beyond_the_vocabulary_filters_nothing() -> None:
    assert {sample([[0.0, 0.0]], [request(seed=seed, top_k=50)])[0] for seed in range(20)} == {0, 1}


def test_a_token_without_probability_is_never_drawn() -> None:
    never = float("-inf")
    for seed in range(50):
        assert sample([[never, 0.0, never, 0.0, never]], [request(seed=seed)])[0] in (1, 3)


class Edge(random.Random):
    """A generator that sits at one end of [0, 1)."""

    value = 0.0

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.9}])
@pytest.mark.parametrize("value", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval(value: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The number nearest to 1 rounds to 1 in float32 and still draws a token that has probability."""
    never = float("-inf")
    sampler, one = Sampler(), request(seed=0, **params)
    generator = Edge()
    generator.value = value
    sampler._generators[one.id] = generator
    assert sample([[never, 0.0, -1.0, never]], [one], sampler)[0] == (1 if value == 0.0 else 2)


def test_more_tokens_than_a_float_counts() -> None:
    """Over a vocabulary of 200 000 equal tokens draws follow the uniform numbers from one end to the other."""
    size = 200_000
    for seed in range(20):
        uniform = random.Random(seed).random()
        token = sample([[0.0] * size], [request(seed=seed)])[0]
        assert abs(token - uniform * size) < 0.001 * size


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-37])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    assert sample([[1.0, 3.0, 2.0]], [request(temperature=temperature, seed=1)]) == [1]


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 5e-324])
def test_a_temperature_too_low_for_float32_is_greedy(temperature: float) -> None:
    assert sample([[1.0, 30.0, 2.0, 0.0]], [request(temperature=temperature, seed=1)]) == [1]


def test_a_very_high_temperature_is_uniform() -> None:
    seen = {sample([[0.0, 9.0, 5.0]], [request(temperature=1e30, seed=seed)])[0] for seed in range(40)}
    assert seen == {0, 1, 2}


# -- seeds --------------------------------------------------------------------------------------------------------


def stream(sampler: Sampler, one: Request, steps: int = 12) -> list[int]:
    return [sample([[0.0] * 50], [one], sampler)[0] for _ in range(steps)]


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    assert stream(Sampler(), request(seed=5)) == stream(Sampler(), request(9, seed=5))
    assert stream(Sampler(), request(seed=5)) != stream(Sampler(), request(seed=6))


def test_the_engines_seed_covers_requests_without_one() -> None:
    assert stream(Sampler(3), request()) == stream(Sampler(3), request())
    assert stream(Sampler(3), request()) != stream(Sampler(4), request())


def test_company_does_not_change_a_seeded_request() -> None:
    alone = stream(Sampler(), request(0, seed=5))
    sampler, one = Sampler(8), request(0, seed=5)
    others = [request(1), request(2, temperature=0), request(3, seed=5)]
    beside = [sample([[0.0] * 50] * 4, [*others[:2], one, others[2]], sampler)[2] for _ in range(12)]
    assert beside == alone


@pytest.mark.parametrize("other", [{"top_k": 10}, {"top_p": 0.9}])
def test_a_filtered_neighbour_does_not_change_a_seeded_request(other: dict[str, Any]) -> None:
    logits = [float(number % 7) / 3 for number in range(50)]
    for seed in range(20):
        alone = sample([logits], [request(0, seed=seed)])[0]
        beside = sample([logits, logits], [request(0, seed=seed), request(1, seed=1, **other)])[0]
        assert beside == alone


def test_a_forgotten_request_starts_its_seed_again() -> None:
    sampler, one = Sampler(), request(seed=5)
    first = stream(sampler, one)
    sampler.forget(one)
    sampler.forget(one)
    assert stream(sampler, one) == first


# -- end tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("produced", "token"), [(0, 3), (1, 3), (2, 1)])
def test_end_tokens_are_barred_until_min_tokens(produced: int, token: int) -> None:
    logits = [0.0, 9.0, 8.0, 7.0]
    one = request(produced=produced, end=(1, 2), temperature=0, min_tokens=2)
    assert sample([logits], [one]) == [token]


def test_barring_touches_only_the_row_that_asks() -> None:
    rows = [[0.0, 9.0, 1.0]] * 2
    requests = [request(0, end=(1,), temperature=0, min_tokens=1), request(1, end=(1,), temperature=0)]
    assert sample(rows, requests) == [2, 1]


def test_barred_tokens_are_not_drawn_either() -> None:
    for seed in range(30):
        assert sample([[0.0, 9.0, 0.0]], [request(end=(1,), seed=seed, min_tokens=1)])[0] in (0, 2)


def test_an_end_token_outside_the_vocabulary_bars_nothing() -> None:
    rows = [[0.0, 9.0, 8.0]] * 2
    one = request(0, end=(1, 7), temperature=0, min_tokens=1)
    assert sample(rows, [one, request(1, temperature=0)]) == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_of_logits(dtype: Any) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]], dtype=dtype)
    tokens = Sampler().sample(logits, [request(0, temperature=0), request(1, temperature=0.01, seed=1)])
    assert tokens == [1, 1]


def test_on_meta_tensors_every_row_gets_some_token() -> None:
    logits = torch.zeros(2, 9, device="meta")
    assert Sampler().sample(logits, [request(0, temperature=0), request(1, seed=1, top_k=3)]) == [0, 0]
