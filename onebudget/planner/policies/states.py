"""Recurrent states of hybrid models: their size in elements, from the keys of several families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StateShape:
    """Recurrent state of one layer of a hybrid model, in elements: a convolution window and a matrix per head.

    ``conv_rows`` is the length of the window without the newest token; ``conv_width`` its channels; ``matrix`` the
    elements of all heads' state; ``inner`` the width of the layer's output before its projection.
    ``matrix_bytes`` is the element size the checkpoint asks for, None the model's own.
    """

    conv_rows: int
    conv_width: int
    matrix: int
    inner: int
    heads: int
    matrix_bytes: int | None = None


def state_shape(whole: Callable[..., int], get: Callable[..., Any]) -> StateShape | None:
    """The shape from a config's keys, None for a model without recurrent layers."""
    matrix_bytes = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(get("mamba_ssm_dtype")))
    linear = get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("num_heads"):
        width = int(linear["num_heads"]) * int(linear["head_dim"])
        rows = int(linear.get("short_conv_kernel_size", 4)) - 1
        return StateShape(rows, 3 * width, width * int(linear["head_dim"]), width, int(linear["num_heads"]), 4)
    values = whole("linear_num_value_heads")
    if values:
        # Released models of this family use 16 key heads and heads of 128; partial configs leave them out.
        keys = whole("linear_num_key_heads") or 16
        key_dim = whole("linear_key_head_dim") or 128
        value_dim = whole("linear_value_head_dim") or 128
        rows = (whole("linear_conv_kernel_dim") or 4) - 1
        matrix = values * value_dim * key_dim
        inner = values * value_dim
        return StateShape(rows, 2 * keys * key_dim + inner, matrix, inner, values, matrix_bytes)
    mamba_heads = whole("mamba_num_heads", "mamba_n_heads")
    if mamba_heads:
        inner = mamba_heads * (whole("mamba_head_dim", "mamba_d_head") or 64)
        size = whole("ssm_state_size", "mamba_d_state")
        groups = whole("n_groups", "mamba_n_groups") or 1
        rows = (whole("conv_kernel", "mamba_d_conv") or 4) - 1
        return StateShape(rows, inner + 2 * groups * size, inner * size, inner, mamba_heads, matrix_bytes)
    if "qwen3_5" in str(get("model_type") or ""):
        # Known models of the family have states as wide as their queries, in heads of 128.
        head_dim = whole("head_dim") or 256
        width = (whole("num_attention_heads") or whole("hidden_size") * 6 // 5 // head_dim) * head_dim
        return StateShape(3, 2 * 16 * 128 + width, width * 128, width, width // 128, 4)
    return None
