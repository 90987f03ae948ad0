"""What a captured graph is for: two batches share one when their keys are equal."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple


class Tier(IntEnum):
    """How much of sampling a graph holds: ``FULL`` none of it, which is always right; ``FAST`` the choice of the
    likeliest token too, for batches of greedy requests."""

    FULL = 0
    FAST = 1


class GraphState(Enum):
    """Life of one key. A key nobody captured stays ``NEW`` and runs eagerly."""

    NEW = "new"
    WARM = "warm"
    CAPTURED = "captured"
    EAGER_ONLY = "eager_only"


class GraphKey(NamedTuple):
    """Shape and path of a batch. ``batch_size`` counts sequences, contexts included.

    ``length_bucket``: attended tokens that attention is laid out for; 0 when its kernels read the lengths themselves,
    so that one graph serves all.
    """

    batch_size: int
    draft_len: int = 0
    is_first_draft: bool = False
    short_seq: bool = False
    all_greedy: bool = True
    tier: Tier = Tier.FULL
    num_contexts: int = 0
    context_query_len: int = 0
    num_encoder_tokens: int = 0
    adapter_dtype: str | None = None
    use_adapter_graph: bool = False
    length_bucket: int = 0

    def tokens(self, beam_width: int = 1) -> int:
        """Packed tokens: each context brings its query, every other beam its last token and the drafts after it."""
        generating = self.batch_size * beam_width - self.num_contexts
        return self.num_contexts * self.context_query_len + generating * (self.draft_len + 1)


def capture_order(keys: set[GraphKey]) -> list[GraphKey]:
    """Largest first, so that smaller graphs live in the memory of larger ones; a base graph after its adapter graph,
    ``FULL`` before ``FAST``."""
    return sorted(keys, key=lambda k: (-k.batch_size, -k.draft_len, -k.length_bucket, not k.use_adapter_graph, k.tier))
