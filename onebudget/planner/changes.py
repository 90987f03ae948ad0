"""Ways to make a plan hold what was asked, cheapest first: each is planned again before it is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import Change, Ledger
from onebudget.errors import OneBudgetError
from onebudget.planner.answers import at_length, largest_that_holds, longest_asked, meets_target
from onebudget.planner.catalogue.gpus import all_gpus, parse_gpu
from onebudget.planner.host_tiers import smaller_tiers
from onebudget.planner.question import FRACTION, LENGTH, SEATS, STEP_TOKENS
from onebudget.units import MIB, align_up

if TYPE_CHECKING:
    from onebudget.planner.question import Question

_HIGHEST_FRACTIONS = (0.9, 0.92, 0.95, 0.97)
_FEWER_SEATS = (256, 128, 64, 32, 16, 8, 4, 1)
_FEWER_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
_NARROW_WEIGHTS = ("fp8", "int4")
_MOST_CARDS = 64
_WITHOUT_GRAPHS: Mapping[str, tuple[str, bool]] = {
    "onebudget": ("enable_cuda_graphs", False), "vllm": ("enforce_eager", True), "sglang": ("disable_cuda_graph", True),
}  # fmt: skip
_CAPS: Mapping[str, tuple[str, ...]] = {
    "onebudget": ("max_gpu_total_bytes", "kv_max_tokens"), "sglang": ("max_total_tokens",), "trtllm": ("max_tokens",),
    "vllm": ("kv_cache_memory_bytes",),
}  # fmt: skip


def find_changes(question: Question, ledger: Ledger, *, most: int = 6) -> tuple[Change, ...]:
    """Up to ``most`` changes with which the plan fits and meets its target; what the derivation itself simulated comes
    first. Where settings alone don't do, larger or more cards and narrower weights are tried."""
    asked = replace(question, quick=True)
    found: dict[str, Change] = {}
    for change in [*(each.set for each in ledger.changes if each.fits), *_settings(asked, ledger)]:
        _try(found, question, ledger, change)
        if len(found) >= most:
            return tuple(found.values())
    for change in _hardware(asked, ledger):
        _try(found, question, ledger, change)
    if not found:
        _together(found, question, ledger)
    return tuple(found.values())


def _try(found: dict[str, Change], question: Question, before: Ledger, change: Mapping[str, Any]) -> None:
    """Plan with the change; keep it when it does what was asked."""
    key = repr(sorted(change.items(), key=str))
    if key in found:
        return
    try:
        changed = replace(question.changed(change), advises=False)
        after = changed.ledger()
        helps = meets_target(changed, after)
    except OneBudgetError:
        return
    if helps:
        found[key] = Change(dict(change), max(0, after.kv_cache.bytes - before.kv_cache.bytes), True)


def _fits(question: Question, change: Mapping[str, Any]) -> bool:
    try:
        changed = question.changed(change)
        return meets_target(changed, changed.ledger())
    except OneBudgetError:
        return False


