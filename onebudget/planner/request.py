"""One question to a policy, from the words people give: names are resolved, and what contradicts is refused."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebudget.errors import ConfigError
from onebudget.planner.catalogue.gpus import GpuFacts, find_gpu, parse_gpu
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.dims import Dims, dims_from_config
from onebudget.planner.policies.formats import FORMATS, cache_bits, weight_format
from onebudget.planner.policies.settings import check_settings, switch
from onebudget.planner.rank_config import check_heads
from onebudget.planner.source import ModelSource, resolve_model
from onebudget.planner.weights import ParallelLayout
from onebudget.units import MIB, format_bytes

if TYPE_CHECKING:
    from datetime import date

CACHE_WORDS = ("auto", "bf16", "fp16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
LEAST_CARD_BYTES, MOST_CARD_BYTES = 64 * MIB, 16 * 2**40
"""Cards outside these sizes are typing errors."""
_MOST_NUMBER = 2**44


def make_request(
    model: str | ModelSource,
    gpu: str | GpuFacts,
    *,
    engine: str,
    engine_version: str | None = None,
    tp: int | None = None,
    pp: int = 1,
    ep: int = 1,
    dp: int = 1,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    settings: Mapping[str, object] | None = None,
    total_bytes: int | None = None,
    free_bytes: int | None = None,
    revision: str | None = None,
    offline: bool = False,
    use: str = "server",
    as_of: date | None = None,
) -> PlanRequest:
    """The question to ``engine``'s policy. ``gpu`` may carry a count (``H100-SXM-80GBx8``); without ``tp`` all of them
    share every layer, as far as ``pp`` and ``dp`` leave them to.

    ``total_bytes`` and ``free_bytes`` are per card. Raises ``ConfigError`` or ``ModelError``, one sentence each with
    near matches where a name was meant, for anything unknown, contradictory or absurd.
    """
    policy = policy_for(engine)
    known = check_settings(policy.name, settings or {}, policy.known_settings)
    _check_numbers(known)
    _check_sizes(total_bytes, free_bytes)
    facts, count = _card(gpu, total_bytes)
    source = resolve_model(model, revision=revision, offline=offline) if isinstance(model, str) else model
    dims = dims_from_config(source.config, source.name)
    _check_dtypes(weights_dtype, kv_dtype, known)
    layout, cards = _layout(policy.name, known, count, tp=tp, pp=pp, ep=ep, dp=dp)
    _check_division(dims, layout, _attention_ranks(policy.name, known, layout))
    return PlanRequest(
        model=source, gpu=facts, n_gpus=cards, layout=layout, engine_version=engine_version,
        weights_dtype=weights_dtype, kv_dtype=kv_dtype, settings=known, as_of=as_of, total_bytes=total_bytes,
        free_bytes=free_bytes, use=use, offline=offline,
    )  # fmt: skip


def request_document(engine: str, request: PlanRequest) -> dict[str, Any]:
    """What was asked, as plain values that ``request_from_document`` turns back into the same question."""
    given = {
        "engine": policy_for(engine).name,
        "engine_version": request.engine_version,
        "model": _model_words(request.model),
        "revision": request.model.revision,
        "gpu": request.gpu.name,
        "n_gpus": request.n_gpus,
        "layout": asdict(request.layout),
        "weights_dtype": request.weights_dtype,
        "kv_dtype": request.kv_dtype,
        "settings": dict(request.settings),
        "total_bytes": request.total_bytes,
        "free_bytes": request.free_bytes,
        "use": request.use,
    }
    return {name: value for name, value in given.items() if value is not None}


def parse_settings(texts: Iterable[str]) -> dict[str, object]:
    """``KEY=VALUE`` texts as settings: numbers, ``true`` and ``false``, JSON, and anything else as it stands."""
    settings: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise ConfigError(f"--set {text!r} is not usable: it must be KEY=VALUE, like max_model_len=8192.",
                              field="--set", value=text)  # fmt: skip
        if name in settings:
            raise ConfigError(f"--set {name} is given twice.", field="--set", value=text)
        settings[name] = plain_value(value.strip())
    return settings


def plain_value(text: str) -> object:
    """A word of a command line as the value it stands for."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        value: object = json.loads(text)
    except ValueError:
        return text
    return value if not isinstance(value, float) or (value == value and abs(value) != float("inf")) else text


def _model_words(source: ModelSource) -> str:
    return source.origin if Path(source.origin).exists() else source.name


