"""What engines keep in host memory by their own settings: swapped and evicted KV blocks, states, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import HostLine
from onebudget.planner.host_memory import pinned_bytes, tiers_in_proportion
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.settings import size_bytes, switch, whole
from onebudget.planner.policies.versions import read_version
from onebudget.units import GIB, align_up, format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.planner.policies.base import PlanRequest

GB = 10**9
TIER_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "onebudget": ("host_cache_bytes",), "vllm": ("swap_space", "cpu_offload_gb"),
    "sglang": ("hicache_size", "hicache_ratio"), "trtllm": ("host_cache_size",),
}  # fmt: skip
"""Settings that size host memory, by engine."""
_SGLANG_RESERVE_BYTES = 10 * GIB


@dataclass(frozen=True, slots=True)
class Tiers:
    """``lines`` of one rank or of a host; ``reserve_bytes``: what the engine leaves free of the host or refuses."""

    lines: tuple[HostLine, ...] = ()
    reserve_bytes: int = 0
    notes: tuple[str, ...] = ()


def tiers_of(request: PlanRequest, ledger: Ledger, ranks: int) -> Tiers:
    """Host tiers of the ledger's engine, where ``ranks`` share a host. ``ConfigError`` for a size that is none."""
    found = _ENGINES.get(ledger.engine)
    return Tiers() if found is None else found(request, ledger, ranks)


def _lines(**sizes: int) -> tuple[HostLine, ...]:
    return tuple(HostLine(name, nbytes, "rank") for name, nbytes in sizes.items() if nbytes)


def _own(request: PlanRequest, ledger: Ledger, ranks: int) -> Tiers:
    """Our engine shares ``host_cache_bytes`` out among the ranks of a host; the v2 manager takes a tier by itself."""
    given = request.settings.get("host_cache_bytes")
    automatic = given is None and request.settings.get("kv_cache_manager") == "v2"
    if automatic and request.host_memory_bytes:
        from onebudget.budget.ranks import host_tier_bytes

        tier = host_tier_bytes(
            device_quota_bytes=ledger.kv_cache.bytes, host_available_bytes=request.host_memory_bytes,
            ranks_on_node=ranks, memlock_limit_bytes=None,
        )  # fmt: skip
    else:
        tier = (whole(request.settings, "host_cache_bytes", 0) or 0) // ranks
    return Tiers(_lines(host_kv_tier=tier))


def _vllm(request: PlanRequest, ledger: Ledger, ranks: int) -> Tiers:
    del ranks
    from onebudget.planner.policies.vllm.case import read_case

    notes = []
    swap = size_bytes(request.settings, "swap_space", GIB, default=4)
    if read_case(request).limits.worker != "V0":
        if request.settings.get("swap_space"):
            notes.append("swap_space belongs to the first core: this version keeps no blocks on the host by it.")
        swap = 0
    offloaded = size_bytes(request.settings, "cpu_offload_gb", GIB)
    if offloaded:
        notes.append("Offloaded weights are pinned tensor by tensor, each rounded up to a power of two: up to twice.")
    return Tiers(_lines(kv_swap=_pinned_swap(request, ledger, swap), offloaded_weights=offloaded), notes=tuple(notes))


def _pinned_swap(request: PlanRequest, ledger: Ledger, swap_bytes: int) -> int:
    """Whole blocks of ``swap_bytes`` in one pinned allocation for each layer of the rank."""
    kv, layers = ledger.kv_cache, len(dims_from_config(request.model.config).layers)
    block = kv.bytes_per_token * kv.tokens_per_block
    on_rank = max(1, layers // request.layout.pp)
    return on_rank * pinned_bytes(swap_bytes // block * (block // on_rank)) if block and swap_bytes >= block else 0


def _sglang(request: PlanRequest, ledger: Ledger, ranks: int) -> Tiers:
    """One tier behind the KV cache and, for hybrids, one behind the states, each as large as ``hicache_size`` says or
    ``hicache_ratio`` times what it stands behind. The memory is registered where it lies, so nothing is rounded."""
    del ranks
    settings = request.settings
    size = size_bytes(settings, "hicache_size", GB)
    if not switch(settings, "enable_hierarchical_cache", default=False):
        note = "hicache_size and hicache_ratio do nothing without enable_hierarchical_cache."
        return Tiers(notes=(note,) if size or settings.get("hicache_ratio") else ())
    pools = [ledger.kv_cache.bytes, ledger.term("recurrent_state").bytes]
    ratio = Fraction(str(settings.get("hicache_ratio", 2)))
    kv, states = ((size or int(pool * ratio)) if pool else 0 for pool in pools)
    page = ledger.kv_cache.bytes_per_token * ledger.kv_cache.tokens_per_block
    kv = align_up(kv, page) if kv and page else kv
    notes = _in_proportion(size, pools) if size and states else ()
    return Tiers(_lines(host_kv_tier=kv, host_state_tier=states), _SGLANG_RESERVE_BYTES, notes)


def _in_proportion(size: int, pools: list[int]) -> tuple[str, ...]:
    fair = tiers_in_proportion(size, pools)
    return (
        f"hicache_size counts twice, for the cache and for the states: in proportion to their pools the second would "
        f"take {format_bytes(fair[1])} and a rank {format_bytes(sum(fair))}.",
    )


def _trtllm(request: PlanRequest, ledger: Ledger, ranks: int) -> Tiers:
    """``host_cache_size`` for every cache manager of a rank."""
    del ledger, ranks
    tier = whole(request.settings, "host_cache_size", 0) or 0
    if not tier or not _drafts_apart(request):
        return Tiers(_lines(host_kv_tier=tier))
    note = "The draft's cache manager takes host_cache_size again."
    return Tiers(_lines(host_kv_tier=tier, draft_host_kv_tier=tier), notes=(note,))


def _drafts_apart(request: PlanRequest) -> bool:
    """Whether a draft has a cache manager of its own."""
    from onebudget.planner.policies.trtllm_drafts import has_own_manager, read_draft

    config = request.settings.get("speculative_config")
    if not config:
        return False
    dims = dims_from_config(request.model.config, request.model.name)
    version = read_version("trtllm", request.engine_version, request.as_of)
    return has_own_manager(read_draft(request.settings, request, dims, version), config)


_ENGINES: Mapping[str, Callable[[PlanRequest, Ledger, int], Tiers]] = {
    "onebudget": _own, "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm,
}  # fmt: skip


def smaller_tiers(engine: str, settings: Mapping[str, Any]) -> Iterable[list[dict[str, Any]]]:
    """For every host setting that was given, ever smaller values of it, down to none."""
    for name in TIER_SETTINGS.get(engine, ()):
        given = settings.get(name)
        if not isinstance(given, (int, float)) or isinstance(given, bool) or given <= 0:
            continue
        parts = [given / part if isinstance(given, float) else given // part for part in (2, 4, 8, 16, 32, 64)]
        yield [{name: value} for value in (*(part for part in parts if part), 0)]
