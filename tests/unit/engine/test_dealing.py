"""Requests of one call among ranks: who computes which, and that all learn every result in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import Request, SamplingParams
from onebudget.engine.dealing import Dealt, EveryRank, deal
from onebudget.engine.ranks import RankGroup
from onebudget.engine.session import Session


def request(number: int, prompt: int, new: int = 4) -> Request:
    return Request(number, [5] * prompt, SamplingParams(), max_new_tokens=new)


def test_each_request_goes_where_the_fewest_tokens_are() -> None:
    # 14 and 44 tokens are dealt after two; then 14 + 9, 23 + 30 and 44 + 5.
    requests = [request(number, prompt) for number, prompt in enumerate([10, 40, 5, 26, 1])]
    assert deal(requests, 2) == [0, 1, 0, 0, 1]
    assert deal([], 2) == []
    assert deal([request(number, 3) for number in range(5)], 3) == [0, 1, 2, 0, 1]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 200))), st.integers(1, 8))
def test_ranks_differ_by_one_request_at_most(shapes: list[tuple[int, int]], ranks: int) -> None:
    requests = [request(number, *shape) for number, shape in enumerate(shapes)]
    tokens = [0] * ranks
    for one, rank in zip(requests, deal(requests, ranks), strict=True):
        tokens[rank] += one.prompt_tokens + one.max_new_tokens
    assert max(tokens) - min(tokens) <= max([prompt + new for prompt, new in shapes], default=0)


class Together(RankGroup):
    """One of several ranks in this process; what the others would say is said by ``others``."""

    def __init__(self, rank: int, others: dict[int, Any]) -> None:
        self.rank, self.size, self.others = rank, len(others) + 1, others

    def gather(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else self.others[rank] for rank in range(self.size)]


def sessions(count: int) -> list[Session]:
    return [Session(request(number, 6), None) for number in range(count)]


def test_ranks_that_serve_the_same_requests_ask_nobody() -> None:
    every, dealing = sessions(3), EveryRank()
    assert dealing.own(every) is every
    assert dealing.unfinished(every)
    for session in every:
        session.request.finish("length")
    assert not dealing.unfinished(every)
    assert [output.request_id for output in dealing.outputs(every, every)] == [0, 1, 2]


def test_a_refused_request_is_dealt_to_nobody_and_known_to_all() -> None:
    every = sessions(4)
    every[1].request.finish("refused", "too long")
    shares = [[session.request.id for session in Dealt(Together(r, {1 - r: None})).own(every)] for r in range(2)]
    assert shares == [[0, 3], [2]]


@pytest.mark.parametrize(("here", "there"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_rank_goes_on_while_any_has_work(here: bool, there: bool) -> None:
    own = sessions(1)
    if not here:
        own[0].request.finish("length")
    assert Dealt(Together(0, {1: there})).unfinished(own) is (here or there)


def test_every_rank_gets_all_results_in_the_order_of_the_prompts() -> None:
    copies = [sessions(5), sessions(5)]
    owned = [Dealt(Together(rank, {1 - rank: None})).own(copies[rank]) for rank in range(2)]
    for rank, own in enumerate(owned):
        for session in own:
            session.request.output_token_ids = [rank, session.request.id]
            session.request.finish("length")
    told = [EveryRank().outputs(own, own) for own in owned]
    for rank in range(2):
        dealing = Dealt(Together(rank, {1 - rank: told[1 - rank]}))
        outputs = dealing.outputs(copies[rank], owned[rank])
        assert [output.token_ids for output in outputs] == [[0, 0], [1, 1], [0, 2], [1, 3], [0, 4]]
