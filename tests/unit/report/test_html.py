from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("plotly")
from onebudget.report.html import page

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Structure(HTMLParser):
    """Open tags, everything a browser would fetch, and the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetches: list[str] = []
        self.text: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.script_id: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetches += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.script_id = given.get("id")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[self.script_id] = data
        elif not self.open or self.open[-1] != "style":
            self.text.append(data)


def parsed(document: dict[str, Any]) -> Structure:
    structure = Structure()
    structure.feed(page(document))
    structure.close()
    return structure


def test_the_page_is_whole_and_fetches_nothing(run_document: dict[str, Any]) -> None:
    structure = parsed(run_document)
    assert structure.open == []
    assert structure.fetches == []


def test_the_page_forbids_itself_the_network(plan_document: dict[str, Any]) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page(plan_document))
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "http" not in policy[1]
    assert "connect-src" not in policy[1]


def test_style_and_own_script_name_no_address(plan_document: dict[str, Any]) -> None:
    text = page(plan_document)
    style = re.search(r"<style>(.*?)</style>", text, re.S)
    assert style is not None
    own = text[text.rindex('<script type="application/json"') :]
    assert not re.search(r"https?://|@import|url\(", style[1] + own)


def test_every_share_is_on_the_page_with_formula_and_exact_bytes(run_document: dict[str, Any]) -> None:
    structure = parsed(run_document)
    visible = " ".join(structure.text)
    for term in run_document["terms"]:
        assert term["name"] in visible
        assert f"{term['bytes']:,}" in visible
        assert term["why"] in visible
    shares = json.loads(structure.scripts["shares"])
    assert [share["name"] for share in shares] == [term["name"] for term in run_document["terms"]] + [
        "kv_cache",
        "unassigned",
    ]
    assert "planned 8.00 GiB = 8,589,934,592 B" in shares[1]["facts"]
    assert "measured 7.25 GiB = 7,784,628,224 B" in shares[1]["facts"]


def test_caps_requests_and_remarks_are_on_the_page(run_document: dict[str, Any]) -> None:
    visible = " ".join(parsed(run_document).text)
    for text in (
        "max_gpu_total_bytes",
        "binding",
        "The capital of France is Paris.",
        "bucket 64",
        "The probe ran",
        "steps 48",
    ):
        assert text in visible


def test_text_from_outside_stays_text(run_document: dict[str, Any]) -> None:
    attack = "</script><script>alert(1)</script><img src=x>"
    run_document["model"] = attack
    run_document["notes"] = [attack]
    run_document["terms"][0]["why"] = attack
    run_document["requests"][0] |= {"prompt": attack, "text": attack}
    structure = parsed(run_document)
    assert structure.open == []
    assert structure.fetches == []
    assert json.loads(structure.scripts["shares"])[0]["why"] == attack


def test_a_budget_that_does_not_fit_says_so(plan_document: dict[str, Any]) -> None:
    plan_document |= {"fits": False, "shortfall_bytes": 2**30}
    assert "It does not fit: 1.00 GiB are missing." in " ".join(parsed(plan_document).text)
