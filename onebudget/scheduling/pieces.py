"""What one request would compute of its context in the coming step, before anything is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.budget.context_workspace import attended_tokens

if TYPE_CHECKING:
    from onebudget.core import Request


@dataclass(slots=True)
class Piece:
    """``tokens`` of the context of ``request`` behind ``cached`` ones, which stand in the cache or would once the
    request begins. ``is_new``: the request is still waiting."""

    request: Request
    cached: int
    tokens: int
    is_new: bool = False

    @property
    def attended(self) -> int:
        return attended_tokens(position=self.cached, chunk=self.tokens, prompt_len=self.request.context_tokens)
