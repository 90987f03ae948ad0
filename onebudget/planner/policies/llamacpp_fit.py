"""llama.cpp's ``fit``: what the tools change by themselves so that a model leaves a margin free on every card.

The context is shortened first, where nobody set it, but not below ``fit_ctx``. Then, where nobody said which layers go
where, experts of the first layers stay on the host, and for models without experts the first layers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from onebudget.planner.policies.llamacpp_buffers import Buffers, Placement
from onebudget.planner.policies.settings import switch, whole
from onebudget.units import GIB, MIB, format_bytes

_STEP_TOKENS = 256
_LEAST_CONTEXT = 4096
_MARGIN_MIB = GIB // MIB


@dataclass(frozen=True, slots=True)
class Fitted:
    """A placement and what had to be changed for it, by llama.cpp's own names; ``notes`` say so in words."""

    place: Placement
    changes: dict[str, Any]
    notes: tuple[str, ...] = ()


def fit(buffers: Buffers, wanted: Placement, free_bytes: int) -> Fitted:
    """``wanted`` where it leaves the margin of ``free_bytes`` (all cards together) free, else what the tools make of
    it."""
    margin = (whole(buffers.settings, "fit_target", _MARGIN_MIB) or 0) * MIB
    target = free_bytes - margin * buffers.cards
    if buffers.on_cards(wanted) <= target:
        return Fitted(wanted, {})
    why = f"fit leaves {format_bytes(margin)} of every card free"
    place, changes, notes = wanted, dict[str, Any](), list[str]()
    if buffers.settings.get("n_ctx") in (None, 0):
        place = replace(wanted, n_ctx=_context(buffers, wanted, target))
        if place.n_ctx < wanted.n_ctx:
            changes["n_ctx"] = place.n_ctx
            notes.append(f"{why}: the context shrinks from {wanted.n_ctx} to {place.n_ctx} tokens.")
    if buffers.on_cards(place) > target and not _placed_by_hand(buffers):
        moved = _fewer(buffers, place, target)
        changes |= _by_name(buffers, moved)
        notes.append(f"{why}: {_left_on_host(buffers, moved)}")
        place = moved
    return Fitted(place, changes, tuple(notes))


def _placed_by_hand(buffers: Buffers) -> bool:
    settings = buffers.settings
    automatic = str(settings.get("n_gpu_layers", "auto")).lower() == "auto"
    return not automatic or bool(settings.get("n_cpu_moe")) or switch(settings, "cpu_moe", default=False)


def _context(buffers: Buffers, wanted: Placement, target: int) -> int:
    """The longest context by a straight line between the shortest allowed and the wanted one, to whole steps."""
    settings = buffers.settings
    streams = 1 if switch(settings, "kv_unified", default=False) else whole(settings, "n_seq_max", 1) or 1
    least = (whole(settings, "fit_ctx", _LEAST_CONTEXT) or 0) * streams
    if wanted.n_ctx <= least:
        return wanted.n_ctx
    target -= _waste(buffers, wanted)
    shortest = buffers.on_cards(replace(wanted, n_ctx=least))
    if target <= shortest:
        return least
    span = buffers.on_cards(wanted) - shortest
    length = least + (wanted.n_ctx - least) * (target - shortest) // span
    return max(length - length % (_STEP_TOKENS * streams), least)


def _waste(buffers: Buffers, wanted: Placement) -> int:
    """Several cards take whole layers, or a third of one where experts are moved, so some of each stays unused."""
    if buffers.cards == 1:
        return 0
    layer = buffers.weights(wanted).bytes // max(wanted.layers, 1)
    return (buffers.cards + 1) * layer // (6 if buffers.dims.experts else 2)


def _fewer(buffers: Buffers, place: Placement, target: int) -> Placement:
    """Experts of as few of the first layers as possible on the host; where that is not enough, or there are none, as
    few layers."""
    count = place.layers
    if buffers.dims.experts:
        moved = _least(count, lambda most: replace(place, n_cpu_moe=most), buffers, target)
        if buffers.on_cards(moved) <= target:
            return moved
        place = moved
    whole_layers = _least(count, lambda most: replace(place, layers=count - most), buffers, target)
    if buffers.on_cards(whole_layers) <= target:
        return whole_layers
    return replace(whole_layers, output=False)


def _least(most: int, at: Callable[[int], Placement], buffers: Buffers, target: int) -> Placement:
    """The placement with the fewest moved layers that fits, or with all of them moved."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if buffers.on_cards(at(middle)) <= target else (middle + 1, high)
    return at(low)


def _by_name(buffers: Buffers, place: Placement) -> dict[str, Any]:
    """The placement as settings: the output matrix counts as one more layer on the cards."""
    named: dict[str, Any] = {"n_cpu_moe": place.n_cpu_moe} if place.n_cpu_moe else {}
    if place.layers < len(buffers.dims.layers) or not place.output:
        named["n_gpu_layers"] = place.layers + int(place.output)
    return named


def _left_on_host(buffers: Buffers, place: Placement) -> str:
    layers = len(buffers.dims.layers)
    if place.layers == layers and place.output:
        return f"the experts of {place.n_cpu_moe} of {layers} layers stay on the host, which is slower."
    beside = " and the output matrix" if not place.output else ""
    return f"{layers - place.layers} of {layers} layers{beside} stay on the host, which is slower."
