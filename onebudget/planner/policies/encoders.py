"""Encoders of images: their widths from a config, or what a family is known to have where the config leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """``patches_per_token``: patches that are merged into one token of the language model."""

    hidden: int
    intermediate: int
    layers: int
    patches_per_token: int = 1
    gated: bool = False

    def forward_bytes(self, tokens: int) -> int:
        """Live bytes while the patches of ``tokens`` tokens go through: as in a language model, two wide and two narrow
        rows in 16 bits, three where the layer is gated."""
        return tokens * self.patches_per_token * (6 if self.gated else 4) * (self.intermediate + self.hidden)


# Patches per token: the merging of the families' public configuration classes, squared; Gemma 3 pools 64 x 64 patches
# into 256 tokens, Gemma 4 by threes.
_MERGED = {"qwen2_vl": 4, "qwen2_5": 4, "qwen3_vl": 4, "qwen3_omni": 4, "qwen3_5": 4, "gemma4": 9, "gemma3": 16}

# Widths where a config has no vision part: Qwen's and the smaller Gemma 4 are defaults of the public configuration
# classes; 1280 for Qwen 2.5 is that of its published configs; the larger Gemma 4 is from memory, not checked.
_SHAPES = {
    "qwen2_5": EncoderShape(1280, 3420, 32, 4, gated=True),
    "qwen3_vl": EncoderShape(1152, 4304, 27, 4),
    "qwen3_5": EncoderShape(1152, 4304, 27, 4),
    "gemma4": EncoderShape(1152, 4304, 27, 9, gated=True),
}
_SMALL_GEMMA = EncoderShape(768, 3072, 16, 9, gated=True)
_SMALL_HIDDEN = 2560
_GATED = ("qwen2_5", "gemma4", "pixtral", "mistral")


def encoder_shape(config: Mapping[str, Any], family: str, text_hidden: int) -> EncoderShape | None:
    """The encoder of a multimodal model; None where neither its config nor its family tells."""
    vision = config.get("vision_config") or {}
    hidden = int(vision.get("hidden_size") or 0)
    layers = int(vision.get("num_hidden_layers") or vision.get("depth") or 0)
    if hidden and layers:
        wide = int(vision.get("intermediate_size") or 4 * hidden)
        return EncoderShape(hidden, wide, layers, _patches(vision, family), gated=family.startswith(_GATED))
    if family.startswith("gemma4") and text_hidden <= _SMALL_HIDDEN:
        return _SMALL_GEMMA
    return next((shape for start, shape in _SHAPES.items() if family.startswith(start)), None)


def _patches(vision: Mapping[str, Any], family: str) -> int:
    merge = vision.get("spatial_merge_size")
    if isinstance(merge, int) and merge > 0:
        return merge * merge
    return next((count for start, count in _MERGED.items() if family.startswith(start)), 1)
