"""One self-contained HTML page about a ledger: picture, table, caps, requests. It loads nothing from a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from onebudget.report.chart import chart_html
from onebudget.report.context_cap import EXPLANATION, cap_points
from onebudget.report.context_cap_chart import cap_chart_html
from onebudget.report.palette import colour_of
from onebudget.report.plan_view import plan_html
from onebudget.report.segments import Document, Segment, cap_value, has_measurement, kv_sentence, segments_of, subject
from onebudget.report.shell import resource, section, shell
from onebudget.report.tables import HOW_MEASURED, change_sentence, run_lines, signed
from onebudget.units import format_bytes

_CURVE_POINTS = 64


def page(document: Document) -> str:
    """The whole page as text, plotly's source included (about 5 MB)."""
    segments, measured = segments_of(document), has_measurement(document)
    sections = [
        _picture(segments, measured=measured),
        section("Shares of the card", _ledger_table(segments, measured=measured)),
        section("What it is good for", plan_html(document)),
        section("Caps on the KV cache", _caps_table(document.get("caps", ()))),
        section("KV cache against prompts at once", _cap_curve(document)),
        section("Warnings and notes", _remarks(document)),
        section("Run", "".join(f"<p>{escape(line)}</p>" for line in run_lines(document))),
        section("Requests", _requests(document.get("requests", ()))),
    ]
    after = (
        f'<script type="application/json" id="shares">{_shares_json(segments)}</script>'
        f"<script>{resource('page.js')}</script>"
    )
    return shell(f"Memory budget: {subject(document)}", f"{_head(document)}{''.join(sections)}", after)


def _head(document: Document) -> str:
    device, kv = document["device"], document["kv_cache"]
    verdict = (
        f'<p class="good">It fits: {escape(kv_sentence(kv))} for the KV cache.</p>'
        if document["fits"]
        else f'<p class="bad">It does not fit: {format_bytes(document["shortfall_bytes"])} are missing.</p>'
    )
    facts = [
        f"capacity {format_bytes(document['capacity_bytes'])} ({document['capacity_bytes']:,} B)",
        f"device kind {device.get('kind') or 'unknown'}",
        f"free at start {format_bytes(device.get('free_at_start_bytes', 0))}",
        f"engine {document.get('engine') or 'unknown'} {document.get('engine_version') or ''}".rstrip(),
    ]
    spans = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f'<h1>{escape(subject(document))}</h1><div class="facts dim">{spans}</div>{verdict}'


def _picture(segments: Sequence[Segment], *, measured: bool) -> str:
    hint = "Point at a share, or tap it here or in the table, to see where its bytes come from."
    chips = "".join(f'<button class="chip">{_swatch(segment)}</button>' for segment in segments)
    detail = f'<div id="detail" aria-live="polite"><span class="dim">{hint}</span></div>'
    return section("The card", f'{chart_html(segments, measured=measured)}<div class="legend">{chips}</div>{detail}')


def _swatch(segment: Segment) -> str:
    return f'<span class="swatch" style="background:{colour_of(segment.name)}"></span>{escape(segment.name)}'


def _ledger_table(segments: Sequence[Segment], *, measured: bool) -> str:
    planned_total = sum(segment.planned_bytes for segment in segments)
    measured_total = sum(segment.measured_bytes or 0 for segment in segments)
    more = ["measured bytes", "difference", "peak use"] if measured else []
    heads = ["share", "planned", "planned bytes", *more, "basis", "owner", "why"]
    total = ["total", format_bytes(planned_total), f"{planned_total:,}"]
    total += [f"{measured_total:,}", signed(measured_total - planned_total), ""] if measured else []
    numbers = range(1, 6 if measured else 3)
    rows = "".join(f'<tr class="share">{_cells(_row(s, measured=measured), numbers)}</tr>' for s in segments)
    how = f'<p class="dim">{HOW_MEASURED}</p>' if measured else ""
    return (
        f'<div class="scroll"><table><thead><tr>{_cells(heads, numbers, "th")}</tr></thead>'
        f"<tbody>{rows}</tbody><tfoot><tr>{_cells([*total, '', '', ''], numbers)}</tr></tfoot></table></div>{how}"
    )


