"""The order in which runs of blocks lose their place: lowest priority first, then longest unused."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from onebudget.resources.kv.node import Node


class EvictionOrder:
    """Nodes nobody holds, each listed once.

    Whoever lists a node has listed those under it before, and a node's priority is at least that of those under it, so
    the first node never has another listed one under it. No operation depends on how many are listed.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Node, None]] = {}
        self._priorities: list[int] = []
        self.moves = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, node: Node) -> bool:
        return node in self._queues.get(node.priority, ())

    def append(self, node: Node) -> None:
        """List as the last of its priority; one that is listed already moves there."""
        self.moves += 1
        queue = self._queues.get(node.priority)
        if queue is None:
            queue = self._queues[node.priority] = OrderedDict()
            insort(self._priorities, node.priority)
        queue[node] = None
        queue.move_to_end(node)

    def discard(self, node: Node) -> None:
        queue = self._queues.get(node.priority)
        if queue is not None and node in queue:
            self.moves += 1
            del queue[node]

    def first(self) -> Node | None:
        for priority in self._priorities:
            queue = self._queues[priority]
            if queue:
                return next(iter(queue))
        return None

    def clear(self) -> None:
        self._queues.clear()
        self._priorities.clear()
