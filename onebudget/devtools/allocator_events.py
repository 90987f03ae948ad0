"""What torch's own allocator did, from its profiler: a third source beside the meter and a dry run.

The meter sees every tensor that an operation returns. What a kernel allocates and frees inside one operation (oneDNN's
scratchpads, per-thread buffers of attention) only the allocator sees; ``kernel_scratch_bytes`` lists it by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True)
class AllocatorEvents:
    """Bytes above the start. ``peak_operation`` is the innermost operation running at the peak."""

    peak_bytes: int
    peak_operation: str
    kernel_scratch_bytes: dict[str, int]


def allocator_events(work: Callable[[], object]) -> AllocatorEvents:
    """Run ``work`` under torch's profiler and follow the CPU allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        work()
    events = recording.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if e.name().startswith("aten::")
    )
    return _follow(changes, spans)


def _follow(changes: list[tuple[int, int]], spans: list[tuple[int, int, str]]) -> AllocatorEvents:
    live = peak = 0
    peak_operation = ""
    scratch: dict[str, int] = {}
    open_spans: list[tuple[int, int, str]] = []
    highest: dict[
        tuple[int, int, str], tuple[int, int]
    ] = {}  # innermost span -> (highest live inside, live at its end)
    upcoming = iter([*spans, (2**63, 2**63, "")])
    following = next(upcoming)
    for moment, nbytes in changes:
        while following[0] <= moment:
            open_spans.append(following)
            following = next(upcoming)
        open_spans = [span for span in open_spans if span[1] > moment]
        live += nbytes
        innermost = open_spans[-1] if open_spans else None
        if innermost is not None:
            highest[innermost] = (max(live, highest.get(innermost, (0, 0))[0]), live)
        if live > peak:
            peak, peak_operation = live, innermost[2] if innermost else ""
    for (_, _, name), (top, at_end) in highest.items():
        if top > at_end:
            scratch[name] = max(scratch.get(name, 0), top - at_end)
    return AllocatorEvents(peak, peak_operation, scratch)
