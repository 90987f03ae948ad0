"""How many bytes of the card the KV cache may take: the one equation, top to bottom.

Pure: samples, costs, reserves and settings go in as values, a ledger that sums to the card comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from onebudget.budget.advice import Candidate, budget_error, find_changes, pool_warnings
from onebudget.budget.caps import list_caps
from onebudget.budget.context_workspace import ContextWorkspace, context_workspace_line
from onebudget.budget.ledger import Admission, Basis, ContextWorkspaceLine, DeviceLine, HostLine, KVGroup, Ledger
from onebudget.budget.partition import Labels, partition
from onebudget.budget.pool import missing_bytes, pool_line
from onebudget.budget.shares import Inputs, Shares
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.budget.cost import CacheCost
    from onebudget.budget.profile import ProfileResult
    from onebudget.budget.reserves import ReserveLine
    from onebudget.config import BudgetConfig


def divide(inputs: Inputs) -> Shares:
    """The arithmetic: what the peak leaves, what the fraction makes available, what caps and cuts take off again."""
    config, profile, cost = inputs.config, inputs.profile, inputs.cost

    added = tuple(line for line in inputs.reserves if line.kind == "adds_to_peak")
    peak = profile.torch_peak_bytes + profile.extra_cost_bytes + sum(line.bytes for line in added)
    left = inputs.total_bytes - peak + profile.allocated_bytes  # the probe's own KV will not exist in service
    available = int(max(left, 0) * config.free_fraction_exact)

    caps = list_caps(config, cost, available)
    budget = min(cap.limit_bytes for cap in caps)

    cuts = tuple(line for line in inputs.reserves if line.kind == "cuts_kv")
    uncut = budget - sum(line.bytes for line in cuts)
    cuts += context_workspace_line(uncut, cost.slope, inputs.context_workspace)
    pool = budget - sum(line.bytes for line in cuts) + min(left, 0)  # an overdrawn card leaves less than nothing

    return Shares(
        added=added, peak_bytes=peak, left_bytes=left, available_bytes=available,
        caps=caps, budget_bytes=budget, cuts=cuts, pool_bytes=pool,
    )  # fmt: skip


def derive_budget(
    config: BudgetConfig,
    profile: ProfileResult,
    cost: CacheCost,
    reserves: Iterable[ReserveLine] = (),
    *,
    total_bytes: int,
    context_workspace: ContextWorkspace | None = None,
    pp_size: int = 1,
    model: str | None = None,
    device: DeviceLine | None = None,
    outside: Mapping[str, int] | None = None,
    logits_bytes: int = 0,
    basis: Mapping[str, Basis] | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    groups: Callable[[int], Iterable[KVGroup]] | None = None,
    candidates: Callable[[BudgetConfig], Iterable[Candidate]] | None = None,
    host: Iterable[HostLine] = (),
    notes: Iterable[str] = (),
) -> Ledger:
    """Derive the KV budget and write down where every byte of the card went.

    ``cost`` is the whole KV cost of this rank; ``total_bytes`` the card. ``context_workspace`` is split against the
    pool after all other cuts. ``outside`` divides the memory outside the allocator (keys ``other_processes``,
    ``communication``, ``graphs``, ``fragmentation``), ``logits_bytes`` the activations; ``basis`` and ``ranges`` say
    how certain terms are; ``groups`` divides the pool's bytes; ``candidates`` offers changes with profiles of their
    own.

    Raises ``BudgetError`` when not one block fits; its ledger has ``fits`` False, an empty pool, the shortfall, and the
    changes that would help. A pool of at least one block fits, with a warning when a request of ``max_seq_len``
    doesn't.
    """
    inputs = Inputs(
        config=config, profile=profile, cost=cost, total_bytes=total_bytes, reserves=tuple(reserves),
        context_workspace=context_workspace, pp_size=pp_size,
    )  # fmt: skip
    _refuse_nonsense(inputs)
    shares = divide(inputs)
    kv_cache = pool_line(inputs, shares.pool_bytes, groups)
    labels = Labels(outside=outside or {}, logits_bytes=logits_bytes, basis=basis or {}, ranges=ranges or {})
    terms, trimmed = partition(inputs, shares, labels)
    changes = find_changes(inputs, divide, candidates)
    ledger = Ledger(
        model=model,
        device=device or _device_as_profiled(inputs, labels),
        capacity_bytes=total_bytes,
        terms=terms,
        kv_cache=kv_cache,
        unassigned_bytes=total_bytes - sum(term.bytes for term in terms) - kv_cache.bytes,
        caps=shares.caps,
        admission=Admission(shares.attended_tokens_cap),
        context_workspace=_context_workspace_division(inputs, shares),
        fits=kv_cache.blocks > 0,
        shortfall_bytes=missing_bytes(inputs, shares) if kv_cache.blocks == 0 else 0,
        changes=changes,
        host=tuple(host),
        notes=(*notes, *trimmed),
    )
    if not ledger.fits:
        raise budget_error(inputs, shares, ledger)
    return replace(ledger, warnings=pool_warnings(inputs, ledger))


def _context_workspace_division(inputs: Inputs, shares: Shares) -> ContextWorkspaceLine | None:
    cut = sum(line.bytes for line in shares.cuts if line.name == "context_workspace")
    workspace, config = inputs.context_workspace, inputs.config
    if not cut or workspace is None or workspace.kv_len_cap is None:
        return None
    return ContextWorkspaceLine(
        shared_bytes=shares.budget_bytes - shares.cut_bytes + cut,
        bytes_per_token=workspace.bytes_per_token,
        kv_len_cap=workspace.kv_len_cap,
        max_seq_len=config.max_seq_len,
        requests_per_step=min(config.max_batch_size, config.max_num_tokens),
    )


def _refuse_nonsense(inputs: Inputs) -> None:
    if inputs.total_bytes <= 0:
        raise ConfigError.for_field("total_bytes", inputs.total_bytes, "a whole number of bytes above 0")
    for name, value in (("cost.slope", inputs.cost.slope), ("cost.intercept", inputs.cost.intercept)):
        if value < 0:
            raise ConfigError.for_field(name, value, "at least 0")
    tokens, block = inputs.config.kv_max_tokens, inputs.config.tokens_per_block
    if inputs.cost.slope == 0 and tokens is not None and tokens < block:
        raise ConfigError.for_field(
            "kv_max_tokens", tokens, f"at least one block ({block}) where tokens take no memory"
        )


def _device_as_profiled(inputs: Inputs, labels: Labels) -> DeviceLine:
    total, others = inputs.total_bytes, labels.outside.get("other_processes", 0)
    return DeviceLine(total_bytes=total, free_at_start_bytes=max(total - others, 0), others_bytes=others)
