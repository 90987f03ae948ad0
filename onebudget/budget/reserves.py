"""Bytes held back for buffers that the probe cannot see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from onebudget.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class ContextWorkspace:
    """A buffer of the context phase that grows with the attended KV of a step.

    ``bytes_per_token``: what the attention backend allocates per attended token. ``kv_len_cap``: attended tokens per
    step that the reserve must be able to cover (see ``context_kv_len_cap``); None: the buffer is bounded otherwise.
    """

    bytes_per_token: int
    kv_len_cap: int | None


def context_workspace_reserve(
    budget_bytes: int, kv_bytes_per_token: int, workspace_bytes_per_token: int, kv_len_cap: int | None
) -> tuple[int, int | None]:
    """Split a budget between KV cache and the context workspace: ``(reserve_bytes, admission cap in tokens)``.

    Both grow with the same tokens, so the fair point is where ``k`` bytes of cache and ``w`` bytes of workspace per
    token use the budget up together, at ``budget // (k + w)`` tokens; there is no need to reserve beyond ``kv_len_cap``
    tokens. ``(0, None)`` when nothing is to be reserved.
    """
    b, k, w, cap = budget_bytes, kv_bytes_per_token, workspace_bytes_per_token, kv_len_cap
    if b <= 0 or k <= 0 or w <= 0 or cap is None or cap <= 0:
        return 0, None
    return min(w * cap, b * w // (k + w)), min(cap, b // (k + w))


def context_workspace_line(
    budget_bytes: int, kv_bytes_per_token: int, workspace: ContextWorkspace | None
) -> tuple[ReserveLine, ...]:
    """The context workspace as a cut from a pool of ``budget_bytes``; empty when nothing is to be reserved."""
    if workspace is None:
        return ()
    w, cap_tokens = workspace.bytes_per_token, workspace.kv_len_cap
    reserve_bytes, admitted = context_workspace_reserve(budget_bytes, kv_bytes_per_token, w, cap_tokens)
    if admitted is None:
        return ()
    reason = f"{w} B per attended token: min({w} * {cap_tokens}, {budget_bytes} * {w} // ({kv_bytes_per_token} + {w}))"
    return (ReserveLine("context_workspace", reserve_bytes, "cuts_kv", reason, admitted, owner="attention"),)
