from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from onebudget.models.experts import _GroupedShapes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [8, 6, 17])
def test_a_grouped_product_on_meta_tensors_is_laid_out_as_the_real_one(dtype: str, width: int) -> None:
    """Rows are padded to whole 16 bytes, so the storage may be larger than the shape says."""

    def product(device: str) -> torch.Tensor:
        rows = torch.zeros(5, 16, dtype=getattr(torch, dtype), device=device)
        weights = torch.zeros(2, width, 16, dtype=getattr(torch, dtype), device=device).transpose(1, 2)
        offsets = torch.tensor([2, 5], dtype=torch.int32).to(device)
        return torch.nn.functional.grouped_mm(rows, weights, offs=offsets)

    real = product("cpu")
    with _GroupedShapes():
        planned = product("meta")
    assert planned.shape == real.shape == (5, width)
    assert planned.dtype == real.dtype
    assert planned.stride() == real.stride()
    assert planned.untyped_storage().nbytes() == real.untyped_storage().nbytes()
