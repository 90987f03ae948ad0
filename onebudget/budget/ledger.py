"""The ledger: who holds which bytes of the card, and how that is known. Its terms always sum to the capacity.

The attributes are the keys of the JSON document ``onebudget.ledger/1``. Planned, measured and reported budgets are all
this type, so any two of them can be compared line by line (see ``onebudget.budget.explain``).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from onebudget.errors import ConfigError, UnknownKeyError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA = "onebudget.ledger/1"
Basis = Literal["exact", "measured", "declared", "modelled", "assumed", "reported"]
Phase = Literal["load", "profile", "reserve", "capture", "serve"]

TERM_NAMES = (
    "other_processes", "context", "weights", "draft_weights", "activations", "logits", "communication", "fragmentation",
    "multimodal_encoder", "fixed_workspace", "penalty_workspace", "indexer_logits", "context_workspace", "graphs",
    "lora", "recurrent_state", "late_allocations", "safety_margin", "fraction_slack",
)  # fmt: skip
"""Names that mean the same thing in every ledger. Owners of other kinds of memory may add their own."""

_OPTIONAL = ("context_workspace", "answers", "request")
_POOL_RANGE = ("low_bytes", "high_bytes", "low_tokens", "high_tokens", "basis")


@dataclass(frozen=True, slots=True)
class Term:
    """One share of the card: whose it is, how many bytes, how that is known, and when it comes to life.

    ``low_bytes`` and ``high_bytes`` bound the figure where it is an estimate; left out they equal ``bytes``. ``why`` is
    one line with the formula and its numbers.
    """

    name: str
    owner: str
    bytes: int
    basis: Basis = "measured"
    phase: Phase = "profile"
    low_bytes: int | None = None
    high_bytes: int | None = None
    why: str = ""

    def __post_init__(self) -> None:
        if self.low_bytes is None:
            object.__setattr__(self, "low_bytes", self.bytes)
        if self.high_bytes is None:
            object.__setattr__(self, "high_bytes", self.bytes)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One pool inside the KV cache: layers that share a window (None: full attention) and a number of blocks."""

    name: str
    bytes: int
    blocks: int
    bytes_per_token: int
    window: int | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLine:
    """The KV pool. ``blocks * tokens_per_block`` may be a little below ``tokens``; the rest stays inside ``bytes``.

    A planned pool is as uncertain as the terms beside it: ``low_*`` and ``high_*`` bound it, ``basis`` says how it is
    known. All None where the figures are final.
    """

    bytes: int = 0
    tokens: int = 0
    blocks: int = 0
    tokens_per_block: int = 0
    bytes_per_token: int = 0
    fixed_bytes: int = 0
    max_concurrency_at_max_seq_len: float = 0.0
    groups: tuple[KVGroup, ...] = ()
    low_bytes: int | None = None
    high_bytes: int | None = None
    low_tokens: int | None = None
    high_tokens: int | None = None
    basis: Basis | None = None


