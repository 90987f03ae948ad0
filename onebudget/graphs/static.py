"""Inputs of graphs: device tensors at fixed addresses, sized once for the largest bucket and sliced per graph.

Capture records addresses, so everything a graph sees is only ever written into. Lengths change every step and are the
one input whose upload is a node of the graph: the host writes into its shadow, the replay carries it over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from onebudget.errors import ConfigError, StateError

if TYPE_CHECKING:
    from onebudget.buffers import Buffer, BufferManager
    from onebudget.device.base import Device

OWNER = "graphs"
INPUT_IDS, POSITION_IDS, SEQ_LENS = "input_ids", "position_ids", "seq_lens"
_SYMBOLS = ("tokens", "batch")
Dim = int | Literal["tokens", "batch"]


class Event(Protocol):
    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ExtraInput:
    """An input that only its user knows. ``dims``: fixed lengths, at most one of them a symbol, which stands for the
    most tokens or sequences of any bucket. ``dtype``: torch's name. From the ``host`` it has a shadow to assemble it
    in."""

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    source: Literal["host", "device"] = "host"
    fill: int = 0

    def __post_init__(self) -> None:
        symbols = [dim for dim in self.dims if isinstance(dim, str)]
        if len(symbols) > 1 or any(symbol not in _SYMBOLS for symbol in symbols):
            allowed = "whole numbers and at most one of 'tokens' and 'batch'"
            raise ConfigError.for_field(f"dims of input {self.name}", self.dims, allowed)
        if any(isinstance(dim, int) and dim < 1 for dim in self.dims):
            raise ConfigError.for_field(f"dims of input {self.name}", self.dims, "lengths of at least 1")
        if self.source not in ("host", "device"):
            raise ConfigError.for_field(f"source of input {self.name}", self.source, "'host' or 'device'")

    def shape(self, limits: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(limits[dim] if isinstance(dim, str) else dim for dim in self.dims)


def static_tokens(
    *,
    max_bucket: int,
    max_num_tokens: int,
    beam_width: int = 1,
    max_draft_len: int = 0,
    mixed_encoder_decoder: bool = False,
) -> int:
    """Tokens of the largest graph: what the bucket limit asks for, so that ``max_num_tokens``, a knob of scheduling,
    does not raise graph memory. Graphs that mix encoder and decoder hold whole steps."""
    if mixed_encoder_decoder:
        return max_num_tokens
    return min(max_bucket * beam_width * (max_draft_len + 1), max_num_tokens)


def prefer_pinned(device: Device) -> bool:
    """Whether uploads come from page-locked memory. Only confidential computing makes those the slow ones."""
    return not getattr(device.facts, "confidential_computing", False)


class StaticTensors:
    """``input_ids`` int32 ``[tokens]``, ``position_ids`` int32 ``[1, tokens]`` (``[3, 1, tokens]`` with ``axes=3``),
    ``seq_lens`` int32 ``[max_bucket]`` and the extra inputs, each with a host shadow.

    With ``capture_h2d`` shadows are page-locked and the upload of lengths belongs into the graph; else they are
    pageable and ``upload`` carries everything over before the launch. A shadow is written again only after the upload
    from it is over. ``scope`` is entered around allocations.
    """

    def __init__(
        self,
        manager: BufferManager,
        *,
        tokens: int,
        max_bucket: int,
        axes: int = 1,
        extras: Iterable[ExtraInput] = (),
        capture_h2d: bool | None = None,
        new_event: Callable[[], Event] | None = None,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.capture_h2d = prefer_pinned(manager.device) if capture_h2d is None else capture_h2d
        self._manager = manager
        self._new_event = new_event or manager.stream.record_event
        self._limits = {"tokens": tokens, "batch": max_bucket}
        positions: tuple[Dim, ...] = (1, "tokens") if axes == 1 else (axes, 1, "tokens")
        builtin = [
            # Token 0 can give no number in some models, so the padded tail starts as ones.
            ExtraInput(INPUT_IDS, "int32", ("tokens",), fill=1),
            ExtraInput(POSITION_IDS, "int32", positions),
            ExtraInput(SEQ_LENS, "int32", ("batch",), fill=1),
        ]
        self._declared = {one.name: one for one in (*builtin, *extras)}
        self._tensors: dict[str, torch.Tensor] = {}
        self._shadows: dict[str, torch.Tensor] = {}
        self._uploads: dict[str, Event] = {}
        self.buffers: list[Buffer] = []
        self.host_buffers: list[Buffer] = []
        with ExitStack() as undo, scope():
            undo.callback(self.release)
            for one in self._declared.values():
                self._allocate(one)
            undo.pop_all()

    def _allocate(self, one: ExtraInput) -> None:
        shape = one.shape(self._limits)
        buffer = self._manager.gpu(shape, one.dtype, owner=OWNER)
        self.buffers.append(buffer)
        self._tensors[one.name] = buffer.as_tensor()
        self._tensors[one.name].fill_(one.fill)
        if one.source == "host":
            make = self._manager.pinned if self.capture_h2d else self._manager.cpu
            shadow = make(shape, one.dtype, owner=OWNER)
            self.host_buffers.append(shadow)
            self._shadows[one.name] = shadow.as_tensor().fill_(one.fill)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole device tensor, always the same object."""
        return self._tensors[name]

    def shadow(self, name: str) -> torch.Tensor:
        """The host's twin, once no upload reads it any more."""
        upload = self._uploads.pop(name, None)
        if upload is not None:
            upload.synchronize()
        return self._shadows[name]

    def set_static(self, name: str, value: torch.Tensor) -> None:
        """Accepts the tensor that is there; ``StateError`` for any other, and nothing changed."""
        if value is not self._tensors[name]:
            raise StateError(
                f"graph-visible buffers must be updated in place: {name} is another tensor than the one that was "
                "captured. Write into it instead."
            )

    def stage(self, name: str, values: Sequence[int]) -> None:
        """Write the first elements of a host shadow; the rest keeps what it held."""
        flat = self.shadow(name).view(-1)
        if len(values) > flat.numel():
            raise self._too_long(name, len(values), flat.numel())
        flat[: len(values)].copy_(torch.tensor(values, dtype=flat.dtype))

    def stage_rows(self, name: str, rows: Sequence[Sequence[int]]) -> None:
        """Write the first columns of the first rows of a two-dimensional shadow."""
        table = self.shadow(name)
        if len(rows) > table.shape[0] or len(rows[0]) > table.shape[1]:
            raise self._too_long(name, len(rows) * len(rows[0]), table.numel())
        table[: len(rows), : len(rows[0])].copy_(torch.tensor(rows, dtype=table.dtype))

    def upload(self, name: str, count: int) -> None:
        """Carry the first ``count`` places of the last (or, with fixed axes behind it, the first) axis over."""
        source, target = self._shadows[name], self._tensors[name]
        axis = self._axis(name)
        target.narrow(axis, 0, count).copy_(source.narrow(axis, 0, count), non_blocking=True)
        self._uploads[name] = self._new_event()

    def upload_elements(self, name: str, count: int) -> None:
        """Carry the first ``count`` elements over, whatever their shape."""
        source, target = self._shadows[name].view(-1), self._tensors[name].view(-1)
        target[:count].copy_(source[:count], non_blocking=True)
        self._uploads[name] = self._new_event()

    def upload_in_graph(self, batch_size: int) -> None:
        """The copy node of lengths: call it inside the capture. Nothing where uploads are issued before the launch."""
        if self.capture_h2d:
            self._tensors[SEQ_LENS][:batch_size].copy_(self._shadows[SEQ_LENS][:batch_size], non_blocking=True)

    def launched(self) -> None:
        """A replay was launched: it reads the shadow of lengths until it is over."""
        if self.capture_h2d:
            self._uploads[SEQ_LENS] = self._new_event()

    def write(self, values: Mapping[str, object]) -> None:
        """Copy extra inputs of a step in. ``ConfigError`` naming the input for a missing value, another dtype or fixed
        length, or more than the buffer holds."""
        for name, one in self._declared.items():
            if name in (INPUT_IDS, POSITION_IDS, SEQ_LENS):
                continue
            if name not in values:
                raise ConfigError.for_field(f"input {name}", None, "a tensor: it was declared and not given")
            value = values[name]
            if not isinstance(value, torch.Tensor):
                raise ConfigError.for_field(f"input {name}", type(value).__name__, "a tensor")
            self._write_checked(one, value)

    def _write_checked(self, one: ExtraInput, value: torch.Tensor) -> None:
        wanted = one.shape(self._limits)
        fixed = all(isinstance(dim, str) or length == dim for dim, length in zip(one.dims, value.shape, strict=False))
        if value.dtype is not self._tensors[one.name].dtype:
            raise ConfigError.for_field(f"dtype of input {one.name}", value.dtype, one.dtype)
        if value.dim() != len(wanted) or not fixed:
            raise ConfigError.for_field(f"shape of input {one.name}", tuple(value.shape), f"{one.dims}")
        axis = self._axis(one.name)
        if wanted and value.shape[axis] > wanted[axis]:
            raise self._too_long(one.name, value.shape[axis], wanted[axis])
        if one.source == "device":
            self._tensors[one.name].narrow(axis, 0, value.shape[axis]).copy_(value)
        else:
            self.shadow(one.name).narrow(axis, 0, value.shape[axis]).copy_(value)
            self.upload(one.name, value.shape[axis])

    def _axis(self, name: str) -> int:
        dims = self._declared[name].dims
        return next((place for place, dim in enumerate(dims) if isinstance(dim, str)), 0)

    def _too_long(self, name: str, given: int, room: int) -> ConfigError:
        return ConfigError.for_field(f"length of input {name}", given, f"at most {room}, the largest bucket")

    @property
    def device_bytes(self) -> int:
        return sum(buffer.capacity_bytes for buffer in self.buffers)

    @property
    def host_bytes(self) -> int:
        return sum(buffer.capacity_bytes for buffer in self.host_buffers)

    def release(self) -> None:
        """Drop the tensors, then their memory. Safe to call again."""
        self._tensors.clear()
        self._shadows.clear()
        self._uploads.clear()
        for buffer in (*self.buffers, *self.host_buffers):
            if not buffer.released:
                buffer.release()
        self.buffers, self.host_buffers = [], []
