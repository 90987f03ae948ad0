"""Scratch memory shared by attention layers."""

from onebudget.workspace.scratch import ScratchBuffer

__all__ = ["ScratchBuffer"]
