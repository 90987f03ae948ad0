"""How many blocks a request takes, counted before it holds any."""

from __future__ import annotations

from onebudget.errors import ConfigError
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


def helix_is_active(iteration: int, *, tokens_per_block: int, cp_size: int, rank: int) -> bool:
    """Whether ``rank`` of a helix group keeps the token of this decode iteration (the first is 1): blocks go round."""
    return (iteration - 1) // tokens_per_block % cp_size == rank


def helix_decode_tokens(iterations: int, *, tokens_per_block: int, cp_size: int, rank: int) -> int:
    """Tokens of the first ``iterations`` decode iterations that ``rank`` keeps."""
    if not 0 <= rank < cp_size:
        raise ConfigError.for_field("rank", rank, f"from 0 to {cp_size - 1}")
    rounds, rest = divmod(iterations, tokens_per_block * cp_size)
    return rounds * tokens_per_block + min(tokens_per_block, max(0, rest - rank * tokens_per_block))
