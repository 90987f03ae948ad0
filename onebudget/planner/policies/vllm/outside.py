"""Memory of vLLM's process that torch's allocator does not know, and the graphs: what is charged, and what is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.planner.policies.base import Figure
from onebudget.planner.policies.dims import Dims
from onebudget.planner.policies.versions import EngineVersion
from onebudget.planner.policies.vllm.defaults import Limits
from onebudget.units import GIB

if TYPE_CHECKING:
    from onebudget.planner.catalogue.gpus import GpuFacts

LINKED_BANDWIDTH = 1500 * 10**9
"""Cards of more bandwidth are server parts with NVLink, whose communicators take more."""


def _gib(low: float, best: float, high: float, why: str) -> Figure:
    return Figure(int(best * GIB), int(low * GIB), int(high * GIB), "modelled", why)


def context_bytes(gpu: GpuFacts) -> Figure:
    """What driver and libraries hold before anything else: the catalogue's observation, or the usual range."""
    known = getattr(gpu, "context_bytes", None)
    if known:
        return Figure(known, known * 7 // 10, known * 14 // 10, "modelled", "observed on this card")
    return _gib(0.23, 0.5, 0.8, "usual for driver and libraries")


def non_torch(version: EngineVersion, worker: str, gpu: GpuFacts, tp: int, ranks: int) -> Figure:
    """What the profile charges beside torch's own memory, by version and ranks.

    Communicators are set up after the snapshot until 0.10 and before it from 0.11 on; 0.6.4 and the first V1 count all
    used memory, the driver's context too.
    """
    if getattr(gpu, "unified", False):
        return _gib(-1.0, 2.0, 7.0, "unified memory: whatever the machine did meanwhile is charged")
    if version.at_least(0, 27):
        return _late_slack(gpu, tp)
    if ranks > tp and version.at_least(0, 11):
        return _gib(0.15, 0.7, 1.2, "stages set their channels up when they first send, after the snapshot")
    if ranks > 1:
        return _communication(version, gpu, tp, ranks)
    if (version.number[:2] == (0, 6) and version.number[2] == 4) or (worker == "V1" and version.number[:2] == (0, 8)):
        return _gib(0.25, 0.35, 0.6, "this version charges the context too")
    return _gib(0.01, 0.04, 0.12, "small driver allocations during the profile")


def _communication(version: EngineVersion, gpu: GpuFacts, tp: int, ranks: int) -> Figure:
    linked = (getattr(gpu, "bandwidth_bytes_per_s", 0) or 0) > LINKED_BANDWIDTH
    if version.at_least(0, 11):
        best = 0.6 if linked else 0.15
        return _gib(0.03, best, best + 0.4, "drivers' share of the collectives; their buffers predate the snapshot")
    if linked:
        best = 2.4 if ranks > tp else 1.4 if tp <= 4 else 2.0
        return _gib(0.5, best, best + 0.6, "communicators over linked cards, charged by this version")
    best = 0.25 if tp <= 2 else 0.38
    return _gib(0.15, best, best + 0.2, "communicators over PCIe, charged by this version")


def _late_slack(gpu: GpuFacts, tp: int) -> Figure:
    """From 0.27 everything used since start is charged: allocator slack and library pools."""
    best = 0.25 + (0.2 if tp > 1 else 0)
    if (getattr(gpu, "bandwidth_bytes_per_s", 0) or 0) > 4 * LINKED_BANDWIDTH:
        best += 0.3
    return _gib(0.05, best, best + 0.5, "allocator slack and library pools, charged since 0.27")


def penalty_buffers(version: EngineVersion, limits: Limits, dims: Dims) -> Figure:
    """Penalty state of the newer runner: a counter and a mask bit per seat and vocabulary entry."""
    if not limits.v2_runner:
        return Figure.exact(0)
    nbytes = limits.batch_requests * dims.vocab * 4 + limits.batch_requests * dims.vocab // 8
    charged = "charged" if version.at_least(0, 27) else "not charged by this version"
    return Figure.exact(nbytes, f"{limits.batch_requests} seats x {dims.vocab} x 4.125 B, {charged}", "modelled")


_REFERENCE = 4096 * 32
_FULL_SET = 86
"""Graphs of the usual set: 51 piecewise and 35 full."""


def graphs_are_estimated(version: EngineVersion, limits: Limits) -> bool:
    """The profile estimates graphs from 0.20 on; for the newer runner the estimate is 0 until 0.28, so that its graphs
    live outside the budget (read in the sources of 0.20.2 to 0.31.0)."""
    return version.at_least(0, 29) if limits.v2_runner else version.at_least(0, 20)


def compressed_kernels(dims: Dims) -> Figure:
    """Compressed caches charge more than weights, profile and reserved rooms explain. The figure is what is missing in
    the two cases of the even half that print a pool (3.5 GiB on two linked cards, 2.4 GiB on unified memory)."""
    if dims.compressed is None:
        return Figure.exact(0)
    return _gib(1.5, 3.2, 5.0, "kernels of compressed attention: not explained, from two logs")


def graph_bytes(limits: Limits, dims: Dims, tp: int) -> Figure:
    """What graphs are estimated to take: a shared part and a part per graph that grows with the layers' widths.

    No formula is close: engines print estimates of half to five times what is captured, more with tuned expert
    kernels. The range says so.
    """
    if not limits.captures:
        return Figure.exact(0, "no graphs", "exact")
    scale = dims.hidden * len(dims.layers) / _REFERENCE
    best = (0.2 if not limits.v2_runner else 0.15) + 0.45 * scale * min(limits.captures, 102) / _FULL_SET
    if tp > 1:
        best = 0.1 + (best - 0.1) / 2
    wide = 3.5 if dims.experts else 2.0
    return _gib(best / 3, best, best * wide, f"{limits.captures} graphs of {len(dims.layers)} layers")
