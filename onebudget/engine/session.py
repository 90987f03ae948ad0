"""One request as its caller sees it: text as it settles, and exactly one last chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onebudget.core import Request, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from onebudget.engine.text import TextBuilder


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New text and tokens of one request; ``output`` is set on its last chunk."""

    request_id: int
    text: str
    token_ids: list[int]
    output: RequestOutput | None = None


class Session:
    """A request, the decoder of its text where somebody needs text before the end, and what was given out so far."""

    def __init__(self, request: Request, builder: TextBuilder | None) -> None:
        self.request = request
        self._builder = builder
        self._given_text = 0
        self._given_tokens = 0
        self._over = False

    def on_token(self) -> None:
        """Decode the newest token; a stop text ends the request."""
        if self._builder is not None:
            self._builder.take(self.request)
            if self._builder.stopped:
                self.request.finish("stop")

    def settle(self, tokenizer: Any) -> Request:
        """Write the final text of a request that ended."""
        request = self.request
        if self._builder is not None and request.params.stop:
            request.text = self._builder.text
        elif request.output_token_ids:
            request.text = tokenizer.decode(request.output_token_ids, skip_special_tokens=True)
        return request

    @property
    def has_news(self) -> bool:
        fresh = len(self.request.output_token_ids) > self._given_tokens
        return not self._over and (fresh or self.request.finished)

    def chunk(self) -> StreamChunk:
        """What came since the last chunk."""
        request = self.request
        text = request.text if request.finished else (self._builder.settled if self._builder is not None else "")
        tokens = request.output_token_ids[self._given_tokens :]
        chunk = StreamChunk(
            request.id, text[self._given_text :], tokens, RequestOutput.of(request) if request.finished else None
        )
        self._given_text = max(self._given_text, len(text))
        self._given_tokens += len(tokens)
        self._over = request.finished
        return chunk


@dataclass(slots=True)
class Throughput:
    """Tokens and seconds of all calls so far."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0

    def add(self, seconds: float, sessions: list[Session]) -> None:
        self.seconds += seconds
        self.prompt_tokens += sum(session.request.prompt_tokens for session in sessions)
        self.new_tokens += sum(len(session.request.output_token_ids) for session in sessions)

    def add_elsewhere(self, outputs: Iterable[RequestOutput]) -> None:
        """Tokens that other ranks computed in the same seconds."""
        for output in outputs:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.new_tokens += len(output.token_ids)

    def to_dict(self) -> dict[str, float | int]:
        rate = round(self.new_tokens / self.seconds, 3) if self.seconds else 0.0
        return {
            "seconds": round(self.seconds, 6),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "new_tokens_per_second": rate,
        }
