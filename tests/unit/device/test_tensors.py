from __future__ import annotations

import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.tensors import host_tensor, lies_in_buffer, meta_tensor


class Keep:
    pass


class Spy(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_storages_hold_what_they_were_given() -> None:
    backing = torch.zeros(64, dtype=torch.uint8)
    for make in (
        lambda keep: host_tensor(backing.data_ptr(), "float32", (4, 4), 64, keep),
        lambda keep: meta_tensor("float32", (4, 4), keep),
    ):
        keep = Keep()
        gone = weakref.ref(keep)
        view = make(keep)[1:].t()
        del keep
        gc.collect()
        assert gone() is not None
        assert lies_in_buffer(view.untyped_storage())
        del view
        gc.collect()
        assert gone() is None


def test_making_a_tensor_is_not_an_operation() -> None:
    for kind in ("host", "fake"):
        with open_device(kind, capacity_bytes=1 << 20) as device, Spy() as spy:
            BufferManager(device.create_stream()).gpu((2, 2), "bfloat16").as_tensor()
        assert spy.seen == []
