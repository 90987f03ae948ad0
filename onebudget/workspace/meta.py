"""Which scratch a forward's attention works in, and whether it may be replaced between forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebudget.workspace.scratch import ScratchBuffer


class AttentionMeta:
    """``workspace`` serves normal forwards, ``graph_workspace`` captured ones, whose addresses are frozen.

    ``workspace_reclaimable`` is a latch: it falls once a kernel ran that may keep state in the buffer, and stays down.
    """

    __slots__ = ("__weakref__", "graph_workspace", "is_graph", "workspace", "workspace_reclaimable")

    def __init__(
        self,
        workspace: ScratchBuffer | None = None,
        graph_workspace: ScratchBuffer | None = None,
        *,
        is_graph: bool = False,
    ) -> None:
        self.workspace = workspace
        self.graph_workspace = graph_workspace
        self.is_graph = is_graph
        self.workspace_reclaimable = True

    @property
    def effective_workspace(self) -> ScratchBuffer | None:
        return self.graph_workspace if self.is_graph else self.workspace

    def for_graph(self) -> AttentionMeta:
        """Metadata of a graph: it shares the one graph copy, so that a single buffer serves all graphs."""
        return AttentionMeta(self.workspace, self.graph_workspace, is_graph=True)

    def attend(self, *, supports_reclamation: bool) -> None:
        """A kernel works in the scratch now. ``supports_reclamation``: it keeps nothing there between forwards."""
        if self.is_graph or not supports_reclamation:
            self.workspace_reclaimable = False
