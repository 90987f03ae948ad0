"""What a plan adds to its ledger: answers in sentences, ranges, ranks beside each other, host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onebudget.report.segments import Document
from onebudget.units import format_bytes

_MOST_RANKS = 16
_WORDS = {"model": "the model's own limit", "kv_cache": "the KV cache"}


def plan_view(document: Document) -> list[RenderableType]:
    """Everything below the ledger's own table, for a terminal; empty for a ledger that no planner made."""
    parts: list[RenderableType] = [Text(line) for line in answer_sentences(document)]
    ranges = range_rows(document)
    if ranges:
        parts.append(_table("ranges: nine times in ten the true figure is between these", RANGE_HEADS, ranges))
    if document.get("ranks"):
        parts.append(_table("ranks", RANK_HEADS, rank_rows(document)))
    if document.get("host"):
        parts.append(_table("host memory", HOST_HEADS, host_rows(document)))
    return parts


RANK_HEADS = ("rank", "KV cache it could have", "tokens", "KV cache it keeps", "")
HOST_HEADS = ("host memory", "bytes", "size", "per")
RANGE_HEADS = ("share", "low", "planned", "high", "basis")


def answer_sentences(document: Document) -> list[str]:
    """The answers of a plan, one sentence each."""
    answers = document.get("answers")
    if not answers:
        return []
    lines = [_longest(answers)]
    if answers["concurrency"]:
        lines.append(_at_once(answers))
    wanted, reach = answers.get("target_concurrency"), answers.get("largest_seq_len_at_target")
    if wanted is not None:
        lines.append(f"{wanted:,} requests fit at once up to {reach or 0:,} tokens each.")
    if document.get("fits") and not answers["meets_target"]:
        lines.append("The plan does not reach its target.")
    if answers["second_instance_free_bytes"]:
        free = answers["second_instance_free_bytes"]
        lines.append(
            f"Another instance on this card would find {format_bytes(free)} free beyond its context: plan it with "
            f"--gpu-free {free}."
        )
    return lines


def _longest(answers: Mapping[str, Any]) -> str:
    if not answers["largest_seq_len"]:
        return "No request fits, however short."
    bound = _WORDS.get(answers["seq_len_bound_by"], answers["seq_len_bound_by"])
    return f"The longest request that could be served has {answers['largest_seq_len']:,} tokens: {bound} bounds it."


def _at_once(answers: Mapping[str, Any]) -> str:
    bound = _WORDS.get(answers["concurrency_bound_by"], answers["concurrency_bound_by"])
    return (
        f"Of requests of {answers['at_seq_len']:,} tokens {answers['largest_concurrency']:,} run at once, and {bound} "
        f"bounds them: the KV cache holds {answers['concurrency']:,.2f}."
    )


def range_rows(document: Document) -> list[tuple[str, ...]]:
    """Shares that are not known exactly, and the KV cache where it is as uncertain; none where shares went unpaid."""
    if not document.get("fits"):
        return []
    rows: list[tuple[str, ...]] = [
        (term["name"], format_bytes(term["low_bytes"]), format_bytes(term["bytes"]), format_bytes(term["high_bytes"]),
         term["basis"])
        for term in document["terms"]
        if (term["low_bytes"], term["high_bytes"]) != (term["bytes"], term["bytes"])
    ]  # fmt: skip
    kv = document["kv_cache"]
    if kv.get("low_tokens") is not None:
        low, high = kv["low_tokens"], kv["high_tokens"]
        rows.append(("KV cache, tokens", f"{low:,}", f"{kv['tokens']:,}", f"{high:,}", kv.get("basis") or ""))
    return rows


def rank_rows(document: Document) -> list[tuple[str, ...]]:
    """One row a rank, alike ones together; the one that limits the pool is marked."""
    lines: Sequence[Mapping[str, Any]] = document["ranks"]
    limiting = document.get("limiting_rank", 0)
    rows: list[tuple[str, ...]] = []
    at = 0
    while at < len(lines):
        last = at
        while last + 1 < len(lines) and {**lines[last + 1], "rank": 0} == {**lines[at], "rank": 0}:
            last += 1
        line = lines[at]
        name = str(line["rank"]) if last == at else f"{line['rank']} to {lines[last]['rank']}"
        mark = (
            "limits the pool" if line["rank"] <= limiting <= lines[last]["rank"] and len(lines) > last - at + 1 else ""
        )
        tokens = "-" if line["tokens"] is None else f"{line['tokens']:,}"
        rows.append((name, format_bytes(line["kv_bytes"]), tokens, format_bytes(line["agreed_kv_bytes"]), mark))
        at = last + 1
    return rows[:_MOST_RANKS]


def host_rows(document: Document) -> list[tuple[str, ...]]:
    """Host memory by owner."""
    return [(line["name"], f"{line['bytes']:,}", format_bytes(line["bytes"]), line["per"]) for line in document["host"]]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at in (0, len(heads) - 1) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def plan_html(document: Document) -> str:
    """The same as a part of a page; empty for a ledger that no planner made."""
    sentences = "".join(f"<p>{escape(line)}</p>" for line in answer_sentences(document))
    tables: list[tuple[Sequence[str], list[tuple[str, ...]]]] = [
        (RANGE_HEADS, range_rows(document) if sentences else [])
    ]
    tables += [(RANK_HEADS, rank_rows(document))] if document.get("ranks") else []
    tables += [(HOST_HEADS, host_rows(document))] if document.get("host") and sentences else []
    return sentences + "".join(_html_table(heads, rows) for heads, rows in tables if rows)


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
