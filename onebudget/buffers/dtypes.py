"""Element types by name, so that buffers need neither torch nor NumPy to know their size."""

from __future__ import annotations

from typing import Any

from onebudget.errors import ConfigError

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8, "complex64": 8,
}  # fmt: skip
_ALIASES = {
    "half": "float16", "float": "float32", "double": "float64", "byte": "uint8", "fp16": "float16", "bf16": "bfloat16",
    "fp32": "float32", "float8_e4m3": "float8_e4m3fn", "int": "int32", "long": "int64",
}  # fmt: skip
_NOT_IN_NUMPY = {name for name in ITEM_BYTES if name.startswith(("float8", "bfloat"))}
_seen: dict[Any, tuple[str, int]] = {name: (name, size) for name, size in ITEM_BYTES.items()}


def element_type(dtype: Any) -> tuple[str, int]:
    """Name and bytes per element of a torch dtype, a NumPy dtype or scalar type, or a name of one.

    ``ConfigError`` for anything else.
    """
    try:
        found = _seen.get(dtype)
    except TypeError:
        found = None
    if found is None:
        name = _name_of(dtype)
        if name not in ITEM_BYTES:
            allowed = f"a torch dtype, a NumPy dtype, or one of {', '.join(ITEM_BYTES)}"
            raise ConfigError.for_field("dtype", dtype, allowed)
        found = _seen[dtype] = (name, ITEM_BYTES[name])
    return found


def in_numpy(name: str) -> bool:
    return name not in _NOT_IN_NUMPY


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
    elif type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", ""))
    return _ALIASES.get(name, name)
