"""Sizing policies of serving engines, by name. Each is imported when it is first asked for."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget.planner.policies.base import EnginePolicy

_POLICIES = {
    "onebudget": ("onebudget.planner.policies.onebudget", "OnebudgetPolicy"),
    "trtllm": ("onebudget.planner.policies.trtllm", "TrtllmPolicy"),
    "vllm": ("onebudget.planner.policies.vllm", "VllmPolicy"),
    "sglang": ("onebudget.planner.policies.sglang", "SglangPolicy"),
    "llamacpp": ("onebudget.planner.policies.llamacpp", "LlamacppPolicy"),
}
_ALIASES = {"llama.cpp": "llamacpp", "tensorrt-llm": "trtllm", "tensorrt_llm": "trtllm"}

ENGINES = tuple(_POLICIES)
"""Names of the engines that can be planned for."""


def policy_for(engine: str) -> EnginePolicy:
    """The policy of an engine. Raises ``ConfigError`` with near matches for a name that isn't known."""
    name = engine.lower()
    name = _ALIASES.get(name, name)
    if name not in _POLICIES:
        near = difflib.get_close_matches(name, _POLICIES, n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(
            f"engine {engine!r} is not known.{hint} There are {', '.join(ENGINES)}.",
            field="engine",
            value=engine,
            allowed=f"one of {', '.join(ENGINES)}",
        )
    module, attribute = _POLICIES[name]
    policy: EnginePolicy = getattr(import_module(module), attribute)()
    return policy
