"""llama.cpp: no fraction. Buffers are what the settings make them, and one ledger stands for all cards together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from onebudget.budget.ledger import Change, Ledger
from onebudget.errors import ConfigError
from onebudget.planner.policies.base import EnginePolicy, Figure, PlanRequest
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.layouts import refuse_layout
from onebudget.planner.policies.ledgers import Budget, Outcome, Part, Pool, build_ledger
from onebudget.planner.policies.llamacpp_buffers import Buffers, Placement, compute_bytes, kv_bytes
from onebudget.planner.policies.llamacpp_fit import Fitted, fit
from onebudget.planner.policies.settings import check_settings, switch, whole
from onebudget.planner.policies.versions import EngineVersion, read_version
from onebudget.planner.unified import free_at_start, system_notes
from onebudget.units import GIB

__all__ = ["KNOWN_SETTINGS", "LlamacppPolicy", "compute_bytes", "kv_bytes"]

KNOWN_SETTINGS: Mapping[str, str] = {
    "n_ctx": "tokens of the cache; the tools take the model's length",
    "n_batch": "tokens of a logical batch; 2048",
    "n_ubatch": "tokens of a physical batch; 512",
    "n_seq_max": "sequences; 1",
    "n_gpu_layers": "layers on the cards, the output matrix counting as one more: a number, all, or auto",
    "n_cpu_moe": "first layers whose experts stay on the host",
    "cpu_moe": "experts of all layers stay on the host",
    "fit": "make the model fit the cards: a shorter context, then fewer layers; on in the tools since the end of 2025",
    "fit_target": "MiB that fit leaves free on every card; 1024",
    "fit_ctx": "shortest context that fit sets; 4096",
    "flash_attn": "attention without the table of scores; on where it works",
    "swa_full": "windowed layers cache everything",
    "kv_unified": "sequences share one cache",
    "type_k": "format of cached keys; f16",
    "type_v": "format of cached values; f16",
}


class LlamacppPolicy(EnginePolicy):
    """llama.cpp's buffers."""

    name: ClassVar[str] = "llamacpp"
    known_settings: ClassVar[Mapping[str, str]] = KNOWN_SETTINGS

    def plan(self, request: PlanRequest) -> Ledger:
        settings = check_settings("llamacpp", request.settings, KNOWN_SETTINGS)
        version = read_version("llamacpp", request.engine_version, request.as_of)
        dims = dims_from_config(request.model.config, request.model.name)
        refuse_layout(request, dims)
        buffers = Buffers(request, settings, dims)
        free = _free(request)
        wanted = _wanted(settings, dims, version)
        fits_itself = switch(settings, "fit", default=_has_fit(version))
        fitted = fit(buffers, wanted, free) if fits_itself else Fitted(wanted, {})
        ledger = build_ledger(request, _outcome(buffers, fitted, free, version))
        changes = (Change(fitted.changes),) if fitted.changes and ledger.fits else ()
        return ledger.replace(host=buffers.on_host(fitted.place), changes=changes)


def _has_fit(version: EngineVersion) -> bool:
    """The tools fit a model from December 2025 on, and since then the output matrix goes to the cards first."""
    return version.at_least(2025, 12)


def _wanted(settings: Mapping[str, Any], dims: Dims, version: EngineVersion) -> Placement:
    """What the settings ask for before anything is made to fit."""
    length = whole(settings, "n_ctx", dims.max_len or 4096) or dims.max_len or 4096
    count = len(dims.layers)
    experts = count if switch(settings, "cpu_moe", default=False) else whole(settings, "n_cpu_moe", 0) or 0
    asked = _gpu_layers(settings)
    if asked is None:
        return Placement(length, count, n_cpu_moe=min(experts, count))
    output = asked > count or (_has_fit(version) and asked > 0)
    layers = min(asked - int(output), count) if _has_fit(version) else min(asked, count)
    return Placement(length, layers, output, min(experts, count))


def _gpu_layers(settings: Mapping[str, Any]) -> int | None:
    """The number that was set; None where all layers go to the cards."""
    value = settings.get("n_gpu_layers")
    if value is None or str(value).lower() in ("all", "auto"):
        return None
    try:
        return whole(settings, "n_gpu_layers")
    except ConfigError as error:
        allowed = "a whole number of layers, all, or auto"
        raise ConfigError.for_field("n_gpu_layers", value, allowed) from error


def _context_bytes(cards: int, hundredths: int = 45) -> int:
    """What driver and cuBLAS hold of all cards together."""
    return cards * GIB * hundredths // 100


def _free(request: PlanRequest) -> int:
    """What all cards together have once driver and libraries are there."""
    cards = request.n_gpus
    total = (request.total_bytes or request.gpu.total_bytes) * cards
    known = free_at_start(request)
    return total - _context_bytes(cards) if known is None else min(known * cards, total)


def _outcome(buffers: Buffers, fitted: Fitted, free_bytes: int, version: EngineVersion) -> Outcome:
    request, place = buffers.request, fitted.place
    total = (request.total_bytes or request.gpu.total_bytes) * buffers.cards
    weights, cache, compute = buffers.weights(place), buffers.cache(place), buffers.compute(place)
    fixed = (
        Part("weights", "models", Figure.exact(weights.bytes, weights.why, "modelled"), "load"),
        Part("activations", "graphs", Figure.exact(compute, "compute buffers", "modelled")),
    )
    needed = cache + sum(part.figure.bytes for part in fixed)
    return Outcome(
        capacity_bytes=total,
        budget=Budget(min(needed, free_bytes), "n_ctx", place.n_ctx),
        charged=fixed,
        outside=_outside(request, total - free_bytes),
        pool=_pool(place.n_ctx, cache),
        engine="llamacpp",
        version=str(version),
        notes=(
            "No fraction: weights, cache and compute buffers are what the settings make them, all cards together.",
            *fitted.notes,
            *system_notes(request),
        ),
    )


def _outside(request: PlanRequest, held_bytes: int) -> tuple[Part, ...]:
    """Of the bytes that are gone at start: driver and libraries, and what others hold beyond them."""
    cards = request.n_gpus
    context = min(_context_bytes(cards), held_bytes)
    low, high = min(_context_bytes(cards, 30), context), max(_context_bytes(cards, 60), context)
    others = Figure.exact(held_bytes - context, "given")
    return (
        Part("context", "driver", Figure(context, low, high, "modelled", "driver, cuBLAS"), "load"),
        Part("other_processes", "system", others, "load"),
    )


def _pool(length: int, cache: int) -> Pool:
    """A cache for ``length`` tokens, or, where less is left, as many as that takes."""
    slope = cache // max(length, 1)

    def tokens(nbytes: int) -> int:
        return length if nbytes >= cache else nbytes // max(slope, 1)

    return Pool(
        tokens=tokens,
        blocks=tokens,
        tokens_per_block=1,
        bytes_per_token=slope,
        concurrency=lambda nbytes: tokens(nbytes) / max(length, 1),
        needed_bytes=cache,
    )
