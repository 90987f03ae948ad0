"""Dividing one budget between two caches: target and draft model, self and cross attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING

from onebudget.budget.cost import CacheCost
from onebudget.config import Adjustment, BudgetConfig, Resolved, adjust
from onebudget.errors import BudgetError, ConfigError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def split_budget(
    total_bytes: int, target: CacheCost, draft: CacheCost, *, max_batch_size: int | None = None
) -> tuple[int, int]:
    """Divide ``total_bytes`` so that both caches hold the same number of tokens: ``(target_bytes, draft_bytes)``.

    Intercepts are paid first; the rest is shared by slope, or by ``bytes_per_request`` where both costs carry one.
    Quotas per request then bound the draft's share: it gets one quota at least and ``max_batch_size`` of them at most,
    and leaves the target one. A draft that costs nothing gets nothing. Raises ``BudgetError`` when the parts cannot be
    met and ``ConfigError`` for a negative cost.
    """
    _refuse_negative(total_bytes, target, draft)
    if draft.slope == 0 and draft.intercept == 0:
        return total_bytes, 0
    shared = total_bytes - target.intercept - draft.intercept
    if shared < 0 or (shared == 0 and target.slope + draft.slope > 0):
        raise _infeasible(total_bytes, target, draft, "the fixed parts leave nothing for tokens")
    weight_target, weight_draft = _weights(target, draft)
    weights = weight_target + weight_draft
    proportional = draft.intercept + (shared * weight_draft // weights if weights else 0)
    low, high = _bounds(total_bytes, target, draft, max_batch_size)
    if low > high:
        raise _infeasible(total_bytes, target, draft, "the quotas per request do not fit together")
    draft_bytes = min(max(proportional, low), high)
    return total_bytes - draft_bytes, draft_bytes


def _weights(target: CacheCost, draft: CacheCost) -> tuple[int, int]:
    if target.bytes_per_request is not None and draft.bytes_per_request is not None:
        return target.bytes_per_request, draft.bytes_per_request
    return target.slope, draft.slope


def _bounds(total: int, target: CacheCost, draft: CacheCost, max_batch_size: int | None) -> tuple[int, int]:
    """Lowest and highest bytes of the draft under the quotas that are present."""
    low, high = draft.intercept, total - target.intercept - (target.quota_per_request or 0)
    if draft.quota_per_request is not None:
        low += draft.quota_per_request
        if max_batch_size is not None:
            high = min(high, draft.intercept + max_batch_size * draft.quota_per_request)
    return low, high


def _refuse_negative(total: int, target: CacheCost, draft: CacheCost) -> None:
    if total < 0:
        raise ConfigError.for_field("total_bytes", total, "a whole number of bytes, at least 0")
    for owner, cost in (("target", target), ("draft", draft)):
        for item in dataclasses.fields(cost):
            value = getattr(cost, item.name)
            if value is not None and value < 0:
                raise ConfigError.for_field(f"{owner}.{item.name}", value, "at least 0")


def _infeasible(total: int, target: CacheCost, draft: CacheCost, why: str) -> BudgetError:
    fixed = target.intercept + draft.intercept
    return BudgetError(
        f"{format_bytes(total)} of KV cache can't be divided between target and draft model: {why} (fixed parts "
        f"{format_bytes(fixed)}). Raise free_gpu_memory_fraction or the cap, or lower max_batch_size."
    )


@dataclass(frozen=True, slots=True)
class HostSplit:
    """A host or disk budget divided between target and draft; ``warning`` when the draft had to go without."""

    target_bytes: int
    draft_bytes: int
    warning: str | None = None


def split_host_budget(total_bytes: int, target: CacheCost, draft: CacheCost) -> HostSplit:
    """Divide a host or disk tier by slope alone: intercepts stand for state on the device. Where that fails the target
    keeps everything; both never get the full amount."""
    try:
        sides = (dataclasses.replace(cost, intercept=0, quota_per_request=None) for cost in (target, draft))
        return HostSplit(*split_budget(total_bytes, *sides))
    except (BudgetError, ConfigError) as error:
        return HostSplit(total_bytes, 0, f"The draft model gets no host cache: {error}")


def split_for_helix(
    total_bytes: int, target: CacheCost, draft: CacheCost, cp_size: int, *, max_batch_size: int | None = None
) -> tuple[int, int]:
    """The split under helix context parallelism: the target keeps one of every ``cp_size`` pages, so one of its local
    tokens stands for ``cp_size`` tokens of the draft, whose slope counts that many times."""
    return split_budget(total_bytes, target, draft.scaled(cp_size), max_batch_size=max_batch_size)


def resolve_draft_pool_ratio(draft: BudgetConfig) -> Resolved:
    """A draft model with a single window has one pool, so a ratio of several entries becomes ``(1.0,)``."""
    if draft.pool_ratio is None or len(draft.pool_ratio) == 1 or draft.has_several_windows:
        return Resolved(draft)
    return adjust(draft, Adjustment("pool_ratio", draft.pool_ratio, (1.0,), "the draft model has one pool"))


def check_equal_quotas(quotas: Sequence[int | None]) -> None:
    """Two engines that share sequences on the v2 manager must be given equal GPU budgets."""
    if len(set(quotas)) > 1:
        raise ConfigError.for_field("max_gpu_total_bytes", list(quotas), "the same for both engines")


def split_cross(total_bytes: int, cross_kv_fraction: float | None) -> tuple[int, int]:
    """Divide a pool of an encoder-decoder model: ``(self_bytes, cross_bytes)``. Done before the draft split."""
    cross = int(total_bytes * _cross_share(cross_kv_fraction))
    return total_bytes - cross, cross


def resolve_cross_configs(config: BudgetConfig) -> tuple[Resolved, Resolved]:
    """Settings of the self-attention and of the cross-attention manager: byte cap, host cache and fraction are
    divided."""
    share = _cross_share(config.cross_kv_fraction)
    return _take_share(config, 1 - share, ceil), _take_share(config, share, floor)


def _take_share(config: BudgetConfig, share: Fraction, whole: Callable[[Fraction], int]) -> Resolved:
    why = f"{float(share)} of the budget of an encoder-decoder model"
    wanted = [
        Adjustment("host_cache_bytes", config.host_cache_bytes, whole(config.host_cache_bytes * share), why),
        Adjustment(
            "free_gpu_memory_fraction",
            config.free_gpu_memory_fraction,
            float(config.free_fraction_exact * share),
            why,
        ),
    ]
    if config.max_gpu_total_bytes is not None:
        cap = config.max_gpu_total_bytes
        wanted.append(Adjustment("max_gpu_total_bytes", cap, whole(cap * share), why))
    return adjust(config, *wanted)


def _cross_share(cross_kv_fraction: float | None) -> Fraction:
    if cross_kv_fraction is None or not 0 < cross_kv_fraction < 1:
        allowed = "a number above 0 and below 1 for an encoder-decoder model"
        raise ConfigError.for_field("cross_kv_fraction", cross_kv_fraction, allowed)
    return Fraction(str(cross_kv_fraction))
