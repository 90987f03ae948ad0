from __future__ import annotations

import re

import pytest

from onebudget.budget.ledger import TERM_NAMES
from onebudget.report.palette import colour_of, ink_on

NAMES = [*TERM_NAMES, "kv_cache", "unassigned"]


def test_every_standard_share_has_a_colour_of_its_own() -> None:
    colours = [colour_of(name) for name in NAMES]
    assert len(set(colours)) == len(NAMES)
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in colours)


def test_an_unknown_share_keeps_its_colour() -> None:
    assert colour_of("my_pool") == colour_of("my_pool")
    assert re.fullmatch(r"#[0-9a-f]{6}", colour_of("my_pool"))


@pytest.mark.parametrize(("colour", "ink"), [("#ffffff", "#111111"), ("#000000", "#ffffff"), ("#3b6fd4", "#ffffff")])
def test_ink_contrasts(colour: str, ink: str) -> None:
    assert ink_on(colour) == ink
