"""Drafts beside a model: layers that cache, weights that are not the model's, and what verifying takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onebudget.errors import ConfigError, ModelError
from onebudget.models.files import TensorEntry
from onebudget.planner.catalogue.gpus import find_gpu
from onebudget.planner.catalogue.models import find_model
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.base import PlanRequest
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.policies.drafts import draft_weights, head_draft, module_draft
from onebudget.planner.policies.formats import FORMATS
from onebudget.planner.policies.sglang_drafts import reserve_mib
from onebudget.planner.policies.trtllm_drafts import target_share
from onebudget.planner.policies.versions import read_version
from onebudget.planner.policies.vllm.case import rank_shards, read_case
from onebudget.planner.policies.vllm.drafting import runs_newer_runner, verifying_bytes_per_logit
from onebudget.planner.policies.vllm.pool import pool_of
from onebudget.planner.policies.weight_headers import weights_in_headers
from onebudget.planner.policies.weight_rules import Shard, rope_bytes, weights_on_rank
from onebudget.planner.source import ModelSource
from onebudget.planner.weights import ParallelLayout
from onebudget.units import GIB

EAGLE3_HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "draft_vocab_size": 32000, "max_position_embeddings": 2048, "torch_dtype": "float16",
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    found = find_model(name)
    assert found is not None
    return found[1]


def request(name: str, drafting: object, version: str, *, engine: str = "vllm", **changes: Any) -> PlanRequest:
    layout = ParallelLayout(tp=changes.pop("tp", 1), pp=changes.pop("pp", 1))
    settings = {"speculative_config": drafting} if engine != "sglang" else dict(drafting or {})  # type: ignore[call-overload]
    return PlanRequest(
        model=ModelSource(name, changes.pop("config", None) or config_of(name), "test"), gpu=find_gpu("H200-141GB"),
        n_gpus=layout.tp * layout.pp, layout=layout, engine_version=version,
        settings=settings | changes.pop("settings", {}), **changes,
    )  # fmt: skip


def token_bytes(name: str, drafting: object, version: str, **changes: Any) -> int:
    return policy_for("vllm").plan(request(name, drafting, version, **changes)).kv_cache.bytes_per_token


def weights(name: str, drafting: object, version: str, **changes: Any) -> int:
    return policy_for("vllm").plan(request(name, drafting, version, **changes)).term("weights").bytes


def folder(path: Path, config: Mapping[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def test_an_eagle_head_is_a_layer_more_as_a_log_says() -> None:
    drafting = {"method": "eagle", "num_speculative_tokens": 3}
    assert token_bytes("meta-llama/Llama-3.1-8B-Instruct", drafting, "0.9.2") == 33 * 4096
    # A log: 51.63 GiB, 410128 tokens.
    assert abs(int(51.63 * GIB) // (33 * 4096) - 410_128) * 33 * 4096 < GIB // 100


@pytest.mark.parametrize("version", ["0.13.0", "0.19.1", "0.28.0"])
def test_modules_of_a_checkpoint_cache_one_by_one(version: str) -> None:
    name = "deepseek-ai/DeepSeek-V3"
    deeper = config_of(name) | {"num_nextn_predict_layers": 3}
    assert token_bytes(name, "mtp", version, tp=8) == 62 * 1152
    assert token_bytes(name, {"method": "deepseek_mtp"}, version, tp=8) == 62 * 1152
    assert token_bytes(name, {"method": "mtp", "num_speculative_tokens": 6}, version, tp=8, config=deeper) == 64 * 1152


def test_tokens_default_to_the_modules() -> None:
    case = read_case(request("deepseek-ai/DeepSeek-V3", "mtp", "0.28.0", tp=8))
    assert (case.draft.tokens, case.draft.modules) == (1, 1)


def test_a_hybrid_has_17_full_layers_with_its_module() -> None:
    case = read_case(request("Qwen/Qwen3.6-27B", {"method": "mtp", "num_speculative_tokens": 2}, "0.24.0"))
    (shard,) = rank_shards(case)
    groups = pool_of(case, shard).groups(40 * GIB)
    # 17 full and 48 recurrent layers: groups of 17, and 3 layers of padding.
    assert [group.layers for group in groups] == [17] * 4
    assert groups[0].name.startswith(("full", "state"))


def test_windows_and_a_head_make_groups_of_the_larger_count() -> None:
    case = read_case(request("openai/gpt-oss-20b", {"method": "eagle3", "num_speculative_tokens": 3}, "0.19.1"))
    (shard,) = rank_shards(case)
    assert [group.layers for group in pool_of(case, shard).groups(40 * GIB)] == [13, 13]  # 12 windows, 12 + 1 full


def test_a_module_weighs_a_layer_and_what_joins_it_but_no_tables() -> None:
    name = "deepseek-ai/DeepSeek-V3"
    dims = dims_from_config(config_of(name))
    kind = FORMATS["bf16"]
    attention = 7168 * (512 + 64 + 1536) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 257 * 3 * 7168 * 2048
    small = 1536 + 512 + 2 * 7168 + 7168 * 256
    alone = weights_on_rank(dims, kind, Shard()).bytes
    drafting = weights_on_rank(dims, kind, Shard(draft_layers=1)).bytes
    assert drafting - alone == 2 * (attention + experts + small + 2 * 7168**2)
    table = 129280 * 7168 * 2
    assert weights_on_rank(dims, kind, Shard(draft_layers=1, draft_tables=1)).bytes - drafting == table


def test_modules_keep_an_output_table_until_0_16_and_an_embedding_on_the_last_stage() -> None:
    name = "deepseek-ai/DeepSeek-V3"
    table = 129280 // 8 * 7168 * 2
    assert weights(name, "mtp", "0.15.1", tp=8) - weights(name, "mtp", "0.17.1", tp=8) == table
    staged = [rank_shards(read_case(request(name, "mtp", "0.28.0", tp=8, pp=pp)))[-1] for pp in (1, 2)]
    assert [shard.draft_tables for shard in staged] == [0, 1]


def entry(name: str, *shape: int) -> TensorEntry:
    count = 1
    for length in shape:
        count *= length
    return TensorEntry(name, "BF16", shape, 2 * count)


def test_copies_of_tables_in_a_checkpoint_are_not_counted_twice() -> None:
    dims = dims_from_config(config_of("deepseek-ai/DeepSeek-V3"))
    tables = [entry("model.embed_tokens.weight", 129280, 7168), entry("lm_head.weight", 129280, 7168)]
    module = [
        entry("model.layers.61.embed_tokens.weight", 129280, 7168),
        entry("model.layers.61.shared_head.head.weight", 129280, 7168),
        entry("model.layers.61.shared_head.norm.weight", 7168),
        entry("model.layers.61.eh_proj.weight", 7168, 14336),
        entry("model.layers.61.mlp.shared_experts.up_proj.weight", 2048, 7168),
    ]
    own = 2 * 129280 * 7168 * 2 + rope_bytes(dims)
    assert weights_in_headers(tables + module, dims, Shard()).bytes == own
    joined, halved = 7168 * 14336 * 2 + 7168 * 2, 2048 * 7168
    drafting = weights_in_headers(tables + module, dims, Shard(tp=2, draft_layers=1)).bytes
    assert drafting == own - 129280 * 7168 * 2 + joined + halved
    kept = weights_in_headers(tables + module, dims, Shard(tp=2, draft_layers=1, draft_tables=1)).bytes
    assert kept - drafting == 129280 * 7168


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.up_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"])
def test_modules_under_a_name_of_their_own_count_where_they_are_loaded(name: str) -> None:
    dims = dims_from_config(config_of("Qwen/Qwen3.6-27B"))
    tensors = [entry(name, 1024, 512), entry(name.replace("0", "1"), 1024, 512)]
    sizes = [weights_in_headers(tensors, dims, Shard(tp=2, draft_layers=count)).bytes for count in (0, 1, 2)]
    assert [size - rope_bytes(dims) for size in sizes] == [0, 1024 * 512, 2 * 1024 * 512]


def test_an_eagle3_head_by_hand(tmp_path: Path) -> None:
    target = dims_from_config(config_of("meta-llama/Llama-3.1-8B-Instruct"))
    source = ModelSource("head", EAGLE3_HEAD, "test")
    draft = head_draft(target, source, kind="eagle3", method="eagle3", tokens=3, ranks=1)
    found = draft_weights(draft, target, FORMATS["bf16"], own_tables=False)
    attention = 8192 * (4096 + 2 * 1024) + 4096 * 4096
    linear = attention + 3 * 4096 * 14336 + 3 * 4096 * 4096
    rope, norms = 2048 * 128 * 2, 4 * 4096 * 2
    assert found is not None
    assert found.bytes == 2 * linear + norms + 2 * 32000 * 4096 + 8 * 32000 + rope
    apart = draft_weights(draft, target, FORMATS["bf16"], own_tables=True)
    assert apart is not None
    assert apart.bytes - found.bytes == 128256 * 4096 * 2
    drafting = {"model": folder(tmp_path / "EAGLE3-head", EAGLE3_HEAD), "num_speculative_tokens": 3}
    name = "meta-llama/Llama-3.1-8B-Instruct"
    assert token_bytes(name, drafting, "0.28.0") == 33 * 4096
    assert weights(name, drafting, "0.28.0") - weights(name, None, "0.28.0") == found.bytes


def test_a_head_by_its_headers() -> None:
    target = dims_from_config(config_of("meta-llama/Llama-3.1-8B-Instruct"))
    tensors = (
        entry("midlayer.self_attn.q_proj.weight", 4096, 8192), entry("midlayer.self_attn.k_proj.weight", 1024, 8192),
        entry("midlayer.hidden_norm.weight", 4096), entry("fc.weight", 4096, 12288),
        entry("lm_head.weight", 32000, 4096), entry("t2d", 128256), entry("d2t", 32000),
        entry("embed_tokens.weight", 128256, 4096),
    )  # fmt: skip
    source = ModelSource("head", EAGLE3_HEAD, "test", tensors)
    draft = head_draft(target, source, kind="eagle3", method="eagle3", tokens=3, ranks=2)
    found = draft_weights(draft, target, FORMATS["bf16"], own_tables=False)
    assert found is not None
    whole = 2 * (4096 + 4096 * 12288) + 8 * 32000 + 2048 * 128 * 2
    assert found.bytes == whole + (4096 * 8192 + 1024 * 8192) + 32000 * 4096


def test_a_head_as_wide_in_words_is_shared_for_two_versions() -> None:
    target = dims_from_config(config_of("meta-llama/Llama-3.1-8B-Instruct"))
    config = {key: value for key, value in EAGLE3_HEAD.items() if key != "draft_vocab_size"}
    draft = head_draft(target, ModelSource("head", config, "test"), kind="eagle3", method="eagle3", tokens=1, ranks=1)
    own, shared = (
        draft_weights(draft, target, FORMATS["bf16"], own_tables=False, equal_heads_shared=equal)
        for equal in (False, True)
    )
    assert own is not None and shared is not None
    assert own.bytes - shared.bytes == 128256 * 4096 * 2


def test_a_draft_model_brings_layers_and_weights_of_its_own() -> None:
    name, small = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B"
    drafting = {"model": small, "num_speculative_tokens": 5}
    target, draft = 80 * 2 * 2 * 128 * 2, 16 * 2 * 2 * 64 * 2  # 8 KV heads on 4 ranks
    assert token_bytes(name, drafting, "0.19.1", tp=4) == target + draft
    by_rule = weights_on_rank(dims_from_config(config_of(small)), FORMATS["bf16"], Shard(tp=4, experts_over=4)).bytes
    assert weights(name, drafting, "0.19.1", tp=4) - weights(name, None, "0.19.1", tp=4) == by_rule


def test_only_the_first_core_keeps_a_draft_model_whole() -> None:
    name = "meta-llama/Llama-3.3-70B-Instruct"
    drafting = {"model": "Llama-3.2-1B", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}
    assert token_bytes(name, drafting, "0.6.3", tp=4) == 80 * 1024 + 16 * 2 * 8 * 64 * 2
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        token_bytes(name, drafting, "0.19.1", tp=4)


def test_unknown_drafts() -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    with pytest.raises(ModelError, match="no-such-draft"):
        token_bytes(name, {"model": "no-such-draft"}, "0.28.0")
    with pytest.raises(ConfigError, match="speculative_config"):
        token_bytes(name, "{method", "0.28.0")
    assumed = policy_for("vllm").plan(request(name, {"model": "someone/EAGLE3-head"}, "0.28.0"))
    plain = policy_for("vllm").plan(request(name, None, "0.28.0"))
    assert assumed.kv_cache.bytes_per_token == 33 * 4096
    assert assumed.term("weights").bytes > plain.term("weights").bytes + 2 * 218_000_000


def test_words_as_json_are_the_same_as_a_mapping() -> None:
    name, drafting = "meta-llama/Llama-3.3-70B-Instruct", {"model": "Llama-3.2-1B", "num_speculative_tokens": 5}
    assert token_bytes(name, json.dumps(drafting), "0.28.0") == token_bytes(name, drafting, "0.28.0")


@pytest.mark.parametrize("method", ["ngram", "[ngram]", "suffix", "medusa"])
def test_methods_without_a_cache(method: str) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    assert token_bytes(name, {"method": method, "num_speculative_tokens": 4}, "0.28.0") == 32 * 4096
    assert weights(name, {"method": method, "num_speculative_tokens": 4}, "0.28.0") == weights(name, None, "0.28.0")


def test_which_runner_drafts() -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    runners = {
        (method, version): read_case(request(name, {"method": method, "model": model}, version)).limits.v2_runner
        for method, model in (("ngram", ""), ("eagle", "x/y"), ("draft_model", "Llama-3.2-1B"))
        for version in ("0.28.0", "0.31.0")
    }
    newer = {key for key, runs in runners.items() if runs}
    assert newer == {("eagle", "0.28.0"), ("eagle", "0.31.0"), ("draft_model", "0.31.0")}
    llama = dims_from_config(config_of(name))
    module = module_draft(llama, method="mtp", tokens=1, ranks=1)
    assert runs_newer_runner(module, read_version("vllm", "0.24.0"))


def test_verifying_takes_more_than_sampling() -> None:
    def per_logit(version: str, *, newer_runner: bool = False, sorts: bool = False) -> int:
        return verifying_bytes_per_logit(read_version("vllm", version), newer_runner=newer_runner, sorts=sorts)

    assert per_logit("0.9.2", sorts=True) == 0
    assert per_logit("0.13.0", sorts=True) == 4 + 6 + 4 + 32
    assert per_logit("0.15.1", sorts=True) == 4 + 6 + 8 + 32
    assert per_logit("0.19.1") == 4 + 6 + 8 + 8
    assert per_logit("0.28.0", newer_runner=True) == 0


def sglang(name: str, settings: Mapping[str, Any], version: str, **changes: Any) -> Any:
    return policy_for("sglang").plan(request(name, settings, version, engine="sglang", **changes))


def test_sglang_counts_a_draft_from_0_5_15_on(tmp_path: Path) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    drafting = {
        "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": folder(tmp_path / "head", EAGLE3_HEAD)
    }  # fmt: skip
    early, late, plain = (
        sglang(name, drafting, "0.5.9"), sglang(name, drafting, "0.5.16"), sglang(name, {}, "0.5.16")
    )  # fmt: skip
    assert (early.kv_cache.bytes_per_token, late.kv_cache.bytes_per_token) == (32 * 4096, 33 * 4096)
    head = late.term("weights").bytes - plain.term("weights").bytes
    assert early.term("draft_weights").bytes == head > 0
    assert early.term("weights").bytes == plain.term("weights").bytes
    parts = sum(term.bytes for term in early.terms) + early.kv_cache.bytes + early.unassigned_bytes
    assert parts == early.capacity_bytes


def test_sglang_takes_a_draft_models_layers_to_be_like_the_models() -> None:
    drafting = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "Llama-3.2-1B"}
    name = "meta-llama/Llama-3.1-8B-Instruct"
    assert sglang(name, drafting, "0.5.16").kv_cache.bytes_per_token == (32 + 16) * 4096
    with pytest.raises(ModelError, match="no-such"):
        sglang(name, drafting | {"speculative_draft_model_path": "no-such"}, "0.5.16")


def test_sglang_modules_and_keys_of_a_scorer() -> None:
    name = "deepseek-ai/DeepSeek-V3.2"
    drafting = {"speculative_algorithm": "NEXTN"}

    def price(settings: Mapping[str, Any], version: str, dtype: str | None = None) -> int:
        return int(sglang(name, settings, version, tp=8, kv_dtype=dtype).kv_cache.bytes_per_token)

    assert price({}, "0.5.6") == 61 * (1152 + 132)
    assert price({}, "0.5.16", "fp8") == 61 * (576 + 132)
    assert price({}, "0.5.23", "fp8") == 61 * (656 + 132)
    assert price(drafting, "0.5.16") == 62 * (1152 + 132)
    assert price(drafting, "0.5.23", "fp8") == 62 * (656 + 132)
    shared = config_of(name) | {"index_topk_freq": 4}
    plan = sglang(name, drafting, "0.5.23", tp=8, config=shared)
    assert plan.kv_cache.bytes_per_token == 62 * 1152 + (16 + 1) * 132


def test_sglang_states_of_drafts_come_first() -> None:
    name = "Qwen/Qwen3.6-27B"
    drafting = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "max_running_requests": 16}
    plain = sglang(name, {"max_running_requests": 16, "disable_radix_cache": True}, "0.5.16").term("recurrent_state")
    drafted = sglang(name, drafting | {"disable_radix_cache": True}, "0.5.16").term("recurrent_state")
    slot = plain.bytes // 17
    assert drafted.bytes == (17 + 16 * 4) * slot


@pytest.mark.parametrize(
    ("version", "algorithm", "mib"),
    [
        ("0.4.9", "EAGLE", 2048), ("0.5.6", "EAGLE", 2048), ("0.5.6", "STANDALONE", 6144), ("0.5.6", "NGRAM", 0),
        ("0.5.12", "EAGLE", 4096), ("0.5.15", "EAGLE", 0), ("0.5.6", "", 0),
    ],
)  # fmt: skip
def test_sglang_reserves(version: str, algorithm: str, mib: int) -> None:
    assert reserve_mib(algorithm, read_version("sglang", version)) == mib


def trtllm_bytes(name: str, drafting: object, version: str, **changes: Any) -> int:
    asked = request(name, drafting, version, engine="trtllm", settings={"max_batch_size": 64}, **changes)
    return policy_for("trtllm").plan(asked).kv_cache.bytes_per_token


def test_trtllm_modules_run_again_or_each_once() -> None:
    name = "deepseek-ai/DeepSeek-V3"
    three = {"decoding_type": "MTP", "num_nextn_predict_layers": 3}
    assert trtllm_bytes(name, "MTP", "1.0.0", tp=8) == 62 * 1152
    assert trtllm_bytes(name, three, "1.0.0", tp=8) == 64 * 1152
    assert trtllm_bytes(name, three, "1.2.0", tp=8) == 62 * 1152
    assert trtllm_bytes(name, three | {"use_mtp_vanilla": True}, "1.2.0", tp=8) == 64 * 1152
    assert trtllm_bytes(name, {"decoding_type": "NGram", "max_draft_len": 4}, "1.2.0", tp=8) == 61 * 1152


def test_trtllm_heads_and_models(tmp_path: Path) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    head = {"decoding_type": "Eagle3", "speculative_model_dir": folder(tmp_path / "head", EAGLE3_HEAD)}
    small = {"decoding_type": "DraftTarget", "speculative_model_dir": "Llama-3.2-1B", "max_draft_len": 4}
    assert trtllm_bytes(name, head, "1.0.0") == 33 * 4096
    assert trtllm_bytes(name, small, "1.0.0") == 32 * 4096 + 16 * 2048


def test_two_managers_hold_as_many_tokens() -> None:
    usable = 40 * GIB
    own = target_share(usable, 32 * 4096, 16 * 2048)
    assert abs(own // (32 * 4096) - (usable - own) // (16 * 2048)) <= 1
    assert target_share(usable, 4096, 0) == usable


def test_trtllm_windows_beside_a_draft_model() -> None:
    asked = request(
        "google/gemma-2-9b-it", {"decoding_type": "DraftTarget", "speculative_model_dir": "google/gemma-2-2b-it"},
        "1.0.0", engine="trtllm", settings={"max_batch_size": 64},
    )  # fmt: skip
    drafting = policy_for("trtllm").plan(asked)
    target, draft = 42 * 2 * 8 * 256 * 2, 26 * 2 * 4 * 256 * 2
    assert drafting.kv_cache.bytes_per_token == target + draft
