"""One GGUF file of the Llama family to a folder that ``transformers`` loads: float32 safetensors, config, tokenizer.

``transformers`` can read GGUF itself, but parses the 98,000 strings of the vocabulary three times and rebuilds its
table of tensor names once per module, which takes most of a minute on a slow machine; one pass takes a few seconds. Its
tokenizer also leaves out the digit splitting of the ``smollm`` pre-tokenizer, which is kept here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onebudget.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from transformers import LlamaConfig

Progress = Callable[[int, int], None]

OUTER_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
BLOCK_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
CONTROL_TOKEN = 3
SPECIAL_KINDS = ("bos", "eos", "padding", "unknown")
FLOAT32_BYTES = 4


def convert_llama_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Write the model in ``source`` to the existing, empty folder ``target``.

    ``progress`` gets (bytes of float32 weights done, bytes in all). Raises ``ModelError`` when the file is of another
    architecture or tokenizer, or when its tensors are not exactly those of its configuration.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{source.name} is not a readable GGUF file: {error}") from error
    _check_kind(reader, source)
    config = _config(reader)
    _write_weights(reader, config, target, progress)
    _write_config(config, target)
    _write_tokenizer(reader, config, target)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelError(f"The GGUF file has no {key!r}, which the conversion needs.")
    return field.contents()


def _check_kind(reader: GGUFReader, source: Path) -> None:
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }
    for key, value in expected.items():
        found = _field(reader, key)
        if found != value:
            raise ModelError(f"{source.name} can't be converted: {key} is {found!r}, and only {value!r} is supported.")


def _config(reader: GGUFReader) -> LlamaConfig:
    from transformers import LlamaConfig

    def llama(key: str) -> Any:
        return _field(reader, f"llama.{key}")

    heads = llama("attention.head_count")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=llama("vocab_size"),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=llama("attention.head_count_kv"),
        head_dim=llama("rope.dimension_count"),
        max_position_embeddings=llama("context_length"),
        # Stored as float32: the shortest decimal that means the same float32 is the value that was written.
        rms_norm_eps=float(str(np.float32(llama("attention.layer_norm_rms_epsilon")))),
        rope_parameters={"rope_type": "default", "rope_theta": float(llama("rope.freq_base"))},
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        # GGUF says "tied" by leaving the output matrix out.
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )


def _write_config(config: LlamaConfig, target: Path) -> None:
    from transformers import GenerationConfig

    config.save_pretrained(target)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(target)


def _tensor_names(config: LlamaConfig) -> dict[str, str]:
    """Every GGUF tensor name that this configuration must have, with the name that ``LlamaForCausalLM`` gives it."""
    names = dict(OUTER_TENSORS)
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        names |= {f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}" for theirs, ours in BLOCK_TENSORS.items()}
    return names


def _write_weights(reader: GGUFReader, config: LlamaConfig, target: Path, progress: Progress) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    names = _tensor_names(config)
    _check_names(set(names), {tensor.name for tensor in reader.tensors})
    total_bytes = sum(int(tensor.n_elements) for tensor in reader.tensors) * FLOAT32_BYTES
    weights: dict[str, NDArray[np.float32]] = {}
    done_bytes = 0
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        weights[names[tensor.name]] = np.ascontiguousarray(_natural_order(tensor.name, values, config))
        done_bytes += values.nbytes
        progress(done_bytes, total_bytes)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _check_names(expected: set[str], found: set[str]) -> None:
    if expected == found:
        return
    missing, unknown = sorted(expected - found), sorted(found - expected)
    raise ModelError(
        f"The GGUF file does not hold exactly the tensors of its configuration: {len(missing)} missing "
        f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}."
    )


def _natural_order(name: str, values: NDArray[np.float32], config: LlamaConfig) -> NDArray[np.float32]:
    """Undo the row order of query and key projections.

    GGUF keeps the two members of each rotary pair in neighbouring rows ``(2i, 2i+1)`` of a head; ``transformers``
    rotates row ``i`` with row ``i + head_dim / 2``. So within a head ``[pairs, 2, hidden]`` becomes
    ``[2, pairs, hidden]``.
    """
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    count = heads.get(name.split(".", 2)[-1])
    if count is None:
        return values
    rows, columns = values.shape
    return values.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _byte_level_bpe(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE with every digit alone, as the ``smollm`` pre-tokenizer is defined."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges: list[str] = _field(reader, "tokenizer.ggml.merges")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_tokenizer(reader: GGUFReader, config: LlamaConfig, target: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    special = {kind: tokens[_field(reader, f"tokenizer.ggml.{kind}_token_id")] for kind in SPECIAL_KINDS}
    PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(reader, tokens),
        bos_token=special["bos"],
        eos_token=special["eos"],
        pad_token=special["padding"],
        unk_token=special["unknown"],
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=_field(reader, "tokenizer.chat_template"),
    ).save_pretrained(target)
