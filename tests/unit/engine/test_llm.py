"""The public front on a tiny model."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, RequestOutput, SamplingParams
from onebudget.core import Request
from onebudget.engine.llm import StreamChunk
from onebudget.errors import ConfigError, StateError

KNOBS: dict[str, Any] = {"dtype": "fp32", "device_memory": "8MiB", "max_seq_len": 64, "max_num_tokens": 64}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = ["one", "another", [5, 6, 7, 8], "a third, longer prompt"]


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("gqa")


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **KNOBS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The same engine for all tests, checked to be empty after each."""
    yield shared
    assert_idle(shared)


def assert_idle(llm: LLM) -> None:
    executor = llm.engine.executor
    assert not executor.has_work
    assert executor.kv.free_blocks == executor.kv.max_resource_count()
    assert executor.slots.free_slots == executor.slots.max_resource_count()


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


# -- prompts ------------------------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == ["one", "another", None, "a third, longer prompt"]
    assert [output.prompt_token_ids for output in outputs][2] == [5, 6, 7, 8]
    assert [output.finish_reason for output in outputs] == ["length"] * 4
    assert [len(output.token_ids) for output in outputs] == [6] * 4
    assert [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS] == [o.token_ids for o in outputs]
    assert len({output.request_id for output in outputs}) == 4


def test_text_is_what_the_tokenizer_decodes(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, SamplingParams(max_tokens=20, seed=3, ignore_eos=True)):
        assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    text, ids = llm.generate("hi", GREEDY), llm.generate(llm.tokenizer("hi").input_ids, GREEDY)
    assert len(text) == len(ids) == 1
    assert text[0].token_ids == ids[0].token_ids
    assert llm.generate(("hi",), GREEDY)[0].token_ids == text[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_chat_goes_through_the_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    prompt = "<bos>user\nhi<end>\n<bos>assistant\n"
    one, several = llm.chat(talk, GREEDY), llm.chat([talk, talk], GREEDY)
    assert one[0].prompt == prompt
    assert one[0].prompt_token_ids == llm.tokenizer(prompt).input_ids
    assert [output.token_ids for output in several] == [one[0].token_ids] * 2
    assert llm.generate(talk, GREEDY)[0].prompt == prompt


BAD: list[tuple[Any, str]] = [
    ([], "no tokens"),
    ("", "no tokens"),
    ([1, 320], "320 is outside the vocabulary"),
    ([1, -1], "-1 is outside the vocabulary"),
    ([5] * 65, "65 tokens and max_seq_len is 64"),
    ([1.5, 2.5], "a prompt must be"),
    ([True, False], "a prompt must be"),
    (["a", 1], "a prompt must be"),
    ([{"role": "user"}, 3], "a prompt must be"),
    ([{"content": "by nobody"}], "a message without a role"),
]


@pytest.mark.parametrize(("bad", "says"), BAD)
def test_a_bad_prompt_among_good_ones_fails_alone(llm: LLM, bad: Any, says: str) -> None:
    outputs = llm.generate(["good", bad, "fine"], GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", "refused", "length"]
    assert says in (outputs[1].error or "")
    assert (outputs[1].token_ids, outputs[1].text) == ([], "")
    assert [output.error for output in outputs[::2]] == [None, None]


@pytest.mark.parametrize("bad", [None, 3, 3.5, object(), "\ud800"])
def test_a_prompt_of_no_form_at_all_fails_alone(llm: LLM, bad: Any) -> None:
    try:
        outputs = llm.generate(["good", bad, "fine"], GREEDY)
    finally:
        for request in list(llm.engine.executor.scheduler.waiting):
            llm.engine.executor.cancel(request)
    assert [output.finish_reason for output in outputs] == ["length", "refused", "length"]


def test_bad_parameters_of_one_request_fail_alone(llm: LLM) -> None:
    bad = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(10**6,))
    outputs = llm.generate(["good", "bad"], [GREEDY, bad])
    assert outputs[0].finish_reason == "length"


def test_max_seq_len_cuts_the_answer(llm: LLM) -> None:
    outputs = llm.generate([[5] * 60, [5] * 64], SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [5, 1]
    assert [output.finish_reason for output in outputs] == ["length", "length"]


# -- parameters ---------------------------------------------------------------------------------------------------


def test_parameters_one_for_all_or_one_each(llm: LLM) -> None:
    lengths = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 3)]
    assert [len(output.token_ids) for output in llm.generate(["a", "b"], lengths)] == [1, 3]
    with pytest.raises(ConfigError, match="2 prompts came with 1 sampling_params"):
        llm.generate(["a", "b"], lengths[:1])


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, top_k=20, seed=11, ignore_eos=True)
    alone = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    assert [output.token_ids for output in llm.generate(PROMPTS, params)] == alone


