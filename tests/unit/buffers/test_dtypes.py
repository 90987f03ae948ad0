from __future__ import annotations

import numpy as np
import pytest
import torch

from onebudget.buffers.dtypes import ITEM_BYTES, element_type, in_numpy
from onebudget.errors import ConfigError


@pytest.mark.parametrize("name", list(ITEM_BYTES))
def test_sizes_agree_with_torch_and_numpy(name: str) -> None:
    dtype = getattr(torch, name)
    assert element_type(dtype) == (name, dtype.itemsize)
    if in_numpy(name):
        assert element_type(np.dtype(name)) == (name, np.dtype(name).itemsize)
        assert element_type(np.dtype(name).type) == (name, np.dtype(name).itemsize)


@pytest.mark.parametrize(
    ("alias", "name"), [("half", "float16"), ("bf16", "bfloat16"), ("torch.float32", "float32"), ("long", "int64")]
)
def test_other_words(alias: str, name: str) -> None:
    assert element_type(alias)[0] == name


@pytest.mark.parametrize("dtype", ["float7", "", "torch.nothing", 8, None, {}, np.dtype("U4"), torch.qint8])
def test_everything_else_is_refused(dtype: object) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        element_type(dtype)
