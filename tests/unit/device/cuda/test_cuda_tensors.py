"""How device memory is described to torch, and torch's answers as far as they need no GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from onebudget.buffers import BufferManager
from onebudget.device.cuda_torch import DeviceBytes, cuda_tensor
from onebudget.device.tensors import lies_in_buffer


class Keep:
    pass


def test_the_description_is_bytes_whatever_the_dtype() -> None:
    described = DeviceBytes(0x1000, 48, None).__cuda_array_interface__
    assert (described["data"], described["shape"], described["typestr"]) == ((0x1000, False), (48,), "|u1")
    assert described["version"] == 3


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bfloat16", (2, 3, 4)), ("float8_e4m3fn", (48,)), ("int64", (6,)), ("float32", (3, 4))]
)
def test_the_bytes_are_viewed_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...]
) -> None:
    memory, keep = torch.zeros(48, dtype=torch.uint8), Keep()
    asked: list[Any] = []

    def as_tensor(described: DeviceBytes, device: str) -> torch.Tensor:
        asked.append((described.__cuda_array_interface__["data"], device))
        return memory[:]

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    tensor = cuda_tensor(0x1000, dtype, shape, 48, keep, "cuda:0")
    assert asked == [((0x1000, False), "cuda:0")]
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), shape)
    assert tensor.data_ptr() == memory.data_ptr()
    assert lies_in_buffer(tensor.untyped_storage())
    assert not tensor.is_inference()


def test_the_description_holds_on_to_the_buffer() -> None:
    keep = Keep()
    gone = weakref.ref(keep)
    described = DeviceBytes(0x1000, 8, keep)
    del keep
    gc.collect()
    assert gone() is not None
    del described
    gc.collect()
    assert gone() is None


def test_host_kinds_are_host_tensors(manager: BufferManager) -> None:
    with manager.cpu(6, "int16") as buffer:
        tensor = buffer.as_tensor()
        tensor.fill_(5)
        assert (tensor.device.type, tensor.tolist()) == ("cpu", [5] * 6)
        assert buffer.as_numpy().tolist() == [5] * 6
        del tensor