def test_end_tokens_and_min_tokens(llm: LLM) -> None:
    free = llm.generate("one", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].token_ids
    end = free[3]
    assert end not in free[:3]
    stopped = llm.generate("one", SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(end,), ignore_eos=True))
    assert (stopped[0].token_ids, stopped[0].finish_reason) == (free[:4], "stop")
    later = llm.generate(
        "one", SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(end,), min_tokens=8, ignore_eos=True)
    )[0]
    assert end not in later.token_ids[:8]
    assert later.token_ids[:3] == free[:3]


def test_stop_texts_end_the_answer_before_them(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)
    free = llm.generate("one", params)[0]
    wanted = next(character for character in free.text[2:] if character != "\ufffd")
    stopped = llm.generate("one", SamplingParams(max_tokens=30, seed=5, ignore_eos=True, stop=(wanted,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(wanted)]
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def other_defaults(folder: Path, copy: Path, **settings: Any) -> Path:
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))
    return copy


def test_defaults_without_sampling_are_greedy(llm: LLM) -> None:
    assert llm.default_sampling_params == SamplingParams(temperature=0.0)
    assert llm.generate("a")[0].token_ids == llm.generate("a", SamplingParams(temperature=0.0))[0].token_ids


def test_defaults_of_a_generation_config_that_samples(folder: Path, tmp_path: Path) -> None:
    copy = other_defaults(folder, tmp_path / "copy", do_sample=True, temperature=0.6, top_p=0.8, top_k=7)
    with LLM(copy, **KNOBS, seed=1) as llm:
        assert llm.default_sampling_params == SamplingParams(temperature=0.6, top_p=0.8, top_k=7)


@pytest.mark.parametrize("end", [2, [2, 3, 250]])
def test_end_tokens_of_the_model_end_an_answer(folder: Path, tmp_path: Path, end: int | list[int]) -> None:
    listed = [end] if isinstance(end, int) else end
    with LLM(other_defaults(folder, tmp_path / "copy", eos_token_id=end), **KNOBS) as llm:
        outputs = llm.generate([[number] for number in range(4, 100)], SamplingParams(max_tokens=60, temperature=0))
        stopped = [output for output in outputs if output.finish_reason == "stop"]
        assert stopped
        assert {output.token_ids[-1] for output in stopped} <= set(listed)
        assert not any(token in listed for output in outputs for token in output.token_ids[:-1])
        ignoring = llm.generate(
            stopped[0].prompt_token_ids, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        )
        assert len(ignoring[0].token_ids) == 60


# -- streams ------------------------------------------------------------------------------------------------------


def gathered(chunks: list[StreamChunk]) -> dict[int, tuple[str, list[int]]]:
    whole: dict[int, tuple[str, list[int]]] = {}
    for chunk in chunks:
        text, tokens = whole.get(chunk.request_id, ("", []))
        whole[chunk.request_id] = text + chunk.text, tokens + chunk.token_ids
    return whole


@pytest.mark.parametrize("stop", [(), ("e",), ("zzz", "\ufffd")])
def test_a_stream_says_what_generate_says(llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True, stop=stop)
    outputs = llm.generate(PROMPTS, params)
    chunks = list(llm.stream(PROMPTS, params))
    assert list(gathered(chunks).values()) == [(output.text, output.token_ids) for output in outputs]
    finals = {chunk.request_id: chunk.output for chunk in chunks if chunk.output}
    assert [final.text for _, final in sorted(finals.items())] == texts(outputs)


def test_a_chunk_a_token(llm: LLM) -> None:
    chunks = list(llm.stream("one", GREEDY))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 6
    assert [chunk.output is not None for chunk in chunks] == [False] * 5 + [True]


