"""Ways out when the pool is too small: settings that were simulated, cheapest first, and the sentences around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import Change, Ledger
from onebudget.budget.pool import budget_needed, missing_bytes, pool_line
from onebudget.errors import BudgetError
from onebudget.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from onebudget.budget.context_workspace import ContextWorkspace
    from onebudget.budget.cost import CacheCost
    from onebudget.budget.profile import ProfileResult
    from onebudget.budget.reserves import ReserveLine
    from onebudget.budget.shares import Inputs, Shares
    from onebudget.config import BudgetConfig

MOST_FRACTION_PERCENT = 99
"""No advice goes beyond this share: what is left covers what no profile can see."""

_PRICES = {
    "max_gpu_total_bytes": 0, "kv_max_tokens": 0, "free_gpu_memory_fraction": 1, "context_kv_len_cap": 2,
    "enable_penalties": 3, "cuda_graph_batch_sizes": 3, "max_loras": 3, "max_num_tokens": 4, "max_batch_size": 5,
    "max_seq_len": 6, "kv_cache_dtype": 7, "dtype": 8, "device_memory": 9,
}  # fmt: skip
_UNKNOWN_PRICE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A change worth simulating. Whatever is left None stays as it is; a change that alters what the probe would see,
    what a token costs or what is declared must bring its own profile, cost, reserves or context workspace."""

    set: Mapping[str, Any]
    profile: ProfileResult | None = None
    cost: CacheCost | None = None
    reserves: tuple[ReserveLine, ...] | None = None
    context_workspace: ContextWorkspace | None = None
    total_bytes: int | None = None


Simulate = Callable[["Inputs"], "Shares"]
MoreCandidates = Callable[["BudgetConfig"], Iterable[Candidate]]


def find_changes(inputs: Inputs, simulate: Simulate, more: MoreCandidates | None) -> tuple[Change, ...]:
    """Changes that help, cheapest first; none when one request of ``max_seq_len`` fits already.

    A pool without a block is helped by whatever gives it one; a small pool by what makes room for that request. Cheap
    is what takes little from the user: first lifting a cap, then the slack of the fraction, then speed, then size of
    batch and request, then precision, then a bigger card. Where no single change helps, our own are tried together.
    """
    now = simulate(inputs)
    if missing_bytes(inputs, now) == 0:
        return ()
    has_a_block = pool_line(inputs, now.pool_bytes).blocks > 0
    own = list(_own_candidates(inputs, now))
    offered = [*own, *(more(inputs.config) if more else ())]
    tried = [_simulated(inputs, now, item, simulate) for item in offered]
    if len(own) > 1 and not any(item.helps(has_a_block) for item in tried):
        tried = [_simulated(inputs, now, _together(own), simulate)]
    return tuple(sorted((item.change for item in tried if item.helps(has_a_block)), key=_price))


@dataclass(frozen=True, slots=True)
class _Outcome:
    change: Change
    holds_full_request: bool

    def helps(self, had_a_block: bool) -> bool:
        """Whether this is better than what there was."""
        return self.holds_full_request if had_a_block else self.change.fits


def _price(change: Change) -> tuple[int, int]:
    return max(_PRICES.get(name, _UNKNOWN_PRICE) for name in change.set), len(change.set)


def _together(candidates: Iterable[Candidate]) -> Candidate:
    return Candidate(set={name: value for item in candidates for name, value in item.set.items()})


def _simulated(inputs: Inputs, now: Shares, candidate: Candidate, simulate: Simulate) -> _Outcome:
    changed = _apply(inputs, candidate)
    then = simulate(changed)
    before, after = pool_line(inputs, now.pool_bytes), pool_line(changed, then.pool_bytes)
    change = Change(dict(candidate.set), max(after.bytes - before.bytes, 0), after.blocks > 0)
    return _Outcome(change, missing_bytes(changed, then) == 0)


def _apply(inputs: Inputs, candidate: Candidate) -> Inputs:
    config = inputs.config.replace(**candidate.set)
    workspace = candidate.context_workspace or inputs.context_workspace
    if workspace and workspace.kv_len_cap and "context_kv_len_cap" in candidate.set:
        workspace = replace(workspace, kv_len_cap=min(workspace.kv_len_cap, candidate.set["context_kv_len_cap"]))
    total = candidate.total_bytes or candidate.set.get("device_memory") or inputs.total_bytes
    return replace(
        inputs,
        config=config,
        profile=candidate.profile or inputs.profile,
        cost=candidate.cost or inputs.cost,
        reserves=inputs.reserves if candidate.reserves is None else candidate.reserves,
        total_bytes=total,
        context_workspace=workspace,
    )


