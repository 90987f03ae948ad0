"""How many blocks a request takes, counted before it holds any."""

from __future__ import annotations

from onebudget.resources.units import BlocksTotal
from onebudget.units import ceil_div


def blocks_to_completion(
    prompt_tokens: int, new_tokens: int, tokens_per_block: int, beam_width: int = 1
) -> BlocksTotal:
    """Blocks of a sequence when its last token exists: whole prompt blocks are shared by its beams, the rest with the
    new tokens is each beam's own."""
    whole, rest = divmod(prompt_tokens, tokens_per_block)
    return BlocksTotal(whole + ceil_div(rest + new_tokens, tokens_per_block) * beam_width)


def recurrent_state_slots(
    *,
    max_batch_size: int,
    pp_size: int = 1,
    graph_padding: bool = True,
    max_draft_tokens: int = 0,
    pool_tokens: int = 0,
    snapshot_interval: int | None = None,
) -> int:
    """States of recurrent layers that can exist at once: one per seat and pipeline stage, one for the dummy that pads
    graphs, one per draft token, and with reuse one snapshot every ``snapshot_interval`` of the pool's tokens."""
    snapshots = pool_tokens // snapshot_interval if snapshot_interval else 0
    return max_batch_size * pp_size + graph_padding + max_draft_tokens + snapshots
