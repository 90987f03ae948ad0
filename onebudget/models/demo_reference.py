"""Eight chat prompts with what ``transformers`` answers on the demo model: something to serve and to agree with.

``scripts/record_demo_reference.py`` wrote the file behind this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class GreedyReference:
    """What ``transformers`` generates greedily for one prompt alone, in one dtype.

    ``token_ids`` ends with the end-of-sequence id when the model stopped by itself. ``min_margin`` is the smallest
    distance between the best and the second logit along the path: another implementation whose logits are off by less
    than half of it chooses the same ids.
    """

    token_ids: tuple[int, ...]
    min_margin: float


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """One chat prompt, its ids under the model's chat template, and the greedy answers by dtype name.

    ``text`` is the float32 answer without special tokens; ``greedy`` has the keys ``float32`` and ``bfloat16``.
    """

    messages: tuple[dict[str, str], ...]
    max_tokens: int
    prompt_token_ids: tuple[int, ...]
    text: str
    greedy: dict[str, GreedyReference]


@cache
def demo_prompts() -> tuple[DemoPrompt, ...]:
    """The prompts kept with this package, in a fixed order."""
    return tuple(_prompt(entry) for entry in _recorded()["prompts"])


def demo_reference_versions() -> dict[str, str]:
    """The library versions that produced the recorded answers, and the hash of the weights."""
    return dict(_recorded()["made_with"])


@cache
def _recorded() -> dict[str, Any]:
    text = resources.files("onebudget.models").joinpath("demo_prompts.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _prompt(entry: dict[str, Any]) -> DemoPrompt:
    return DemoPrompt(
        messages=tuple(entry["messages"]),
        max_tokens=entry["max_tokens"],
        prompt_token_ids=tuple(entry["prompt_token_ids"]),
        text=entry["text"],
        greedy={
            dtype: GreedyReference(token_ids=tuple(answer["token_ids"]), min_margin=answer["min_margin"])
            for dtype, answer in entry["greedy"].items()
        },
    )
