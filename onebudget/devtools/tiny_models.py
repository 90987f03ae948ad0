"""Model folders small enough for unit tests: random weights of each kind of architecture, and a byte tokenizer.

``tiny_model("gqa", folder)`` writes config, weights, generation settings and tokenizer files as a real model folder has
them. Weights depend on the kind and the overrides alone, so recorded answers stay valid.
The initialisation is wide: answers differ from prompt to prompt and neighbouring logits are far apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TinyKind = Literal["gqa", "sliding", "mixed", "moe", "mla"]
"""``gqa``: Llama, two query heads share a KV head. ``sliding``: Mistral, every layer sees a window. ``mixed``: Gemma 3,
sliding and full layers alternate. ``moe``: Mixtral, sparse experts. ``mla``: DeepSeek-V3, latent attention, experts."""

TINY_KINDS: tuple[TinyKind, ...] = get_args(TinyKind)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<end>")
BYTE_TOKENS = 256
TINY_VOCAB = 320
"""Ids 0..3 are ``SPECIAL_TOKENS``, then one id a byte; the rest of the embedding is padding no tokenizer ever gives."""

_WINDOW = 24
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if not message['role'] %}{{ raise_exception('a message without a role') }}{% endif %}"
    "<bos>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)
_COMMON: Mapping[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


_ARCHITECTURES: Mapping[TinyKind, tuple[str, Mapping[str, Any]]] = {
    "gqa": ("LlamaConfig", {}),
    "sliding": ("MistralConfig", {"sliding_window": _WINDOW}),
    "mixed": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "moe": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mla": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}


def tiny_model(kind: TinyKind, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a model of ``kind`` into ``folder`` (made if missing) and return the folder.

    ``overrides`` are keys of the architecture's config. Raises ``ConfigError`` for an unknown kind.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return folder


def tiny_config(kind: TinyKind, **overrides: Any) -> PretrainedConfig:
    """The transformers config of a tiny model, with ``overrides`` on top."""
    import transformers

    if kind not in TINY_KINDS:
        raise ConfigError.for_field("kind", kind, f"one of {', '.join(TINY_KINDS)}")
    class_name, own = _ARCHITECTURES[kind]
    config: PretrainedConfig = getattr(transformers, class_name)(**{**_COMMON, **own, **overrides})
    return config


def tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer files for a vocabulary of single bytes: any text round-trips, and characters beyond ASCII take
    several tokens."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE(vocab={token: number for number, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteDecoder()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)
