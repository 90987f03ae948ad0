"""What a running engine was seen to hold, term by term, to stand beside its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onebudget.device.account import TENSOR_OWNER

if TYPE_CHECKING:
    from onebudget.device.base import Device
    from onebudget.engine.build import Engine

_OWNERS = (
    "weights", "activations", TENSOR_OWNER, "static_inputs",
    "fixed_workspace", "context_workspace", "penalty_workspace", "graphs",
)  # fmt: skip


def measured_terms(engine: Engine) -> dict[str, Any]:
    """Bytes held and the peak of their use since the engine was built, by the ledger's own names.

    ``activations`` are measured while the meter is on: in every step under strict memory, else in the warm-up, which
    repeats the profiled shapes. Scratch and ``kv_cache`` count the part really used at the peak; scratch beyond the
    planned ``fixed_workspace`` counts as ``context_workspace``. ``logits`` is by how much rows of the vocabulary rose
    above the peaks of everything else.
    """
    device, executor = engine.station.device, engine.executor
    peaks, scratch = device.peak_by_owner(), executor.runner.scratch
    fixed = engine.ledger.term("fixed_workspace").bytes
    # Blocks of padding dummies lie in the pools, and the ledger counts them with the graphs.
    padding_bytes = sum(group.set_aside_blocks * group.store.block_bytes for group in executor.kv.groups)
    held = {
        "weights": (peaks.get("weights", 0), peaks.get("weights", 0)),
        "activations": _twice(sum(peaks.get(owner, 0) for owner in ("activations", TENSOR_OWNER, "static_inputs"))),
        "fixed_workspace": (min(scratch.capacity_bytes, fixed), min(scratch.peak_bytes, fixed)),
        "context_workspace": (max(scratch.capacity_bytes - fixed, 0), max(scratch.peak_bytes - fixed, 0)),
        "penalty_workspace": (executor.sampler.table_bytes, peaks.get("penalty_workspace", 0)),
        "graphs": _twice(peaks.get("graphs", 0) + padding_bytes),
        "other_processes": _twice(device.account.others_bytes),
        "fragmentation": _twice(_rounding_bytes(device)),
    }
    kv = executor.kv
    beside = sum(peaks.get(owner, 0) for owner in _OWNERS) + kv.allocated_bytes
    held["logits"] = (0, min(peaks.get("logits", 0), max(0, device.sample().alloc_peak - beside)))
    terms = [{"name": name, "bytes": now, "peak_bytes": peak} for name, (now, peak) in held.items() if now or peak]
    kv_bytes = kv.allocated_bytes - padding_bytes
    held_bytes = sum(now for now, _ in held.values()) + kv_bytes
    return {
        "terms": terms,
        "kv_cache": {
            "bytes": kv_bytes,
            "peak_bytes": max(0, kv.peak_used_bytes - padding_bytes),
            "blocks": kv.pool.num_blocks - kv.groups[0].set_aside_blocks,
        },
        "unassigned_bytes": max(0, device.total_bytes - held_bytes),
        "peak_bytes": device.sample().alloc_peak,
        "capacity_bytes": device.total_bytes,
    }


def _rounding_bytes(device: Device) -> int:
    """Physical bytes that nobody asked for: whole pages around every buffer, idle pool memory given back first.

    On a real card the driver's context is in that figure too, so it is not called fragmentation there.
    """
    if not device.accounts_exactly:
        return 0
    device.empty_cache()
    sample = device.sample()
    return max(0, device.used_bytes() - device.account.others_bytes - sample.alloc_live)


def _twice(nbytes: int) -> tuple[int, int]:
    return nbytes, nbytes
