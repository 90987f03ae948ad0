"""The card a trace runs on: pools from a ledger or from a number of blocks, and step times from what is known of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError
from onebudget.planner.simulate.books import CountedPool
from onebudget.planner.simulate.clock import RooflineClock

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.config import BudgetConfig

BYTES_PER_WEIGHT = 2
QUERY_HEADS_PER_KV_HEAD = 4
ASSUMED_PRODUCTS = f"Operations per token are not known: 2 per weight of {BYTES_PER_WEIGHT} bytes are assumed."
ASSUMED_ATTENTION = (
    "Operations of attention are not known: 2 values of 2 bytes per cached head and dimension, and "
    f"{QUERY_HEADS_PER_KV_HEAD} query heads for each cached one, are assumed."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What is known of a model's steps and of the card they run on; None is not known."""

    gpu: str = "custom"
    weight_bytes: int | None = None
    parameters: int | None = None
    """Weights that one token meets."""
    kv_bytes_per_token: int | None = None
    flops_per_attended_pair: int | None = None
    bandwidth_bytes_per_s: int | None = None
    peak_flops: float | None = None

    def beneath(self, given: StepLoad) -> StepLoad:
        """The same with everything that ``given`` knows instead."""
        known = {name: getattr(given, name) for name in self.__slots__ if getattr(given, name) is not None}
        if given.gpu == "custom":
            known.pop("gpu")
        return replace(self, **known)


def load_of_ledger(ledger: Ledger) -> StepLoad:
    """Weights and KV cache of a ledger, and the name of its card."""
    return StepLoad(
        gpu=ledger.device.name or "custom",
        weight_bytes=ledger.term("weights").bytes or None,
        kv_bytes_per_token=ledger.kv_cache.bytes_per_token or None,
    )


def pools_of_ledger(ledger: Ledger, config: BudgetConfig) -> tuple[CountedPool, ...]:
    """The pools of a ledger in blocks of ``config.tokens_per_block``. ``ConfigError`` when it has no KV cache."""
    cache, size = ledger.kv_cache, config.tokens_per_block
    if not ledger.fits or not cache.blocks:
        raise ConfigError(
            "The ledger has no KV cache to serve requests from: it does not fit, and "
            f"{ledger.shortfall_bytes:,} bytes are missing."
            if not ledger.fits
            else "The ledger has no KV cache to serve requests from.",
            field="--plan",
        )
    if len(cache.groups) > 1:
        own = cache.tokens_per_block or size
        return tuple(
            CountedPool(group.blocks * own // size, group.window, group.bytes_per_token) for group in cache.groups
        )
    blocks = cache.blocks if cache.tokens_per_block in (0, size) else cache.tokens // size
    return (CountedPool(blocks, None, cache.bytes_per_token),)


def roofline(load: StepLoad) -> tuple[RooflineClock, tuple[str, ...]]:
    """The clock, and what had to be assumed. ``ConfigError`` naming the options that would tell what is missing."""
    options = {
        "weight_bytes": "--weights", "kv_bytes_per_token": "--kv-bytes-per-token",
        "bandwidth_bytes_per_s": "--bandwidth", "peak_flops": "--tflops",
    }  # fmt: skip
    missing = [option for name, option in options.items() if getattr(load, name) is None]
    if missing:
        raise ConfigError(
            f"Step times are not known: {_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing. Give that, "
            "or a --gpu of the catalogue with --model or --plan, or measured times with --step-times.",
            field=missing[0],
        )
    assert load.weight_bytes is not None and load.kv_bytes_per_token is not None
    assert load.bandwidth_bytes_per_s is not None and load.peak_flops is not None
    parameters = load.weight_bytes // BYTES_PER_WEIGHT if load.parameters is None else load.parameters
    pair = load.flops_per_attended_pair
    clock = RooflineClock(
        gpu=load.gpu,
        weight_bytes=load.weight_bytes,
        flops_per_token=2 * parameters,
        kv_bytes_per_token=load.kv_bytes_per_token,
        # Scores and sums take 4 operations per query head and dimension; 2 values of 2 bytes are cached per KV head.
        flops_per_attended_pair=load.kv_bytes_per_token * QUERY_HEADS_PER_KV_HEAD if pair is None else pair,
        bandwidth_bytes_per_s=load.bandwidth_bytes_per_s,
        peak_flops=load.peak_flops,
    )
    assumed = {ASSUMED_PRODUCTS: load.parameters, ASSUMED_ATTENTION: pair}
    return clock, tuple(note for note, known in assumed.items() if known is None)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
