"""``run`` around the engine: which prompts and knobs reach it, what is printed, which status comes out.

The engine itself is replaced by a stand-in here; tests/e2e runs the real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import onebudget
from onebudget.budget.ledger import Ledger
from onebudget.core import RequestOutput, SamplingParams, Timings
from onebudget.errors import BudgetError, DeviceError, ModelError

Invoke = Callable[..., Any]
Answer = Callable[[int, Any], tuple[str, list[int], str | None]]


def paris(number: int, prompt: Any) -> tuple[str, list[int], str | None]:
    return f"answer {number}", [number], None


class Stage:
    """What the commands see of the engine, and what they told it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.answer: Answer = paris
        self.failure: BaseException | None = None
        self.interrupt = False
        self.model: Any = None
        self.settings: dict[str, Any] = {}
        self.prompts: Sequence[Any] = ()
        self.params: Sequence[SamplingParams] = ()
        self.closed = 0

    def open(self, model: Any, **settings: Any) -> StandIn:
        self.model, self.settings = model, settings
        print("a library talks on stdout")
        if self.failure is not None:
            raise self.failure
        return StandIn(self)


class StandIn:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.interrupted = False

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.stage.closed += 1

    def generate(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], *, return_on_interrupt: bool
    ) -> list[RequestOutput]:
        assert return_on_interrupt
        self.stage.prompts, self.stage.params = prompts, params
        self.interrupted = self.stage.interrupt
        outputs = []
        for number, prompt in enumerate(prompts):
            text, ids, error = self.stage.answer(number, prompt)
            reason: Any = "cancelled" if self.interrupted and number else "refused" if error else "stop"
            outputs.append(RequestOutput(number, None, [1, 2], text, ids, reason, error, Timings()))
        return outputs

    def run_report(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {**self.stage.document, "dtype": "bfloat16", "requests": [output.to_dict() for output in outputs]}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, run_document: dict[str, Any]) -> Stage:
    stage = Stage(run_document)
    monkeypatch.setitem(vars(onebudget), "LLM", stage.open)
    monkeypatch.setattr("onebudget.models.demo.ensure_demo_model", lambda **_: Path("demo-folder"))
    return stage


def recorded(number: int, prompt: Any) -> tuple[str, list[int], str | None]:
    from onebudget.models.demo import demo_prompts

    return "", list(demo_prompts()[number].greedy["bfloat16"].token_ids), None


def test_prompts_of_both_kinds_reach_the_engine_in_order(invoke: Invoke, stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "c", "max_tokens": 5}\n{"messages": [{"role": "user", "content": "d"}]}\n')
    result = invoke("run", "folder", "--prompt", "a", "--prompt", "b", "--prompts", file, "--top-k", "3")
    assert result.status == 0
    assert stage.prompts == ["a", "b", "c", [{"role": "user", "content": "d"}]]
    assert [params.max_tokens for params in stage.params] == [64, 64, 5, 64]
    assert {params.top_k for params in stage.params} == {3}
    assert {params.temperature for params in stage.params} == {0.0}
    assert stage.model == "folder"
    assert stage.closed == 1


def test_only_given_knobs_reach_the_engine(invoke: Invoke, stage: Stage) -> None:
    invoke("run", "m", "--prompt", "a", "--device-memory", "512MiB", "--no-enable-chunked-prefill", "--strict-memory")
    progress = stage.settings.pop("progress")
    assert hasattr(progress, "stage")
    assert stage.settings == {
        "device": "host", "strict_memory": True, "attention_dp": False, "device_memory": 2**29,
        "enable_chunked_prefill": False,
    }  # fmt: skip


def test_ranks_with_requests_of_their_own_are_asked_for_by_a_flag(invoke: Invoke, stage: Stage) -> None:
    invoke("run", "m", "--prompt", "a", "--attention-dp")
    assert stage.settings["attention_dp"] is True


def test_people_see_answers_then_the_ledger(invoke: Invoke, stage: Stage) -> None:
    result = invoke("run", "m", "--prompt", "What is it?", "--quiet")
    assert (result.status, result.err) == (0, "")
    lines = result.out.splitlines()
    assert "1. What is it?" in lines
    assert any(line.strip().startswith("answer 0 [stop; 2 prompt and 1 new tokens]") for line in lines)
    order = [result.out.index(text) for text in ("answer 0", "[AAA", "total", "throughput:", "counters:")]
    assert order == sorted(order)


def test_text_of_a_model_can_not_steer_the_terminal(invoke: Invoke, stage: Stage) -> None:
    stage.answer = lambda number, prompt: ("\x1b[2Jgone [bold]", [1], None)
    out = invoke("run", "m", "--prompt", "a").out
    assert "\x1b" not in out
    assert "gone [bold]" in out


