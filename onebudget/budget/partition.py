"""The ledger's terms: every byte of the peak, of the reserves and of what the fraction leaves, under one owner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from onebudget.budget.ledger import Basis, Phase, Term
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.budget.reserves import ReserveLine
    from onebudget.budget.shares import Inputs, Shares

OUTSIDE_NAMES = ("other_processes", "communication", "graphs", "fragmentation")
_OUTSIDE_OWNERS = {"other_processes": "system", "communication": "ranks", "graphs": "graphs", "fragmentation": "device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What is known beyond the arithmetic: how figures were obtained and how the peak divides.

    ``outside`` splits the memory outside the framework's allocator, ``logits_bytes`` tells logits apart from the other
    activations, ``basis`` and ``ranges`` (low, high) override what the terms say about their certainty.
    """

    outside: Mapping[str, int] = field(default_factory=dict)
    logits_bytes: int = 0
    basis: Mapping[str, Basis] = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def partition(inputs: Inputs, shares: Shares, labels: Labels) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    """All terms in the order their memory comes to life, and notes about figures that had to be trimmed.

    Together with the pool and the unassigned rest they make up the card. Where the card is too small they are charged
    in this order until it is used up.
    """
    terms = [
        *_probe_terms(inputs, labels),
        *(_reserve_term(line, "peak") for line in shares.added),
        _slack_term(inputs, shares),
        *(_reserve_term(line, "pool") for line in shares.cuts),
    ]
    merged = _merge([term for term in terms if term.bytes > 0])
    labelled = [_label(term, labels) for term in merged]
    return _charge_in_order(labelled, inputs.total_bytes)


def _probe_terms(inputs: Inputs, labels: Labels) -> list[Term]:
    profile = inputs.profile
    inside_kv, outside_kv = _where_probe_kv_was(inputs)
    activations = profile.activation_bytes - inside_kv
    logits = min(max(labels.logits_bytes, 0), activations)
    less = f" - {inside_kv} of the probe's own KV" if inside_kv else ""
    peak = f"allocator peak {profile.torch_peak_bytes} - weights {profile.model_bytes}{less}"
    told_apart = f" - logits {logits}" if logits else ""
    return [
        *_outside_terms(inputs, labels, profile.extra_cost_bytes - outside_kv, outside_kv),
        Term("weights", "models", profile.model_bytes, "measured", "load", why="allocator-live after loading"),
        Term("activations", "engine", activations - logits, "measured", "profile", why=peak + told_apart),
        Term("logits", "engine", logits, "declared", "profile", why="rows of logits inside the peak"),
    ]


def _where_probe_kv_was(inputs: Inputs) -> tuple[int, int]:
    """The probe's temporary KV as (bytes inside the allocator's peak, bytes outside it)."""
    profile = inputs.profile
    if profile.kv_outside_allocator:
        outside = min(profile.allocated_bytes, profile.extra_cost_bytes)
        return profile.allocated_bytes - outside, outside
    inside = min(profile.allocated_bytes, profile.activation_bytes)
    return inside, profile.allocated_bytes - inside


def _outside_terms(inputs: Inputs, labels: Labels, outside_bytes: int, probe_kv_bytes: int) -> list[Term]:
    terms, rest = [], outside_bytes
    for name in OUTSIDE_NAMES:
        known = min(max(labels.outside.get(name, 0), 0), rest)
        rest -= known
        phase: Phase = "capture" if name == "graphs" else "load"
        why = "part of the memory outside the framework's allocator"
        terms.append(Term(name, _OUTSIDE_OWNERS[name], known, "measured", phase, why=why))
    profile = inputs.profile
    less = f" - {probe_kv_bytes} of the probe's own KV" if probe_kv_bytes else ""
    named = f" - {outside_bytes - rest} named apart" if rest < outside_bytes else ""
    why = f"device used {profile.device_used_bytes} - allocator-live {profile.torch_used_bytes}{less}{named}"
    return [Term("context", "device", rest, "measured", "load", why=why), *terms]


def _reserve_term(line: ReserveLine, payer: str) -> Term:
    cap = f"; covers {line.admission_cap_tokens} attended tokens" if line.admission_cap_tokens is not None else ""
    source = "from the pool's share" if payer == "pool" else "beside the peak"
    why = f"{line.reason or 'declared by its owner'} ({source}{cap})"
    return Term(line.name, line.owner or "engine", line.bytes, line.basis, "reserve", why=why)


def _slack_term(inputs: Inputs, shares: Shares) -> Term:
    left = max(shares.left_bytes, 0)
    fraction = inputs.config.free_gpu_memory_fraction
    why = f"{left} left - {shares.available_bytes}, which is free_gpu_memory_fraction {fraction} of it"
    return Term("fraction_slack", "user", left - shares.available_bytes, "exact", "reserve", why=why)


def _merge(terms: Iterable[Term]) -> list[Term]:
    """One term per name: several reserves of one name add up."""
    merged: dict[str, Term] = {}
    for term in terms:
        first = merged.get(term.name)
        if first is None:
            merged[term.name] = term
            continue
        total, why = first.bytes + term.bytes, f"{first.why}; {term.why}"
        merged[term.name] = replace(first, bytes=total, low_bytes=None, high_bytes=None, why=why)
    return list(merged.values())


def _label(term: Term, labels: Labels) -> Term:
    low, high = labels.ranges.get(term.name, (term.bytes, term.bytes))
    return replace(term, basis=labels.basis.get(term.name, term.basis), low_bytes=low, high_bytes=high)


def _charge_in_order(terms: Iterable[Term], capacity_bytes: int) -> tuple[tuple[Term, ...], tuple[str, ...]]:
    charged, left, unmet = [], capacity_bytes, []
    for term in terms:
        paid = min(term.bytes, left)
        left -= paid
        if paid < term.bytes:
            unmet.append(f"{term.name} needs {format_bytes(term.bytes)} and finds {format_bytes(paid)}")
            term = replace(term, bytes=paid, low_bytes=paid, why=f"{term.why}; needs {term.bytes}, only {paid} left")
        charged.append(term)
    note = f"The card is used up before every term is paid, in the order of the terms: {'; '.join(unmet)}."
    return tuple(charged), (note,) if unmet else ()
