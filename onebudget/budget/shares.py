"""What goes into the derivation and what comes out of it, before it is written down as a ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebudget.budget.context_workspace import ContextWorkspace
    from onebudget.budget.cost import CacheCost
    from onebudget.budget.ledger import Cap
    from onebudget.budget.profile import ProfileResult
    from onebudget.budget.reserves import ReserveLine
    from onebudget.config import BudgetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything the arithmetic depends on."""

    config: BudgetConfig
    profile: ProfileResult
    cost: CacheCost
    total_bytes: int
    reserves: tuple[ReserveLine, ...] = ()
    context_workspace: ContextWorkspace | None = None
    pp_size: int = 1

    @property
    def min_tokens(self) -> int:
        """Whole blocks for one request of ``max_seq_len`` tokens: what a pool should hold at the very least."""
        return self.config.blocks_per_max_request * self.config.tokens_per_block

    @property
    def min_kv_bytes(self) -> int:
        return max(self.cost.bytes_for_tokens(self.min_tokens), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The figures of the derivation in the order they arise. ``left_bytes`` and ``pool_bytes`` may be negative."""

    added: tuple[ReserveLine, ...]
    peak_bytes: int
    left_bytes: int
    available_bytes: int
    caps: tuple[Cap, ...]
    budget_bytes: int
    cuts: tuple[ReserveLine, ...]
    pool_bytes: int

    @property
    def cut_bytes(self) -> int:
        return sum(line.bytes for line in self.cuts)

    @property
    def attended_tokens_cap(self) -> int | None:
        """The strictest admission cap that a reserve brings along."""
        caps = [line.admission_cap_tokens for line in self.added + self.cuts if line.admission_cap_tokens is not None]
        return min(caps, default=None)
