"""Tokens to text as they come, and stop texts that may span tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebudget.core import Request


class TextBuilder:
    """Text of one request, token by token.

    ``text`` holds everything decoded. ``settled`` is the part no later token can take back: it excludes a tail that
    may still turn into a stop text. Bytes of an unfinished character wait inside the decoder.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stop = stop
        self._stream = DecodeStream(skip_special_tokens=True)
        self._taken = 0
        self.text = ""
        self.stopped = False

    def take(self, request: Request) -> None:
        """Decode the tokens that came since the last call; sets ``stopped`` and cuts at the first stop text."""
        for token in request.output_token_ids[self._taken :]:
            self._taken += 1
            piece = self._stream.step(self._tokenizer._tokenizer, token)
            if piece:
                searched_from = len(self.text)
                self.text += piece
                if self._cut_at_stop(searched_from):
                    return

    def _cut_at_stop(self, searched_from: int) -> bool:
        starts = [
            position
            for stop in self._stop
            if (position := self.text.find(stop, max(0, searched_from - len(stop) + 1))) >= 0
        ]
        if starts:
            self.text = self.text[: min(starts)]
            self.stopped = True
        return self.stopped

    @property
    def settled(self) -> str:
        if self.stopped:
            return self.text
        longest = max((_overlap(self.text, stop) for stop in self._stop), default=0)
        return self.text[: len(self.text) - longest]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest start of ``stop`` that ``text`` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
