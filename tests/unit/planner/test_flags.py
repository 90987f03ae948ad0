from __future__ import annotations

from pathlib import Path

import pytest

from onebudget.errors import ConfigError
from onebudget.planner.engine_flags import ENGINE_FLAGS, LAYOUT, WORDS
from onebudget.planner.flags import options_from, read_command
from onebudget.planner.policies import policy_for


def test_vllm_serve_with_quotes_variables_and_line_ends() -> None:
    command = read_command(
        "VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0,1 vllm serve 'meta-llama/Llama-3.1-8B' \\\n"
        "  --tensor-parallel-size 2 --max-model-len=8k --gpu_memory_utilization 0.85 --enforce-eager --port 8000 \\\n"
        '  --speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\' --no-enable-prefix-caching '
        "--cudagraph-capture-sizes 1 2 4 --kv-cache-dtype fp8 --trust-remote-code"
    )
    assert (command.engine, command.model, command.tp, command.pp) == ("vllm", "meta-llama/Llama-3.1-8B", 2, 1)
    assert command.settings == {
        "VLLM_USE_V1": 1, "max_model_len": 8000, "gpu_memory_utilization": 0.85, "enforce_eager": True,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "enable_prefix_caching": False,
        "cudagraph_capture_sizes": [1, 2, 4], "kv_cache_dtype": "fp8",
    }  # fmt: skip
    assert command.notes == ()


def test_module_form_dotted_options_and_experts() -> None:
    command = read_command(
        "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-30B-A3B -tp 4 -dp 2 --enable-expert-parallel "
        "--speculative-config.method mtp --speculative-config.num_speculative_tokens 2 --quantization awq_marlin "
        "--kv-cache-memory-bytes 20G"
    )
    assert (command.tp, command.dp, command.ep, command.weights_dtype) == (4, 2, 8, "awq_marlin")
    assert command.settings["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 2}
    assert command.settings["kv_cache_memory_bytes"] == 20 * 2**30


@pytest.mark.parametrize("start", ["python -m sglang.launch_server", "sglang serve"])
def test_sglang(start: str) -> None:
    command = read_command(
        f"{start} --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp-size 8 --enable-dp-attention "
        "--mem-fraction-static 0.85 --chunked-prefill-size 4096 --cuda-graph-bs 1 2 8 --page-size 64 --host 0.0.0.0 "
        "--enable-hierarchical-cache --hicache-size 40 --attention-backend fa3"
    )
    assert (command.engine, command.model, command.tp, command.dp) == ("sglang", "deepseek-ai/DeepSeek-V3", 8, 8)
    assert command.settings == {
        "enable_dp_attention": True, "mem_fraction_static": 0.85, "chunked_prefill_size": 4096,
        "cuda_graph_bs": [1, 2, 8], "page_size": 64, "enable_hierarchical_cache": True, "hicache_size": 40,
        "attention_backend": "fa3",
    }  # fmt: skip


def test_trtllm_with_an_options_file_that_counts_more(tmp_path: Path) -> None:
    options = tmp_path / "extra.yaml"
    options.write_text(
        "kv_cache_config:\n  free_gpu_memory_fraction: 0.8\n  dtype: fp8\n  tokens_per_block: 64\n"
        "  use_kv_cache_manager_v2: true\n  host_cache_size: 1073741824\n  max_attention_window: [512, 4096]\n"
        "max_batch_size: 64\nprint_iter_log: true\n"
    )
    command = read_command(
        f"trtllm-serve serve nvidia/Some-Model --tp_size 4 --ep_size 2 --max_batch_size 8 --max_num_tokens 4096 "
        f"--extra_llm_api_options '{options}'"
    )
    assert (command.engine, command.tp, command.ep) == ("trtllm", 4, 2)
    assert command.settings == {
        "free_gpu_memory_fraction": 0.8, "kv_cache_dtype": "fp8", "tokens_per_block": 64, "kv_cache_manager": "v2",
        "host_cache_size": 2**30, "max_attention_window": [512, 4096], "max_batch_size": 64, "max_num_tokens": 4096,
    }  # fmt: skip
    assert command.notes == ("The option print_iter_log is not known here, so it changed nothing.",)


def test_a_cache_manager_that_trtllm_chooses_itself_is_not_set() -> None:
    assert "kv_cache_manager" not in options_from({"kv_cache_config": {"use_kv_cache_manager_v2": "auto"}}, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve m --tensor-paralel-size 2", "did you mean --tensor-parallel-size"),
        ("vllm serve m --trust-remote-cod", "did you mean --trust-remote-code"),
        ("sglang serve --model-path m --mem-fraction-statik 0.8", "did you mean --mem-fraction-static"),
        ("trtllm-serve m --max_batch_sise 3", "did you mean --max_batch_size"),
        ("vlm serve m", "Did you mean vllm"),
        ("python -m sglang.launch_serve --model m", "sglang.launch_server"),
        ("vllm serve 'm", "not quoted"),
        ("vllm serve", "names no model"),
        ("", "starts no engine"),
        ("vllm serve m --max-model-len", "needs a value"),
        ("vllm serve m --max-model-len --port 1", "needs a value"),
        ("vllm serve m n", "two models"),
        ("vllm serve m -tp two", "tp = 'two'"),
        ("vllm serve m --enforce-eager=maybe", "true or false"),
        ("trtllm-serve m --config /nowhere/at/all.yaml", "can't be read"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_command(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_misspelt_options_of_a_file(tmp_path: Path) -> None:
    for number, text in enumerate(("max_batch_sise: 3", "- 1", "a: [", "kv_cache_config: {max_token: 5}")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_command(["trtllm-serve", "m", "--config", str(path)])


def test_unknown_options_are_said_and_lengths_chosen_at_start_left_out() -> None:
    command = read_command("vllm serve m --zzzz 3 --max-model-len auto --quantization compressed-tensors")
    assert command.settings == {}
    assert command.weights_dtype is None
    assert len(command.notes) == 3


@pytest.mark.parametrize("engine", list(ENGINE_FLAGS))
def test_every_place_is_a_setting_of_the_policy(engine: str) -> None:
    flags = ENGINE_FLAGS[engine]
    known = {*policy_for(engine).known_settings, *LAYOUT, *WORDS}
    assert set(flags.places.values()) <= known
    assert {*flags.switches, *flags.lists} <= set(flags.places)
    assert not {*flags.places} & {*flags.other_values, *flags.other_switches}
