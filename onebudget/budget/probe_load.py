"""The load of the profiling run: how long its dummy requests are, how large its temporary KV pool, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.config import Adjustment, BudgetConfig, Resolved, adjust
from onebudget.errors import BudgetError, ConfigError
from onebudget.units import align_down, ceil_div, format_bytes

if TYPE_CHECKING:
    from onebudget.budget.cost import CacheCost


def dummy_lengths(
    *, max_num_tokens: int, net_max_seq_len: int, max_batch_size: int | None = None, dp_size: int = 1
) -> list[int]:
    """Prompt lengths that use up one step's tokens, as few requests as possible.

    Each leaves room for the one token it generates. More requests than ``max_batch_size`` can't run in one step, so the
    list ends there. Under attention data parallelism it is repeated ``dp_size`` times, and each rank takes its share.
    """
    for name, value in (("max_num_tokens", max_num_tokens), ("net_max_seq_len", net_max_seq_len)):
        if value < 1:
            raise ConfigError.for_field(name, value, "an integer, at least 1")
    longest = min(max_num_tokens, max(1, net_max_seq_len - 1))
    whole, rest = divmod(max_num_tokens, longest)
    lengths = [longest] * whole + ([rest] if rest else [])
    return lengths[:max_batch_size] * dp_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding as the probe pool sees it: tokens per generation step, and extra KV tokens per sequence."""

    tokens_per_step: int = 1
    extra_kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ProbePool:
    """Size of the probe's temporary KV pool, and the part of it that its dummies need."""

    tokens: int
    blocks: int
    dummy_blocks: int


def probe_pool(
    lengths: Sequence[int],
    config: BudgetConfig,
    *,
    max_graph_batch_size: int = 0,
    overlap: bool = False,
    speculation: Speculation | None = None,
    attention_dp_size: int = 1,
    pool_groups: int = 1,
) -> ProbePool:
    """Blocks for the dummies, for one full request beside the largest graph's batch, and for a block per seat.

    Dummies share nothing. The v2 manager keeps one pool per group of layers, each of this size. The user's token cap
    limits service, never the probe.
    """
    size, extra = config.tokens_per_block, 1 + _speculative_tokens(overlap, speculation)
    dummies = sum(ceil_div(length + extra, size) for length in lengths)
    dummies = ceil_div(dummies, attention_dp_size)
    warm_up = ceil_div(config.max_seq_len + 1, size) + min(config.max_batch_size, max_graph_batch_size) - 1
    factor = config.max_beam_width * (pool_groups if config.kv_cache_manager == "v2" else 1)
    blocks = factor * max(dummies, warm_up, config.max_batch_size)
    return ProbePool(blocks * size, blocks, factor * dummies)


def _speculative_tokens(overlap: bool, speculation: Speculation | None) -> int:
    if speculation is None:
        return 0
    drafted = speculation.tokens_per_step - 1
    return (drafted if overlap else 0) + drafted + speculation.extra_kv_tokens


def limit_probe_pool(pool: ProbePool, config: BudgetConfig, cost: CacheCost, free_bytes: int) -> ProbePool:
    """The pool as far as free memory allows (v1; the v2 manager is limited by its byte quota instead).

    Raises ``BudgetError`` before anything is enqueued when the dummies themselves would not fit.
    """
    size = config.tokens_per_block
    usable = int(free_bytes * config.free_fraction_exact)
    needed = cost.bytes_for_tokens(pool.dummy_blocks * size)
    if needed > usable:
        raise BudgetError(
            f"The profiling run does not fit: its requests need {format_bytes(needed)} of KV cache, and "
            f"{format_bytes(usable)} is usable (free_gpu_memory_fraction {config.free_gpu_memory_fraction} of "
            f"{format_bytes(free_bytes)} free). Lower max_num_tokens, or raise free_gpu_memory_fraction."
        )
    if config.kv_cache_manager == "v2" or cost.slope <= 0:
        return pool
    tokens = min(pool.tokens, align_down(cost.tokens_for_budget(usable), size))
    return ProbePool(tokens, tokens // size, pool.dummy_blocks)


def resolve_probe_config(config: BudgetConfig, pool: ProbePool, *, free_bytes: int) -> Resolved:
    """Settings of the probe's managers. The user's own config is untouched, so there is nothing to restore afterwards.

    A user's pool ratio could starve one pool and leave the dummies waiting for ever, and host tiers would pin host
    memory for a pool that is thrown away. Managers sized in bytes (v2, or v1 with several windows) get what is usable
    as quota.
    """
    why = "only for the profiling run"
    wanted = [
        Adjustment("pool_ratio", config.pool_ratio, None, why),
        Adjustment("avg_seq_len", config.avg_seq_len, config.max_seq_len, why),
        Adjustment("host_cache_bytes", config.host_cache_bytes, 0, why),
        Adjustment("disk_cache_bytes", config.disk_cache_bytes, 0, why),
    ]
    sized_in_bytes = config.kv_cache_manager == "v2" or config.has_several_windows
    if sized_in_bytes:
        usable = int(free_bytes * config.free_fraction_exact)
        quota = min(usable, config.max_gpu_total_bytes or usable)
        wanted.append(Adjustment("max_gpu_total_bytes", config.max_gpu_total_bytes, quota, why))
    if config.kv_cache_manager == "v2" or not sized_in_bytes:
        wanted.append(Adjustment("kv_max_tokens", config.kv_max_tokens, pool.tokens, why))
    return adjust(config, *wanted)
