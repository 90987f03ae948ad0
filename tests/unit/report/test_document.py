from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onebudget.errors import ConfigError
from onebudget.report.document import check_document, read_document


def test_a_run_document_is_read_whole(run_document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run_document))
    document = read_document(file)
    assert document["measured"] == run_document["measured"]
    assert [term["name"] for term in document["terms"]] == [term["name"] for term in run_document["terms"]]


def test_missing_parts_of_a_ledger_get_their_defaults(plan_document: dict[str, Any]) -> None:
    del plan_document["caps"], plan_document["notes"]
    assert check_document(plan_document)["caps"] == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b"{\n  'a': 1}", "line 2, column 3"),
        (b"[1]", "a JSON list, not an object"),
        (b"null", "a JSON null, not an object"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b'{"schema": "other/9"}', "onebudget.ledger/1"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_not_a_ledger_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "ledger.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a usable ledger") as caught:
        read_document(file)
    assert reason in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_ledger_that_does_not_sum_is_refused(plan_document: dict[str, Any]) -> None:
    plan_document["unassigned_bytes"] += 1
    with pytest.raises(ConfigError, match="sum"):
        check_document(plan_document)


@pytest.mark.parametrize("measured", [{"terms": [{"name": "weights"}]}, {"terms": [{"name": "a", "bytes": -1}]}, 7])
def test_a_broken_measurement_is_refused(plan_document: dict[str, Any], measured: object) -> None:
    with pytest.raises(ConfigError, match="measured"):
        check_document({**plan_document, "measured": measured})


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            read_document(path)