def _row(segment: Segment, *, measured: bool) -> list[str]:
    row = [_swatch(segment), format_bytes(segment.planned_bytes), f"{segment.planned_bytes:,}"]
    if measured:
        difference = segment.difference_bytes
        row.append("-" if segment.measured_bytes is None else f"{segment.measured_bytes:,}")
        row.append("" if difference is None else signed(difference))
        row.append("-" if segment.peak_bytes is None else f"{segment.peak_bytes:,}")
    return [*row, escape(segment.basis), escape(segment.owner), escape(segment.why)]


def _cells(texts: Iterable[str], numbers: Iterable[int], tag: str = "td") -> str:
    right, row = set(numbers), list(texts)
    last = len(row) - 1
    names = ["number" if at in right else "why" if at == last else "" for at in range(len(row))]
    return "".join(f'<{tag} class="{name}">{text}</{tag}>' for name, text in zip(names, row, strict=True))


def _caps_table(caps: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f'<tr><td>{escape(cap["name"])}</td><td class="number">{escape(cap_value(cap))}</td>'
        f'<td class="number">{format_bytes(cap["limit_bytes"])}</td><td class="number">{cap["limit_bytes"]:,}</td>'
        f"<td>{'<b>binding</b>' if cap['binding'] else ''}</td></tr>"
        for cap in caps
    )
    heads = _cells(["cap", "value", "allows", "bytes", ""], range(1, 4), "th")
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll">{table}</div>' if rows else ""


def _cap_curve(document: Document) -> str:
    points = cap_points(document, most=_CURVE_POINTS)
    return f'{cap_chart_html(points)}<p class="dim">{escape(EXPLANATION)}</p>' if points else ""


def _remarks(document: Document) -> str:
    changes = [f"<p><b>{escape(change_sentence(change))}</b></p>" for change in document.get("changes", ())]
    warnings = [f'<p class="warn">{escape(line)}</p>' for line in document.get("warnings", ())]
    notes = [f'<p class="dim">{escape(line)}</p>' for line in document.get("notes", ())]
    return "".join(changes + warnings + notes)


def _requests(requests: Sequence[Mapping[str, Any]]) -> str:
    return "".join(_request(at, request) for at, request in enumerate(requests, start=1))


def _request(number: int, request: Mapping[str, Any]) -> str:
    prompt = str(request.get("prompt") or f"{len(request.get('prompt_token_ids') or ())} token ids")
    answer = str(request.get("error") or request.get("text") or "")
    timings = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {value:.3f} s"
        for name, value in (request.get("timings") or {}).items()
        if isinstance(value, (int, float))
    )
    counted = f"{len(request.get('token_ids') or ())} tokens, {request.get('finish_reason')}"
    facts = f"{counted}, {timings}" if timings else counted
    return (
        f"<details><summary>{number}. {escape(prompt[:160])}</summary>"
        f'<pre>{escape(answer)}</pre><p class="dim">{escape(facts)}</p></details>'
    )


def _shares_json(segments: Sequence[Segment]) -> str:
    """What the page shows about a share, safe to stand inside a script element."""
    shares = [{"name": s.name, "colour": colour_of(s.name), "facts": _facts(s), "why": s.why} for s in segments]
    return json.dumps(shares).replace("<", "\\u003c")


def _facts(segment: Segment) -> list[str]:
    facts = [f"planned {format_bytes(segment.planned_bytes)} = {segment.planned_bytes:,} B"]
    if segment.measured_bytes is not None:
        facts.append(f"measured {format_bytes(segment.measured_bytes)} = {segment.measured_bytes:,} B")
    if segment.peak_bytes is not None:
        facts.append(f"used at the peak {format_bytes(segment.peak_bytes)} = {segment.peak_bytes:,} B")
    return [*facts, f"basis {segment.basis}{', owner ' + segment.owner if segment.owner else ''}"]
