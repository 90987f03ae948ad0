"""Requests that hold blocks as real ones of their shape would: for the profile, for padding, for idle ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onebudget.core import Request, RequestState, SamplingParams
from onebudget.errors import CapacityError

if TYPE_CHECKING:
    from onebudget.resources.kv.manager import KVCacheManager

DUMMY_TOKEN_ID = 1  # token 0 is the padding of many models, and may give no numbers


def add_dummies(
    managers: Sequence[KVCacheManager], ids: Iterable[int], tokens: int, *, generation: bool
) -> list[Request] | None:
    """One request of ``tokens`` for each id, with blocks in every manager. None when one of them has too few.

    Any failure on the way removes all of them again. A manager that can't remove one is the error that counts.
    """
    requests = [_dummy(number, tokens, generation) for number in ids]
    try:
        for request in requests:
            for manager in managers:
                if not manager.resize(request, tokens):
                    raise CapacityError(f"dummy {request.id} of {tokens} tokens finds no blocks", request_id=request.id)
    except BaseException as error:
        _remove_all(requests, managers)
        if isinstance(error, CapacityError):
            return None
        raise
    return requests


def _dummy(number: int, length: int, generation: bool) -> Request:
    prompt_tokens = max(1, length - 1) if generation else length
    request = Request(
        number, [DUMMY_TOKEN_ID] * prompt_tokens, SamplingParams(max_tokens=1), max_new_tokens=1, is_dummy=True
    )
    if generation:
        request.state = RequestState.GENERATION
        request.computed_tokens = prompt_tokens
        request.output_token_ids = [DUMMY_TOKEN_ID]
    return request


def _remove_all(requests: Iterable[Request], managers: Sequence[KVCacheManager]) -> None:
    """Removal goes on behind a failure, and the first one is raised at the end."""
    first: Exception | None = None
    for request in requests:
        for manager in managers:
            try:
                manager.free(request)
            except Exception as error:
                first = first or error
    if first is not None:
        raise first
