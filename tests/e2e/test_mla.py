"""Latent attention through the whole engine: the same tokens as transformers, inside the bytes that were planned."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import transformers

from onebudget import LLM, ConfigError, SamplingParams
from onebudget.devtools.tiny_models import tiny_model
from onebudget.engine.dry_runs import dry_profile

LAYERS, RANK, ROPE = 4, 32, 8
NEW_TOKENS = 16
ANSWER = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
START = [5, 6, 7, 8, 9, 10, 11, 12] * 5
PROMPTS = [START, [*START, 40, 41, 42], [60 + place for place in range(33)], [9], [*START, 50, 51, 52, 53]]
KNOBS: Mapping[str, Any] = {
    "dtype": "fp32", "device_memory": "16MiB", "max_seq_len": 96, "max_batch_size": 4, "tokens_per_block": 8,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("mla", tmp_path_factory.mktemp("mla"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    return answers_of_transformers(folder, PROMPTS)


def answers_of_transformers(folder: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            output = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


# -- the same tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [1, 7, None])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("tokens", [16, 400])
@pytest.mark.parametrize("chunked", [True, False])
def test_tokens_are_those_of_transformers(
    folder: Path, wanted: list[list[int]], chunked: bool, tokens: int, reuse: bool, cap: int | None
) -> None:
    """Whatever the chunks, the reuse and the cap; the second round finds prefixes kept from the first."""
    if not chunked:
        tokens = max(tokens, 64)  # a whole prompt must fit in a step
    knobs = {**KNOBS, "max_num_tokens": tokens, "enable_chunked_prefill": chunked, "enable_block_reuse": reuse}
    with LLM(folder, **knobs) as llm:
        if cap is not None:
            llm.engine.executor.kv.attended_tokens_cap = cap
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(PROMPTS, ANSWER)] == wanted
        counters = llm.engine.executor.counters
        assert (counters.reused_tokens > 0) == reuse
        assert (counters.deferred > 0) == (cap is not None)
        assert counters.failed_steps == 0


@pytest.mark.parametrize("cap", [1, 7, 10**6])
def test_the_knob_changes_no_token(folder: Path, wanted: list[list[int]], cap: int) -> None:
    with LLM(folder, **KNOBS, context_kv_len_cap=cap, strict_memory=True) as llm:
        assert llm.budget.admission.attended_tokens_cap == (96 if cap < 96 else 4 * 96)
        assert [output.token_ids for output in llm.generate(PROMPTS, ANSWER)] == wanted


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ("DeepseekV2Config", {"q_lora_rank": None, "topk_method": "greedy"}),
        ("DeepseekV3Config", {"rope_parameters": YARN}),
        ("Glm4MoeLiteConfig", {"v_head_dim": 24}),
        ("MiniCPM3Config", {}),
    ],
)
def test_other_architectures(folder: Path, tmp_path: Path, config: str, changes: dict[str, Any]) -> None:
    """Half-precision scaling of YaRN, values as wide as keys, no compressed queries, other rotations."""
    shape = transformers.AutoConfig.from_pretrained(folder).to_dict()
    keys = (
        "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads max_position_embeddings "
        "initializer_range bos_token_id eos_token_id pad_token_id q_lora_rank kv_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim first_k_dense_replace moe_intermediate_size n_routed_experts n_shared_experts "
        "num_experts_per_tok n_group topk_group"
    )
    settings = {**{key: shape[key] for key in keys.split()}, "num_hidden_layers": 2, **changes}
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with LLM(tmp_path, **KNOBS, max_num_tokens=24, strict_memory=True) as llm:
        got = [output.token_ids for output in llm.generate(PROMPTS, ANSWER)]
    assert got == answers_of_transformers(tmp_path, PROMPTS)


# -- inside the plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kv", "element_bytes"), [("fp32", "auto", 4), ("bf16", "auto", 2), ("fp32", "fp8", 1), ("bf16", "fp8", 1)]
)
def test_a_token_takes_its_latent_and_nothing_else(folder: Path, dtype: str, kv: str, element_bytes: int) -> None:
    with LLM(folder, **{**KNOBS, "dtype": dtype}, kv_cache_dtype=kv) as llm:
        pool, planned = llm.engine.executor.kv.pool, llm.budget.kv_cache
        held = sum(page.slots.numel() * page.slots.element_size() for parts in pool.parts for page in parts)
        padding = llm.engine.executor.kv.groups[0].set_aside_blocks  # beside the plan's blocks, a part of `graphs`
        tokens = (planned.blocks + padding) * planned.tokens_per_block
        assert held == pool.buffer.nbytes == tokens * LAYERS * (RANK + ROPE) * element_bytes
        assert planned.bytes_per_token == LAYERS * (RANK + ROPE) * element_bytes
        assert llm.generate([PROMPTS[0]], ANSWER)[0].finish_reason == "length"


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_dry_run_profiles_the_same_bytes(folder: Path, dtype: str, kv: str) -> None:
    with LLM(folder, **{**KNOBS, "dtype": dtype}, kv_cache_dtype=kv, max_num_tokens=200) as llm:
        profile = dry_profile(folder, llm.engine.station.model.dtype, llm.config)
        assert profile.model_bytes == llm.budget.term("weights").bytes
        assert profile.activation_bytes - profile.allocated_bytes == llm.budget.term("activations").bytes


def test_fp8_is_refused_where_it_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only latent attention can store FP8"):
        LLM(tiny_model("gqa", tmp_path), **KNOBS, kv_cache_dtype="fp8_e4m3")


def conversations(seed: int, *, longest: int, count: int = 24) -> list[list[int]]:
    """Prompts of any length, many with a long start in common."""
    numbers = random.Random(seed)
    starts = [[numbers.randrange(4, 260) for _ in range(longest)] for _ in range(2)]
    prompts = []
    for _ in range(count):
        length = numbers.choice([1, longest, longest - 1, numbers.randint(1, longest)])
        shared = min(numbers.choice([0, longest // 2, longest]), length)
        own = [numbers.randrange(4, 260) for _ in range(length - shared)]
        prompts.append(numbers.choice(starts)[:shared] + own)
    return prompts


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("knobs", "kv"),
    [
        ({"max_num_tokens": 40}, "auto"),
        ({"max_num_tokens": 300}, "fp8_e4m3"),
        ({"max_num_tokens": 300, "context_kv_len_cap": 1}, "auto"),
        ({"max_num_tokens": 300, "enable_chunked_prefill": False}, "fp8_e4m3"),
        pytest.param({"max_num_tokens": 40}, "fp8_e4m3", marks=LONG),
        pytest.param({"max_num_tokens": 300}, "auto", marks=LONG),
        pytest.param({"max_num_tokens": 300, "context_kv_len_cap": 1}, "fp8_e4m3", marks=LONG),
        pytest.param({"max_num_tokens": 300, "enable_chunked_prefill": False}, "auto", marks=LONG),
        pytest.param({"max_num_tokens": 8}, "auto", marks=LONG),
        pytest.param({"max_num_tokens": 8}, "fp8_e4m3", marks=LONG),
    ],
)
def test_what_the_cap_admits_always_fits(folder: Path, knobs: dict[str, Any], kv: str) -> None:
    """Memory so tight that the cache and the workspace split it, and nothing left to the fraction's slack."""
    settings = {
        **KNOBS, "device_memory": 3 << 20, "max_seq_len": 160, "free_gpu_memory_fraction": 1.0, "kv_cache_dtype": kv,
        "enable_penalties": False, **knobs,
    }  # fmt: skip
    with LLM(folder, **settings, strict_memory=True) as llm:
        cap = llm.budget.admission.attended_tokens_cap
        assert cap is not None and cap >= 160
        outputs = llm.generate(conversations(0, longest=160), ANSWER)
        assert {output.finish_reason for output in outputs} == {"length"}
        counters, report = llm.engine.executor.counters, llm.memory_report()
        assert counters.failed_steps == 0 and counters.reused_tokens > 0
        assert report["peak_bytes"] <= llm.budget.capacity_bytes
        peaks = {term["name"]: term["peak_bytes"] for term in report["terms"]}
        # Warm-up repeats the profile's steps, whose scratch the planned activations hold.
        assert peaks.get("context_workspace", 0) <= max(cap, knobs["max_num_tokens"]) * 640
        if knobs.get("context_kv_len_cap"):
            assert counters.deferred > 0
