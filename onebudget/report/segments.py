"""The card as a row of segments: every term, the KV cache and what is left, planned beside measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Document = Mapping[str, Any]

KV_CACHE = "kv_cache"
UNASSIGNED = "unassigned"


@dataclass(frozen=True, slots=True)
class Segment:
    """One share of the card.

    ``measured_bytes`` are held by it, ``peak_bytes`` the most that was really used of it; None where the run did not
    report that.
    """

    name: str
    owner: str
    planned_bytes: int
    measured_bytes: int | None
    basis: str
    why: str
    peak_bytes: int | None = None

    @property
    def difference_bytes(self) -> int | None:
        """Measured minus planned."""
        return None if self.measured_bytes is None else self.measured_bytes - self.planned_bytes


def segments_of(document: Document) -> list[Segment]:
    """Every share of the document's card in ledger order, then the KV cache, then what is unassigned.

    The planned bytes add up to the capacity. Shares that only the measurement knows come with 0 planned bytes.
    """
    measured = measured_bytes(document)
    terms = [_term_segment(term, measured) for term in document["terms"]]
    known = {segment.name for segment in terms} | {KV_CACHE, UNASSIGNED}
    surprises = [
        Segment(name, "", 0, nbytes, "measured", "not in the plan")
        for name, nbytes in measured.items()
        if name not in known and nbytes
    ]
    segments = [*terms, *surprises, _kv_segment(document, measured), _unassigned_segment(document, measured)]
    peaks = peak_bytes(document)
    return [replace(segment, peak_bytes=peaks.get(segment.name)) for segment in segments]


def measured_bytes(document: Document) -> dict[str, int]:
    """Bytes per share as measured; empty for a document without a measurement."""
    measured = document.get("measured") or {}
    shares = {term["name"]: int(term["bytes"]) for term in measured.get("terms", ())}
    if measured.get(KV_CACHE):
        shares[KV_CACHE] = int(measured[KV_CACHE]["bytes"])
    if "unassigned_bytes" in measured:
        shares[UNASSIGNED] = int(measured["unassigned_bytes"])
    return shares


def peak_bytes(document: Document) -> dict[str, int]:
    """Peak use per share, as far as a run reports it."""
    measured = document.get("measured") or {}
    shares = [*measured.get("terms", ()), {"name": KV_CACHE, **(measured.get(KV_CACHE) or {})}]
    return {share["name"]: int(share["peak_bytes"]) for share in shares if share.get("peak_bytes") is not None}


def has_measurement(document: Document) -> bool:
    """Whether the document holds anything to set beside the plan."""
    return bool(measured_bytes(document))


def subject(document: Document) -> str:
    """What the ledger is about: the model and the card."""
    return f"{document.get('model') or 'a model'} on {document['device']['name'] or 'a card'}"


def binding_cap(document: Document) -> Mapping[str, Any] | None:
    """The cap that decided the size of the KV cache, if one did."""
    caps: list[Mapping[str, Any]] = [cap for cap in document.get("caps", ()) if cap.get("binding")]
    return caps[-1] if caps else None


def cap_value(cap: Mapping[str, Any]) -> str:
    """The setting as its owner wrote it: a count with separators, a fraction, or nothing."""
    value = cap["value"]
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _term_segment(term: Mapping[str, Any], measured: Mapping[str, int]) -> Segment:
    name = str(term["name"])
    return Segment(
        name, str(term["owner"]), int(term["bytes"]), measured.get(name), str(term["basis"]), str(term["why"])
    )


def _kv_segment(document: Document, measured: Mapping[str, int]) -> Segment:
    kv = document["kv_cache"]
    return Segment(KV_CACHE, "resources", int(kv["bytes"]), measured.get(KV_CACHE), "exact", kv_sentence(kv))


def kv_sentence(kv: Mapping[str, Any]) -> str:
    """What the KV cache's bytes hold, in tokens and blocks."""
    if not kv["bytes"]:
        return "nothing is left for it"
    fixed = f" + {kv['fixed_bytes']:,} B fixed" if kv.get("fixed_bytes") else ""
    return (
        f"{kv['tokens']:,} tokens x {kv['bytes_per_token']:,} B{fixed}; "
        f"{kv['blocks']:,} blocks of {kv['tokens_per_block']:,} tokens"
    )


def _unassigned_segment(document: Document, measured: Mapping[str, int]) -> Segment:
    cap = binding_cap(document)
    why = f"left over because {cap['name']} limits the KV cache" if cap else "no share asked for it"
    nbytes = int(document["unassigned_bytes"])
    return Segment(UNASSIGNED, "", nbytes, measured.get(UNASSIGNED), "exact", why if nbytes else "nothing is left over")
