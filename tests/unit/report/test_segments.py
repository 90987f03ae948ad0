from __future__ import annotations

from typing import Any

from onebudget.report.segments import binding_cap, has_measurement, kv_sentence, measured_bytes, segments_of

CARD = 80 * 2**30


def test_planned_segments_add_up_to_the_card(plan_document: dict[str, Any]) -> None:
    segments = segments_of(plan_document)
    assert sum(segment.planned_bytes for segment in segments) == CARD
    assert [segment.name for segment in segments[-2:]] == ["kv_cache", "unassigned"]
    assert all(segment.measured_bytes is None for segment in segments)


def test_measured_segments_add_up_to_the_card_too(run_document: dict[str, Any]) -> None:
    segments = segments_of(run_document)
    assert sum(segment.measured_bytes or 0 for segment in segments) == CARD
    assert sum(segment.difference_bytes or 0 for segment in segments) == 0


def test_a_share_that_only_the_measurement_knows_is_shown(run_document: dict[str, Any]) -> None:
    run_document["measured"]["terms"].append({"name": "surprise", "bytes": 7})
    surprise = next(segment for segment in segments_of(run_document) if segment.name == "surprise")
    assert (surprise.planned_bytes, surprise.measured_bytes, surprise.difference_bytes) == (0, 7, 7)


def test_a_term_that_was_not_measured_has_no_difference(run_document: dict[str, Any]) -> None:
    del run_document["measured"]["terms"][0]
    assert segments_of(run_document)[0].difference_bytes is None


def test_the_binding_cap_is_named_where_bytes_stay_over(plan_document: dict[str, Any]) -> None:
    cap = binding_cap(plan_document)
    assert cap is not None
    assert cap["name"] == "max_gpu_total_bytes"
    assert "max_gpu_total_bytes" in segments_of(plan_document)[-1].why


def test_kv_sentence_tells_the_product(plan_document: dict[str, Any]) -> None:
    kv = plan_document["kv_cache"]
    assert kv_sentence(kv) == "314,572 tokens x 40,960 B; 9,830 blocks of 32 tokens"
    assert kv_sentence({**kv, "fixed_bytes": 5}).startswith("314,572 tokens x 40,960 B + 5 B fixed")
    assert kv_sentence({**kv, "bytes": 0}) == "nothing is left for it"


def test_without_a_run_nothing_is_measured(plan_document: dict[str, Any]) -> None:
    assert measured_bytes(plan_document) == {}
    assert not has_measurement(plan_document)
    assert not has_measurement({**plan_document, "measured": None})
