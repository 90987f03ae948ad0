"""Who runs when: capacity, micro-batches, post-filters, token fit, and the order of a step's moments. No torch."""

from onebudget.scheduling.scheduler import Scheduler
from onebudget.scheduling.token_fit import FitResult, fit_token_budget

__all__ = ["FitResult", "Scheduler", "fit_token_budget"]
