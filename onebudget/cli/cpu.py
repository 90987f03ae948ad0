"""Instructions of this machine's processor that decide which dtype computes fast."""

from __future__ import annotations

from pathlib import Path

DTYPE_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx_ne_convert",
    "amx_bf16", "amx_fp16", "amx_int8", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme",
)  # fmt: skip
"""x86 names first, then Arm's."""

CPUINFO = Path("/proc/cpuinfo")


def dtype_features(cpuinfo: Path = CPUINFO) -> tuple[list[str], str]:
    """The flags of ``DTYPE_FLAGS`` that the processor has, and where that was read."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return [], f"{cpuinfo} can't be read: {error.strerror or error}"
    flags: set[str] = set()
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            flags.update(values.split())
    return [flag for flag in DTYPE_FLAGS if flag in flags], str(cpuinfo)
