"""Agreement between ranks: the tightest one decides. Only the arithmetic; gathering the figures is somebody else's
work.

Free memory is measured in bytes on each rank, but ranks of a pipeline pay differently for a token, so tokens are
compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

from onebudget.budget.cost import CacheCost
from onebudget.budget.ledger import Admission, RankLine
from onebudget.errors import AgreementError

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger

HOST_SHARE, MEMLOCK_SHARE = Fraction(1, 2), Fraction(4, 5)
"""Parts of the available host memory, and of the limit on locked memory, that an automatic host cache may take."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The quota of each rank after agreement. ``tokens`` are what each could hold alone (None: memory is no bound)."""

    agreed_tokens: int | None
    limiting_rank: int
    tokens: tuple[int | None, ...]
    quotas: tuple[int, ...]


def agree_on_tokens(tokens: Sequence[int | None]) -> tuple[int | None, int]:
    """The smallest token count and the rank it comes from; ranks without a bound (None) have no say."""
    if not tokens:
        raise AgreementError("no rank reported how many tokens it can hold")
    bounded = [(count, rank) for rank, count in enumerate(tokens) if count is not None]
    return min(bounded, default=(None, 0))


def agree_on_quotas(quotas: Sequence[int], costs: Sequence[CacheCost], max_util_for_resume: Fraction) -> Agreement:
    """Byte quotas of the v2 manager such that all ranks hold the same tokens.

    Each rank turns ``max_util_for_resume`` of its quota into tokens with its own cost; the smallest count is turned
    back into a quota, rounded up because rounding down would lose a token on the way back. A quota never rises.
    """
    usable = (int(quota * max_util_for_resume) for quota in quotas)
    tokens = tuple(
        cost.tokens_for_budget(nbytes) if cost.slope > 0 else None for cost, nbytes in zip(costs, usable, strict=True)
    )
    agreed, limiting = agree_on_tokens(tokens)
    if agreed is None:
        return Agreement(None, 0, tokens, tuple(quotas))
    after = tuple(
        quota if count is None else min(quota, ceil(cost.bytes_for_tokens(agreed) / max_util_for_resume))
        for quota, cost, count in zip(quotas, costs, tokens, strict=True)
    )
    return Agreement(agreed, limiting, tokens, after)


def rank_lines(agreement: Agreement, quotas: Sequence[int], capacities: Sequence[int]) -> tuple[RankLine, ...]:
    """The ranks' part of a ledger: what each had, and what it keeps."""
    rows = zip(capacities, quotas, agreement.tokens, agreement.quotas, strict=True)
    return tuple(
        RankLine(rank=rank, capacity_bytes=capacity, kv_bytes=quota, tokens=count, agreed_kv_bytes=after)
        for rank, (capacity, quota, count, after) in enumerate(rows)
    )


def agreed_ledger(
    ledger: Ledger,
    agreement: Agreement,
    *,
    rank: int,
    quotas: Sequence[int],
    capacities: Sequence[int],
    attended_tokens_caps: Sequence[int | None] = (),
    blocks_per_max_request: int,
) -> Ledger:
    """The ledger of ``rank`` with the pool that the ranks agreed on.

    ``quotas`` are the pools before. What the rank could have held beyond the agreed tokens becomes unassigned. The
    ranks admit prompts alike, so the lowest cap of attended tokens is everybody's.
    """
    pool, kv_bytes = ledger.kv_cache, agreement.quotas[rank]
    if pool.groups:
        raise AgreementError("several ranks with several window pools are not built: give all layers one window")
    tokens = (
        pool.tokens
        if agreement.tokens[rank] is None
        else CacheCost(pool.bytes_per_token, pool.fixed_bytes).tokens_for_budget(kv_bytes)
    )
    blocks = tokens // pool.tokens_per_block
    agreed = replace(
        pool, bytes=kv_bytes, tokens=tokens, blocks=blocks,
        max_concurrency_at_max_seq_len=blocks / blocks_per_max_request,
    )  # fmt: skip
    caps = [cap for cap in attended_tokens_caps if cap is not None]
    return ledger.replace(
        kv_cache=agreed,
        unassigned_bytes=ledger.unassigned_bytes + pool.bytes - kv_bytes,
        admission=Admission(min(caps)) if caps else ledger.admission,
        ranks=rank_lines(agreement, quotas, capacities),
        limiting_rank=agreement.limiting_rank,
        notes=(*ledger.notes, *_rank_note(agreement, rank, tokens)),
    )


def _rank_note(agreement: Agreement, rank: int, tokens: int) -> tuple[str, ...]:
    alone = agreement.tokens[rank]
    if alone is None or alone == agreement.agreed_tokens:
        return ()
    return (
        f"Rank {agreement.limiting_rank} limits the pool to {tokens} tokens; this rank, {rank}, could hold {alone}.",
    )


def agree_on_window_blocks(blocks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Blocks per window that every rank has. Ranks must have the same windows, or ``AgreementError``."""
    if not blocks or any(each.keys() != blocks[0].keys() for each in blocks):
        raise AgreementError(f"ranks have different attention windows: {[sorted(each) for each in blocks]}")
    return {window: min(each[window] for each in blocks) for window in sorted(blocks[0])}


def host_tier_bytes(
    *, device_quota_bytes: int, host_available_bytes: int, ranks_on_node: int, memlock_limit_bytes: int | None
) -> int:
    """An automatic host cache of one rank: no larger than the device's pool, half of the host's memory shared by its
    ranks, and most of the limit on locked memory (None: unlimited). The minimum over ranks is what all use."""
    arms = [device_quota_bytes, int(host_available_bytes * HOST_SHARE / ranks_on_node)]
    if memlock_limit_bytes is not None:
        arms.append(int(memlock_limit_bytes * MEMLOCK_SHARE))
    return min(arms)
