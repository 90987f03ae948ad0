"""The config of one rank's part of a model: the same model with fewer heads, narrower layers and fewer of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.planner.weights import ParallelLayout

_NESTED = ("text_config", "llm_config", "language_config")
_DROPPED = ("quantization_config", "auto_map", "compression_config")
_EXPERT_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the number format of a checkpoint and without pointers to code: shapes are all a dry run needs."""
    plain = {name: copy.deepcopy(value) for name, value in config.items() if name not in _DROPPED}
    for name in _NESTED:
        if isinstance(plain.get(name), Mapping):
            plain[name] = plain_config(plain[name])
    return plain


def config_of_rank(config: Mapping[str, Any], layout: ParallelLayout) -> dict[str, Any]:
    """Shapes of what one rank of ``layout`` computes. ``ConfigError`` with the numbers where heads can't be divided.

    KV heads that are fewer than the ranks are kept whole, one on each. Expert parallelism gives a rank whole experts
    and the tokens routed to them, which on average are as many as it would have had.
    """
    rank = plain_config(config)
    for part in (rank, *(rank[name] for name in _NESTED if isinstance(rank.get(name), dict))):
        _divide(part, layout.tp)
        _cut_layers(part, layout.pp)
    return rank


def check_heads(heads: int, kv_heads: int, tp: int, name: str = "") -> None:
    """``ConfigError`` where ``tp`` ranks can't share the heads evenly."""
    if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0):
        return
    usable = [
        size for size in range(1, heads + 1) if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    ]
    raise ConfigError(
        f"tp = {tp} does not divide the {heads} attention and {kv_heads} KV heads of {name or 'the model'}: "
        f"{', '.join(map(str, usable[:8]))} would do.",
        field="tp",
        value=tp,
    )


def _divide(part: dict[str, Any], tp: int) -> None:
    heads = part.get("num_attention_heads")
    if tp == 1 or not isinstance(heads, int):
        return
    hidden = part.get("hidden_size")
    if not part.get("head_dim") and not part.get("kv_lora_rank") and isinstance(hidden, int):
        part["head_dim"] = hidden // heads
    kv_heads = int(part.get("num_key_value_heads") or heads)
    check_heads(heads, kv_heads, tp)
    part["num_attention_heads"] = heads // tp
    part["num_key_value_heads"] = max(1, kv_heads // tp) if not part.get("kv_lora_rank") else heads // tp
    for name in ("intermediate_size", "ffn_dim", *_EXPERT_WIDTHS):
        if isinstance(part.get(name), int):
            part[name] = max(1, part[name] // tp)


def _cut_layers(part: dict[str, Any], pp: int) -> None:
    count = part.get("num_hidden_layers")
    if pp == 1 or not isinstance(count, int):
        return
    if pp > count:
        raise ConfigError(f"pp = {pp} is more than the model's {count} layers.", field="pp", value=pp)
    first_layers(part, -(-count // pp))


def first_layers(part: dict[str, Any], wanted: int) -> None:
    """Keep the first ``wanted`` layers of a config in place, with its lists of one entry a layer."""
    count = int(part["num_hidden_layers"])
    for name, value in part.items():
        if isinstance(value, list) and len(value) == count:
            part[name] = value[:wanted]
    part["num_hidden_layers"] = wanted


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model, to be changed in place."""
    for name in _NESTED:
        if isinstance(config.get(name), dict):
            return text_part(config[name])
    return config
