"""Memory problems that people reported, as data; the numbers they printed follow from the rules."""

from __future__ import annotations

import tomllib
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onebudget.budget.reserves import logits_bytes
from onebudget.planner.engine_scratch import split_attention_bytes, split_attention_rows
from onebudget.planner.host_memory import host_need, pinned_bytes, tiers_in_proportion
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.ledgers import Budget, Part, pool_range
from onebudget.planner.policies.versions import read_version
from onebudget.planner.policies.vllm.groups import CachedLayer, cached_layers, plan_groups, request_blocks
from onebudget.planner.request import make_request
from onebudget.planner.source import ModelSource, resolve_model
from onebudget.planner.unified import usable_on_unified
from onebudget.units import GIB, MIB

FOLDER = Path(__file__).parents[2] / "cases" / "incidents"
GB = 10**9


def incident(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def gib(value: float) -> int:
    return int(Fraction(str(value)) * GIB)


def printed(nbytes: int) -> float:
    """As engines print sizes: GiB with two decimals."""
    return round(nbytes / GIB, 2)


def pool(limit: int, *charged_gib: float) -> int:
    parts = [Part(f"part{at}", "engine", Figure.exact(gib(size))) for at, size in enumerate(charged_gib)]
    return pool_range(Budget(limit, "gpu_memory_utilization", None, 0), parts)[0]


def share(total_gib: float, fraction: float) -> int:
    return int(gib(total_gib) * Fraction(str(fraction)))


def test_every_incident_has_its_data_and_sources() -> None:
    files = sorted(path.stem for path in FOLDER.glob("*.toml"))
    assert files == ["c01", "c03", "c05", "c06", "c07", "c09", "c10", "c11"]
    for name in files:
        assert {"title", "engine", "sources", "verdict"} <= incident(name).keys()


def test_c1_the_pool_takes_what_graphs_need() -> None:
    case = incident("c01")
    given, stated = case["given"], case["stated"]
    parts = given["weights_gib"], given["activations_gib"], given["non_torch_gib"]
    limit = share(given["total_gib"], given["utilization"])
    kv = pool(limit, *parts)
    first = pool(limit, *parts, given["graphs_gib"]) - given["margin_mib"] * MIB
    second = pool(gib(given["free_gib"]), *parts, given["graphs_gib"]) - given["margin_mib"] * MIB
    assert printed(limit) == stated["limit_gib"]
    assert printed(kv) == stated["kv_gib"]
    assert printed(first) == printed(stated["first_cap_bytes"]) == stated["first_cap_gib"]
    assert printed(kv - first) == stated["over_gib"]
    # Five rounded sizes: the sum is known to 0.025 GiB, and 2.4 MiB off.
    assert abs(second - stated["second_cap_bytes"]) <= 5 * gib(0.005)


def test_c3_headroom_outside_the_fraction() -> None:
    case = incident("c03")
    given, stated = case["given"], case["stated"]
    parts = given["consumed_gib"], given["activations_gib"]
    limit = share(given["total_gib"], given["utilization"])
    first = pool(limit, *parts, given["graphs_gib"]) - given["margin_mib"] * MIB
    second = pool(gib(given["free_gib"]), *parts, given["graphs_gib"]) - given["margin_mib"] * MIB
    assert printed(limit) == stated["limit_gib"]
    assert printed(pool(limit, *parts, given["graphs_estimated_gib"])) == stated["kv_gib"]
    assert printed(first) == printed(stated["first_cap_bytes"]) == stated["first_cap_gib"]
    # Three sizes printed to 0.01 GiB and one, what was consumed, to 0.1.
    assert abs(second - stated["second_cap_bytes"]) <= 3 * gib(0.005) + gib(0.05)
    headroom = gib(given["free_gib"]) - limit
    assert printed(headroom) == stated["headroom_gib"]
    assert headroom < gib(given["later_need_gib"])


def test_c5_log_probabilities_of_prompts() -> None:
    for case in incident("c05")["given"]:
        nbytes = sum(
            logits_bytes(rows=case["rows"], vocab_size=case["vocab"], element_bytes=width)
            for width in case["element_bytes"]
        )
        assert nbytes == case["stated_bytes"]
        if "stated_gib" in case:
            assert printed(nbytes) == case["stated_gib"]
        else:
            assert nbytes / MIB == case["stated_mib"] > case["free_mib"]


def test_c6_scratch_of_split_attention() -> None:
    for case in incident("c06")["given"]:
        heads, head_dim = case["heads"], case["head_dim"]
        need = split_attention_bytes(heads=heads, padded_rows=case["rows"], head_dim=head_dim)
        assert need == case["stated_bytes"] > case["scratch_bytes"]
        most = split_attention_rows(case["scratch_bytes"], heads=heads, head_dim=head_dim)
        assert most < case["rows"]
        assert split_attention_bytes(heads=heads, padded_rows=most, head_dim=head_dim) <= case["scratch_bytes"]
        assert split_attention_bytes(heads=heads, padded_rows=most + 1, head_dim=head_dim) > case["scratch_bytes"]
        with_sums = split_attention_bytes(heads=heads, padded_rows=case["rows"], head_dim=head_dim, with_sums=True)
        assert with_sums - need == heads * case["rows"] * 4


LLAMA_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}  # fmt: skip


