"""What the scheduler asks of a KV cache manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from onebudget.core import Request


class SchedulableCache(Protocol):
    """The KV manager as the scheduler sees it. Counts are blocks of the pool that runs out first."""

    attended_tokens_cap: int | None
    """Cached and computed context tokens that the contexts of one step may attend to together; None: no cap."""

    @property
    def tokens_per_block(self) -> int: ...

    @property
    def free_blocks(self) -> int: ...

    @property
    def used_blocks(self) -> int: ...

    def max_resource_count(self) -> int: ...

    def needed_to_completion(self, request: Request) -> int: ...

    def reusable_tokens(self, request: Request) -> int:
        """Tokens that ``begin`` would find in the cache now; nothing is held."""
        ...

    def begin_all(self, requests: Sequence[Request]) -> Sequence[int]:
        """Hold what each of these finds in the cache; returns the tokens that need no computing."""
        ...

    def first_new_block_key(self, request: Request) -> object | None:
        """What identifies the contents of the first block that this waiting request would compute."""
        ...

    def growth(self, request: Request, tokens: int) -> int:
        """Blocks the request lacks to have a place for ``tokens`` in all."""
        ...

    def free(self, request: Request) -> object: ...

    def suspend(self, request: Request) -> bool:
        """Keep a sequence outside the device; False where that is impossible, with nothing changed."""
        ...

    def resume(self, request: Request) -> bool:
        """Bring a suspended sequence back; False where there is no room now."""
        ...
