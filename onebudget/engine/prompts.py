"""Prompts in their three forms: text, token ids, chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onebudget.errors import RequestError

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


def as_prompts(prompts: Any) -> list[Prompt]:
    """A single prompt counts as a list of one."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    single = bool(prompts) and all(isinstance(part, (int, Mapping)) for part in prompts)
    return [prompts] if single else list(prompts)


def tokenize(tokenizer: Any, prompt: Prompt) -> tuple[str | None, list[int]]:
    """Prompt text (None for ids) and its token ids. ``RequestError`` when the prompt is of no usable form."""
    if isinstance(prompt, str):
        return prompt, _token_ids(tokenizer, prompt)
    if isinstance(prompt, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        return None, [int(token) for token in prompt]  # type: ignore[arg-type]
    if isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt):
        text = _chat_text(tokenizer, prompt)  # type: ignore[arg-type]
        return text, _token_ids(tokenizer, text, add_special_tokens=False)
    raise RequestError(
        f"a prompt must be a text, a list of token ids, or a list of chat messages, not {type(prompt).__name__}."
    )


def _token_ids(tokenizer: Any, text: str, **options: bool) -> list[int]:
    try:
        return list(tokenizer(text, **options).input_ids)
    except Exception as error:  # a lone surrogate, say, that no encoding can hold
        raise RequestError(f"the prompt can't be turned into tokens: {error}") from error


def _chat_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except Exception as error:
        raise RequestError(f"the chat template can't render these messages: {error}") from error
