"""Kinds of memory a buffer can lie in."""

from __future__ import annotations

from enum import StrEnum

from onebudget.errors import ConfigError


class MemoryKind(StrEnum):
    """Where bytes live. Only ``GPU``, ``MANAGED`` and ``NVLS`` are charged to the card."""

    GPU = "gpu"
    CPU = "cpu"
    PINNED = "pinned"
    MANAGED = "managed"
    UVM = MANAGED  # the driver's older word
    PINNED_POOL = "pinned_pool"
    NVLS = "nvls"

    __hash__ = str.__hash__  # the inherited one runs Python code at every dictionary access

    @property
    def on_host(self) -> bool:
        return self in (MemoryKind.CPU, MemoryKind.PINNED, MemoryKind.PINNED_POOL)

    @classmethod
    def parse(cls, kind: MemoryKind | str) -> MemoryKind:
        try:
            return cls("managed" if kind == "uvm" else kind)
        except ValueError:
            raise ConfigError.for_field("kind", kind, f"one of {', '.join(cls)}") from None
