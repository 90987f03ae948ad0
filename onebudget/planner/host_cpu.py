"""What this machine's processor can do, told without torch."""

from __future__ import annotations

from pathlib import Path

_FLAGS = ("avx512_bf16", "amx_tile")


def native_bfloat16() -> bool:
    """Whether bfloat16 products are computed natively, as the engine finds out through torch. False where the system
    does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return any(flag in flags for flag in _FLAGS)
