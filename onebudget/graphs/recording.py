"""Record the dispatcher's operations of one forward as a program over planned memory.

Tensors that the forward makes are known by storage, size and strides only, so a recording keeps none of them alive and
works on ``meta`` tensors as well: there it tells the bytes of a graph before anything real exists. What was there
before (weights, static inputs, pages) is recorded as it is, address and all. Values that Python put into the calls,
numbers and tensors made from numbers, are frozen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from onebudget.attention import operations
from onebudget.errors import StateError
from onebudget.graphs.arena import ALIGNMENT_BYTES, Interval, place
from onebudget.graphs.bindings import entry_point
from onebudget.units import align_up

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that the forward made: a view of storage number ``storage``."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def in_arena(self, arena: torch.Tensor, start: int) -> torch.Tensor:
        """The same view with its storage at byte ``start`` of ``arena`` (uint8)."""
        typed = arena[start:].view(self.dtype) if arena.numel() > start else arena[:0].view(self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.offset)

    def narrow(self, axis: int, start: int, length: int) -> Slot:
        """``length`` places of ``axis`` from ``start`` on."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.strides[axis])


@dataclass(frozen=True, slots=True)
class Call:
    """One operation. ``results`` are what it makes anew: written through ``out=`` where the operation has a kernel for
    that, else computed beside the arena and copied in."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot, ...] = ()
    out_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """``workspace_bytes``: the most that one operation takes beside the arena while it runs."""

    calls: tuple[Call, ...]
    storage_bytes: tuple[int, ...]
    outputs: tuple[Slot | torch.Tensor, ...]
    workspace_bytes: int

    def plan(self) -> tuple[list[int], int]:
        """Byte offset of every storage, and the size of the arena."""
        return place(self._lifetimes())

    def _lifetimes(self) -> list[Interval]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for moment, call in enumerate(self.calls):
            for slot in _slots((call.args, call.kwargs, call.results)):
                first.setdefault(slot.storage, moment)
                last[slot.storage] = moment
        for slot in _slots(self.outputs):
            first.setdefault(slot.storage, 0)
            last[slot.storage] = len(self.calls)
        return [
            Interval(nbytes, first[number], last[number]) if number in first else Interval(0, 0, 0)
            for number, nbytes in enumerate(self.storage_bytes)
        ]


class Recorder(TorchDispatchMode):
    """Use under ``torch.no_grad()``, where composite operations come apart and show their temporaries."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: dict[int, int] = {}
        self._storage_bytes: list[int] = []
        self._calls: list[Call] = []
        self._workspace_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        refuse_data_dependent(func, args)
        noted_args, noted_kwargs = self._note((args, kwargs))
        result = func(*args, **kwargs)
        made = self._made_anew(result, (args, kwargs))
        if func._schema.is_mutable:
            self._append(Call(entry_point(func), noted_args, noted_kwargs), operations.workspace_bytes(func, args))
        elif made and func not in _UNWRITTEN:
            self._append_functional(func, noted_args, noted_kwargs, tuple(self._note(tensor) for tensor in made))
        return result

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._token = _active.set(self)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _active.reset(self._token)
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def finish(self, outputs: tuple[torch.Tensor, ...]) -> Recording:
        return Recording(
            tuple(self._calls), tuple(self._storage_bytes), tuple(map(self._note, outputs)), self._workspace_bytes
        )

    def _append_functional(self, func: Any, args: Any, kwargs: Any, results: tuple[Slot, ...]) -> None:
        if func in _COPIES:
            self._append(Call(entry_point(aten.copy_.default), (results[0], args[0]), {}))
            return
        if func is aten.cat.default and all(len(part.shape) == len(results[0].shape) for part in args[0]):
            self._append_cat(results[0], *args, **kwargs)
            return
        written = out_variant(func)
        if written is not None:
            operation, names = written
            self._append(Call(entry_point(operation), args, kwargs | dict(zip(names, results, strict=True))))
            return
        beside = sum(align_up(self._storage_bytes[slot.storage], ALIGNMENT_BYTES) for slot in results)
        self._append(Call(entry_point(func), args, kwargs, results), beside)

    def _append_cat(self, result: Slot, parts: Any, dim: int = 0) -> None:
        """One copy per part: each takes a fraction of what the kernel for lists spends before it begins."""
        start, axis = 0, dim % len(result.shape)
        for part in parts:
            length = part.shape[axis]
            place = result.narrow(axis, start, length)
            self._append(Call(entry_point(aten.copy_.default), (place, part), {}))
            start += length

    def needs_beside(self, nbytes: int) -> None:
        """An operation takes so many bytes beside the arena; for those that stand in for others and can't show it."""
        self._workspace_bytes = max(self._workspace_bytes, nbytes)

    def _append(self, call: Call, workspace_bytes: int = 0) -> None:
        self._calls.append(call)
        self.needs_beside(workspace_bytes)

    def _note(self, tree: Any) -> Any:
        """``tree`` with every tensor of the forward's own making replaced by its slot."""
        return tree_map_only(torch.Tensor, self._slot, tree)

    def _slot(self, tensor: torch.Tensor) -> Slot | torch.Tensor:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            return tensor
        return Slot(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _made_anew(self, result: Any, inputs: Any) -> list[torch.Tensor]:
        """Results in storages of their own; from now on those have numbers."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not made:
            return []
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
        made = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        for tensor in made:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._numbers:
                self._numbers[key] = len(self._storage_bytes)
                self._storage_bytes.append(storage.nbytes())
                weakref.finalize(storage, self._numbers.pop, key, None).atexit = False
        return made


_active: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def computed_beside(result: torch.Tensor) -> torch.Tensor:
    """Tell a recording that ``result``, made on ``meta`` tensors in place of an operation that they lack, is computed
    beside the arena and copied in, as that operation's result would be."""
    recorder = _active.get()
    if recorder is not None:
        recorder.needs_beside(align_up(result.untyped_storage().nbytes(), ALIGNMENT_BYTES))
    return result


_UNWRITTEN = frozenset(
    {
        aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    }
)  # fmt: skip
"""Results without contents: their storage is enough."""
_COPIES = frozenset({aten._to_copy.default, aten.clone.default})
"""Operations that are one copy into their result."""
_MASKS = frozenset({torch.bool, torch.uint8})


def refuse_data_dependent(func: Any, args: tuple[Any, ...]) -> None:
    """``StateError`` for an operation that lets a value decide what happens next: a replay could not follow it."""
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        raise StateError(f"{func} reads a value back to the host: a graph can't hold it")
    if torch.Tag.dynamic_output_shape not in tags:
        return
    # Indexing by numbers has the shape of the index; by a mask, as many rows as it lets through.
    if func is aten.index.Tensor and not any(i is not None and i.dtype in _MASKS for i in args[1]):
        return
    raise StateError(f"{func} has a result whose shape depends on values: a graph can't hold it")


@cache
def out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload that writes into given tensors, with the names of those arguments; None where that is only a
    computation followed by a copy, or there is none."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func._overloadpacket.overloads():
        overload = getattr(func._overloadpacket, name)
        schema = overload._schema
        outs = tuple(argument.name for argument in schema.arguments if argument.is_out)
        given = [(argument.name, str(argument.type)) for argument in schema.arguments if not argument.is_out]
        if outs and given == wanted and torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU"):
            return overload, outs
    return None


def _slots(tree: Any) -> Iterator[Slot]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Slot))
