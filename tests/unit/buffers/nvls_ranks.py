"""Run by several processes: what each rank of a multicast buffer sees. Prints one JSON line per rank."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch.distributed as dist

from onebudget.buffers import BufferManager, MemoryKind, memory_counters
from onebudget.device import open_device
from onebudget.errors import OneBudgetError
from onebudget.units import MIB


def share(manager: BufferManager, rank: int, world: set[int]) -> dict[str, Any]:
    """Each rank writes its number; everybody reads all of them, at one address."""
    buffer = manager.ipc_nvls(world, (len(world), 1000), "int32", owner="collective")
    tensor = buffer.as_tensor()
    fresh = bool((tensor == 0).all())
    dist.barrier()
    tensor[rank] = rank + 1
    dist.barrier()
    seen = tensor[:, 0].tolist()
    held = memory_counters.current(MemoryKind.NVLS), manager.device.used_by_owner()["collective"]
    address = buffer.data_ptr
    dist.barrier()
    if rank == 0:
        buffer.release()  # the others still hold the memory
    dist.barrier()
    after = None if rank == 0 else tensor[:, 0].tolist()
    if rank:
        buffer.release()
    return {"address": address, "fresh": fresh, "seen": seen, "after": after, "held": held}


def refused(manager: BufferManager, rank: int, world: set[int]) -> dict[str, Any]:
    """Unequal calls, each refused on every rank."""
    calls: dict[str, tuple[Any, Any, Any]] = {
        "shape": (world, (4, 4) if rank else (4, 5), "int32"),
        "dtype": (world, (4,), "int32" if rank else "float32"),
        "bad_dtype": (world, (4,), "int32" if rank else "float7"),
        "ranks": (world if rank else {0}, (4,), "int32"),
        "other_ranks": ({0} if rank else world, (4,), "int32"),
        "one_rank_full": (world, 3 * MIB, "uint8"),
    }
    errors: dict[str, Any] = {}
    ballast = manager.gpu(6 * MIB) if rank else None
    for name, arguments in calls.items():
        try:
            manager.ipc_nvls(*arguments).release()
            errors[name] = None
        except OneBudgetError as error:
            errors[name] = type(error).__name__
    if ballast is not None:
        ballast.release()
        manager.pool_trim_to(0)
    return errors


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), set(range(dist.get_world_size()))
    with open_device("host", capacity_bytes=8 * MIB) as device:
        manager = BufferManager(device.create_stream())
        report = {
            "rank": rank,
            "errors": refused(manager, rank, world),
            "shared": share(manager, rank, world),
            "again": share(manager, rank, world),
            "left": [device.used_bytes(), memory_counters.current(MemoryKind.NVLS)],
        }
    dist.barrier()
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
