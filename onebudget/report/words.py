"""The derivation in words: term by term from the whole card down to the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onebudget.report.segments import (
    KV_CACHE,
    UNASSIGNED,
    Document,
    Segment,
    binding_cap,
    cap_value,
    kv_sentence,
    segments_of,
    subject,
)  # fmt: skip
from onebudget.units import format_bytes

_BASIS = {
    "exact": "known exactly",
    "measured": "measured",
    "declared": "declared by its owner",
    "modelled": "modelled",
    "assumed": "assumed",
    "reported": "reported by another program",
}


def size(nbytes: int) -> str:
    """A size for people beside the exact bytes."""
    return f"{nbytes} B" if abs(nbytes) < 1024 else f"{format_bytes(nbytes)} ({nbytes:,} B)"


def explain(document: Document) -> list[str]:
    """One sentence per step of the derivation, with what remains of the card after each."""
    remaining = int(document["capacity_bytes"])
    sentences = [_opening(document)]
    for segment in segments_of(document):
        if segment.name in (KV_CACHE, UNASSIGNED) or not segment.planned_bytes:
            continue
        remaining -= segment.planned_bytes
        sentences.append(f"{_share(segment)} {_remains(remaining)}")
    empty = [s.name for s in segments_of(document) if not s.planned_bytes and s.name not in (KV_CACHE, UNASSIGNED)]
    if empty:
        sentences.append(f"Nothing is needed for {', '.join(empty)}.")
    return [*sentences, *_caps(document), *_ending(document), *_measurement(document)]


def _opening(document: Document) -> str:
    free = document["device"].get("free_at_start_bytes")
    at_start = f", of which {size(free)} were free at the start" if free else ""
    return f"{subject(document)}: the card has {size(document['capacity_bytes'])}{at_start}."


def _share(segment: Segment) -> str:
    basis = _BASIS.get(segment.basis, segment.basis)
    owner = f", owner {segment.owner}" if segment.owner else ""
    why = f": {segment.why.rstrip('.')}" if segment.why else ""
    return f"{segment.name} takes {size(segment.planned_bytes)}, {basis}{owner}{why}."


def _remains(remaining: int) -> str:
    return f"{size(remaining)} remain." if remaining >= 0 else f"That is {size(-remaining)} more than there is."


def _caps(document: Document) -> list[str]:
    return [
        f"The cap {cap['name']} = {cap_value(cap)} allows the KV cache {size(cap['limit_bytes'])}{_binds(cap)}."
        for cap in document.get("caps", ())
    ]


def _binds(cap: Mapping[str, Any]) -> str:
    return ", and that decides" if cap.get("binding") else ""


def _ending(document: Document) -> list[str]:
    if not document["fits"]:
        return [f"It does not fit: {size(document['shortfall_bytes'])} are missing."]
    kv, cap = document["kv_cache"], binding_cap(document)
    sentences = [f"The KV cache gets {size(kv['bytes'])}: {kv_sentence(kv)}."]
    attended = (document.get("admission") or {}).get("attended_tokens_cap")
    if attended is not None:
        sentences.append(f"Prompts computed in one step may attend to {attended:,} tokens together; more wait a step.")
    if document["unassigned_bytes"]:
        who = f" because {cap['name']} holds the KV cache below what is left" if cap else ""
        sentences.append(f"{size(document['unassigned_bytes'])} stay unassigned{who}.")
    return [*sentences, f"All shares together are the card: {document['capacity_bytes']:,} B."]


def _measurement(document: Document) -> list[str]:
    known = [s for s in segments_of(document) if s.difference_bytes is not None]
    if not known:
        return []
    off = [s for s in known if s.difference_bytes]
    if not off:
        return ["The run measured every share exactly as planned."]
    words = [f"{s.name} {format_bytes(abs(s.difference_bytes or 0))} {_side(s)}" for s in off]
    return [f"Against the plan the run measured {', '.join(words)}; everything else as planned."]


def _side(segment: Segment) -> str:
    return "above" if (segment.difference_bytes or 0) > 0 else "below"
