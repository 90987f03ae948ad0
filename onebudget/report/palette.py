"""One colour per share, the same in the terminal, the page and the figure."""

from __future__ import annotations

import zlib

_COLOURS = {
    "other_processes": "#5f6b7a",
    "context": "#8a97a8",
    "communication": "#a7b0bd",
    "fragmentation": "#737e8c",
    "weights": "#3b6fd4",
    "draft_weights": "#6f98e8",
    "lora": "#2a9fd6",
    "activations": "#e8833a",
    "logits": "#f2a65e",
    "multimodal_encoder": "#c9622a",
    "fixed_workspace": "#c2417c",
    "penalty_workspace": "#e06c9f",
    "indexer_logits": "#9d2f66",
    "context_workspace": "#d94f5c",
    "graphs": "#7c5cc4",
    "late_allocations": "#a98be0",
    "recurrent_state": "#1b9aa0",
    "safety_margin": "#b59a3b",
    "fraction_slack": "#d6bf6a",
    "kv_cache": "#2f9e62",
    "unassigned": "#c8ced6",
}
_SPARE = ("#8c564b", "#17a2b8", "#bc5090", "#6a994e", "#d4a373", "#4d648d")


def colour_of(name: str) -> str:
    """The colour of a share as ``#rrggbb``; a name without a colour of its own always gets the same spare one."""
    return _COLOURS.get(name) or _SPARE[zlib.crc32(name.encode()) % len(_SPARE)]


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on ``colour`` (WCAG relative luminance)."""
    red, green, blue = (_linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#111111" if luminance > 0.179 else "#ffffff"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else float(((channel + 0.055) / 1.055) ** 2.4)
