"""Collective operations inside a metered step.

The threads that carry out an exchange let go of its tensors a moment after the caller was told that it is done, sooner
or later as they get processor time. A peak measured meanwhile would differ from run to run. In metered steps they work
on copies, in ordinary memory, and the tensors of the device are free when their last user drops them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_IN_PLACE = {"c10d::allreduce_"}
_WITH_RESULT = {
    "_c10d_functional::all_reduce",
    "_c10d_functional::all_gather_into_tensor",
    "_c10d_functional::reduce_scatter_tensor",
}
_NAMELESS = SimpleNamespace(name="")


def is_exchange(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether ``operation`` exchanges real tensors between ranks; ``meta`` tensors go nowhere."""
    name = getattr(operation, "_schema", _NAMELESS).name
    if name in _IN_PLACE:
        return not args[0][0].is_meta
    return name in _WITH_RESULT and not args[0].is_meta


def exchange(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operation's result once it is done; other ranks' threads and ours hold copies only."""
    copies = tree_map_only(torch.Tensor, torch.clone, args)
    result = operation(*copies, **kwargs)
    if operation._schema.name in _WITH_RESULT:
        return torch.ops._c10d_functional.wait_tensor(result).clone()
    from torch._C._distributed_c10d import Work

    tensors, work = result
    Work.unbox(work).wait()
    for target, source in zip(args[0], tensors, strict=True):
        target.copy_(source)
    return args[0], work
