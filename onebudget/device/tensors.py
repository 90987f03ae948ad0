"""torch tensors over memory that is not torch's. torch is imported when the first one is made."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage

_MARK = "_onebudget_buffer"


def host_tensor(address: int, dtype: str, shape: tuple[int, ...], nbytes: int, keep: object) -> Tensor:
    """A CPU tensor over ``nbytes`` at ``address``. ``keep`` lives as long as the tensor's storage."""
    import torch

    view = byte_view(address, nbytes, keep)
    with outside_modes():
        tensor = torch.frombuffer(view, dtype=getattr(torch, dtype))
        mark(tensor, keep)
        return tensor.view(shape)


def meta_tensor(dtype: str, shape: tuple[int, ...], keep: object) -> Tensor:
    """A tensor of this shape without contents."""
    import torch

    with outside_modes():
        return mark(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), keep)


def byte_view(address: int, nbytes: int, keep: object) -> Any:
    """A writable object with the buffer protocol over raw memory; it holds on to ``keep``."""
    view = (ctypes.c_uint8 * nbytes).from_address(address)
    view.keep = keep  # type: ignore[attr-defined]
    return view


def mark(tensor: Tensor, keep: object) -> Tensor:
    """Mark a tensor's storage as lying in a buffer and let it hold ``keep``; views share storage and mark."""
    setattr(tensor.untyped_storage(), _MARK, keep)
    return tensor


def lies_in_buffer(storage: UntypedStorage) -> bool:
    """Was this storage made by ``Buffer.as_tensor()``? Then its bytes are on the books already."""
    return getattr(storage, _MARK, None) is not None


def outside_modes() -> ExitStack:
    """No dispatch mode sees the tensor being made (it is not an allocation), and it is never an inference tensor
    (it outlives any inference-mode block it is made in)."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    stack = ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch.inference_mode(False))
    return stack
