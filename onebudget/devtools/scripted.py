"""The step loop without a model: real scheduler, managers and executor, tokens from a script, blocks that hold nothing.

Thousands of steps a second, so lifetimes and admission can be tested over many random workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from onebudget.engine.executor import Executor
from onebudget.resources.kv.manager import KVCacheManager

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.core import Request, ScheduledBatch
    from onebudget.engine.model_runner import ModelRunner
    from onebudget.engine.sampler import Sampler
    from onebudget.resources.kv.pool import KVPool

Script = Callable[["Request"], int]
"""The next token of a request."""


@dataclass(slots=True)
class ScriptedRunner:
    """Stands where the model runner stands: tokens come from ``script``.

    ``steps`` keeps what each step computed, as ``{request id: tokens}``. An exception put into ``faults`` is raised by
    the next step instead of computing it.
    """

    script: Script
    steps: list[dict[int, int]] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    scratch: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(grow_count=0))
    released: bool = False

    def step(self, batch: ScheduledBatch, sampler: Sampler) -> list[int]:
        if self.faults:
            raise self.faults.pop(0)
        self.steps.append({request.id: len(request.tokens_of_step()) for request in batch.requests})
        return [self.script(request) for request in [*batch.context_last, *batch.generation]]

    def release(self) -> None:
        self.released = True


@dataclass(slots=True)
class CountedPool:
    """A KV pool of ``num_blocks`` numbers."""

    num_blocks: int
    tokens_per_block: int
    released: bool = False

    @property
    def layout(self) -> CountedPool:
        return self

    @property
    def allocated_bytes(self) -> int:
        return 0

    def clear_fresh(self, blocks: Sequence[int]) -> None:
        pass

    def forget_contents(self) -> None:
        pass

    def release(self) -> None:
        self.released = True


def scripted_executor(config: BudgetConfig, num_blocks: int, script: Script = lambda request: 7) -> Executor:
    """An executor over ``num_blocks`` KV blocks whose runner is a ``ScriptedRunner``."""
    pool = cast("KVPool", CountedPool(num_blocks, config.tokens_per_block))
    manager = KVCacheManager(pool, reuse=config.enable_block_reuse)
    return Executor(config, cast("ModelRunner", ScriptedRunner(script)), manager)
