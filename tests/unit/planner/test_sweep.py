from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from onebudget.errors import ConfigError
from onebudget.planner.grid import Grid, GridPoint, parse_axes
from onebudget.planner.policies import policy_for
from onebudget.planner.request import make_request
from onebudget.planner.source import ModelSource
from onebudget.planner.sweep import (
    SweepRow,
    in_process,
    mark_pareto,
    on_cores,
    on_ray,
    plan_point,
    sweep,
    sweep_document,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MODEL = ModelSource("llama", LLAMA, "test")
SMALL = Grid(
    models=[MODEL], gpus=["H100-SXM-80GB", "RTX-3050-6GB"], engines=["vllm", "sglang"], tp=[1, 2, 3],
    settings={"vllm.max_model_len": [4096, 8192], "sglang.context_length": [8192]},
)  # fmt: skip


def test_points_are_every_combination_and_settings_go_to_their_engine() -> None:
    points = SMALL.points()
    assert len(points) == 2 * 3 * (2 + 1)
    assert {point.settings for point in points if point.engine == "sglang"} == {(("context_length", 8192),)}
    assert len({(p.engine, p.gpu, p.tp, p.settings) for p in points}) == len(points)


def test_rows_are_the_plans_and_say_what_does_not_fit() -> None:
    rows = sweep(SMALL.points(), prices={"h100": 2.5, "RTX-3050-6GB": 0.1})
    by = {(row.engine, row.gpu, row.tp, tuple(row.settings.items())): row for row in rows}
    row = by["vllm", "H100-SXM-80GB", 2, (("max_model_len", 8192),)]
    ledger = policy_for("vllm").plan(
        make_request(MODEL, "H100-SXM-80GB", engine="vllm", tp=2, settings={"max_model_len": 8192})
    )
    assert (row.kv_tokens, row.kv_bytes) == (ledger.kv_cache.tokens, ledger.kv_cache.bytes)
    assert (row.cards, row.usd_per_hour) == (2, 5.0)
    small = by["vllm", "RTX-3050-6GB", 1, (("max_model_len", 8192),)]
    assert (small.fits, small.shortfall_bytes > 0, small.pareto) == (False, True, False)
    refused = [row for row in rows if row.refused]
    assert len(refused) == 6
    assert all("tp = 3 does not divide" in str(row.refused) for row in refused)
    document = sweep_document(rows)
    assert document["points"] == 18
    assert document["refused"] == 6
    assert document["fitting"] == sum(row["fits"] for row in document["rows"])


def test_concurrency_is_counted_at_a_length_and_over_replicas() -> None:
    point = GridPoint(
        model=MODEL, gpu="H100-SXM-80GB", engine="vllm", settings=(("max_model_len", 8192),), target_seq_len=4096
    )
    longest = plan_point(
        GridPoint(model=MODEL, gpu="H100-SXM-80GB", engine="vllm", settings=(("max_model_len", 8192),))
    )
    shorter = plan_point(point)
    assert (longest.at_seq_len, shorter.at_seq_len) == (8192, 4096)
    assert shorter.concurrency == pytest.approx(2 * longest.concurrency, rel=0.01)
    twice = plan_point(
        GridPoint(model=MODEL, gpu="H100-SXM-80GB", engine="vllm", dp=2, settings=(("max_model_len", 8192),))
    )
    assert (twice.kv_tokens, twice.cards) == (2 * longest.kv_tokens, 2)


def row(**given: Any) -> SweepRow:
    plain: dict[str, Any] = {
        "model": "m", "gpu": "g", "cards": 1, "engine": "vllm", "engine_version": None, "tp": 1, "pp": 1, "ep": 1,
        "dp": 1, "weights_dtype": None, "kv_dtype": None, "settings": {}, "fits": True, "kv_tokens": 100,
        "concurrency": 1.0, "waste": 0.1,
    }  # fmt: skip
    return SweepRow(**plain | given)


def test_the_front_holds_what_no_other_beats() -> None:
    rows = [
        row(),
        row(kv_tokens=99),
        row(kv_tokens=99, waste=0.05),
        row(cards=2, kv_tokens=150),
        row(cards=2, kv_tokens=100),
        row(cards=4, kv_tokens=10**9, fits=False),
        row(model="other", kv_tokens=1),
        row(),
    ]
    assert [each.pareto for each in mark_pareto(rows)] == [True, False, True, True, False, False, True, True]


def test_prices_count_where_all_are_known() -> None:
    cheap = [row(cards=4, usd_per_hour=1.0), row(cards=1, usd_per_hour=2.0)]
    assert [each.pareto for each in mark_pareto(cheap)] == [True, False]
    assert [each.pareto for each in mark_pareto([*cheap, row(cards=8)])] == [False, True, False]


def test_all_cores_give_what_one_gives() -> None:
    points = SMALL.points()[:6]
    assert sweep(points, runner=on_cores(2)) == sweep(points, runner=in_process)


class StandIn:
    """Ray's calls as far as a sweep makes them."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def init(self, *, address: str, log_to_driver: bool) -> None:
        self.calls.append(address)
        if address == "nowhere":
            raise ConnectionError("nobody\nthere")

    def remote(self, work: Any) -> Any:
        return SimpleNamespace(remote=lambda point: (work, point))

    def get(self, reference: Any) -> Any:
        work, point = reference
        self.calls.append(point)
        return work(point)

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_ray_gets_the_same_points(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandIn()
    monkeypatch.setitem(sys.modules, "ray", ray)
    points = SMALL.points()
    assert sweep(points, runner=on_ray("ray://head:10001")) == sweep(points)
    assert ray.calls == ["ray://head:10001", *points, "shutdown"]
    with pytest.raises(ConfigError, match="No Ray cluster at 'nowhere': nobody there"):
        sweep(points, runner=on_ray("nowhere"))


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install ray"):
        on_ray("auto")


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="not possible"):
        Grid(models=[], gpus=["H100-SXM-80GB"]).points()
    with pytest.raises(ConfigError, match="not possible"):
        Grid(models=[MODEL], gpus=["a"], tp=range(1, 400), pp=range(1, 400)).points()
    with pytest.raises(ConfigError, match="Did you mean vllm"):
        Grid(models=[MODEL], gpus=["a"], engines=["vlm"]).points()
    wrong = Grid(models=[MODEL], gpus=["H100-SXM-80GB"], engines=["vllm"], settings={"max_model_length": [1, 2]})
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        sweep(wrong.points())


def test_axes_from_texts() -> None:
    assert parse_axes(["a=1,2", "b=[1,2],[4]", "vllm.c=x,true"]) == {
        "a": [1, 2],
        "b": [[1, 2], [4]],
        "vllm.c": ["x", True],
    }
    for wrong in (["a"], ["a="], ["a=1,,2"], ["a=1", "a=2"], ["=1"]):
        with pytest.raises(ConfigError, match="--set"):
            parse_axes(wrong)
