"""The trade between KV cache and context workspace: what other admission caps would have cost and given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from onebudget.budget.context_workspace import context_workspace_reserve
from onebudget.budget.cost import CacheCost
from onebudget.budget.ledger import ContextWorkspaceLine, Ledger
from onebudget.report.palette import colour_of
from onebudget.report.segments import KV_CACHE, Document
from onebudget.units import ceil_div, format_bytes

EXPLANATION = (
    "Prompts of one step share the context workspace: the more tokens they may attend to together, the fewer the cache "
    "holds. Prompts beyond the cap wait a step."
)
_BAR_CELLS = 28


@dataclass(frozen=True, slots=True)
class CapPoint:
    """One division of the bytes that cache and workspace share.

    ``attended_tokens_cap`` is what the prompts of a step may attend to together; ``prompts_at_once`` counts those of
    ``max_seq_len`` tokens, and ``steps_for_a_batch`` in how many steps a batch full of them would get through.
    """

    attended_tokens_cap: int
    workspace_bytes: int
    kv_bytes: int
    kv_tokens: int
    prompts_at_once: int
    steps_for_a_batch: int
    chosen: bool


def cap_points(document: Document, *, most: int) -> tuple[CapPoint, ...]:
    """Divisions from the smallest usable cap to the largest that has an effect, at most about ``most`` of them and the
    chosen one; empty for a ledger without a context workspace."""
    ledger = Ledger.from_dict(document)
    line = ledger.context_workspace
    if line is None or min(line.max_seq_len, line.requests_per_step, line.kv_len_cap) <= 0:
        return ()
    points = {}
    for kv_len_cap in sorted({*_caps(line, ledger.kv_cache.bytes_per_token, most), line.kv_len_cap}):
        point = _point(ledger, line, kv_len_cap)
        if point is not None:
            points[point.attended_tokens_cap] = point
    return tuple(points.values())


def _caps(line: ContextWorkspaceLine, kv_bytes_per_token: int, most: int) -> Iterable[int]:
    """Whole requests of ``max_seq_len``, evenly apart, up to the fullest step or to where the two demands meet."""
    worst = line.requests_per_step * line.max_seq_len
    _, largest = context_workspace_reserve(line.shared_bytes, kv_bytes_per_token, line.bytes_per_token, worst)
    requests = (largest or 0) // line.max_seq_len
    step = max(ceil_div(requests, most), 1)
    return [*(line.max_seq_len * count for count in range(1, requests + 1, step)), worst]


def _point(ledger: Ledger, line: ContextWorkspaceLine, kv_len_cap: int) -> CapPoint | None:
    kv = ledger.kv_cache
    reserve, cap = context_workspace_reserve(line.shared_bytes, kv.bytes_per_token, line.bytes_per_token, kv_len_cap)
    if cap is None:
        return None
    kv_bytes = line.shared_bytes - reserve
    at_once = max(cap // line.max_seq_len, 1)  # the first prompt always runs
    return CapPoint(
        attended_tokens_cap=cap,
        workspace_bytes=reserve,
        kv_bytes=kv_bytes,
        kv_tokens=CacheCost(kv.bytes_per_token, kv.fixed_bytes).tokens_for_budget(kv_bytes),
        prompts_at_once=at_once,
        steps_for_a_batch=ceil_div(line.requests_per_step, at_once),
        chosen=cap == ledger.admission.attended_tokens_cap,
    )


def cap_table(points: Sequence[CapPoint]) -> Table:
    """The curve for a terminal: a row per cap, a bar as long as the cache it leaves, the chosen one marked."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="KV cache against prompts at once", title_justify="left",
        caption=EXPLANATION, caption_justify="left",
    )  # fmt: skip
    for name in ("attended tokens", "prompts", "steps", "workspace", "KV tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    largest = max((point.kv_tokens for point in points), default=0)
    for point in points:
        table.add_row(
            f"{point.attended_tokens_cap:,}",
            f"{point.prompts_at_once:,}",
            f"{point.steps_for_a_batch:,}",
            format_bytes(point.workspace_bytes),
            f"{point.kv_tokens:,}",
            _bar(point, largest),
            style="bold" if point.chosen else "",
        )
    return table


def _bar(point: CapPoint, largest: int) -> Text:
    cells = point.kv_tokens * _BAR_CELLS // largest if largest else 0
    bar = Text("\u2588" * cells, style=colour_of(KV_CACHE))
    return bar.append(" \u25c0 chosen" if point.chosen else "", style="default")
