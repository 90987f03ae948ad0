from __future__ import annotations

from array import array

from onebudget.planner.simulate.tokens import TokenArray, own_token, prompt_token_ids
from onebudget.planner.simulate.traces import TraceRequest
from onebudget.resources.kv.node import token_bytes


def test_equal_ids_give_equal_tokens_and_no_others() -> None:
    one = prompt_token_ids(TraceRequest(0, 1100, 1, (3, 7, 9)), 0)
    other = prompt_token_ids(TraceRequest(0, 1024, 1, (3, 8)), 1)
    assert (len(one), len(other)) == (1100, 1024)
    assert one[:512] == other[:512] == array("i", [3] * 512)
    assert set(one[512:]).isdisjoint(other[512:])


def test_prompts_without_prefixes_share_nothing() -> None:
    prompts = [prompt_token_ids(TraceRequest(0, 40, 1), number) for number in range(3)]
    assert len({prompt[0] for prompt in prompts}) == 3
    assert list(prompts[1]) == [own_token(1)] * 40


def test_arrays_stand_where_lists_of_tokens_do() -> None:
    ids = TokenArray([1, 2])
    assert list(ids + [3]) == list([1] + TokenArray([2, 3])) == [1, 2, 3]  # noqa: RUF005 (what a request does)
    assert token_bytes(ids) == array("i", [1, 2]).tobytes()