def test_every_request_has_one_last_chunk(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (2, 5, 3)]
    chunks = list(llm.stream(["a", "b", []], params))
    finals = [chunk.request_id for chunk in chunks if chunk.output]
    assert len(finals) == len(set(finals)) == 3


def test_leaving_a_stream_early_cancels(llm: LLM) -> None:
    for _ in llm.stream(["a", "b"], GREEDY):
        break
    assert_idle(llm)
    stream = llm.stream(["a", "b"], GREEDY)
    next(stream)
    del stream
    assert_idle(llm)


def test_an_aborted_stream_ends_with_a_cancelled_output(llm: LLM) -> None:
    chunks = []
    for chunk in llm.stream("a", GREEDY):
        chunks.append(chunk)
        llm.abort(chunk.request_id)
    assert len(chunks[0].token_ids) == 1
    assert chunks[-1].output is not None
    assert chunks[-1].output.finish_reason == "cancelled"
    assert chunks[-1].output.token_ids == chunks[0].token_ids


def test_an_abort_leaves_the_others_alone(llm: LLM) -> None:
    wanted = llm.generate("b", GREEDY)[0]
    finals = {}
    for number, chunk in enumerate(llm.stream(["a", "b"], GREEDY)):
        if number == 0:
            llm.abort(chunk.request_id)
            llm.abort(chunk.request_id)
            llm.abort(10**6)
        if chunk.output:
            finals[chunk.output.prompt] = chunk.output
    assert (finals["a"].finish_reason, len(finals["a"].token_ids)) == ("cancelled", 1)
    assert (finals["b"].finish_reason, finals["b"].token_ids) == ("length", wanted.token_ids)


def test_two_streams_at_once(llm: LLM) -> None:
    short = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    first, second = llm.stream("a", GREEDY), llm.stream("b", short)
    chunks = [[next(first)], [next(second)]]
    chunks[0] += list(first)
    chunks[1] += list(second)
    for prompt, params, got in zip("ab", (GREEDY, short), chunks, strict=True):
        output = llm.generate(prompt, params)[0]
        assert list(gathered(got).values()) == [(output.text, output.token_ids)]
        assert got[-1].output is not None


def test_generate_inside_a_stream(llm: LLM) -> None:
    wanted = [output.token_ids for output in llm.generate(["a", "b"], GREEDY)]
    inside: list[int] = []
    outside: list[int] = []
    for chunk in llm.stream("a", GREEDY):
        outside += chunk.token_ids
        if not inside:
            inside = llm.generate("b", GREEDY)[0].token_ids
    assert inside == wanted[1]
    assert outside == wanted[0]


# -- interrupts ---------------------------------------------------------------------------------------------------


def interrupt(llm: LLM, monkeypatch: pytest.MonkeyPatch, at_step: int = 3) -> None:
    executor, steps = llm.engine.executor, iter(range(1, 1000))
    original = executor.step

    def step() -> Any:
        if next(steps) == at_step:
            raise KeyboardInterrupt
        return original()

    monkeypatch.setattr(executor, "step", step)


LENGTHS = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 2, 9)]


def test_an_interrupt_cancels_and_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt(llm, patch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], LENGTHS)
    assert_idle(llm)
    assert [output.finish_reason for output in llm.generate(["a", "b", "c"], LENGTHS)] == ["length"] * 3


