"""The step loop without a model: real scheduler, managers and executor, tokens from a script, blocks that hold nothing.

Thousands of steps a second, so lifetimes and admission can be tested over many random workloads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from onebudget.engine.executor import Counters, Executor
from onebudget.engine.failures import Relief
from onebudget.resources.kv.manager import KVCacheManager
from onebudget.resources.kv.store import CountedStore

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.core import Request, ScheduledBatch
    from onebudget.engine.model_runner import ModelRunner
    from onebudget.engine.sampler import Sampler

Script = Callable[["Request"], int]
"""The next token of a request."""


@dataclass(slots=True)
class ScriptedRunner:
    """Stands where the model runner stands: tokens come from ``script``.

    ``steps`` keeps what each step computed, as ``{request id: tokens}``. An exception put into ``faults`` is raised by
    the next step instead of computing it, one put into ``sampling_faults`` by its sampling.
    """

    script: Script
    steps: list[dict[int, int]] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    sampling_faults: list[BaseException] = field(default_factory=list)
    scratch: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(grow_count=0))
    released: bool = False

    kv_written: bool = True
    relief: Relief | None = None

    def forward(self, batch: ScheduledBatch) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.steps.append({request.id: request.step_tokens for request in batch.requests})

    def sample(self, batch: ScheduledBatch, output: object, sampler: Sampler) -> list[int]:
        if self.sampling_faults:
            raise self.sampling_faults.pop(0)
        return [self.script(request) for request in batch.sampled]

    def relieve(self) -> Relief | None:
        return self.relief

    def count(self, counters: Counters) -> None:
        counters.graph_eager = counters.steps

    def release(self) -> None:
        self.released = True


def scripted_executor(
    config: BudgetConfig, num_blocks: int, script: Script = lambda request: 7, **options: Any
) -> Executor:
    """An executor over ``num_blocks`` KV blocks whose runner is a ``ScriptedRunner``."""
    manager = KVCacheManager(
        CountedStore(num_blocks, config.tokens_per_block), reuse=config.enable_block_reuse, partial_reuse=False
    )
    return Executor(config, cast("ModelRunner", ScriptedRunner(script)), manager, **options)
