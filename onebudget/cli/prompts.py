"""Prompts from a file: one per line as plain text, or JSON lines with sampling fields of their own."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from onebudget.core import SamplingParams
from onebudget.errors import ConfigError

Prompt = str | list[int] | list[dict[str, Any]]
_SAMPLING_FIELDS = tuple(item.name for item in fields(SamplingParams))
_FIELDS = ("prompt", "messages", *_SAMPLING_FIELDS)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt (text, token ids or chat messages) and the sampling fields that came with it."""

    prompt: Prompt
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Sampling parameters: the line's own fields over ``defaults``."""
        return SamplingParams(**{**defaults, **self.sampling})


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a file (``-``: stdin). JSON lines when it is named so or its first line starts an object.

    Blank lines are skipped. Raises ``ConfigError`` naming the line that can't be used, or saying that there is none.
    """
    lines = [(number, line) for number, line in enumerate(_text(path).splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError(
            f"{path} holds no prompts.", field="--prompts", value=str(path), allowed="one prompt per line"
        )
    if path.suffix in (".jsonl", ".ndjson") or lines[0][1].lstrip().startswith("{"):
        return list(_json_lines(path, lines))
    return [PromptLine(line.strip()) for _, line in lines]


def _text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror or error}.", field="--prompts", value=str(path)
        ) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not text in UTF-8.", field="--prompts", value=str(path)) from error


def _json_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[PromptLine]:
    for number, line in lines:
        try:
            yield _json_line(line)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}", field="--prompts", value=line[:80]) from error


def _json_line(line: str) -> PromptLine:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg} at column {error.colno}.") from error
    except RecursionError as error:
        raise ConfigError("its JSON is nested too deeply.") from error
    if not isinstance(entry, dict):
        raise ConfigError("not a JSON object.")
    for name in entry:
        if name not in _FIELDS:
            raise ConfigError(f"there is no field {name!r}{_near(name)}.", field=name)
    given = {name: value for name, value in entry.items() if name in _SAMPLING_FIELDS and value is not None}
    return PromptLine(_prompt(entry), _checked_sampling(given))


def _checked_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The fields with the types that ``SamplingParams`` wants; ``ConfigError`` names the one that can't have it."""
    from pydantic import TypeAdapter, ValidationError

    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        params = TypeAdapter(SamplingParams).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(step) for step in first["loc"])
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        raise ConfigError(f"{name}: {reason}" if name else reason, field=name or None) from error
    return {name: getattr(params, name) for name in given}


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, _FIELDS, n=2)
    return f"; did you mean {' or '.join(near)}" if near else f"; there are {', '.join(_FIELDS)}"


def _prompt(entry: Mapping[str, Any]) -> Prompt:
    if ("prompt" in entry) == ("messages" in entry):
        raise ConfigError('it needs either "prompt" or "messages".')
    if "messages" in entry:
        return _messages(entry["messages"])
    prompt = entry["prompt"]
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return list(prompt)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError.for_field("prompt", prompt, "a text that is not empty, or a list of token ids")
    return prompt


def _messages(messages: object) -> list[dict[str, Any]]:
    usable = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )
    if not usable or not messages:
        raise ConfigError.for_field("messages", messages, 'a list of objects with "role" and "content"')
    assert isinstance(messages, list)
    return messages
