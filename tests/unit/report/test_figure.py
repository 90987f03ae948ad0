from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from onebudget.errors import ConfigError
from onebudget.report.figure import draw, main, write_figure
from onebudget.report.segments import segments_of


def test_bars_are_as_long_as_the_card(run_document: dict[str, Any]) -> None:
    patches = draw(run_document).axes[0].patches
    for row in (0, 1):
        widths = [patch.get_width() for patch in patches if round(patch.get_y() + patch.get_height() / 2) == row]
        assert sum(widths) == run_document["capacity_bytes"]


def test_every_share_has_its_bytes_in_the_legend(run_document: dict[str, Any]) -> None:
    labels = [text.get_text() for text in draw(run_document).legends[0].get_texts()]
    assert len(labels) == len(segments_of(run_document))
    assert "activations  8.00 GiB" in labels


def test_svg_is_well_formed_and_png_is_a_picture(run_document: dict[str, Any], tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    ledger.write_text(json.dumps(run_document))
    assert main([str(ledger), str(tmp_path / "out.svg")]) == 0
    assert ET.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")
    assert main([str(ledger), str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_bad_arguments_are_one_paragraph_and_status_2(
    tmp_path: Path, run_document: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger.json"
    ledger.write_text(json.dumps(run_document))
    for arguments in (
        [],
        [str(tmp_path / "no.json"), "x.svg"],
        [str(ledger), "x.gif"],
        [str(ledger), str(tmp_path / "no" / "x.svg")],
    ):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_unknown_format_is_refused(run_document: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg, \.png, \.pdf"):
        write_figure(run_document, tmp_path / "ledger.docx")