def _settings(asked: Question, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Single settings in the order of what they cost; of each the mildest value that does."""
    engine = asked.engine
    yield from ({cap: None} for cap in _CAPS.get(engine, ()) if asked.settings.get(cap) is not None)
    for tiers in smaller_tiers(engine, asked.settings):
        yield from _first(asked, tiers)
    name = FRACTION.get(engine)
    if name is not None:
        now = _fraction(ledger, name)
        yield from _first(asked, [{name: value} for value in _HIGHEST_FRACTIONS if value > now])
        yield from _first(asked, [{name: value} for value in _within_free(ledger) if 0 < value < now])
    if engine in _WITHOUT_GRAPHS:
        yield dict([_WITHOUT_GRAPHS[engine]])
    yield from _first(asked, [{STEP_TOKENS[engine]: value} for value in _FEWER_TOKENS])
    yield from _first(asked, [{SEATS[engine]: value} for value in _fewer_seats(asked)])
    if asked.target_seq_len is None:
        yield from _shorter(asked, ledger)
    if asked.kv_dtype in (None, "auto", "bf16", "fp16"):
        yield {"kv_dtype": "fp8"}
    frugal = list(_first(asked, [_frugal_settings(asked)]))
    yield from frugal
    if not frugal and asked.target_seq_len is None:
        yield from _shorter(_frugal(asked), ledger, _frugal_settings(asked))


def _fraction(ledger: Ledger, name: str) -> float:
    values = [cap.value for cap in ledger.caps if cap.name == name and cap.value is not None]
    return float(values[0]) if values else 0.0


def _within_free(ledger: Ledger) -> list[float]:
    """The largest share of the card that is free, where the limit exceeds it."""
    free, limit = ledger.device.free_at_start_bytes, max((cap.limit_bytes for cap in ledger.caps), default=0)
    return [free * 100 // ledger.capacity_bytes / 100] if 0 < free < limit else []


def _fewer_seats(asked: Question) -> list[int]:
    given = asked.settings.get(SEATS[asked.engine])
    most = given if isinstance(given, int) else _FEWER_SEATS[0] + 1
    least = asked.target_concurrency or 1
    return [seats for seats in _FEWER_SEATS if least <= seats < most]


def _first(asked: Question, changes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first of several changes that does what is asked."""
    found = next((change for change in changes if _fits(asked, change)), None)
    if found is not None:
        yield found


def _frugal_settings(asked: Question) -> dict[str, Any]:
    seats = max(asked.target_concurrency or 1, 1)
    frugal: dict[str, Any] = {SEATS[asked.engine]: min(seats, 8), STEP_TOKENS[asked.engine]: 512}
    name = FRACTION.get(asked.engine)
    return frugal | ({name: _HIGHEST_FRACTIONS[-1]} if name else {})


def _frugal(asked: Question) -> Question:
    return asked.changed(_frugal_settings(asked))


def _shorter(asked: Question, ledger: Ledger, beside: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """The longest request that fits, where that is less than was asked for."""
    limit = longest_asked(asked, ledger)

    def holds(length: int) -> bool:
        other = at_length(asked, length)
        return other is not None and meets_target(asked.with_settings(**{LENGTH[asked.engine]: length}), other)

    length = largest_that_holds(holds, limit - 1) if limit > 1 else 0
    if 0 < length < limit:
        yield {**(beside or {}), LENGTH[asked.engine]: length}


def _hardware(asked: Question, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Narrower weights, more cards, and the smallest larger card, the mildest of each kind that does."""
    if asked.engine != "onebudget" and asked.weights_dtype is None and asked.dims.quantization is None:
        yield from _narrower(asked, ledger)
    if asked.on_host:
        yield from _first(asked, [{"device_memory": size} for size in _larger_sizes(asked)])
        return
    name, count = parse_gpu(asked.gpu)
    yield from _first(asked, list(_more_cards(asked, name, count)))
    request = asked.request()
    sizes = sorted({(gpu.total_bytes, gpu.name) for gpu in all_gpus() if gpu.parent is None and not gpu.unified})
    larger = [each for total, each in sizes if total > (asked.total_bytes or request.gpu.total_bytes)]
    if asked.total_bytes is None:
        yield from _first(asked, [{"gpu": f"{each}x{count}" if count > 1 else each} for each in larger])


def _narrower(asked: Question, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Weights in fewer bits, with shorter requests where that takes it."""
    kinds: list[dict[str, Any]] = [{"weights_dtype": kind} for kind in _NARROW_WEIGHTS]
    alone = list(_first(asked, kinds))
    yield from alone
    if not alone and asked.target_seq_len is None:
        yield from _shorter(asked.changed(kinds[-1]), ledger, kinds[-1])


def _larger_sizes(asked: Question) -> Iterator[int]:
    size = asked.request().gpu.total_bytes
    for _ in range(24):
        size = align_up(size * 5 // 4, MIB)
        yield size


def _more_cards(asked: Question, name: str, count: int) -> Iterator[dict[str, Any]]:
    cards = count * 2
    while cards <= _MOST_CARDS:
        tp = cards // (asked.pp * asked.dp)
        yield {"gpu": f"{name}x{cards}", "tp": tp}
        if cards // count <= len(asked.dims.layers):
            yield {"gpu": f"{name}x{cards}", "tp": max(1, tp // (cards // count)), "pp": asked.pp * (cards // count)}
        cards *= 2


def _together(found: dict[str, Change], question: Question, before: Ledger) -> None:
    """Where nothing does alone: frugal settings with narrower weights, more cards, and the largest card."""
    asked = replace(question, quick=True)
    frugal = _frugal_settings(asked)
    if asked.on_host:
        for change in ({**frugal, "device_memory": size} for size in _larger_sizes(asked)):
            _try(found, question, before, change)
            if found:
                return
    for each in _hardware_of(asked):
        change = {**frugal, **each}
        if _fits(asked, change):
            _try(found, question, before, change)
        if found:
            return
    for each in _hardware_of(asked):
        for change in _shorter(asked.changed({**frugal, **each}), before, {**frugal, **each}):
            _try(found, question, before, change)
        if found:
            return


def _hardware_of(asked: Question) -> Iterator[dict[str, Any]]:
    narrow: list[dict[str, Any]] = [{"weights_dtype": kind} for kind in _NARROW_WEIGHTS]
    kinds = [{}, *narrow] if asked.engine != "onebudget" and asked.weights_dtype is None else [{}]
    if asked.on_host:
        return
    name, count = parse_gpu(asked.gpu)
    largest = max((gpu for gpu in all_gpus() if gpu.parent is None), key=lambda gpu: gpu.total_bytes).name
    cards = [{}, *_more_cards(asked, name, count)]
    if asked.total_bytes is None:
        cards += [{"gpu": f"{largest}x{count}"}, *_more_cards(asked, largest, count)]
    for kind in kinds:
        for card in cards:
            if kind or card:
                yield {**kind, **card}
