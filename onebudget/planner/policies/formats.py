"""Number formats of weights and caches, read from the words people use for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from onebudget.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """``bits`` per parameter of the linear layers, scales included. ``experts_only``: everything else stays 16-bit.
    ``table_bits``: of embeddings and head. ``spread``: relative uncertainty, because checkpoints of one format keep
    different layers in 16 bits. ``fused``: activations are quantised on the fly, which changes the peak."""

    name: str
    bits: Fraction
    experts_only: bool = False
    table_bits: int = 16
    spread: float = 0.01
    fused: bool = False
    attention: Fraction | None = None

    @property
    def attention_bits(self) -> Fraction:
        """Bits of projections of attention and recurrent layers."""
        return self.attention or (Fraction(16) if self.experts_only else self.bits)


def _bits(*parts: tuple[int, int]) -> Fraction:
    return sum((Fraction(*part) for part in parts), Fraction(0))


# Scales and zero points per group, as the formats define them; GGUF figures are block sizes of ggml.
FORMATS: Mapping[str, WeightFormat] = {
    "bf16": WeightFormat("bf16", Fraction(16), spread=0.004),
    "fp32": WeightFormat("fp32", Fraction(32), table_bits=32, spread=0.004),
    "fp8": WeightFormat("fp8", _bits((8, 1), (32, 16384)), spread=0.01, fused=True),
    "int8": WeightFormat("int8", Fraction(8), spread=0.01, fused=True),
    "awq": WeightFormat("awq", _bits((4, 1), (16, 128), (4, 128)), spread=0.02),
    "gptq": WeightFormat("gptq", _bits((4, 1), (16, 128), (4, 128)), spread=0.02),
    "int4": WeightFormat("int4", _bits((4, 1), (16, 128)), spread=0.04),
    "nvfp4": WeightFormat("nvfp4", _bits((4, 1), (8, 16)), spread=0.08, fused=True),
    "mxfp4": WeightFormat("mxfp4", _bits((4, 1), (8, 32)), experts_only=True, spread=0.07),
    "fp4_fp8": WeightFormat("fp4_fp8", _bits((4, 1), (8, 32)), spread=0.02, fused=True, attention=Fraction(8)),
    "nf4": WeightFormat("nf4", _bits((4, 1), (8, 64), (32, 16384)), spread=0.03),
    "exl3": WeightFormat("exl3", Fraction(4), spread=0.1),
    "q8_0": WeightFormat("q8_0", _bits((17, 2)), table_bits=9, spread=0.02),
    "q6_k": WeightFormat("q6_k", Fraction(105, 16), table_bits=7, spread=0.03),
    "q5_k": WeightFormat("q5_k", Fraction(11, 2), table_bits=7, spread=0.05),
    "q4_k": WeightFormat("q4_k", Fraction(9, 2), table_bits=7, spread=0.06),
    "q4_0": WeightFormat("q4_0", Fraction(9, 2), table_bits=7, spread=0.03),
}
_WORDS = (
    ("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("exl3", "exl3"), ("nf4", "nf4"), ("bitsandbytes", "nf4"), ("bnb", "nf4"),
    ("q8_0", "q8_0"), ("q6_k", "q6_k"), ("q5_k", "q5_k"), ("q4_k", "q4_k"), ("q4_0", "q4_0"), ("awq", "awq"),
    ("gptq", "gptq"), ("autoround", "int4"), ("auto-round", "int4"), ("w4a16", "int4"), ("int4", "int4"),
    ("4bit", "int4"), ("fp4", "nvfp4"), ("fp8", "fp8"), ("float8", "fp8"), ("w8a8", "int8"), ("w8a16", "int8"),
    ("int8", "int8"), ("gguf", "q4_k"), ("fp32", "fp32"), ("float32", "fp32"), ("bf16", "bf16"), ("fp16", "bf16"),
    ("16-bit", "bf16"), ("bfloat16", "bf16"), ("float16", "bf16"), ("half", "bf16"), ("auto", "bf16"),
)  # fmt: skip


# Families released in a format of their own, whether or not a config at hand says so; from memory of the releases, the
# first by what a rank's log leaves for weights.
_NATIVE = {
    "deepseek-v4": "fp4_fp8",
    "minimax-m2": "fp8",
    "deepseek-r1-0": "fp8",
    "deepseek-v3": "fp8",
    "kimi-k2": "fp8",
}


def weight_format(text: str | None, quantization: Mapping[str, Any] | None, model_name: str = "") -> WeightFormat:
    """The format ``text`` names; without it, what the config declares, what the model's name says, or 16 bits.

    Raises ``ConfigError`` for a word that names no format.
    """
    if text:
        named = _named(text)
        if named is not None and "fp8" in text and named.name == "nvfp4":
            return replace(named, attention=Fraction(8))
        if named is None:
            raise ConfigError.for_field("weights_dtype", text, f"one of {', '.join(FORMATS)}")
        return named
    if quantization:
        declared = " ".join(str(quantization.get(key, "")) for key in ("quant_algo", "format", "quant_method"))
        width = "4bit" if str(quantization.get("bits")) == "4" else "int8" if quantization.get("bits") == 8 else ""
        found = _named(f"{declared} {width}")
        if found:
            return found
    native = next((kind for mark, kind in _NATIVE.items() if mark in model_name.lower()), None)
    return _named(model_name, of_name=True) or (FORMATS[native] if native else None) or FORMATS["bf16"]


def _named(text: str, *, of_name: bool = False) -> WeightFormat | None:
    plain = text.lower()
    words = [word for word in _WORDS if not of_name or word[1] != "bf16"]
    return next((FORMATS[name] for mark, name in words if mark in plain), None)


def cache_bits(text: str | None, model_bytes: int, quantization: Mapping[str, Any] | None) -> Fraction:
    """Bits per cached element. ``auto`` or nothing is the model's dtype, unless the checkpoint carries cache scales."""
    plain = (text or "auto").lower()
    if "nvfp4" in plain:
        return Fraction(9, 2)
    if "fp8" in plain or "int8" in plain or "float8" in plain:
        return Fraction(8)
    if "q8_0" in plain:
        return Fraction(17, 2)
    if "q4_0" in plain:
        return Fraction(9, 2)
    if plain in ("auto", "none"):
        scales = quantization and (quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo"))
        return Fraction(8) if scales else Fraction(8 * model_bytes)
    if "32" in plain:
        return Fraction(32)
    if "16" in plain or plain == "half":
        return Fraction(16)
    raise ConfigError.for_field("kv_cache_dtype", text, "auto, bf16, fp16, fp8, fp8_e4m3, fp8_e5m2 or nvfp4")
