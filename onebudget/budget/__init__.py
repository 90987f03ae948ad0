"""The derivation of the KV budget: pure values in, a ledger out. Nothing here imports torch or a device."""

from __future__ import annotations

from onebudget.budget.advice import Candidate
from onebudget.budget.capacity import check_pool_is_free, resolve_capacity
from onebudget.budget.context_workspace import (
    ContextWorkspace,
    attended_tokens,
    context_kv_len_cap,
    context_workspace_for,
    context_workspace_reserve,
    keep_prefix_within_cap,
)
from onebudget.budget.cost import CacheCost
from onebudget.budget.derive import derive_budget
from onebudget.budget.explain import diff, explain_diff
from onebudget.budget.late import LateAllocation, LateAllocations, penalty_tables
from onebudget.budget.ledger import (
    Admission,
    Cap,
    Change,
    DeviceLine,
    HostLine,
    KVCacheLine,
    KVGroup,
    Ledger,
    RankLine,
    Term,
)
from onebudget.budget.profile import ProfileResult
from onebudget.budget.reserves import ReserveLine, indexer_logits_bytes, penalty_workspace_bytes
from onebudget.budget.split import split_budget

__all__ = [
    "Admission",
    "CacheCost",
    "Candidate",
    "Cap",
    "Change",
    "ContextWorkspace",
    "DeviceLine",
    "HostLine",
    "KVCacheLine",
    "KVGroup",
    "LateAllocation",
    "LateAllocations",
    "Ledger",
    "ProfileResult",
    "RankLine",
    "ReserveLine",
    "Term",
    "attended_tokens",
    "check_pool_is_free",
    "context_kv_len_cap",
    "context_workspace_for",
    "context_workspace_reserve",
    "derive_budget",
    "diff",
    "explain_diff",
    "indexer_logits_bytes",
    "keep_prefix_within_cap",
    "penalty_tables",
    "penalty_workspace_bytes",
    "resolve_capacity",
    "split_budget",
]
