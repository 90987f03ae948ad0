"""How weights are divided among ranks, and what each rank holds."""

from onebudget.planner.weights.layout import ParallelLayout

__all__ = ["ParallelLayout"]