def test_json_is_one_document_whatever_libraries_print(invoke: Invoke, stage: Stage, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    result = invoke("run", "m", "--prompt", "a", "--json", "--json-file", copy)
    document = json.loads(result.out)
    assert document["requests"][0]["text"] == "answer 0"
    assert document["capacity_bytes"] == 80 * 2**30
    assert json.loads(copy.read_text()) == document
    assert "a library talks on stdout" in result.err


def test_the_demo_is_compared_token_by_token(invoke: Invoke, stage: Stage) -> None:
    stage.answer = recorded
    result = invoke("run", "--quiet")
    assert (result.status, result.err) == (0, "")
    assert "8 of 8 answers equal the recorded ones token by token (bfloat16)." in result.out
    assert stage.model == Path("demo-folder")
    assert all(isinstance(prompt, list) for prompt in stage.prompts)


def test_a_demo_answer_that_differs_is_status_1(invoke: Invoke, stage: Stage) -> None:
    stage.answer = lambda number, prompt: ("", [0], None) if number == 3 else recorded(number, prompt)
    result = invoke("run", "--quiet")
    assert result.status == 1
    assert "7 of 8 answers equal" in result.out
    assert "1 of 8 answers differ" in result.paragraph
    document = json.loads(invoke("run", "--json").out)
    assert document["demo"] == {"equal": 7, "of": 8, "dtype": "bfloat16"}


@pytest.mark.parametrize("option", [("--max-tokens", "3"), ("--temperature", "0.7"), ("--top-k", "1")])
def test_the_demo_is_not_compared_when_sampling_was_changed(
    invoke: Invoke, stage: Stage, option: tuple[str, str]
) -> None:
    result = invoke("run", "--quiet", *option)
    assert result.status == 0
    assert "recorded" not in result.out


def test_another_model_without_prompts_answers_the_demo_questions(invoke: Invoke, stage: Stage) -> None:
    assert invoke("run", "m").status == 0
    assert len(stage.prompts) == 8
    assert all(isinstance(prompt, str) for prompt in stage.prompts)


def test_a_refused_request_is_status_1_and_the_others_are_shown(invoke: Invoke, stage: Stage) -> None:
    stage.answer = lambda number, prompt: ("", [], "too long by 3 tokens") if number == 1 else paris(number, prompt)
    result = invoke("run", "m", "--prompt", "a", "--prompt", "b", "--prompt", "c", "--quiet")
    assert result.status == 1
    assert "1 of 3 requests were not answered; the first: too long by 3 tokens" in result.paragraph
    assert "answer 0" in result.out
    assert "answer 2" in result.out


def test_an_interrupted_run_prints_what_was_finished(invoke: Invoke, stage: Stage) -> None:
    stage.interrupt = True
    result = invoke("run", "m", "--prompt", "a", "--prompt", "b", "--quiet")
    assert result.status == 130
    assert "1 of 2 requests were finished" in result.paragraph
    assert "answer 0" in result.out


def test_an_interrupt_while_loading_is_130(invoke: Invoke, stage: Stage) -> None:
    stage.failure = KeyboardInterrupt()
    result = invoke("run", "m", "--prompt", "a", "--json")
    assert (result.status, result.out) == (130, "")
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("failure", "status"),
    [(ModelError("no such folder"), 2), (DeviceError("gone", 3), 1), (OSError(28, "disk is full"), 1)],
)
def test_what_the_engine_can_not_do_is_one_paragraph(
    invoke: Invoke, stage: Stage, failure: Exception, status: int
) -> None:
    stage.failure = failure
    result = invoke("run", "m", "--prompt", "a", "--quiet", "--json")
    assert (result.status, result.out) == (status, "")
    assert result.err.count("error: ") == 1
    assert "Traceback" not in result.err


def no_room(document: dict[str, Any]) -> BudgetError:
    ledger = Ledger.from_dict(document)
    kept = ledger.replace(
        fits=False, shortfall_bytes=4096, unassigned_bytes=ledger.unassigned_bytes + ledger.kv_cache.bytes,
        kv_cache=type(ledger.kv_cache)(),
    )  # fmt: skip
    return BudgetError("no room: 4096 B are missing", ledger=kept)


def test_no_room_is_status_1_with_the_ledger(
    invoke: Invoke, stage: Stage, run_document: dict[str, Any], tmp_path: Path
) -> None:
    stage.failure = no_room(run_document)
    shown = invoke("run", "m", "--prompt", "a", "--quiet")
    assert shown.status == 1
    assert "no room" in shown.paragraph
    assert "does not fit, short of 4.00 KiB" in shown.out
    document = json.loads(invoke("run", "m", "--prompt", "a", "--json").out)
    assert (document["fits"], document["shortfall_bytes"], document["kv_cache"]["bytes"]) == (False, 4096, 0)


def test_the_page_is_written(invoke: Invoke, stage: Stage, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    assert str(page) in invoke("run", "m", "--prompt", "a", "--report", page).out
    assert "answer 0" in page.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt", " "], ["--prompts", "{missing}"], ["--prompts", "{empty}"], ["--prompts", "{folder}"],
        ["--prompts", "{broken}"], ["--max-tokens", "0"], ["--temperature", "-1"], ["--top-p", "0"],
        ["--max-gpu-total-bytes", "0"], ["--report", "{folder}"], ["--json-file", "{folder}/none/x.json"],
    ],
)  # fmt: skip
def test_unusable_input_is_found_before_the_engine_is_touched(
    invoke: Invoke, stage: Stage, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "broken").write_text('{"prompt": 3}')
    names = {name: str(tmp_path / name) for name in ("missing", "empty", "broken")} | {"folder": str(tmp_path)}
    result = invoke("run", "m", *(argument.format(**names) for argument in arguments))
    assert (result.status, result.out) == (2, "")
    assert result.paragraph
    assert stage.model is None


def test_a_broken_line_is_named_by_number(invoke: Invoke, stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "max_token": 3}\n')
    paragraph = invoke("run", "m", "--prompts", file).paragraph
    assert f"{file}, line 2" in paragraph
    assert "did you mean max_tokens" in paragraph
