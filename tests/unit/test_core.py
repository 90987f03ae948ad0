from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.core import Request, RequestOutput, RequestState, SamplingParams, ScheduledBatch, TokenLogprob
from onebudget.errors import ConfigError


def request(number: int, prompt: int, **settings: Any) -> Request:
    return Request(number, list(range(prompt)), SamplingParams(), max_new_tokens=4, **settings)


def test_defaults_are_those_of_the_field() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((), (), False, 0)
    assert not params.greedy


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.0}, {"top_k": 1}])
def test_greedy(settings: dict[str, Any]) -> None:
    assert SamplingParams(**settings).greedy


def test_lists_become_tuples_and_one_stop_text_a_tuple_of_one() -> None:
    params = SamplingParams(stop=["a", "bc"], stop_token_ids=[3, 4])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a", "bc"), (3, 4))
    assert SamplingParams(stop="abc").stop == ("abc",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "3"),
        ("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")),
        ("top_p", 0), ("top_p", 1.01), ("top_p", float("nan")), ("top_k", -1), ("top_k", 1.0),
        ("seed", 1.5), ("seed", True), ("stop", ("",)), ("stop", ("a", 3)),
        ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)), ("min_tokens", -1), ("min_tokens", 0.5),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")), ("logprobs", -1), ("n", 0), ("n", "1"),
    ],
)  # fmt: skip
def test_unusable_values_name_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field
    assert field in str(refused.value)
    assert refused.value.allowed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", "x"),
        ("top_p", None),
        ("stop", 5),
        ("stop_token_ids", 5),
    ],
)
def test_wrong_types_are_config_errors_too(field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_no_penalty_is_the_default_and_none_means_it() -> None:
    params = SamplingParams(
        repetition_penalty=None, presence_penalty=None, frequency_penalty=None, prompt_ignore_length=None
    )  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert not params.penalised


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 0.5}, {"presence_penalty": -2}, {"frequency_penalty": 0.001}]
)
def test_any_penalty_means_that_tokens_are_counted(penalty: dict[str, Any]) -> None:
    assert SamplingParams(**penalty).penalised


@given(prompt=st.integers(1, 50), chunks=st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_chunks_walk_through_the_prompt_once(prompt: int, chunks: list[int]) -> None:
    one = request(0, prompt)
    seen: list[int] = []
    for chunk in [*chunks, prompt]:
        one.chunk_tokens = min(chunk, one.remaining_prompt_tokens)
        seen += one.tokens_of_step()
        assert one.is_last_chunk == (len(seen) == prompt)
        one.computed_tokens += one.chunk_tokens
    assert seen == one.prompt_token_ids
    assert one.remaining_prompt_tokens == 0


def test_generation_computes_the_last_sampled_token() -> None:
    one = request(0, 3)
    one.computed_tokens, one.state = 3, RequestState.GENERATION
    one.output_token_ids += [8, 9]
    assert one.tokens_of_step() == [9]
    assert (one.prompt_tokens, one.total_tokens) == (3, 5)


def test_batch_orders_chunks_last_chunks_generation() -> None:
    generating, last, chunk = request(0, 3, state=RequestState.GENERATION), request(1, 5), request(2, 9)
    generating.output_token_ids.append(1)
    last.chunk_tokens, chunk.chunk_tokens = 5, 8
    batch = ScheduledBatch()
    for one in (generating, last, chunk):
        batch.add(one)
    assert batch.requests == [chunk, last, generating]
    assert batch.context == [chunk, last]
    assert (batch.size, batch.tokens) == (3, 5 + 8 + 1)
    assert ScheduledBatch().size == ScheduledBatch().tokens == 0


def test_finish_is_final() -> None:
    one = request(0, 2)
    assert not one.finished
    one.finish("length")
    assert one.finished
    assert (one.finish_reason, one.error) == ("length", None)
    assert one.timings.finished is not None
    assert one.timings.to_dict()["first_token_s"] is None


def test_output_is_a_copy_of_the_request() -> None:
    one = request(7, 2)
    one.prompt = "hi"
    one.output_token_ids += [4, 5]
    one.finish("error", "why")
    output = RequestOutput.of(one)
    one.output_token_ids.append(6)
    assert (output.request_id, output.prompt, output.token_ids) == (7, "hi", [4, 5])
    assert output.to_dict() == {
        "request_id": 7, "prompt": "hi", "prompt_token_ids": [0, 1], "text": "", "token_ids": [4, 5],
        "finish_reason": "error", "error": "why", "timings": one.timings.to_dict(),
    }  # fmt: skip


def test_log_probabilities_are_in_the_output_only_where_asked_for() -> None:
    first, second = TokenLogprob(4, -0.5, 1, ((4, -0.5), (9, -2.0))), TokenLogprob(5, float("-inf"), 10)
    one = Request(0, [1, 2], SamplingParams(logprobs=2, prompt_logprobs=0), max_new_tokens=4)
    one.output_token_ids += [4]
    one.logprobs += [first, second]  # the second belongs to a token that was thrown away
    one.prompt_logprobs += [None, second]
    output = RequestOutput.of(one)
    assert output.logprobs == [first]
    document = output.to_dict()
    assert document["logprobs"] == [
        {"token_id": 4, "logprob": -0.5, "rank": 1,
         "top": [{"token_id": 4, "logprob": -0.5}, {"token_id": 9, "logprob": -2.0}]},
    ]  # fmt: skip
    assert document["prompt_logprobs"] == [None, {"token_id": 5, "logprob": None, "rank": 10, "top": []}]
    assert RequestOutput.of(request(0, 2)).logprobs is None
