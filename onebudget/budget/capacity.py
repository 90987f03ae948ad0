"""From a derived ledger back to the settings of the KV cache manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.config import Adjustment, BudgetConfig, Resolved, adjust
from onebudget.errors import BudgetError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger


def resolve_capacity(config: BudgetConfig, ledger: Ledger) -> Resolved:
    """Write the result into the knob that the manager takes as its capacity.

    v1 counts tokens: ``kv_max_tokens`` becomes the ledger's figure. v2, and v1 with several windows, keep a quota:
    ``max_gpu_total_bytes`` becomes the pool's bytes, and the user's token cap (or None) stays what it was.
    """
    pool = ledger.kv_cache
    if config.kv_cache_manager == "v1" and not config.has_several_windows:
        return adjust(config, Adjustment("kv_max_tokens", config.kv_max_tokens, pool.tokens, "derived capacity"))
    return adjust(config, Adjustment("max_gpu_total_bytes", config.max_gpu_total_bytes, pool.bytes, "derived capacity"))


def check_pool_is_free(ledger: Ledger, free_bytes: int) -> None:
    """Refuse to build a pool that is larger than what is free at this moment.

    The fraction is not applied a second time and the pool is not shrunk: either the derivation holds or it is an error.
    """
    needed = ledger.kv_cache.bytes
    if needed > free_bytes:
        raise BudgetError(
            f"The KV cache was derived as {format_bytes(needed)}, but only {format_bytes(free_bytes)} is free now "
            f"({needed - free_bytes} B less): something took memory after the profile. Free it, or lower "
            "free_gpu_memory_fraction.",
            ledger=ledger,
        )
