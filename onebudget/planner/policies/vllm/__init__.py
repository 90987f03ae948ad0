"""vLLM's sizing policy."""

from onebudget.planner.policies.vllm.policy import VllmPolicy

__all__ = ["VllmPolicy"]
