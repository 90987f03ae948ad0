from __future__ import annotations

import re
from typing import Any

from onebudget.report.words import explain, size


def test_the_running_remainder_ends_at_what_the_pool_shares(plan_document: dict[str, Any]) -> None:
    remains = [
        int(found[1].replace(",", ""))
        for line in explain(plan_document)
        if (found := re.search(r"\(([\d,]+) B\) remain", line))
    ]
    expected, left = [], plan_document["capacity_bytes"]
    for term in plan_document["terms"]:
        left -= term["bytes"]
        expected.append(left)
    assert remains == expected
    assert left == plan_document["kv_cache"]["bytes"] + plan_document["unassigned_bytes"]


def test_every_term_is_explained_with_basis_owner_and_formula(plan_document: dict[str, Any]) -> None:
    sentences = explain(plan_document)
    for term in plan_document["terms"]:
        sentence = next(line for line in sentences if line.startswith(f"{term['name']} takes"))
        assert term["why"] in sentence
        assert f"owner {term['owner']}" in sentence
        assert f"{term['bytes']:,} B" in sentence


def test_caps_say_which_one_decides(plan_document: dict[str, Any]) -> None:
    deciding = [line for line in explain(plan_document) if line.endswith("and that decides.")]
    limit = "12.00 GiB (12,884,901,888 B)"
    cap = "The cap max_gpu_total_bytes = 12,884,901,888"
    assert deciding == [f"{cap} allows the KV cache {limit}, and that decides."]


def test_terms_of_no_bytes_are_named_once(plan_document: dict[str, Any]) -> None:
    plan_document["terms"].append({**plan_document["terms"][0], "name": "graphs", "bytes": 0})
    assert "Nothing is needed for graphs." in explain(plan_document)


def test_a_cap_of_zero_attended_tokens_is_told(plan_document: dict[str, Any]) -> None:
    plan_document["admission"] = {"attended_tokens_cap": 0}
    assert any("may attend to 0 tokens" in line for line in explain(plan_document))


def test_a_shortfall_ends_the_explanation(plan_document: dict[str, Any]) -> None:
    plan_document |= {"fits": False, "shortfall_bytes": 2**30}
    assert explain(plan_document)[-1] == "It does not fit: 1.00 GiB (1,073,741,824 B) are missing."


def test_the_measurement_names_only_what_differs(run_document: dict[str, Any]) -> None:
    last = explain(run_document)[-1]
    assert last == (
        "Against the plan the run measured activations 768.00 MiB below, context 64.00 MiB above, "
        "unassigned 704.00 MiB above; everything else as planned."
    )
    run_document["measured"]["terms"] = run_document["terms"]
    run_document["measured"]["unassigned_bytes"] = run_document["unassigned_bytes"]
    assert explain(run_document)[-1] == "The run measured every share exactly as planned."


def test_size_is_exact() -> None:
    assert size(1023) == "1023 B"
    assert size(1025) == "1.00 KiB (1,025 B)"
