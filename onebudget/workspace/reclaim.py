"""Gives scratch back that a run of forwards did not need. It saves after the fact, and never lets less be reserved."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from onebudget.errors import AllocationError, ConfigError, StateError
from onebudget.units import format_bytes
from onebudget.workspace.meta import AttentionMeta
from onebudget.workspace.policy import WorkspaceShrinkPolicy
from onebudget.workspace.scratch import OWNER, ScratchBuffer

if TYPE_CHECKING:
    from onebudget.device.base import Device
    from onebudget.device.streams import Stream

logger = logging.getLogger(__name__)


class EagerWorkspaceReclaimer:
    """Surrounds every eager forward: ``with reclaimer.forward(meta): ...``.

    Made once warm-up is over: what the eager scratch holds then is the floor. A demand is measured by forgetting the
    logical size before the forward, so that layers build it up again. Shrinking frees first and allocates then, which
    is legal only because the buffer carries nothing from one forward to the next.

    Replacing the buffer changes its address, and work queued on another stream could still read the old one. So a
    change of stream, or several streams at once, ends reclaiming for good instead of guessing what has finished.

    ``current_stream``, ``is_capturing``: asked at each forward; by default the device's answer. ``multi_stream``:
    whether layers run on several streams. ``trim_after_shrink``: return freed memory from the allocator's cache too.
    """

    def __init__(
        self,
        meta: AttentionMeta,
        *,
        current_stream: Callable[[], Any] | None = None,
        is_capturing: Callable[[], bool] | None = None,
        multi_stream: Callable[[], bool] = lambda: False,
        trim_after_shrink: bool = False,
        policy: WorkspaceShrinkPolicy | None = None,
    ) -> None:
        scratch = meta.workspace
        if scratch is None or scratch.capacity_bytes == 0:
            raise ConfigError("warm-up must create eager scratch first", field="workspace", value=None)
        self.policy = policy or WorkspaceShrinkPolicy(scratch.capacity_bytes)
        self.stream: Any = None
        self.active = False
        self.disabled = False
        self.shrink_count = 0
        self._meta = weakref.ref(meta)
        self._current_stream = current_stream or partial(_current_stream, scratch.device, scratch.stream)
        self._is_capturing = is_capturing or partial(_is_capturing, scratch.device)
        self._multi_stream = multi_stream
        self._trim_after_shrink = trim_after_shrink

    @contextmanager
    def forward(self, meta: AttentionMeta) -> Iterator[None]:
        """Run one forward inside. ``StateError`` for overlapping forwards, replaced metadata or missing scratch.

        What the forward raises passes untouched. ``AllocationError`` when the smaller buffer can't be had: then
        nothing is held, the next forward grows anew, and reclaiming has ended.
        """
        if self.active:
            raise StateError("overlapping forwards share eager scratch")
        if meta.is_graph or self._is_capturing():
            yield
            return
        if meta is not self._meta():
            raise StateError("metadata replaced after warm-up")
        scratch = self._usable_scratch(meta)
        if scratch is None:
            yield
            return
        before = scratch.capacity_bytes
        scratch.record_use(self.stream)
        collect = before > self.policy.floor_bytes
        if collect:
            scratch.resize(0)
        self.active = True
        try:
            yield
        except BaseException:
            self.policy.reset()
            raise
        finally:
            self.active = False
        if not collect or not meta.workspace_reclaimable:
            self.policy.reset()
            return
        capacity = scratch.capacity_bytes
        target = self.policy.finish_forward(scratch.logical_bytes, capacity, grew=capacity > before)
        if target is not None:
            self._shrink(scratch, target)

    def _usable_scratch(self, meta: AttentionMeta) -> ScratchBuffer | None:
        """The scratch to watch in this forward; None where reclaiming has ended, now or earlier."""
        if self.disabled or not meta.workspace_reclaimable:
            self.policy.reset()
            return None
        stream = self._current_stream()
        if self._multi_stream() or (self.stream is not None and stream != self.stream):
            self.disabled = True
            logger.warning("scratch stays as large as it gets: forwards run on more than one stream")
            return None
        self.stream = stream
        if meta.workspace is None:
            raise StateError("scratch removed by someone else")
        return meta.workspace

    def _shrink(self, scratch: ScratchBuffer, target: int) -> None:
        before = scratch.capacity_bytes
        try:
            scratch.reallocate(target)
        except Exception as error:
            self.disabled = True
            if isinstance(error, AllocationError):
                raise
            raise AllocationError(target, scratch.device.free_bytes(), owner=OWNER, detail=str(error)) from error
        self.shrink_count += 1
        if self._trim_after_shrink:
            scratch.device.empty_cache()
        logger.debug("scratch shrinks from %s to %s", format_bytes(before), format_bytes(target))


def _current_stream(device: Device, ours: Stream) -> Any:
    if not device.torch_device.startswith("cuda"):
        return ours
    import torch

    return torch.cuda.current_stream(device.torch_device)


def _is_capturing(device: Device) -> bool:
    if not device.torch_device.startswith("cuda"):
        return False
    import torch

    return torch.cuda.is_current_stream_capturing()


def reason_not_to_reclaim(
    meta: AttentionMeta,
    *,
    enabled: bool = True,
    speculative: bool = False,
    context_parallel_size: int = 1,
    encoder_decoder: bool = False,
    sparse_attention: bool = False,
    compiled: bool = False,
    breakable_prefill_graph: bool = False,
) -> str | None:
    """Why scratch has to stay as large as it gets; None when it may be reclaimed."""
    reasons = (
        (not enabled, "it is switched off"),
        (speculative, "speculative steps keep scratch between forwards"),
        (context_parallel_size > 1, "ranks share the context of a request"),
        (encoder_decoder, "the model has an encoder of its own"),
        (sparse_attention, "sparse attention keeps its choice of tokens there"),
        (compiled, "compiled code holds on to addresses"),
        (breakable_prefill_graph, "graphs of prompts hold on to addresses"),
        (type(meta) is not AttentionMeta, f"{type(meta).__name__} may hold on to addresses"),
        (not meta.workspace_reclaimable, "a kernel ran that may keep state there"),
        (meta.workspace is None or meta.workspace.capacity_bytes == 0, "warm-up used no eager scratch"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def reclaimer_after_warm_up(
    meta: AttentionMeta, *, trim_after_shrink: bool = False, **facts: Any
) -> EagerWorkspaceReclaimer | None:
    """The reclaimer of an engine whose warm-up is over, or None and one line that says why.

    ``facts``: see ``reason_not_to_reclaim``.
    """
    reason = reason_not_to_reclaim(meta, **facts)
    if reason is not None:
        logger.info("scratch is not reclaimed: %s", reason)
        return None
    return EagerWorkspaceReclaimer(meta, trim_after_shrink=trim_after_shrink)
