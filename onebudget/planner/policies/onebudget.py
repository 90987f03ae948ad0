"""Our own engine: the same derivation that a start-up runs, fed with a dry run or with closed forms."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from onebudget.budget.derive import derive_budget
from onebudget.budget.ledger import DeviceLine, HostLine, Ledger
from onebudget.config import KNOBS, UNBUILT_KNOBS, BudgetConfig, resolve_environment, resolve_max_seq_len
from onebudget.errors import BudgetError, ConfigError, ModelError
from onebudget.planner.closed_form import closed_form_peak
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.formats import WeightFormat, weight_format
from onebudget.planner.policies.modelled import Modelled
from onebudget.planner.policies.weight_headers import weights_in_headers
from onebudget.planner.policies.weight_rules import Shard, weights_on_rank
from onebudget.planner.rank_config import check_heads, config_of_rank
from onebudget.planner.unified import free_at_start, system_notes
from onebudget.units import MIB, ceil_div

if TYPE_CHECKING:
    from onebudget.budget.profile import ProfileResult
    from onebudget.engine.graph_budget import GraphDeclaration
    from onebudget.planner.dry_run import FewLayers

HOST = "host"
CUDA_PAGE_BYTES = 2 * MIB
_RUNNABLE = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_KV_DTYPES = {"auto": "auto", "bf16": "auto", "fp16": "auto", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan's question, worked out. ``quantised``: the format of weights that our engine can't compute with."""

    request: PlanRequest
    config: BudgetConfig
    dims: Dims
    dtype: str
    kind: WeightFormat
    total_bytes: int
    context_bytes: int
    others_bytes: int
    granule_bytes: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def quantised(self) -> bool:
        return self.kind.name not in ("bf16", "fp32")

    @property
    def on_host(self) -> bool:
        return self.request.gpu.name == HOST


class OnebudgetPolicy(EnginePolicy):
    """``quick``: closed forms instead of a dry run, and so without torch. ``advises`` False: only whether a plan fits
    is of interest, not what would help, which takes dry runs of its own."""

    name: ClassVar[str] = "onebudget"
    known_settings: ClassVar[Mapping[str, str]] = {
        name: knob.about for name, knob in KNOBS.items() if name not in UNBUILT_KNOBS
    }

    def __init__(self, *, quick: bool = False, advises: bool = True) -> None:
        self._quick = quick
        self._advises = advises

    def plan(self, request: PlanRequest) -> Ledger:
        case = read_case(request)
        if not self._quick:
            try:
                return _finished(case, _by_dry_run(case, advises=self._advises))
            except ModelError as error:
                case = replace(case, notes=(*case.notes, f"No dry run: {error} The terms of the peak are modelled."))
            except ModuleNotFoundError as error:
                case = replace(case, notes=(*case.notes, f"No dry run without {error.name}: the peak is modelled."))
        return _finished(case, _by_closed_form(case))


def read_case(request: PlanRequest) -> Case:
    """Check everything that can be wrong with a question. ``ConfigError`` or ``ModelError`` with a sentence."""
    dims = dims_from_config(request.model.config, request.model.name)
    if not dims.hidden or not dims.vocab:
        missing = "hidden_size" if not dims.hidden else "vocab_size"
        raise ModelError(f"The config of {request.model.name or 'this model'} has no {missing}: it can't be planned.")
    check_heads(dims.heads, dims.kv_heads, request.layout.tp, request.model.name)
    kind = weight_format(request.weights_dtype, dims.quantization, dims.name)
    config = _config(request)
    config = resolve_max_seq_len(config, dims.max_len or None).config
    _check_kv_dtype(config, dims)
    dtype, notes = _dtype(request, config, dims)
    total = request.total_bytes or request.gpu.total_bytes
    on_host = request.gpu.name == HOST
    context = 0 if on_host else request.gpu.context_bytes or 0
    if not on_host and request.gpu.context_bytes is None:
        notes.append(f"How much a driver's context takes of {request.gpu.name} is not known: it counts as 0.")
    free = free_at_start(request)
    others = 0 if free is None else max(0, total - free - context)
    if free is not None and free > total:
        raise ConfigError.for_field("gpu_free", free, f"at most the card's {total} bytes")
    notes += system_notes(request)
    return Case(
        request=request, config=config, dims=dims, dtype=dtype, kind=_kind_for(kind, dtype), total_bytes=total,
        context_bytes=context, others_bytes=others, granule_bytes=_granule(on_host), notes=tuple(notes),
        warnings=tuple(_warnings(request, dims, kind)),
    )  # fmt: skip


def _granule(on_host: bool) -> int:
    return os.sysconf("SC_PAGE_SIZE") if on_host else CUDA_PAGE_BYTES


def _kind_for(kind: WeightFormat, dtype: str) -> WeightFormat:
    """16- and 32-bit weights are held in the computing dtype, whatever the checkpoint stores."""
    if kind.name in ("bf16", "fp32"):
        return weight_format("fp32" if dtype == "float32" else "bf16", None)
    return kind


