from __future__ import annotations

import json

import pytest

from onebudget.budget.ledger import (
    SCHEMA,
    TERM_NAMES,
    Admission,
    Cap,
    Change,
    DeviceLine,
    HostLine,
    KVCacheLine,
    KVGroup,
    Ledger,
    RankLine,
    Term,
)
from onebudget.errors import ConfigError, UnknownKeyError


def ledger(**changes: object) -> Ledger:
    values: dict[str, object] = {
        "model": "tiny",
        "device": DeviceLine(name="host", kind="host", total_bytes=100, free_at_start_bytes=90, others_bytes=10),
        "capacity_bytes": 100,
        "terms": (
            Term("other_processes", "system", 10, "measured", "load"),
            Term("weights", "models", 40, "exact", "load", why="40 parameters of 1 B"),
            Term("activations", "engine", 15, "modelled", "profile", low_bytes=10, high_bytes=20),
        ),
        "kv_cache": KVCacheLine(
            bytes=30,
            tokens=15,
            blocks=3,
            tokens_per_block=4,
            bytes_per_token=2,
            max_concurrency_at_max_seq_len=1.5,
            groups=(KVGroup("full", 30, 3, 2),),
        ),
        "caps": (Cap("free_gpu_memory_fraction", 0.9, 30, True),),
        "admission": Admission(0),
        "unassigned_bytes": 5,
        "changes": (Change({"max_seq_len": 8}, 3, True),),
        "ranks": (RankLine(rank=0, capacity_bytes=100, kv_bytes=30, tokens=15, agreed_kv_bytes=30),),
        "host": (HostLine("host_kv_tier", 64, "host"),),
        "notes": ("a note",),
        "warnings": ("a warning",),
    }
    return Ledger(**(values | changes))  # type: ignore[arg-type]


def test_document_has_the_published_shape() -> None:
    document = ledger().to_dict()
    assert document["schema"] == SCHEMA == "onebudget.ledger/1"
    assert set(document) == {
        "schema", "model", "engine", "engine_version", "device", "capacity_bytes", "terms", "kv_cache", "caps",
        "admission", "unassigned_bytes", "fits", "shortfall_bytes", "changes", "ranks", "limiting_rank", "host",
        "notes", "warnings",
    }  # fmt: skip
    assert set(document["device"]) == {"name", "kind", "total_bytes", "free_at_start_bytes", "others_bytes"}
    assert set(document["terms"][0]) == {
        "name", "owner", "bytes", "basis", "phase", "low_bytes", "high_bytes", "why",
    }  # fmt: skip
    assert set(document["kv_cache"]) == {
        "bytes", "tokens", "blocks", "tokens_per_block", "bytes_per_token", "fixed_bytes",
        "max_concurrency_at_max_seq_len", "groups",
    }  # fmt: skip
    assert document["caps"] == [{"name": "free_gpu_memory_fraction", "value": 0.9, "limit_bytes": 30, "binding": True}]
    assert document["admission"] == {"attended_tokens_cap": 0}
    assert document["changes"] == [{"set": {"max_seq_len": 8}, "gains_bytes": 3, "fits": True}]
    assert document["host"] == [{"name": "host_kv_tier", "bytes": 64, "per": "host"}]


def test_attributes_are_the_keys_of_the_document() -> None:
    original = ledger()
    assert all(hasattr(original, key) for key in original.to_dict())


def test_a_document_survives_json() -> None:
    original = ledger()
    assert Ledger.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_other_keys_of_a_run_are_ignored() -> None:
    document = ledger().to_dict() | {"measured": {"peak": 1}, "requests": []}
    assert Ledger.from_dict(document) == ledger()


def test_bounds_of_a_term_default_to_its_bytes() -> None:
    assert (Term("x", "y", 5).low_bytes, Term("x", "y", 5).high_bytes) == (5, 5)


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_ledger_that_does_not_sum_cannot_be_built(off_by: int) -> None:
    with pytest.raises(ConfigError, match="does not sum"):
        ledger(unassigned_bytes=5 + off_by)


def test_negative_bytes_are_refused_even_if_the_sum_holds() -> None:
    terms = (Term("weights", "models", 75), Term("activations", "engine", -10))
    with pytest.raises(ConfigError, match="activations"):
        ledger(terms=terms)


def test_a_name_occurs_once() -> None:
    with pytest.raises(ConfigError, match="weights"):
        ledger(terms=(Term("weights", "a", 40), Term("weights", "b", 25)))


def test_term_by_name() -> None:
    assert ledger().term("weights").bytes == 40
    assert ledger().term("graphs").bytes == 0
    with pytest.raises(UnknownKeyError, match="weights"):
        ledger().term("weight")


def test_standard_names() -> None:
    assert len(set(TERM_NAMES)) == len(TERM_NAMES) == 19


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("schema", "onebudget.ledger/9", "schema"),
        ("capacity_bytes", "much", "capacity_bytes"),
        ("terms", [{"name": "weights"}], "terms"),
        ("terms", [{"name": "weights", "owner": "m", "bytes": 65, "basis": "guessed"}], "basis"),
        ("unassigned_bytes", 6, "sum"),
    ],
)
def test_a_broken_document_is_refused_with_the_place(key: str, value: object, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        Ledger.from_dict(ledger().to_dict() | {key: value})


def test_a_missing_key_is_named() -> None:
    document = ledger().to_dict()
    del document["capacity_bytes"]
    with pytest.raises(ConfigError, match="capacity_bytes"):
        Ledger.from_dict(document)


def test_lists_become_tuples() -> None:
    assert ledger(notes=["one"]).notes == ("one",)
