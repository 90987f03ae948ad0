"""What happened to blocks so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class KVCounters:
    """Blocks, except where the name says otherwise.

    ``reused`` and ``missed`` are blocks of prompts that were found and had to be computed; ``reused_tokens`` counts
    copied parts of blocks too. ``evicted`` left the device, ``offloaded`` of them to a lower tier; ``onboarded`` came
    back. ``dropped`` left the lowest tier, or found no room in one. ``disk_*`` went through files; ``disk_lost`` were
    gone or damaged when they were asked for.
    """

    reused: int = 0
    missed: int = 0
    reused_tokens: int = 0
    partial_copies: int = 0
    evicted: int = 0
    offloaded: int = 0
    onboarded: int = 0
    dropped: int = 0
    disk_written: int = 0
    disk_read: int = 0
    disk_lost: int = 0
    suspended: int = 0
    resumed: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