def _config(request: PlanRequest) -> BudgetConfig:
    settings: dict[str, Any] = {name.lstrip("-").replace("-", "_"): value for name, value in request.settings.items()}
    if request.kv_dtype is not None:
        kv = _KV_DTYPES.get(request.kv_dtype.lower())
        if kv is None:
            raise ConfigError.for_field("kv_dtype", request.kv_dtype, f"one of {', '.join(_KV_DTYPES)} for our engine")
        settings.setdefault("kv_cache_dtype", kv)
    if request.weights_dtype is not None and request.weights_dtype.lower() in _RUNNABLE:
        settings.setdefault("dtype", _RUNNABLE[request.weights_dtype.lower()])
    unbuilt = sorted(settings.keys() & UNBUILT_KNOBS)
    if unbuilt:
        raise ConfigError(f"{', '.join(unbuilt)}: this engine does not act on that yet.", field=unbuilt[0])
    config = resolve_environment(BudgetConfig(**settings), os.environ).config
    if request.gpu.name == HOST and config.device_memory is None:
        config = config.replace(device_memory=request.total_bytes or request.gpu.total_bytes)
    return config


def _check_kv_dtype(config: BudgetConfig, dims: Dims) -> None:
    if config.kv_cache_dtype != "auto" and not dims.is_latent:
        allowed = f"'auto' for {dims.name}: only latent attention can store FP8 yet"
        raise ConfigError.for_field("kv_cache_dtype", config.kv_cache_dtype, allowed)


def _dtype(request: PlanRequest, config: BudgetConfig, dims: Dims) -> tuple[str, list[str]]:
    """The computing dtype and how it was chosen, as the engine chooses it on that device."""
    if config.dtype != "auto":
        return _TORCH_NAMES[config.dtype], []
    if request.gpu.name != HOST:
        return ("float32" if dims.element_bytes == 4 else "bfloat16"), []
    from onebudget.planner.host_cpu import native_bfloat16

    chosen = "bfloat16" if native_bfloat16() else "float32"
    return chosen, [f"This machine's processor computes in {chosen} (dtype auto)."]


def _warnings(request: PlanRequest, dims: Dims, kind: WeightFormat) -> Iterator[str]:
    if kind.name not in ("bf16", "fp32"):
        yield f"Our engine can't run weights in {kind.name} yet: this is what it would need if it could."
    if dims.is_hybrid:
        yield "Our engine can't run recurrent layers yet: this is what it would need if it could."
    if request.layout.tp > 1 and dims.is_latent:
        yield "Our engine can't divide latent attention over ranks yet: this is what a rank would need if it could."
    if request.layout.pp > 1:
        yield "Our engine has no pipeline stages yet: this is what the first stage would need."
    if dims.multimodal:
        yield "Only the language model is planned: our engine has no encoder for images or sounds yet."


# -- by dry run -------------------------------------------------------------------------------------------------------


def _by_dry_run(case: Case, *, advises: bool) -> Ledger:
    """The engine's own derivation over the dry run of a few layers, as each rank computes them."""
    from onebudget.device import open_device
    from onebudget.engine.derivation import engine_ledger

    with _few_layers(case) as few:
        weights = _weights(case, few.weights_bytes(case.dtype))
        dry = _OnCard(few, case)
        profile = dry.profile(case.dtype, case.config)
        device = open_device(
            "fake", capacity_bytes=case.total_bytes, gpu=case.request.gpu.name, granularity_bytes=case.granule_bytes,
            others_bytes=min(case.others_bytes, case.total_bytes),
        )  # fmt: skip
        try:
            ledger = engine_ledger(
                few.folder, few.facts, case.dtype, case.config, profile, device=device,
                rounding_bytes=profile.extra_cost_bytes - case.context_bytes, dry=dry, advises=advises,
            )  # fmt: skip
        except BudgetError as error:
            if error.ledger is None:
                raise
            ledger = _refused(error)
        finally:
            device.close()
    return _with_range(ledger, weights, Figure.exact(0))


def _refused(error: BudgetError) -> Ledger:
    """The ledger with the error's numbers; ways out stand in its changes."""
    assert error.ledger is not None
    numbers = re.split(r" (?:No setting alone|Cheapest ways out)", str(error))[0]
    return error.ledger.replace(warnings=(*error.ledger.warnings, numbers))


def _few_layers(case: Case) -> AbstractContextManager[FewLayers]:
    from onebudget.planner.dry_run import few_layers

    config = config_of_rank(case.request.model.config, case.request.layout)
    return few_layers(config, case.request.model.name, case.dtype, case.granule_bytes)