def test_an_interrupt_can_return_what_there_is(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.generate(["a", "b", "c"], LENGTHS)
    with monkeypatch.context() as patch:
        interrupt(llm, patch)
        outputs = llm.generate(["a", "b", "c"], LENGTHS, return_on_interrupt=True)
    assert llm.interrupted
    assert [output.finish_reason for output in outputs] == ["length", "length", "cancelled"]
    assert [output.token_ids for output in outputs] == [*(o.token_ids for o in whole[:2]), whole[2].token_ids[:2]]
    assert outputs[2].text == llm.tokenizer.decode(outputs[2].token_ids, skip_special_tokens=True)


def test_interrupted_speaks_of_the_last_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt(llm, patch)
        llm.generate("c", GREEDY, return_on_interrupt=True)
    llm.generate("c", GREEDY)
    assert not llm.interrupted


def test_a_failed_step_fails_its_requests_and_the_next_call_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.executor.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", lambda *_: 1 / 0)
        outputs = llm.generate(["a", "b"], GREEDY)
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert outputs[0].error == "ZeroDivisionError: division by zero"
    assert llm.generate("a", GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("place", ["replay", "sample"])
def test_a_failure_in_the_middle_of_a_step_leaves_nothing_behind(
    llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    live = llm.engine.station.device.sample().alloc_live
    executor = llm.engine.executor
    assert executor.runner.graphs is not None
    target, name = (executor.runner.graphs.runner, "replay") if place == "replay" else (executor.sampler, "launch")
    original, calls = getattr(target, name), iter(range(100))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == (1 if place == "replay" else 2):  # the prompts' step is no replay
            raise RuntimeError("injected")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing)
        outputs = llm.generate(PROMPTS, GREEDY)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert [output.token_ids for output in outputs] == [ids[:2] for ids in wanted]
    assert_idle(llm)
    gc.collect()
    assert llm.engine.station.device.sample().alloc_live == live
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == wanted


# -- the end ------------------------------------------------------------------------------------------------------


def test_close_twice_and_use_after_close(folder: Path) -> None:
    llm = LLM(folder, **KNOBS)
    device = llm.engine.station.device
    assert device.used_bytes() > 0
    llm.close()
    llm.close()
    assert device.closed
    assert device.account.used_bytes == device.account.live_bytes == 0
    for use in (
        lambda: llm.generate("a"), lambda: llm.chat([{"role": "user", "content": "a"}]), lambda: next(llm.stream("a")),
        lambda: llm.budget, lambda: llm.config, lambda: llm.tokenizer, lambda: llm.default_sampling_params,
        llm.memory_report, lambda: llm.run_report([]),
    ):  # fmt: skip
        with pytest.raises(StateError, match="closed"):
            use()
    llm.abort(0)


def test_one_after_the_other(folder: Path) -> None:
    answers = []
    for _ in range(2):
        with LLM(folder, **KNOBS) as llm:
            answers.append(llm.generate(PROMPTS, GREEDY)[0].token_ids)
            device = llm.engine.station.device
        assert device.account.used_bytes == 0
    assert answers[0] == answers[1]


def test_two_at_a_time(folder: Path) -> None:
    with LLM(folder, **KNOBS) as first, LLM(folder, **KNOBS) as second:
        wanted = first.generate("a", GREEDY)[0].token_ids
        chunks = zip(first.stream("a", GREEDY), second.stream("a", GREEDY), strict=True)
        assert [(one.token_ids, other.token_ids) for one, other in chunks] == [([token], [token]) for token in wanted]


def test_an_exception_inside_the_context_closes(folder: Path) -> None:
    devices = []

    def leave_in_the_middle() -> None:
        with LLM(folder, **KNOBS) as llm:
            devices.append(llm.engine.station.device)
            for _ in llm.stream("a", GREEDY):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_in_the_middle()
    (device,) = devices
    assert device.closed
    assert device.account.used_bytes == 0


def test_closing_with_requests_inside_cancels_them(folder: Path) -> None:
    llm = LLM(folder, **KNOBS)
    request = Request(7, [5, 6], GREEDY, max_new_tokens=4)
    llm.engine.executor.submit(request)
    llm.engine.executor.step()
    llm.close()
    assert (request.finish_reason, len(request.output_token_ids)) == ("cancelled", 1)


def test_a_stream_left_over_when_the_llm_closes_ends_quietly(folder: Path) -> None:
    llm = LLM(folder, **KNOBS)
    stream = llm.stream("a", GREEDY)
    next(stream)
    llm.close()
    stream.close()
    again = LLM(folder, **KNOBS)
    stream = again.stream("a", GREEDY)
    next(stream)
    again.close()
    assert [chunk.output.finish_reason for chunk in stream if chunk.output] == ["cancelled"]


@pytest.mark.parametrize("device", ["tpu", "fake:0", ""])
def test_an_unknown_device(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError):
        LLM(folder, device=device)


def test_an_unknown_knob_is_answered_with_its_neighbour(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_seq_len"):
        LLM(folder, max_sequence_len=5)


@pytest.mark.parametrize("knob", [{"cross_kv_fraction": 0.5}])
def test_knobs_nothing_acts_on_are_refused_before_anything_is_opened(folder: Path, knob: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(knob))):
        LLM(folder, **{**KNOBS, **knob})
