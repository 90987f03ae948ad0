"""One edge of the prefix tree: a run of blocks that always follow each other."""

from __future__ import annotations

import array
from collections.abc import Sequence

TOKEN_BYTES = 4
DEFAULT_PRIORITY = 35
"""Priority of blocks nobody spoke for; between 0, the first to go, and 100."""


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Tokens as the tree compares them: 4 bytes each. Negative ids stand for pieces of media."""
    return array.array("i", token_ids).tobytes()


class Node:
    """A run of blocks and what hangs under it.

    ``key`` holds the tokens of the blocks, and perhaps of some that were dropped from its end; ``blocks`` says how many
    count. The first ``device_end`` of ``blocks`` are device blocks, those up to ``near_end`` slots of the first tier,
    the rest slots of the second. A node's blocks are on the device before any of its children's are. ``held`` counts
    sequences that end in this node and children that are held. A held node is on the device altogether, except between
    a claim and its onboarding.
    """

    __slots__ = ("blocks", "children", "device_end", "held", "key", "near_end", "parent", "priority")

    def __init__(self, parent: Node | None, key: bytes, blocks: list[int], priority: int) -> None:
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.priority = priority
        self.children: dict[bytes, Node] = {}
        self.held = 0
        self.device_end = self.near_end = len(blocks)

    def __repr__(self) -> str:
        return f"Node({self.blocks}, device {self.device_end}, near {self.near_end}, held {self.held})"