class _OnCard:
    """Dry runs as the card would show them: with the driver's context, other processes, and weights as they are
    stored."""

    def __init__(self, few: FewLayers, case: Case) -> None:
        self._few = few
        self._case = case

    def profile(self, dtype: str, config: BudgetConfig) -> ProfileResult:
        seen = self._few.profile(dtype, config)
        case = self._case if dtype == self._case.dtype else replace(self._case, dtype=dtype)
        plain = self._few.weights_bytes(dtype)
        more = _weights(replace(case, kind=_kind_for(case.kind, dtype)), plain).bytes - plain
        return replace(
            seen,
            model_bytes=seen.model_bytes + more,
            torch_peak_bytes=seen.torch_peak_bytes + more,
            torch_used_bytes=seen.torch_used_bytes + more,
            device_used_bytes=seen.device_used_bytes + more + case.context_bytes + case.others_bytes,
        )

    def graphs(self, dtype: str, config: BudgetConfig) -> GraphDeclaration | None:
        """None where several ranks share a model: the engine captures none there."""
        return self._few.graphs(dtype, config) if self._case.request.layout.tp == 1 else None


def _weights(case: Case, plain_bytes: int | None) -> Figure:
    """Weights of the first rank. ``plain_bytes`` is what a model built on one rank in the computing dtype holds."""
    layout, dims = case.request.layout, case.dims
    if plain_bytes is not None and not case.quantised and layout.tp == layout.pp == 1:
        return Figure.exact(plain_bytes, "every tensor of the model, built without memory")
    shard = Shard(
        tp=layout.tp, experts_over=max(layout.ep, layout.tp), whole_experts=layout.ep > 1,
        end_layer=ceil_div(len(dims.layers), layout.pp), has_head=layout.pp == 1, vision=False,
    )  # fmt: skip
    tensors = case.request.model.tensors
    if tensors and case.quantised and case.request.weights_dtype is None:
        return weights_in_headers(tensors, dims, shard)
    return weights_on_rank(dims, case.kind, shard)


# -- by closed form ---------------------------------------------------------------------------------------------------


def _by_closed_form(case: Case) -> Ledger:
    weights = _weights(case, None)
    peak = closed_form_peak(case.dims, case.config, case.element_bytes, tp=case.request.layout.tp)
    modelled = Modelled(
        case.dims, case.config, case.element_bytes, case.request.layout, case.granule_bytes, weights.bytes, peak
    )
    spread = peak.activation_bytes // 10
    try:
        ledger = derive_budget(
            case.config,
            modelled.profile(outside_bytes=case.context_bytes + case.others_bytes),
            modelled.cost,
            modelled.reserves(),
            total_bytes=case.total_bytes,
            context_workspace=modelled.context_workspace(),
            model=case.request.model.name,
            device=DeviceLine(
                name=case.request.gpu.name, kind="planned", total_bytes=case.total_bytes,
                free_at_start_bytes=max(0, case.total_bytes - case.others_bytes), others_bytes=case.others_bytes,
            ),
            outside={"other_processes": min(case.others_bytes, case.total_bytes)},
            basis={"weights": weights.basis, "activations": "modelled"},
            groups=modelled.groups(),
            host=[HostLine("load_staging", weights.bytes, "rank")],
        )  # fmt: skip
    except BudgetError as error:
        if error.ledger is None:
            raise
        ledger = _refused(error)
    peak_figure = Figure(peak.activation_bytes, peak.activation_bytes - spread, peak.activation_bytes + spread)
    return _with_range(ledger, weights, peak_figure)


# -- what every plan gets ---------------------------------------------------------------------------------------------


def _with_range(ledger: Ledger, weights: Figure, peak: Figure) -> Ledger:
    """Bounds and bases of what is not exact, and the range of the pool that follows."""
    figures = {"weights": weights} | ({"activations": peak} if peak.bytes else {})
    terms = []
    for term in ledger.terms:
        figure = figures.get(term.name)
        if figure is None:
            terms.append(term)
            continue
        low = max(0, term.bytes - (figure.bytes - figure.low_bytes))
        high = term.bytes + figure.high_bytes - figure.bytes
        why = figure.why if term.name == "weights" and figure.why else term.why
        terms.append(replace(term, basis=figure.basis, low_bytes=low, high_bytes=high, why=why))
    down = sum(figure.high_bytes - figure.bytes for figure in figures.values())
    up = sum(figure.bytes - figure.low_bytes for figure in figures.values())
    return ledger.replace(terms=tuple(terms), kv_cache=_pool_range(ledger, down, up) if down or up else ledger.kv_cache)


def _pool_range(ledger: Ledger, down: int, up: int) -> Any:
    pool = ledger.kv_cache
    if not ledger.fits or not pool.bytes_per_token:
        return pool
    low, high = max(0, pool.bytes - down), pool.bytes + up
    per_token = pool.bytes_per_token
    return replace(
        pool, low_bytes=low, high_bytes=high, low_tokens=max(0, pool.tokens - ceil_div(down, per_token)),
        high_tokens=pool.tokens + up // per_token, basis="modelled",
    )  # fmt: skip


def _finished(case: Case, ledger: Ledger) -> Ledger:
    return ledger.replace(
        model=case.request.model.name or None,
        notes=(*ledger.notes, *case.notes, *case.request.model.notes),
        warnings=(*case.warnings, *ledger.warnings),
    )
