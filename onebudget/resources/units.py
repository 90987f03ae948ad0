"""Two counts of blocks that must not be mixed: what a request holds in all, and what it lacks."""

from __future__ import annotations

from typing import NewType

BlocksTotal = NewType("BlocksTotal", int)
"""Blocks of a request at some moment of its life, those it holds already included."""

BlocksDelta = NewType("BlocksDelta", int)
"""Blocks beyond those a request holds already."""
