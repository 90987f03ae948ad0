from __future__ import annotations

import json
from typing import Any

import pytest

from onebudget.errors import ConfigError, ModelError
from onebudget.planner.policies import policy_for
from onebudget.planner.request import make_request, parse_settings, request_document
from onebudget.planner.source import ModelSource

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MODEL = ModelSource("llama", LLAMA, "test")


def ask(gpu: str = "H100-SXM-80GB", **given: Any) -> Any:
    return make_request(given.pop("model", MODEL), gpu, engine=given.pop("engine", "vllm"), **given)


def test_cards_named_with_a_count_share_every_layer() -> None:
    request = ask("H100-SXM-80GBx8", pp=2)
    assert (request.layout.tp, request.layout.pp, request.n_gpus) == (4, 2, 8)
    assert ask("8xH100-SXM-80GB").layout.tp == 8
    assert ask(tp=2, dp=2).n_gpus == 4


def test_data_parallel_attention_takes_no_further_cards() -> None:
    request = ask("H100-SXM-80GBx8", engine="sglang", tp=8, dp=8, settings={"enable_dp_attention": True})
    assert request.n_gpus == 8


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp": 3}, "tp = 3 does not divide the 32 attention and 8 KV heads"),
        ({"gpu": "H100-SXM-80GBx8", "tp": 2}, "needs 2 cards, and 8 were named"),
        ({"pp": 40}, "pp = 40 is more than the 32 layers"),
        ({"ep": 2, "tp": 2}, "has none"),
        ({"tp": 0}, "tp = 0 is not usable"),
        ({"weights_dtype": "fp7"}, "did you mean fp8"),
        ({"kv_dtype": "e4m3"}, "did you mean fp8_e4m3"),
        ({"gpu": "H1000"}, "Did you mean"),
        ({"settings": {"max_model_length": 1}}, "did you mean max_model_len"),
        ({"engine": "vlm"}, "Did you mean vllm"),
        ({"total_bytes": 80}, "not plausible"),
        ({"total_bytes": 2**50}, "not plausible"),
        ({"total_bytes": 2**34, "free_bytes": 2**35}, "at most the card's 16.00 GiB"),
        ({"settings": {"max_num_seqs": -1}}, "max_num_seqs = -1"),
        ({"settings": {"max_num_seqs": 10**15}}, "max_num_seqs"),
    ],
)
def test_refusals_are_one_sentence_with_what_would_do(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ask(**given)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_config_without_hidden_size_is_refused() -> None:
    broken = {name: value for name, value in LLAMA.items() if name != "hidden_size"}
    with pytest.raises(ModelError, match="no hidden_size"):
        ask(model=ModelSource("broken", broken, "test"))


def test_a_card_of_the_users_own_size() -> None:
    request = ask("customx2", total_bytes=24 * 2**30)
    assert (request.gpu.name, request.n_gpus, request.total_bytes) == ("custom", 2, 24 * 2**30)


def test_settings_from_texts() -> None:
    texts = ["max-model-len=8192", "gpu_memory_utilization=0.9", "enforce_eager=true", "cudagraph_capture_sizes=[1,2]",
             "kv_cache_dtype=fp8"]  # fmt: skip
    assert parse_settings(texts) == {
        "max_model_len": 8192, "gpu_memory_utilization": 0.9, "enforce_eager": True,
        "cudagraph_capture_sizes": [1, 2], "kv_cache_dtype": "fp8",
    }  # fmt: skip
    for wrong in (["max_model_len"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="--set"):
            parse_settings(wrong)


def test_what_was_asked_is_plain_and_asks_the_same() -> None:
    request = ask("H100-SXM-80GBx2", settings={"max_model_len": 8192}, kv_dtype="fp8")
    document = json.loads(json.dumps(request_document("vllm", request)))
    again = make_request(
        MODEL, document["gpu"], engine=document["engine"], **document["layout"], settings=document["settings"],
        kv_dtype=document["kv_dtype"],
    )  # fmt: skip
    assert policy_for("vllm").plan(again) == policy_for("vllm").plan(request)
