"""Answers for people, and what they mean for the exit status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onebudget.cli.boundary import ANSWER_IS_NO, DONE, INTERRUPTED, say
from onebudget.core import RequestOutput

if TYPE_CHECKING:
    from onebudget.cli.output import Output
    from onebudget.cli.prompts import Prompt

PROMPT_CHARACTERS, ANSWER_CHARACTERS = 120, 600
_FAILED = ("refused", "error")


def show_answers(prompts: Sequence[Prompt], outputs: Sequence[RequestOutput], output: Output) -> None:
    """Each prompt and its answer, shortened; ``--json`` holds them whole."""
    from rich.padding import Padding
    from rich.text import Text

    for number, (prompt, answer) in enumerate(zip(prompts, outputs, strict=True), start=1):
        body = answer.error or answer.text or f"{len(answer.token_ids)} tokens without text"
        style = "red" if answer.finish_reason in _FAILED else ""
        counts = f"{len(answer.prompt_token_ids)} prompt and {len(answer.token_ids)} new tokens"
        facts = f"[{answer.finish_reason}; {counts}]"
        text = Text(shorten(body, ANSWER_CHARACTERS), style=style).append(f" {facts}", style="dim")
        output.show(
            Text(f"{number}. {shorten(title_of(prompt), PROMPT_CHARACTERS)}", style="bold"),
            Padding(text, (0, 0, 0, 3), expand=False),
        )


def title_of(prompt: Prompt) -> str:
    """A prompt in a few words: its text, its last message, or how many token ids it has."""
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1]
    return str(last["content"]) if isinstance(last, dict) else f"{len(prompt)} token ids"


def shorten(text: str, limit: int) -> str:
    """One paragraph of at most ``limit`` characters that can't steer a terminal."""
    words = " ".join(text.split())
    visible = "".join(character if character.isprintable() else "\ufffd" for character in words)
    return visible if len(visible) <= limit else visible[: limit - 3] + "..."


def status_of(
    outputs: Sequence[RequestOutput], document: Mapping[str, Any], *, interrupted: bool, output: Output
) -> int:
    """The exit status, with a paragraph on stderr for whatever went wrong and a line about the demo."""
    failed = [answer for answer in outputs if answer.finish_reason in _FAILED]
    demo = document.get("demo")
    if demo:
        output.show(
            f"{demo['equal']} of {demo['of']} answers equal the recorded ones token by token ({demo['dtype']})."
        )
    if interrupted:
        finished = sum(answer.finish_reason in ("stop", "length") for answer in outputs)
        say(f"Interrupted: {finished} of {len(outputs)} requests were finished.")
        return INTERRUPTED
    if failed:
        say(f"{len(failed)} of {len(outputs)} requests were not answered; the first: {failed[0].error}")
        return ANSWER_IS_NO
    if demo and demo["equal"] < demo["of"]:
        say(f"{demo['of'] - demo['equal']} of {demo['of']} answers differ from the recorded ones.")
        return ANSWER_IS_NO
    return DONE
