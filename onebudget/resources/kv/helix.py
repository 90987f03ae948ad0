"""Which tokens of a sequence one rank of a helix group keeps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.core import Request
    from onebudget.resources.kv.group import KVGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HelixRank:
    """One of ``cp_size`` ranks that share the tokens of every sequence, a block at a time.

    Blocks go round. Of the prompt, rank 0 keeps the first block, rank 1 the second, and so on; the answer goes round
    from rank 0 on again, wherever the prompt ended. What a rank keeps stands in its blocks without gaps, so where it
    has the prompt's last block and that is not full, its first tokens of the answer fill it.

    A token's rank depends on its place and on the length of the prompt alone: what is computed again after a pause
    comes back to the rank that had it. No rank ever keeps more of a sequence than rank 0, so what fits there fits
    everywhere. Dummies stand on every rank whole, since each one computes on them.
    """

    cp_size: int
    rank: int

    def __post_init__(self) -> None:
        if self.cp_size < 1:
            raise ConfigError.for_field("cp_size", self.cp_size, "at least 1 rank")
        if not 0 <= self.rank < self.cp_size:
            raise ConfigError.for_field("rank", self.rank, f"from 0 to {self.cp_size - 1}")

    def is_active(self, iteration: int, tokens_per_block: int) -> bool:
        """Whether this rank keeps the token of a decode iteration; the first is 1."""
        return (iteration - 1) // tokens_per_block % self.cp_size == self.rank

    def kept(self, tokens: int, tokens_per_block: int) -> int:
        """How many of ``tokens`` in a row that go round from rank 0 on are this rank's."""
        rounds, rest = divmod(tokens, tokens_per_block * self.cp_size)
        return rounds * tokens_per_block + min(tokens_per_block, max(0, rest - self.rank * tokens_per_block))

    def shares(self, request: Request, new_tokens: int, tokens_per_block: int) -> tuple[int, int]:
        """This rank's tokens of the request's prompt, and of ``new_tokens`` behind it."""
        if request.is_dummy:
            return request.prompt_tokens, new_tokens
        return self.kept(request.prompt_tokens, tokens_per_block), self.kept(new_tokens, tokens_per_block)

    def local_tokens(self, request: Request, tokens: int, tokens_per_block: int) -> int:
        """This rank's part of the first ``tokens`` of the request."""
        prompt = request.prompt_tokens
        if request.is_dummy:
            return tokens
        if tokens <= prompt:
            return self.kept(tokens, tokens_per_block)
        return self.kept(prompt, tokens_per_block) + self.kept(tokens - prompt, tokens_per_block)

    def reach(self, request: Request, local_tokens: int, tokens_per_block: int) -> int:
        """The most tokens of a sequence of which this rank keeps no more than ``local_tokens``."""
        if request.is_dummy:
            return local_tokens
        of_prompt = self.kept(request.prompt_tokens, tokens_per_block)
        if local_tokens < of_prompt:
            return self._reach(local_tokens, tokens_per_block)
        return request.prompt_tokens + self._reach(local_tokens - of_prompt, tokens_per_block)

    def _reach(self, local_tokens: int, tokens_per_block: int) -> int:
        rounds, rest = divmod(local_tokens, tokens_per_block)
        return (rounds * self.cp_size + self.rank) * tokens_per_block + rest


def check_helix(groups: Sequence[KVGroup], *, reuse: bool) -> None:
    """``ConfigError`` where layers attend to a window: what leaves it would depend on other ranks. Warns that nothing
    is reused: a rank's blocks alone don't tell the text they belong to."""
    windows = [group.window_tokens for group in groups if group.window_tokens is not None]
    if windows:
        raise ConfigError(
            "Helix context parallelism needs layers that all attend to everything; this cache has windows of "
            f"{', '.join(map(str, windows))} tokens.",
            field="helix",
            value=windows,
        )
    if reuse:
        logger.warning("prefixes are not reused under helix: a rank's blocks alone don't tell the text they belong to")
