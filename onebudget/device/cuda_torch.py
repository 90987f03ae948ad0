"""torch on one CUDA device: its allocator's statistics, and tensors over memory that is not its own.

torch is imported by the first tensor. While it isn't, or hasn't touched its CUDA side, its allocator holds nothing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from onebudget.device.tensors import mark, outside_modes

if TYPE_CHECKING:
    from torch import Tensor


class TorchAllocator:
    """Readings of torch's caching allocator. "Allocated" are bytes in live tensors, each rounded up to 512 B."""

    def __init__(self, index: int) -> None:
        self._index = index

    def live_bytes(self) -> int:
        return self._read("allocated_bytes.all.current")

    def peak_bytes(self) -> int:
        """High-water mark of ``live_bytes`` since ``reset_peak``."""
        return self._read("allocated_bytes.all.peak")

    def reset_peak(self) -> None:
        torch = _active_torch()
        if torch is not None:
            torch.cuda.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        """Give back what the allocator keeps without using it."""
        torch = _active_torch()
        if torch is not None:
            torch.cuda.empty_cache()

    def _read(self, name: str) -> int:
        torch = _active_torch()
        return 0 if torch is None else int(torch.cuda.memory_stats(self._index).get(name, 0))


def _active_torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


class DeviceBytes:
    """Device memory as the CUDA array interface describes it: bytes, because that protocol has no word for the small
    floating-point types. torch keeps this object, and with it ``keep``, for as long as the storage lives."""

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def cuda_tensor(address: int, dtype: str, shape: tuple[int, ...], nbytes: int, keep: object, device: str) -> Tensor:
    """A tensor over ``nbytes`` of device memory at ``address``, without a copy."""
    import torch

    with outside_modes():
        raw = torch.as_tensor(DeviceBytes(address, nbytes, keep), device=device)
        mark(raw, keep)
        return raw.view(getattr(torch, dtype)).view(shape)
