"""Scratch memory shared by attention layers, and how it shrinks again."""

from onebudget.workspace.meta import AttentionMeta
from onebudget.workspace.policy import WorkspaceShrinkPolicy
from onebudget.workspace.reclaim import EagerWorkspaceReclaimer
from onebudget.workspace.scratch import ScratchBuffer

__all__ = ["AttentionMeta", "EagerWorkspaceReclaimer", "ScratchBuffer", "WorkspaceShrinkPolicy"]
