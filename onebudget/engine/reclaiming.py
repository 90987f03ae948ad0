"""The floor of the eager scratch, and who watches it once an engine serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onebudget.engine.probe import run_dummies
from onebudget.workspace.reclaim import reclaimer_after_warm_up

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.engine.executor import Executor

_SMALLEST_LENGTHS = 3
"""A prompt of one token, one generated in the prompt's step and one in a step of its own."""


def leave_smallest_scratch(executor: Executor, config: BudgetConfig) -> None:
    """End a warm-up with the scratch of the smallest request that generates: what reclaiming never goes below.

    Without that, scratch would be as large as the largest warm-up step made it, and nothing could ever be returned.
    """
    scratch = executor.runner.scratch
    scratch.start_anew()
    if config.reclaim_workspace and config.max_seq_len >= _SMALLEST_LENGTHS:
        run_dummies(executor, [1], new_tokens=2)
        scratch.forget_marks()


def start_reclaiming(executor: Executor, config: BudgetConfig) -> None:
    """Called once graphs are captured: from here on the scratch of eager forwards shrinks again after use."""
    runner = executor.runner
    runner.reclaimer = reclaimer_after_warm_up(
        runner.meta, trim_after_shrink=config.trim_after_shrink, enabled=config.reclaim_workspace
    )
