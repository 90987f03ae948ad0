"""Options of serving commands, by engine: which settings, sizes or places they are, and which size nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LAYOUT = ("tp", "pp", "ep", "dp")
WORDS = ("model", "revision", "weights_dtype", "dtype", "expert_parallel", "options_file")
"""Places of a serving command that are neither a setting nor a number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """``places``: an option's name, with underscores and no dashes before it -> a setting's own name, one of
    ``LAYOUT``, or one of ``WORDS``; the first name of a place is the one to write. ``switches`` take no value,
    ``lists`` several.
    ``other_values`` and ``other_switches`` size no memory; ``dash``: what the engine writes between words.
    """

    engine: str
    places: Mapping[str, str]
    switches: frozenset[str]
    lists: frozenset[str] = field(default=frozenset())
    other_values: frozenset[str] = field(default=frozenset())
    other_switches: frozenset[str] = field(default=frozenset())
    dash: str = "-"

    @property
    def known(self) -> tuple[str, ...]:
        """Every option's name."""
        return (*self.places, *sorted(self.other_values), *sorted(self.other_switches))

    def flag_for(self, place: str) -> str | None:
        """The option that sets ``place``, as a shell wants it."""
        name = next((name for name, target in self.places.items() if target == place), None)
        return None if name is None else "--" + name.replace("_", self.dash)


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_VLLM = EngineFlags(
    engine="vllm",
    places={
        "model": "model", "revision": "revision", "quantization": "weights_dtype", "q": "weights_dtype",
        "dtype": "dtype", "tensor_parallel_size": "tp", "tp": "tp", "pipeline_parallel_size": "pp", "pp": "pp",
        "data_parallel_size": "dp", "dp": "dp", "enable_expert_parallel": "expert_parallel",
        "ep": "expert_parallel", "cuda_graph_sizes": "cudagraph_capture_sizes",
        **_same(
            "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size",
            "kv_cache_dtype", "kv_cache_memory_bytes", "enforce_eager", "cudagraph_capture_sizes",
            "max_cudagraph_capture_size", "cudagraph_mode", "enable_prefix_caching", "enable_chunked_prefill",
            "speculative_config", "enable_lora", "max_loras", "max_lora_rank", "limit_mm_per_prompt",
            "language_model_only", "skip_mm_profiling", "mamba_ssm_cache_dtype", "mamba_cache_dtype",
            "disable_hybrid_kv_cache_manager", "swap_space", "cpu_offload_gb", "decode_context_parallel_size",
        ),
        "dcp": "decode_context_parallel_size",
    },
    switches=frozenset({
        "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "enable_lora", "language_model_only",
        "skip_mm_profiling", "disable_hybrid_kv_cache_manager", "enable_expert_parallel", "ep",
    }),
    lists=frozenset({"cudagraph_capture_sizes", "cuda_graph_sizes"}),
    other_values=frozenset({
        "host", "port", "served_model_name", "tokenizer", "tokenizer_mode", "tokenizer_revision", "api_key",
        "chat_template", "seed", "download_dir", "load_format", "config_format", "hf_config_path", "hf_token",
        "tool_call_parser", "reasoning_parser", "distributed_executor_backend", "uvicorn_log_level", "max_log_len",
        "code_revision", "generation_config", "scheduling_policy", "guided_decoding_backend", "ssl_keyfile",
        "ssl_certfile", "root_path", "response_role", "lora_modules", "all2all_backend", "attention_backend",
        "data_parallel_backend", "data_parallel_address", "data_parallel_rank", "data_parallel_rpc_port",
        "data_parallel_size_local", "api_server_count", "max_parallel_loading_workers", "otlp_traces_endpoint",
        "nnodes", "node_rank", "master_addr", "master_port", "kv_transfer_config", "performance_mode",
    }),
    other_switches=frozenset({
        "trust_remote_code", "enable_auto_tool_choice", "disable_log_stats", "disable_log_requests",
        "enable_log_requests", "enable_request_id_headers", "disable_custom_all_reduce", "headless",
        "async_scheduling", "enable_reasoning", "disable_uvicorn_access_log", "disable_frontend_multiprocessing",
        "enable_server_load_tracking", "enable_eplb", "disable_fastapi_docs", "allow_credentials",
    }),
)  # fmt: skip
_SGLANG = EngineFlags(
    engine="sglang",
    places={
        "model_path": "model", "model": "model", "revision": "revision", "quantization": "weights_dtype",
        "dtype": "dtype", "tp_size": "tp", "tp": "tp", "tensor_parallel_size": "tp", "pp_size": "pp", "pp": "pp",
        "pipeline_parallel_size": "pp", "dp_size": "dp", "dp": "dp", "data_parallel_size": "dp", "ep_size": "ep",
        "ep": "ep", "expert_parallel_size": "ep", "speculative_algo": "speculative_algorithm",
        **_same(
            "mem_fraction_static", "context_length", "max_total_tokens", "max_running_requests",
            "chunked_prefill_size", "max_prefill_tokens", "page_size", "cuda_graph_bs", "cuda_graph_max_bs",
            "disable_cuda_graph", "disable_radix_cache", "kv_cache_dtype", "enable_dp_attention",
            "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
            "speculative_eagle_topk", "speculative_num_draft_tokens", "swa_full_tokens_ratio",
            "mamba_full_memory_ratio", "attention_backend", "enable_hierarchical_cache", "hicache_ratio",
            "hicache_size",
        ),
    },
    switches=frozenset({
        "disable_cuda_graph", "disable_radix_cache", "enable_dp_attention", "enable_hierarchical_cache",
    }),
    lists=frozenset({"cuda_graph_bs"}),
    other_values=frozenset({
        "host", "port", "tokenizer_path", "tokenizer_mode", "load_format", "served_model_name", "chat_template",
        "api_key", "log_level", "random_seed", "sampling_backend", "grammar_backend",
        "reasoning_parser", "tool_call_parser", "schedule_policy", "schedule_conservativeness", "nnodes", "node_rank",
        "dist_init_addr", "nccl_port", "stream_interval", "watchdog_timeout", "dist_timeout", "download_dir",
        "base_gpu_id", "gpu_id_step", "device", "moe_a2a_backend", "moe_runner_backend", "moe_dense_tp_size",
        "deepep_mode", "max_queued_requests", "context_parallel_size", "decode_log_interval",
        "disaggregation_mode", "lora_paths", "json_model_override_args",
    }),
    other_switches=frozenset({
        "trust_remote_code", "skip_tokenizer_init", "enable_metrics", "log_requests", "enable_torch_compile",
        "disable_overlap_schedule", "disable_custom_all_reduce", "enable_p2p_check", "enable_mixed_chunk",
        "enable_cache_report", "is_embedding", "enable_multimodal", "show_time_cost", "enable_dp_lm_head",
        "disable_cuda_graph_padding", "enable_memory_saver", "skip_server_warmup",
    }),
)  # fmt: skip
_TRTLLM = EngineFlags(
    engine="trtllm",
    places={
        "model": "model", "revision": "revision", "tp_size": "tp", "pp_size": "pp", "ep_size": "ep",
        "extra_llm_api_options": "options_file", "config": "options_file",
        "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
        "free_gpu_memory_fraction": "free_gpu_memory_fraction",
        **_same("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width", "backend", "kv_cache_dtype"),
    },
    switches=frozenset(),
    other_values=frozenset({
        "host", "port", "tokenizer", "gpus_per_node", "cluster_size", "num_postprocess_workers", "reasoning_parser",
        "tool_parser", "metadata_server_config_file", "server_role", "log_level", "served_model_name",
        "moe_cluster_parallel_size", "chat_template", "disagg_cluster_uri", "custom_module_dirs",
    }),
    other_switches=frozenset({
        "trust_remote_code", "fail_fast_on_attention_window_too_large", "enable_chunked_prefill",
    }),
    dash="_",
)  # fmt: skip

ENGINE_FLAGS: Mapping[str, EngineFlags] = {each.engine: each for each in (_VLLM, _SGLANG, _TRTLLM)}

TRTLLM_OPTIONS: Mapping[str, str] = {
    "tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "moe_expert_parallel_size": "ep",
    "max_batch_size": "max_batch_size", "max_num_tokens": "max_num_tokens", "max_seq_len": "max_seq_len",
    "max_beam_width": "max_beam_width", "backend": "backend",
    "kv_cache_config.free_gpu_memory_fraction": "free_gpu_memory_fraction",
    "kv_cache_config.max_tokens": "max_tokens", "kv_cache_config.tokens_per_block": "tokens_per_block",
    "kv_cache_config.dtype": "kv_cache_dtype", "kv_cache_config.use_kv_cache_manager_v2": "kv_cache_manager",
    "kv_cache_config.host_cache_size": "host_cache_size",
    "kv_cache_config.max_attention_window": "max_attention_window",
}  # fmt: skip
"""Keys of TensorRT-LLM's options file, with a dot for a level, and where they belong."""
