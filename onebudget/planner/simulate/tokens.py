"""Token ids of a trace's prompts, built from the ids of their prefix blocks when a request arrives.

A trace says which 512-token blocks are equal, not what they hold. One id repeated 512 times stands for a block: equal
ids give equal tokens, different ones differ in every token. Prompts are machine arrays of 4 bytes per token, which the
prefix tree compares as bytes; a list of a long prompt would cost sixteen times as much.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from onebudget.planner.simulate.traces import PREFIX_BLOCK_TOKENS, TraceRequest

if TYPE_CHECKING:
    _Ints = array[int]
else:
    _Ints = array

_BYTE_ORDER: Literal["little", "big"] = sys.byteorder
OWN_FIRST_ID = -(2**31)
"""Tokens that no other request has: this plus the request's number. The ids of a trace are not negative."""


class TokenArray(_Ints):
    """Token ids in 4 bytes each; adding any other sequence of ids works as with lists."""

    def __new__(cls, ids: Any = ()) -> Self:
        made: Self = super().__new__(cls, "i", ids)
        return made

    def __add__(self, other: Sequence[int]) -> TokenArray:
        both = TokenArray(self)
        both.extend(other)
        return both

    def __radd__(self, other: Sequence[int]) -> TokenArray:
        return TokenArray(other) + self


def own_token(number: int) -> int:
    """The token id that request ``number`` alone uses: what it says, and a prompt nobody shares."""
    return OWN_FIRST_ID + number


def prompt_token_ids(request: TraceRequest, number: int) -> TokenArray:
    """The prompt of the trace's request ``number``."""
    if request.prefix_ids is None:
        return TokenArray(array("i", [own_token(number)]) * request.prompt_tokens)
    ids = TokenArray()
    for one in request.prefix_ids:
        ids.frombytes(one.to_bytes(4, _BYTE_ORDER) * PREFIX_BLOCK_TOKENS)
    del ids[request.prompt_tokens :]
    return ids
