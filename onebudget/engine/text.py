"""Tokens to text as they come, and stop texts that may span tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onebudget.core import Request


_UNFINISHED = "\ufffd"  # what decoders print for the first bytes of a character


class TextBuilder:
    """Text of one request, token by token.

    ``text`` holds everything decoded. ``settled`` is the part no later token can take back: it excludes a tail that
    may still turn into a stop text. Bytes of an unfinished character wait inside the decoder. Where the stream decoder
    gives up (some sequences of byte tokens), the whole text is decoded anew at every token.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stop = stop
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=True)
        self._taken = 0
        self.text = ""
        self.stopped = False

    def take(self, request: Request) -> None:
        """Decode the tokens that came since the last call; sets ``stopped`` and cuts at the first stop text."""
        while self._taken < len(request.output_token_ids) and not self.stopped:
            self._taken += 1
            searched_from = len(self.text)
            self.text += self._next_piece(request.output_token_ids[: self._taken])
            self._cut_at_stop(searched_from)

    def _next_piece(self, token_ids: list[int]) -> str:
        """What the last of ``token_ids`` adds to ``text``."""
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer._tokenizer, token_ids[-1]) or ""
            except Exception:  # the decoder's own class is a bare Exception
                self._stream = None
        whole = self._tokenizer.decode(token_ids, skip_special_tokens=True).rstrip(_UNFINISHED)
        return str(whole[len(self.text) :]) if whole.startswith(self.text) else ""

    def _cut_at_stop(self, searched_from: int) -> None:
        starts = [
            position
            for stop in self._stop
            if (position := self.text.find(stop, max(0, searched_from - len(stop) + 1))) >= 0
        ]
        if starts:
            self.text = self.text[: min(starts)]
            self.stopped = True

    @property
    def settled(self) -> str:
        if self.stopped:
            return self.text
        longest = max((_overlap(self.text, stop) for stop in self._stop), default=0)
        return self.text[: len(self.text) - longest]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest start of ``stop`` that ``text`` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
