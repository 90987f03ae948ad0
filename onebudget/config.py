"""What people may set, frozen at the edge.

``BudgetConfig`` is built once from keyword arguments, checked completely, and never changed afterwards. Verbs that need
other values (``resolve_*``) return a new config and say what they changed and why.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from onebudget import knobs
from onebudget.errors import ConfigError
from onebudget.units import GIB, ceil_div

DEFAULT_HOST_MEMORY_BYTES = 2 * GIB
"""Capacity of a host device when ``device_memory`` is not given."""
DEFAULT_MAX_SEQ_LEN = 2048


def _knob(default: Any, clean: Callable[[str, object], object], about: str) -> Any:
    return field(default=default, metadata={"clean": clean, "about": about})


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class BudgetConfig:
    """Every knob of our own engine, by its public name.

    Sizes in bytes accept ``"1GiB"`` as well as integers. ``None`` means "no limit" (or "the default of the model or
    device"); whether a knob was given at all is in ``given``, so an explicit ``None`` stays distinguishable.
    Raises ``ConfigError`` with field, value and allowed range; an unknown name is answered with near matches.
    """

    device_memory: int | None = _knob(None, knobs.size(1, none=True), "capacity of the device; None: the whole device")
    dtype: str = _knob("auto", knobs.choice("auto", "bf16", "fp16", "fp32", aliases=knobs.DTYPE_ALIASES), "model dtype")
    max_gpu_total_bytes: int | None = _knob(None, knobs.size(1, none=True), "hard ceiling of the KV pool in bytes")
    kv_max_tokens: int | None = _knob(None, knobs.count(1, none=True), "hard ceiling of the KV pool in tokens")
    free_gpu_memory_fraction: float = _knob(0.9, knobs.fraction(), "share of what is left after the peak")
    max_seq_len: int = _knob(DEFAULT_MAX_SEQ_LEN, knobs.count(1), "longest request, prompt and answer together")
    max_batch_size: int = _knob(8, knobs.count(1), "most requests in one step")
    max_num_tokens: int = _knob(2048, knobs.count(1), "most tokens computed in one step")
    max_beam_width: int = _knob(1, knobs.count(1, 1), "beams per request; beam search is not built yet")
    tokens_per_block: int = _knob(32, knobs.count(1), "tokens in one KV block")
    kv_cache_dtype: str = _knob(
        "auto", knobs.choice("auto", "fp8_e4m3", aliases={"fp8": "fp8_e4m3"}), "dtype of the KV pool; auto: the model's"
    )
    kv_cache_manager: str = _knob("v1", knobs.choice("v1", "v2"), "v1 counts tokens, v2 keeps a byte quota")
    enable_block_reuse: bool = _knob(True, knobs.flag(), "reuse KV blocks of equal prefixes")
    enable_chunked_prefill: bool = _knob(True, knobs.flag(), "compute long prompts in chunks")
    context_kv_len_cap: int | None = _knob(None, knobs.count(0, none=True), "attended tokens to reserve for")
    max_attention_window: tuple[int, ...] | None = _knob(None, knobs.counts(1), "attention window per layer, repeated")
    pool_ratio: tuple[float, ...] | None = _knob(None, knobs.shares(), "share of the pool per layer group, sums to 1")
    avg_seq_len: int | None = _knob(None, knobs.count(1, none=True), "expected request length; sizes pools of windows")
    cross_kv_fraction: float | None = _knob(
        None, knobs.fraction(none=True, below_one=True), "share of the KV pool that cross-attention gets"
    )
    max_util_for_resume: float = _knob(0.95, knobs.fraction(), "v2: pool use up to which a paused request resumes")
    kv_pool_rebalance: bool = _knob(
        False, knobs.flag(), "v2: move blocks between the pools of attention windows as they are used"
    )
    host_cache_bytes: int = _knob(0, knobs.size(0), "host memory for evicted KV blocks")
    disk_cache_bytes: int = _knob(0, knobs.size(0), "disk space for KV blocks that host memory has no room for")
    disk_cache_dir: str | None = _knob(None, knobs.folder(), "folder of those files; None: the system's temporary one")
    skip_estimation: bool = _knob(False, knobs.flag(), "do not run the probe; size from device use alone")
    scheduler_policy: str = _knob(
        "guaranteed_no_evict",
        knobs.choice("guaranteed_no_evict", "max_utilization", "static_batch"),
        "who starts: whoever can finish, whoever fits now (others may be paused), or a new batch after the old",
    )
    batch_wait: tuple[int, float] | None = _knob(
        None, knobs.patience(), "STEPS:RATIO, hold prompts back while a step has fewer than RATIO of max_num_tokens"
    )
    overlap: bool = _knob(True, knobs.flag(), "launch the next step before the last one's tokens are read")
    enable_cuda_graphs: bool = _knob(True, knobs.flag(), "replay captured graphs for decode")
    cuda_graph_batch_sizes: tuple[int, ...] | None = _knob(
        None, knobs.counts(1), "batch sizes to capture; None: 1, 2, 4 and every eighth up to max_batch_size"
    )
    cuda_graph_padding: bool = _knob(True, knobs.flag(), "pad a batch up to the next captured size")
    reclaim_workspace: bool = _knob(True, knobs.flag(), "give scratch back that three forwards in a row did not need")
    trim_after_shrink: bool = _knob(False, knobs.flag(), "return such scratch from the allocator's cache too")
    enable_penalties: bool = _knob(True, knobs.flag(), "accept penalised requests and reserve their tables")
    enable_sleep: bool = _knob(False, knobs.flag(), "let weights and KV cache leave the device while nobody asks")
    seed: int | None = _knob(None, knobs.count(0, none=True), "seed of requests that bring none")
    given: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __init__(self, **settings: Any) -> None:
        _refuse_unknown(settings)
        for name, knob in KNOBS.items():
            value = knob.clean(name, settings[name]) if name in settings else knob.default
            object.__setattr__(self, name, value)
        object.__setattr__(self, "given", frozenset(settings))
        _refuse_contradictions(self)

    @property
    def free_fraction_exact(self) -> Fraction:
        """The fraction as the decimal people wrote, so that 0.9 of a size is exact."""
        return Fraction(str(self.free_gpu_memory_fraction))

    @property
    def max_util_for_resume_exact(self) -> Fraction:
        return Fraction(str(self.max_util_for_resume))

    @property
    def has_several_windows(self) -> bool:
        """Whether layers differ in how far back they attend, so that each window has a pool of its own."""
        return len({min(window, self.max_seq_len) for window in self.max_attention_window or ()}) > 1

    @property
    def blocks_per_max_request(self) -> int:
        """Blocks that one request of ``max_seq_len`` tokens holds."""
        return ceil_div(self.max_seq_len, self.tokens_per_block)

    def replace(self, **changes: Any) -> BudgetConfig:
        """A checked copy with other values; what was given before stays given."""
        settings = {name: getattr(self, name) for name in self.given}
        return BudgetConfig(**(settings | changes))

    def to_dict(self) -> dict[str, Any]:
        """All knobs with their values, as JSON takes them."""
        values = {name: getattr(self, name) for name in KNOBS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Knob:
    """One knob's default, its check, and a line about it (the command line's help text)."""

    default: Any
    clean: Callable[[str, object], object]
    about: str


UNBUILT_KNOBS = frozenset(
    {
        "cross_kv_fraction", "max_beam_width",
    }
)  # fmt: skip
"""Knobs that the derivation knows and our engine does not act on yet: it refuses them instead of ignoring them."""

KNOBS: Mapping[str, Knob] = {
    item.name: Knob(item.default, item.metadata["clean"], item.metadata["about"])
    for item in dataclasses.fields(BudgetConfig)
    if "clean" in item.metadata
}


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One value that a ``resolve_*`` function changed, and the reason."""

    knob: str
    before: Any
    after: Any
    why: str

    def __str__(self) -> str:
        return f"{self.knob}: {self.before} -> {self.after} ({self.why})"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A new config beside the list of what differs from the old one and why."""

    config: BudgetConfig
    adjustments: tuple[Adjustment, ...] = ()


def adjust(config: BudgetConfig, *wanted: Adjustment) -> Resolved:
    """Apply adjustments in order; those that change nothing are left out."""
    kept = tuple(item for item in wanted if item.before != item.after)
    if not kept:
        return Resolved(config)
    return Resolved(config.replace(**{item.knob: item.after for item in kept}), kept)


def resolve_max_seq_len(config: BudgetConfig, model_max_seq_len: int | None) -> Resolved:
    """Bound ``max_seq_len`` by what the model was made for: min(model, given or 2048)."""
    if model_max_seq_len is None or config.max_seq_len <= model_max_seq_len:
        return Resolved(config)
    asked = "asked for" if "max_seq_len" in config.given else "the default"
    why = f"{asked} is {config.max_seq_len}, the model stops at {model_max_seq_len}"
    wanted = [Adjustment("max_seq_len", config.max_seq_len, model_max_seq_len, why)]
    if config.avg_seq_len is not None and config.avg_seq_len > model_max_seq_len:
        wanted.append(Adjustment("avg_seq_len", config.avg_seq_len, model_max_seq_len, "can't exceed max_seq_len"))
    return adjust(config, *wanted)


_ENVIRONMENT = {
    "ONEBUDGET_SKIP_KV_ESTIMATION": "skip_estimation",
    "ONEBUDGET_CONTEXT_KV_LEN_CAP": "context_kv_len_cap",
    "ONEBUDGET_RECLAIM_WORKSPACE": "reclaim_workspace",
}


def resolve_environment(config: BudgetConfig, environ: Mapping[str, str]) -> Resolved:
    """Take knobs from environment variables; one that was given explicitly wins over its variable."""
    wanted = []
    for variable, name in _ENVIRONMENT.items():
        if environ.get(variable, "") == "" or name in config.given:
            continue
        after = KNOBS[name].clean(variable, environ[variable])
        wanted.append(Adjustment(name, getattr(config, name), after, f"environment variable {variable}"))
    return adjust(config, *wanted)


def _refuse_unknown(settings: Mapping[str, object]) -> None:
    for name in settings:
        if name in KNOBS:
            continue
        near = difflib.get_close_matches(name, KNOBS, n=3, cutoff=0.6)
        hint = f" Did you mean {' or '.join(near)}?" if near else f" Known knobs: {', '.join(KNOBS)}."
        allowed = "one of the known knobs"
        raise ConfigError(f"There is no knob {name!r}.{hint}", field=name, value=settings[name], allowed=allowed)


def _refuse_contradictions(config: BudgetConfig) -> None:
    if config.avg_seq_len is not None and config.avg_seq_len > config.max_seq_len:
        raise ConfigError.for_field("avg_seq_len", config.avg_seq_len, f"at most max_seq_len ({config.max_seq_len})")
    if config.kv_pool_rebalance and config.kv_cache_manager == "v1":
        allowed = "false with kv_cache_manager v1, which sizes every pool once; v2 moves blocks between them"
        raise ConfigError.for_field("kv_pool_rebalance", config.kv_pool_rebalance, allowed)
    if config.has_several_windows and config.kv_max_tokens is not None and config.kv_cache_manager == "v1":
        allowed = (
            "None with several attention windows (each window has its own pool, so one token count has no meaning); "
            "cap the bytes with max_gpu_total_bytes"
        )
        raise ConfigError.for_field("kv_max_tokens", config.kv_max_tokens, allowed)