def _card(gpu: str | GpuFacts, total_bytes: int | None) -> tuple[GpuFacts, int | None]:
    """Facts of the card and the count that was written with it, None where none was."""
    if isinstance(gpu, GpuFacts):
        return gpu, None
    try:
        return find_gpu(gpu, total_bytes=None), None
    except ConfigError:
        name, count = parse_gpu(gpu)
        return find_gpu(name, total_bytes=total_bytes), count if name != gpu.strip() else None


def _layout(
    engine: str, settings: Mapping[str, Any], count: int | None, *, tp: int | None, pp: int, ep: int, dp: int
) -> tuple[ParallelLayout, int]:
    """The layout and its cards; ``ConfigError`` where the cards that were named are not as many."""
    if engine == "llamacpp":
        return ParallelLayout(tp or 1, pp, ep, dp), count or (tp or 1) * pp * dp
    shared = engine == "sglang" and switch(settings, "enable_dp_attention", default=False)
    others = pp if shared else pp * dp
    if tp is None:
        tp = max((count or 1) // max(others, 1), 1)
    layout = ParallelLayout(tp, pp, ep, dp)
    if shared and tp % dp:
        raise ConfigError(f"dp = {dp} does not divide tp = {tp}, as enable_dp_attention needs.", field="dp", value=dp)
    cards = tp * pp if shared else layout.ranks
    if count is not None and count != cards:
        raise ConfigError(
            f"tp {tp} x pp {pp}{'' if shared else f' x dp {dp}'} needs {cards} cards, and {count} were named: change "
            f"the layout, or name {cards} cards.",
            field="gpu",
            value=count,
        )
    return layout, cards


def _attention_ranks(engine: str, settings: Mapping[str, Any], layout: ParallelLayout) -> int:
    shared = engine == "sglang" and switch(settings, "enable_dp_attention", default=False)
    return layout.tp // layout.dp if shared else layout.tp


def _check_division(dims: Dims, layout: ParallelLayout, ranks: int) -> None:
    if dims.heads:
        check_heads(dims.heads, dims.heads if dims.is_latent else dims.kv_heads or dims.heads, ranks, dims.name)
    if layout.pp > len(dims.layers):
        raise ConfigError(
            f"pp = {layout.pp} is more than the {len(dims.layers)} layers of {dims.name or 'the model'}.",
            field="pp",
            value=layout.pp,
        )
    if layout.ep > 1 and not dims.experts:
        raise ConfigError(
            f"ep = {layout.ep} divides experts, and {dims.name or 'the model'} has none: leave ep at 1.",
            field="ep",
            value=layout.ep,
        )


def _check_dtypes(weights_dtype: str | None, kv_dtype: str | None, settings: Mapping[str, Any]) -> None:
    if weights_dtype is not None:
        try:
            weight_format(weights_dtype, None)
        except ConfigError as error:
            raise _unknown_word("weights_dtype", weights_dtype, ("bf16", "fp16", *FORMATS)) from error
    for field, word in (("kv_dtype", kv_dtype), ("kv_cache_dtype", settings.get("kv_cache_dtype"))):
        if word is None:
            continue
        try:
            cache_bits(str(word), 2, None)
        except ConfigError as error:
            raise _unknown_word(field, str(word), CACHE_WORDS) from error


def _unknown_word(field: str, word: str, allowed: tuple[str, ...]) -> ConfigError:
    words = tuple(dict.fromkeys(allowed))
    near = difflib.get_close_matches(word.lower(), words, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(words)}."
    return ConfigError(f"{field} {word!r} is no number format; {hint}", field=field, value=word, allowed=str(words))


def _check_sizes(total_bytes: int | None, free_bytes: int | None) -> None:
    if total_bytes is not None and not LEAST_CARD_BYTES <= total_bytes <= MOST_CARD_BYTES:
        raise ConfigError(
            f"A card of {total_bytes:,} bytes is not plausible: sizes go from {format_bytes(LEAST_CARD_BYTES)} to "
            f"{format_bytes(MOST_CARD_BYTES)}, written like 24GiB.",
            field="gpu_total",
            value=total_bytes,
        )
    if free_bytes is None:
        return
    if free_bytes <= 0 or free_bytes > (total_bytes or MOST_CARD_BYTES):
        most = format_bytes(total_bytes or MOST_CARD_BYTES)
        raise ConfigError.for_field("gpu_free", free_bytes, f"above 0 and at most the card's {most}")


def _check_numbers(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 <= value <= _MOST_NUMBER:
            raise ConfigError.for_field(name, value, f"from 0 to {_MOST_NUMBER}")
