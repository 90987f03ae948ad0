"""What a prefix is compared by: the tokens, and whatever else their K/V depend on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from onebudget.resources.kv.node import token_bytes

if TYPE_CHECKING:
    from onebudget.core import Request


class PrefixKeys:
    """Keys of requests, made once each and forgotten with the request.

    Adapter and salt part texts from the beginning, as spaces of their own. A piece of media parts them where it
    stands: the token at its position is replaced by a negative number that stands for token and digest.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[list[int], bytes]] = {}
        self._media: dict[tuple[int, str], int] = {}

    @staticmethod
    def space(request: Request) -> Hashable:
        if request.adapter_id is None and request.cache_salt is None:
            return None
        return request.adapter_id, request.cache_salt

    def of(self, request: Request, tokens: int) -> bytes:
        """At least the first ``tokens`` tokens of prompt and answer."""
        known = self._prompts.get(request.id)
        if known is None or known[0] is not request.prompt_token_ids:
            known = self._prompts[request.id] = request.prompt_token_ids, self._prompt(request)
        key = known[1]
        answered = tokens - request.prompt_tokens
        return key if answered <= 0 else key + token_bytes(request.output_token_ids[:answered])

    def _prompt(self, request: Request) -> bytes:
        if not request.media_digests:
            return token_bytes(request.prompt_token_ids)
        token_ids = list(request.prompt_token_ids)
        for position, digest in request.media_digests:
            item = (token_ids[position], digest)
            token_ids[position] = self._media.setdefault(item, -1 - len(self._media))
        return token_bytes(token_ids)

    def forget(self, request: Request) -> None:
        self._prompts.pop(request.id, None)
