"""What ``run`` serves, and the demo: eight prompts whose greedy answers are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onebudget.cli.prompts import Prompt
from onebudget.core import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from onebudget.models.demo_reference import DemoPrompt


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts beside their sampling parameters; ``references`` only where the answers are known in advance."""

    prompts: list[Prompt]
    params: list[SamplingParams]
    references: Sequence[DemoPrompt] = ()

    def judge(self, document: dict[str, Any], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The run's document, with ``"demo"`` added: how many answers are the recorded ones of its dtype.

        Unchanged where nothing was recorded.
        """
        expected = [reference.greedy.get(document["dtype"]) for reference in self.references]
        if not expected or None in expected:
            return document
        equal = sum(
            answer is not None and list(output.token_ids) == list(answer.token_ids)
            for output, answer in zip(outputs, expected, strict=True)
        )
        return {**document, "demo": {"equal": equal, "of": len(expected), "dtype": document["dtype"]}}


def demo_workload(sampling: Mapping[str, Any], defaults: Mapping[str, Any]) -> Workload:
    """The demo prompts. Answers are compared with the record only while nobody changed how tokens are chosen."""
    prompts = _demo_prompts()
    limits = [{} if "max_tokens" in sampling else {"max_tokens": prompt.max_tokens} for prompt in prompts]
    params = [SamplingParams(**{**defaults, **limit}) for limit in limits]
    messages: list[Prompt] = [[dict(message) for message in prompt.messages] for prompt in prompts]
    return Workload(messages, params, () if sampling else prompts)


def texts_of_demo() -> list[str]:
    """The demo's questions as plain texts, for any model."""
    return [prompt.messages[-1]["content"] for prompt in _demo_prompts()]


def _demo_prompts() -> Sequence[DemoPrompt]:
    from onebudget.models.demo import demo_prompts

    return demo_prompts()
