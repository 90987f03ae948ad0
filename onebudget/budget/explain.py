"""A ledger in words, and the difference between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger, Term


@dataclass(frozen=True, slots=True)
class Difference:
    """One line that differs between two ledgers; ``None`` where a ledger doesn't have it."""

    name: str
    before: int | float | str | bool | None
    after: int | float | str | bool | None
    unit: str = "bytes"

    def __str__(self) -> str:
        before, after = self._text(self.before), self._text(self.after)
        if isinstance(self.before, int) and isinstance(self.after, int) and self.unit == "bytes":
            gap = self.after - self.before
            return f"{self.name}: {before} -> {after} ({'+' if gap > 0 else ''}{format_bytes(gap)})"
        return f"{self.name}: {before} -> {after}"

    def _text(self, value: object) -> str:
        if value is None:
            return "none"
        if self.unit == "bytes" and isinstance(value, int):
            return format_bytes(value)
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def explain_ledger(ledger: Ledger) -> str:
    """The derivation as plain text: the card, every term taken off it, the caps, and what the pool comes to."""
    lines = [*_head(ledger), *_terms(ledger), *_pool(ledger), *_caps(ledger), *_tail(ledger)]
    return "\n".join(lines)


def diff(before: Ledger, after: Ledger) -> tuple[Difference, ...]:
    """What changed from one ledger to another: terms, pool, caps and verdict, only where they differ."""
    names = list(dict.fromkeys(term.name for ledger in (before, after) for term in ledger.terms))
    held = [{term.name: term.bytes for term in ledger.terms} for ledger in (before, after)]
    lines = [Difference("capacity_bytes", before.capacity_bytes, after.capacity_bytes)]
    lines += [Difference(name, held[0].get(name, 0), held[1].get(name, 0)) for name in names]
    lines += [
        Difference("kv_cache", before.kv_cache.bytes, after.kv_cache.bytes),
        Difference("kv_cache.tokens", before.kv_cache.tokens, after.kv_cache.tokens, "tokens"),
        Difference("kv_cache.blocks", before.kv_cache.blocks, after.kv_cache.blocks, "blocks"),
        Difference("unassigned_bytes", before.unassigned_bytes, after.unassigned_bytes),
        Difference("fits", before.fits, after.fits, ""),
        Difference("shortfall_bytes", before.shortfall_bytes, after.shortfall_bytes),
    ]
    caps = [{cap.name: cap.value for cap in ledger.caps} for ledger in (before, after)]
    cap_names = dict.fromkeys([*caps[0], *caps[1]])
    lines += [Difference(name, caps[0].get(name), caps[1].get(name), "") for name in cap_names]
    before_cap, after_cap = before.admission.attended_tokens_cap, after.admission.attended_tokens_cap
    lines.append(Difference("attended_tokens_cap", before_cap, after_cap, "tokens"))
    return tuple(line for line in lines if line.before != line.after)


def explain_diff(before: Ledger, after: Ledger) -> str:
    """The differences as plain text, one line each."""
    return "\n".join(str(line) for line in diff(before, after)) or "nothing changed"


def _head(ledger: Ledger) -> list[str]:
    what = f" for {ledger.model}" if ledger.model else ""
    where = f" on {ledger.device.name}" if ledger.device.name else ""
    return [f"Memory budget{what}{where}", f"  {_amount(ledger.capacity_bytes)}  the card"]


def _terms(ledger: Ledger) -> list[str]:
    return [
        f"- {_amount(term.bytes)}  {term.name}: {term.why or 'no reason recorded'} [{term.basis}{_span(term)}]"
        for term in ledger.terms
    ]


def _span(term: Term) -> str:
    low, high = term.low_bytes or 0, term.high_bytes or 0
    return f", {format_bytes(low)} to {format_bytes(high)}" if low != high else ""


def _pool(ledger: Ledger) -> list[str]:
    pool = ledger.kv_cache
    fixed = f" after {format_bytes(pool.fixed_bytes)} fixed" if pool.fixed_bytes else ""
    size = (
        f"{pool.tokens:,} tokens at {pool.bytes_per_token:,} B{fixed}, "
        f"{pool.blocks:,} blocks of {pool.tokens_per_block}, "
        f"{pool.max_concurrency_at_max_seq_len:.2f} requests of max_seq_len at once"
    )
    lines = [f"- {_amount(ledger.unassigned_bytes)}  unassigned: left to nobody"] if ledger.unassigned_bytes else []
    lines.append(f"= {_amount(pool.bytes)}  kv_cache: {size if ledger.fits else 'does not fit'}")
    for group in pool.groups:
        size = f"{group.blocks:,} blocks at {group.bytes_per_token:,} B per token"
        lines.append(f"  {_amount(group.bytes)}    {group.name}: {size}")
    return lines


def _caps(ledger: Ledger) -> list[str]:
    return [
        f"  {_amount(cap.limit_bytes)}  limit by {cap.name} = {cap.value}{' (binds)' if cap.binding else ''}"
        for cap in ledger.caps
    ]


def _tail(ledger: Ledger) -> list[str]:
    lines = []
    cap = ledger.admission.attended_tokens_cap
    if cap is not None:
        lines.append(f"Context requests of one step may attend to {cap:,} tokens in all (the first one always runs).")
    if not ledger.fits:
        lines.append(f"Does not fit: {format_bytes(ledger.shortfall_bytes)} ({ledger.shortfall_bytes} B) missing.")
    for change in ledger.changes:
        what = ", ".join(f"{name} = {value}" for name, value in change.set.items())
        verdict = "fits" if change.fits else "does not fit"
        lines.append(f"Would help: {what} (pool + {format_bytes(change.gains_bytes)}, {verdict})")
    lines += [f"Host memory: {line.name} {format_bytes(line.bytes)} per {line.per}" for line in ledger.host]
    lines += [f"Note: {note}" for note in ledger.notes]
    return lines + [f"Warning: {warning}" for warning in ledger.warnings]


def _amount(nbytes: int) -> str:
    return f"{format_bytes(nbytes):>12} {nbytes:>16} B"
