"""The buffer of the context phase that grows with attended KV: how much to reserve, and the admission cap that goes
with it.

Attended KV of a context request in one step: its cached prefix plus the tokens computed now, at most the prompt. The
reserve trades a crash that cannot be undone for a delay of one step: what it does not cover, the scheduler holds back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.budget.reserves import ReserveLine
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig


@dataclass(frozen=True, slots=True)
class ContextWorkspace:
    """What an attention backend declares: ``bytes_per_token`` for each attended token, to be covered for up to
    ``kv_len_cap`` tokens in one step. ``kv_len_cap`` None: the buffer is bounded otherwise and nothing is reserved."""

    bytes_per_token: int
    kv_len_cap: int | None


def context_kv_len_cap(
    *, max_batch_size: int, max_num_tokens: int, max_seq_len: int, override: int | None = None
) -> int:
    """Attended tokens of one step that the reserve should cover.

    Without ``override`` the worst case: every request of a step at full length (a step has no more requests than
    tokens). An override is lifted to ``max_seq_len``, because one full request must fit, and held below the worst case.
    """
    worst = min(max_batch_size, max_num_tokens) * max_seq_len
    if override is None:
        return worst
    if int(override) < 0:
        raise ConfigError.for_field("context_kv_len_cap", override, "an integer of at least 0, or None")
    return min(max(int(override), max_seq_len), worst)


def context_cap_applies(
    *,
    block_reuse: bool,
    chunked: bool,
    chunk_bounded: bool,
    require_chunked_profile: bool = False,
    chunked_path_profiled: bool = True,
    recomputes_in_pieces: bool = False,
) -> bool:
    """Whether a step can attend to more than the probe showed, so that the workspace must be reserved.

    Reused prefixes lengthen the attended KV of unchunked prompts; chunks lengthen it unless the backend's buffer is
    bounded by the chunk. Hardware with ``require_chunked_profile`` trusts that bound only if the probe took the chunked
    path. ``recomputes_in_pieces``: a paused request may come back too long for one step.
    """
    if not chunked:
        return block_reuse or recomputes_in_pieces
    return not chunk_bounded or (require_chunked_profile and not chunked_path_profiled)


def context_workspace_for(
    config: BudgetConfig,
    bytes_per_token: int,
    *,
    chunk_bounded: bool = True,
    require_chunked_profile: bool = False,
    chunked_path_profiled: bool = True,
) -> ContextWorkspace | None:
    """A backend's declaration under these settings, ready for ``derive_budget``; None when nothing needs reserving."""
    pauses = config.kv_cache_manager == "v2" or config.scheduler_policy == "max_utilization"
    applies = context_cap_applies(
        block_reuse=config.enable_block_reuse,
        chunked=config.enable_chunked_prefill,
        chunk_bounded=chunk_bounded,
        require_chunked_profile=require_chunked_profile,
        chunked_path_profiled=chunked_path_profiled,
        recomputes_in_pieces=pauses and config.max_seq_len > config.max_num_tokens,
    )
    if not applies or bytes_per_token <= 0:
        return None
    cap = context_kv_len_cap(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        max_seq_len=config.max_seq_len,
        override=config.context_kv_len_cap,
    )
    return ContextWorkspace(bytes_per_token, cap)


def context_workspace_reserve(
    budget_bytes: int, kv_bytes_per_token: int, workspace_bytes_per_token: int, kv_len_cap: int | None
) -> tuple[int, int | None]:
    """Split a budget between KV cache and the context workspace: ``(reserve_bytes, admission cap in tokens)``.

    Both grow with the same tokens, so the fair point is where ``k`` bytes of cache and ``w`` bytes of workspace per
    token use the budget up together, at ``budget // (k + w)`` tokens; nothing is reserved beyond ``kv_len_cap`` tokens.
    Only the slope of the cache counts. ``(0, None)`` when nothing is to be reserved.
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
    k, w, cap = kv_bytes_per_token, workspace.bytes_per_token, workspace.kv_len_cap
    reserve_bytes, admitted = context_workspace_reserve(budget_bytes, k, w, cap)
    if admitted is None:
        return ()
    reason = f"min({w} B per attended token * {cap}, {budget_bytes} * {w} // ({k} + {w}))"
    return (ReserveLine("context_workspace", reserve_bytes, "cuts_kv", reason, admitted, owner="attention"),)


def attended_tokens(*, position: int, chunk: int, prompt_len: int, reusable: int = 0, first_chunk: bool = False) -> int:
    """Attended KV of one context request in the coming step; a first chunk may find ``reusable`` tokens cached."""
    cached = max(position, reusable) if first_chunk else position
    return min(cached + chunk, prompt_len)


def keep_prefix_within_cap(attended: Sequence[int], cap: int | None) -> int:
    """How many context requests, in scheduling order, run in this step; the rest wait untouched for a later one.

    The first always runs, or nothing would ever. ``None`` is no cap; 0 is one: a single context request per step.
    """
    if cap is None:
        return len(attended)
    total = 0
    for index, tokens in enumerate(attended):
        total += tokens
        if index > 0 and total > cap:
            return index
    return len(attended)
