"""When no profiling run takes place, and what sizes the pool then."""

from __future__ import annotations

from onebudget.config import Adjustment, BudgetConfig, Resolved, adjust
from onebudget.errors import ConfigError


def why_estimation_is_off(
    config: BudgetConfig,
    *,
    attention_backend: str = "",
    encoder_decoder: bool = False,
    context_parallel: str | None = None,
) -> str | None:
    """The reason not to run the probe, or None when it runs. Off still derives a budget, from what the device uses
    now."""
    if context_parallel is not None:
        return f"context parallelism ({context_parallel}) is configured"
    if attention_backend.lower() == "vanilla":
        return "the vanilla attention backend keeps one block of max_num_tokens and pages nothing"
    if encoder_decoder:
        return "dummies are text-only, and cross-attention KV can't be accounted without an encoder length"
    if config.skip_estimation:
        return "skip_estimation is set (ONEBUDGET_SKIP_KV_ESTIMATION sets it too)"
    return None


def resolve_explicit_quota(config: BudgetConfig, free_bytes: int) -> Resolved:
    """Sizing without a probe under helix context parallelism: a given cap stands, else the fraction of what is free.

    The fraction is written down as bytes, never as tokens: the v2 manager inflates a token count by its resume
    head-room and would overshoot. Raises ``ConfigError`` for the v1 manager, which has no such path, and when nothing
    is free.
    """
    if config.kv_cache_manager != "v2":
        raise ConfigError.for_field("kv_cache_manager", config.kv_cache_manager, "'v2' under helix context parallelism")
    if config.max_gpu_total_bytes is not None or config.kv_max_tokens is not None:
        return Resolved(config)
    quota = int(free_bytes * config.free_fraction_exact)
    if quota <= 0:
        raise ConfigError.for_field("max_gpu_total_bytes", quota, f"above 0, but {free_bytes} bytes are free")
    why = f"free_gpu_memory_fraction {config.free_gpu_memory_fraction} of {free_bytes} free"
    return adjust(config, Adjustment("max_gpu_total_bytes", None, quota, why))