@dataclass(frozen=True, slots=True)
class Cap:
    """One limit on the pool, as bytes. ``binding``: no other limit is lower."""

    name: str
    value: int | float | None
    limit_bytes: int
    binding: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that were simulated: what the pool would gain, and whether it would fit then."""

    set: dict[str, Any]
    gains_bytes: int = 0
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """The card as it was found."""

    name: str = ""
    kind: str = ""
    total_bytes: int = 0
    free_at_start_bytes: int = 0
    others_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """Limits the scheduler must keep so that the reserves suffice. None: no limit; 0: one context request per step."""

    attended_tokens_cap: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextWorkspaceLine:
    """What KV cache and context workspace were divided by, so that other divisions can be worked out from the ledger.

    ``shared_bytes`` is what both came out of, ``kv_len_cap`` the attended tokens the workspace was to cover at most. A
    step holds up to ``requests_per_step`` prompts of up to ``max_seq_len`` tokens.
    """

    shared_bytes: int
    bytes_per_token: int
    kv_len_cap: int
    max_seq_len: int
    requests_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """What one rank could hold before the ranks agreed, and what it holds now."""

    rank: int
    capacity_bytes: int
    kv_bytes: int
    tokens: int | None
    agreed_kv_bytes: int


@dataclass(frozen=True, slots=True)
class HostLine:
    """Host memory that goes with the budget: per rank, or shared by all ranks of a host."""

    name: str
    bytes: int
    per: Literal["rank", "host"] = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a plan is good for. Lengths in tokens; ``*_bound_by`` names what keeps a figure from being larger.

    ``largest_seq_len``: the longest request that could be served under otherwise equal settings.
    ``largest_concurrency``: requests of ``at_seq_len`` tokens at once. ``largest_seq_len_at_target``: the longest
    requests of which ``target_concurrency`` fit at once. ``second_instance_free_bytes``: what another instance on the
    same card would find free.
    """

    max_seq_len: int
    largest_seq_len: int
    seq_len_bound_by: str
    at_seq_len: int
    concurrency: float
    largest_concurrency: int
    concurrency_bound_by: str
    target_concurrency: int | None = None
    largest_seq_len_at_target: int | None = None
    meets_target: bool = True
    second_instance_free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Every byte of one card, by owner.

    Promise, checked whenever one is built: all figures are integers of at least 0, term names are unique, and
    ``sum(terms.bytes) + kv_cache.bytes + unassigned_bytes == capacity_bytes``. ``ConfigError`` otherwise.
    """

    capacity_bytes: int
    terms: tuple[Term, ...]
    kv_cache: KVCacheLine = KVCacheLine()
    schema: str = SCHEMA
    model: str | None = None
    engine: str = "onebudget"
    engine_version: str | None = None
    device: DeviceLine = DeviceLine()
    caps: tuple[Cap, ...] = ()
    admission: Admission = Admission()
    context_workspace: ContextWorkspaceLine | None = None
    unassigned_bytes: int = 0
    fits: bool = True
    shortfall_bytes: int = 0
    changes: tuple[Change, ...] = ()
    ranks: tuple[RankLine, ...] = ()
    limiting_rank: int = 0
    host: tuple[HostLine, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    answers: Answers | None = None
    request: dict[str, Any] | None = None
    """The question a planner was asked, as plain values."""

    def __post_init__(self) -> None:
        for name in ("terms", "caps", "changes", "ranks", "host", "notes", "warnings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_figures(self)
        _check_sum(self)

    def term(self, name: str) -> Term:
        """The term of that name. A standard name that nobody charged gives a term of 0 bytes.

        Raises ``UnknownKeyError`` for a name that is neither in this ledger nor standard.
        """
        for term in self.terms:
            if term.name == name:
                return term
        if name in TERM_NAMES:
            return Term(name, owner="", bytes=0, basis="exact", why="nothing was charged under this name")
        known = dict.fromkeys([*(term.name for term in self.terms), *TERM_NAMES])
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}."
        raise UnknownKeyError(f"no term {name!r} in the ledger; {hint}")

    def replace(self, **changes: Any) -> Ledger:
        """A checked copy with other values."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document, with lists and plain values only; ``context_workspace``, the pool's range, and a
        plan's question and answers only where there are any."""
        document = cast("dict[str, Any]", _adapter().dump_python(self, mode="json"))
        for key in _OPTIONAL:
            if document[key] is None:
                del document[key]
        for key in _POOL_RANGE:
            if document["kv_cache"][key] is None:
                del document["kv_cache"][key]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Ledger:
        """Read a document that holds a ledger, such as that of ``run``; keys beside the ledger's own are ignored.

        Raises ``ConfigError`` naming what is missing, of the wrong type, or does not sum.
        """
        if document.get("schema") != SCHEMA:
            raise ConfigError.for_field("schema", document.get("schema"), repr(SCHEMA))
        return _validated(document)

    def explain(self) -> str:
        """The derivation in words, one line per step."""
        from onebudget.budget.explain import explain_ledger

        return explain_ledger(self)


@cache
def _adapter() -> TypeAdapter[Ledger]:
    from pydantic import TypeAdapter

    return TypeAdapter(Ledger)


def _validated(document: Mapping[str, Any]) -> Ledger:
    from pydantic import ValidationError

    try:
        return _adapter().validate_python(dict(document))
    except ConfigError:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "ledger"
        raise ConfigError(f"not a usable ledger: {where}: {first['msg']}", field=where, value=first["input"]) from error


def _check_figures(ledger: Ledger) -> None:
    figures = {term.name: term.bytes for term in ledger.terms}
    if len(figures) != len(ledger.terms):
        names = [term.name for term in ledger.terms]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"a ledger has one term per name; twice: {', '.join(twice)}", field="terms", value=names)
    for name in ("capacity_bytes", "unassigned_bytes", "shortfall_bytes"):
        figures[name] = getattr(ledger, name)
    figures["kv_cache"] = ledger.kv_cache.bytes
    for name, value in figures.items():
        if not isinstance(value, int) or value < 0:
            raise ConfigError.for_field(name, value, "a whole number of bytes, at least 0")


def _check_sum(ledger: Ledger) -> None:
    total = sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes
    if total != ledger.capacity_bytes:
        raise ConfigError(
            f"the ledger does not sum: terms, kv_cache and unassigned_bytes give {total}, "
            f"the capacity is {ledger.capacity_bytes} (difference {ledger.capacity_bytes - total})",
            field="terms",
            value=total,
            allowed=f"a sum of {ledger.capacity_bytes}",
        )