def test_c7_a_fraction_of_what_is_free() -> None:
    case = incident("c07")
    given, stated = case["given"], case["stated"]
    assert LLAMA_7B["num_hidden_layers"] == given["layers"]
    assert LLAMA_7B["num_key_value_heads"] == given["kv_heads"]

    def plan(**settings: object) -> Any:
        request = make_request(
            ModelSource("llama-7b", LLAMA_7B, "test"), case["gpu"], engine=case["engine"],
            engine_version=case["engine_version"], weights_dtype="int8", settings=settings,
        )  # fmt: skip
        return policy_for(case["engine"]).plan(request).kv_cache

    default = plan(free_gpu_memory_fraction=given["fraction"])
    assert default.bytes_per_token == stated["bytes_per_token"]
    assert stated["kv_tokens"] * default.bytes_per_token == stated["kv_bytes"]
    assert default.low_tokens <= stated["kv_tokens"] <= default.high_tokens
    capped = plan(max_tokens=stated["max_tokens"])
    assert (capped.tokens, capped.bytes) == (stated["max_tokens"], given["wanted_bytes"])


@cache
def window_layers(model: str) -> tuple[CachedLayer, ...]:
    source = resolve_model(model, offline=True)
    dims = dims_from_config(source.config, source.name)
    return tuple(cached_layers(dims, Fraction(16), 1, (2, 2), 0))


def ideal_bytes(layers: tuple[CachedLayer, ...], length: int) -> int:
    return sum(layer.token_bytes * min(layer.window or length, length) for layer in layers)


def full_bytes(layers: tuple[CachedLayer, ...], length: int, version: str) -> int:
    """Blocks of an engine that charges windows as full attention."""
    plan = plan_groups(layers, read_version("vllm", version), hybrid=False)
    return plan.block_bytes * request_blocks(plan, length, 8192, aligned_states=False, draft_tokens=0)


def test_c9_window_layers_two_conventions() -> None:
    case = incident("c09")
    small, large, version = case["gpt_oss_20b"], case["gemma_4_31b"], case["engine_version"]
    layers = window_layers(small["model"])
    assert printed(small["batch"] * ideal_bytes(layers, small["length"])) == small["ideal_gib"]
    assert small["batch"] * full_bytes(layers, small["length"], version) == gib(small["full_gib"])
    layers = window_layers(large["model"])
    assert sum(each.token_bytes for each in layers if each.window is None) == large["full_layer_bytes_per_token"]
    per_token = sum(each.token_bytes for each in layers)
    assert per_token == large["all_layer_bytes_per_token"]
    assert full_bytes(layers, large["length"], version) == gib(large["request_gib"])
    assert gib(large["available_gib"]) // per_token == large["largest_length"]


def test_c10_host_memory_per_rank() -> None:
    case = incident("c10")
    for each in case["per_rank"]:
        tiers = [int(Fraction(str(size)) * GB) for size in each["tiers_gb"]]
        need = host_need(tiers, each["ranks"], each["host_gb"] * GB)
        assert need.total_bytes == int(Fraction(str(each["stated_total_gb"])) * GB)
        assert need.fits is each["fits"]
    two = case["managers"]
    need = host_need([two["per_rank_gib"] * GIB] * two["managers"], two["ranks"], two["host_tib"] * 2**40)
    assert need.total_bytes == two["stated_tib"] * 2**40
    assert need.short_bytes == 2**40


def test_c10_tiers_in_proportion_and_pinned_sizes() -> None:
    case = incident("c10")
    fair = case["proportion"]
    pools = [int(Fraction(str(size)) * GB) for size in fair["pools_gb"]]
    tiers = tiers_in_proportion(fair["first_gb"] * GB, pools)
    assert tiers[0] == fair["first_gb"] * GB
    assert round(sum(tiers) / GB, 2) == fair["stated_gb"]
    for each in case["pinned"]:
        taken = pinned_bytes(gib(each["wanted_gib"]))
        assert taken == each["rounded_gib"] * GIB
        assert taken <= gib(each["measured_gib"])  # what was measured includes a little beside the allocation
        if "host_gib" in each:
            assert gib(each["wanted_gib"]) < each["host_gib"] * GIB < taken
    assert [pinned_bytes(size) for size in (1, 2, 3, GIB, GIB + 1)] == [1, 2, 4, GIB, 2 * GIB]


def test_c11_unified_memory() -> None:
    case = incident("c11")
    given, stated = case["given"], case["stated"]
    total, failing, working = gib(given["total_gib"]), stated["failing_utilization"], stated["working_utilization"]
    assert printed(share(given["total_gib"], failing)) == stated["failing_limit_gib"]
    now = usable_on_unified(total, failing, gib(given["available_gib"]), gib(given["os_reserve_gib"]))
    assert now.bytes == gib(given["available_gib"]) - gib(given["os_reserve_gib"])
    assert "less 4.00 GiB for itself" in now.why
    assert now.bytes > gib(given["driver_free_gib"])
    assert usable_on_unified(total, working, total).bytes == share(given["total_gib"], working)


@pytest.mark.parametrize("at", [0, 1])
def test_c11_the_engine_refuses_one_fraction_and_takes_the_other(at: int) -> None:
    case = incident("c11")
    given, stated = case["given"], case["stated"]

    def fits(utilization: float) -> bool:
        request = make_request(
            "Qwen/Qwen3-8B", case["gpu"], engine=case["engine"], total_bytes=gib(given["total_gib"]), offline=True,
            free_bytes=gib(given["free_seen_gib"][at]),
            settings={"gpu_memory_utilization": utilization, "max_model_len": 8192},
        )  # fmt: skip
        return policy_for(case["engine"]).plan(request).fits

    assert not fits(stated["failing_utilization"])
    assert fits(stated["working_utilization"])
