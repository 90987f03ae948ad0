"""Bytes held back for buffers that the probe cannot see, and how many bytes each of them takes.

The context workspace, which is split against the pool, has its own file; buffers born at first use are in ``late``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from onebudget.errors import ConfigError
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.budget.ledger import Basis

ReserveKind = Literal["adds_to_peak", "cuts_kv"]


@dataclass(frozen=True, slots=True)
class ReserveLine:
    """One reserve.

    ``adds_to_peak``: exists before the pool or regardless of it, so the fraction applies to what it leaves.
    ``cuts_kv``: appears inside forwards once the pool has its money, so it is carved from the pool's own share, after
    the fraction. ``admission_cap_tokens``: attended tokens per step that the reserve covers; the scheduler must keep to
    it (None: no cap).
    """

    name: str
    bytes: int
    kind: ReserveKind = "adds_to_peak"
    reason: str = ""
    admission_cap_tokens: int | None = None
    owner: str = ""
    basis: Basis = "declared"

    def __post_init__(self) -> None:
        if not isinstance(self.bytes, int) or self.bytes < 0:
            raise ConfigError.for_field(f"reserve {self.name}", self.bytes, "a whole number of bytes, at least 0")
        if self.kind not in get_args(ReserveKind):
            raise ConfigError.for_field(f"kind of reserve {self.name}", self.kind, "'adds_to_peak' or 'cuts_kv'")


def seat_count(*, max_batch_size: int, pp_size: int = 1, headroom: bool = False, overlap: bool = False) -> int:
    """Sequence slots that sampler, slot manager and penalty store are sized for.

    Pipeline stages each hold a batch. Without them, head-room under overlap keeps a second set of slots, because a
    batch that was launched but not yet processed still holds its own.
    """
    if pp_size > 1:
        return max_batch_size * pp_size
    return max_batch_size * (2 if headroom and overlap else 1)


def penalty_table_bytes(*, num_sequences: int, max_beam_width: int, vocab_size: int, granule_bytes: int = 1) -> int:
    """Token counts (int32 per beam and vocabulary entry) and prompt mask (one byte) for ``num_sequences`` slots, each
    table in whole pages of ``granule_bytes``."""
    counts_bytes = align_up(num_sequences * max_beam_width * vocab_size * 4, granule_bytes)
    return counts_bytes + align_up(num_sequences * vocab_size, granule_bytes)


def penalty_workspace_bytes(
    *, max_num_sequences: int, sequences_without_headroom: int, max_beam_width: int, vocab_size: int
) -> int:
    """Penalty tables of the slots that overlap head-room adds; the ordinary slots are not counted here."""
    added = max(max_num_sequences - sequences_without_headroom, 0)
    return penalty_table_bytes(num_sequences=added, max_beam_width=max_beam_width, vocab_size=vocab_size)


def indexer_logits_bytes(*, max_num_tokens: int, max_seq_len: int, element_budget: int = 2**31) -> int:
    """float32 scores of a sparse-attention indexer: every token of a step against every position, at most
    ``element_budget`` of them because the indexer works in pieces beyond that."""
    return 4 * min(element_budget, max_num_tokens * max_seq_len)


def encoder_reserve_bytes(*, output_budget_bytes: int, encoder_output_bytes: int, cache_bytes: int = 0) -> int:
    """Multimodal encoder output beyond what the probe kept alive, plus the capacity of the encoder cache (0: off)."""
    return max(0, output_budget_bytes - encoder_output_bytes) + cache_bytes


def logits_bytes(*, rows: int, vocab_size: int, element_bytes: int = 4, copies: int = 1) -> int:
    """``rows`` rows of logits; ``copies`` counts the tensors of that shape alive at once (log-probabilities add
    one)."""
    return rows * vocab_size * element_bytes * copies
