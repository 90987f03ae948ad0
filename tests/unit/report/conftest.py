from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

RUN_FILE = Path(__file__).parent / "data" / "run.json"


@pytest.fixture
def run_document() -> dict[str, Any]:
    """An 80 GiB card with a measurement, requests and counters."""
    document: dict[str, Any] = json.loads(RUN_FILE.read_text())
    return document


@pytest.fixture
def plan_document(run_document: dict[str, Any]) -> dict[str, Any]:
    """The same card without anything a run adds."""
    return {name: value for name, value in run_document.items() if name not in ("measured", "requests", "throughput")}