def _own_candidates(inputs: Inputs, now: Shares) -> Iterator[Candidate]:
    """Changes that need no new profile, each as small as suffices by itself."""
    config, needed = inputs.config, budget_needed(inputs)
    caps = {cap.name: cap.limit_bytes for cap in now.caps}
    if caps.get("max_gpu_total_bytes", needed) < needed:
        yield Candidate(set={"max_gpu_total_bytes": needed})
    if caps.get("kv_max_tokens", needed) < needed and inputs.cost.slope > 0:
        yield Candidate(set={"kv_max_tokens": ceil_div(needed - inputs.cost.intercept, inputs.cost.slope)})
    if now.available_bytes < needed and now.left_bytes > 0:
        percent = min(ceil_div(100 * needed, now.left_bytes), MOST_FRACTION_PERCENT)
        if percent / 100 > config.free_gpu_memory_fraction:
            yield Candidate(set={"free_gpu_memory_fraction": percent / 100})
    workspace = inputs.context_workspace
    if workspace and workspace.kv_len_cap and workspace.kv_len_cap > config.max_seq_len:
        yield Candidate(set={"context_kv_len_cap": config.max_seq_len})
    fitting = pool_line(inputs, now.pool_bytes).blocks * config.tokens_per_block
    if 0 < fitting < config.max_seq_len:
        yield Candidate(set={"max_seq_len": fitting})
    if config.device_memory == inputs.total_bytes and now.available_bytes < needed:
        yield Candidate(set={"device_memory": inputs.total_bytes + missing_bytes(inputs, now)})


def budget_error(inputs: Inputs, shares: Shares, ledger: Ledger) -> BudgetError:
    """The error for a ledger that doesn't fit: needed, available, largest term, and the two cheapest ways out."""
    config = inputs.config
    largest, largest_bytes = _largest_claim(inputs, shares)
    lines = [f"{line.name} {format_bytes(line.bytes)}" for line in (*shares.added, *shares.cuts)]
    reserves = f", reserves: {', '.join(lines)}" if lines else ""
    binding = " and ".join(cap.name for cap in shares.caps if cap.binding)
    message = (
        f"No room for the KV cache: one request of max_seq_len {config.max_seq_len} needs "
        f"{format_bytes(inputs.min_kv_bytes)}, {format_bytes(max(shares.pool_bytes, 0))} is available "
        f"(short by {format_bytes(ledger.shortfall_bytes)}; {binding} binds). "
        f"Of {format_bytes(inputs.total_bytes)} the peak takes {format_bytes(shares.peak_bytes)}{reserves}, "
        f"and free_gpu_memory_fraction {config.free_gpu_memory_fraction} applies to the rest. "
        f"The largest term is {largest} with {format_bytes(largest_bytes)}. "
        f"{ways_out(ledger.changes)}"
    )
    return BudgetError(message, ledger=ledger)


def _largest_claim(inputs: Inputs, shares: Shares) -> tuple[str, int]:
    """What wants most of the card, whether or not it finds it: a ledger that does not fit shows only what is paid."""
    profile = inputs.profile
    claims = {line.name: line.bytes for line in (*shares.added, *shares.cuts)} | {
        "weights": profile.model_bytes,
        "activations": max(profile.activation_bytes - profile.allocated_bytes, 0),
        "context": profile.extra_cost_bytes,
    }
    return max(claims.items(), key=lambda item: item[1])


def ways_out(changes: Iterable[Change]) -> str:
    """The two cheapest changes as a sentence."""
    texts = [" with ".join(_setting(*item) for item in change.set.items()) for change in changes][:2]
    if not texts:
        return (
            "No setting alone is enough: lower max_batch_size, max_num_tokens or max_seq_len, or use a larger device."
        )
    return f"Cheapest ways out: {', or '.join(texts)}."


def _setting(name: str, value: Any) -> str:
    size = f" ({format_bytes(value)})" if name in {"device_memory", "max_gpu_total_bytes"} else ""
    return f"{name} = {value}{size}"


def pool_warnings(inputs: Inputs, ledger: Ledger) -> tuple[str, ...]:
    """What a user should know about a pool that fits but is small."""
    config, pool, cap = inputs.config, ledger.kv_cache, ledger.admission.attended_tokens_cap
    warnings = []
    if pool.blocks < config.blocks_per_max_request:
        longest = pool.blocks * pool.tokens_per_block
        warnings.append(
            f"The KV cache holds {longest} tokens, less than one request of max_seq_len {config.max_seq_len}: "
            f"the longest request that fits has {longest} tokens. {ways_out(ledger.changes)}"
        )
    if cap is not None and cap < config.max_seq_len:
        warnings.append(
            f"Context requests are admitted up to {cap} attended tokens per step, below max_seq_len "
            f"{config.max_seq_len}: the memory budget is too small for more, so give the KV cache more bytes; "
            "context_kv_len_cap can't raise it."
        )
    return tuple(warnings)
