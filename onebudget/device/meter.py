"""Charge a device for torch tensors by following their storages.

Works the same for CPU and ``meta`` tensors, so a forward can be measured without memory or weights. It is blind
to what a single operation allocates and frees inside its kernel; whoever calls such a kernel declares that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from onebudget.device.exchange import exchange, is_exchange
from onebudget.errors import AllocationError
from onebudget.units import align_up

if TYPE_CHECKING:
    from onebudget.device.base import Device

ALLOCATOR_ROUNDING_BYTES = 512  # the CUDA caching allocator's smallest unit; kept on every device so plans agree


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class StorageMeter(TorchDispatchMode):
    """While active, every new tensor storage is charged to ``device`` until the storage dies.

    Use under ``torch.no_grad()``: ``inference_mode`` keeps composite operations whole and hides their temporaries.
    A charge beyond the device's capacity raises ``AllocationError`` naming the operation. Charges outlive the
    ``with`` block for as long as the storages do.
    """

    def __init__(self, device: Device, *, owner: str = "activations") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._owner = owner
        self._charged: set[int] = set()
        self._counts_meta = device.torch_device == "meta"

    @contextmanager
    def charging(self, owner: str) -> Iterator[None]:
        """Inside, what is new belongs to ``owner``, and for as long as it lives."""
        before, self._owner = self._owner, owner
        try:
            yield
        finally:
            self._owner = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a wrapper (DTensor) computes on plain tensors in turn, and those come by here
        carry_out = exchange if is_exchange(func, args) else _call
        result = carry_out(func, args, kwargs or {})
        fresh = [
            tensor
            for tensor in _tensors(result)
            if tensor.untyped_storage()._cdata not in self._charged and self._is_on_device(tensor)
        ]
        if fresh:
            inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
            for tensor in fresh:
                if tensor.untyped_storage()._cdata not in inputs:
                    self._charge(tensor.untyped_storage(), str(func))
        return result

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        """Wrappers and fake tensors hold no memory of their own; nor do ``meta`` tensors, except of a fake device."""
        return type(tensor) in _PLAIN_TENSORS and (self._counts_meta or not tensor.is_meta)

    def _charge(self, storage: torch.UntypedStorage, operation: str) -> None:
        key, nbytes = storage._cdata, align_up(storage.nbytes(), ALLOCATOR_ROUNDING_BYTES)
        if key in self._charged or nbytes == 0:
            return
        try:
            self._device.charge_tensor_bytes(nbytes, self._owner)
        except AllocationError as full:
            raise AllocationError(
                full.requested_bytes,
                full.free_bytes,
                kind=full.kind,
                owner=self._owner,
                detail=f"Operation: {operation}.",
            ) from None
        self._charged.add(key)
        weakref.finalize(storage, self._refund, key, nbytes, self._owner).atexit = False

    def _refund(self, key: int, nbytes: int, owner: str) -> None:
        self._charged.discard(key)
        self._device.refund_tensor_bytes(nbytes, owner)


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def _tensors(tree: object) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
