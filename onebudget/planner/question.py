"""A question to a planner that can be asked again with something changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from onebudget.config import DEFAULT_HOST_MEMORY_BYTES
from onebudget.planner.catalogue.gpus import GpuFacts
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.dims import dims_from_config
from onebudget.planner.request import make_request, request_document
from onebudget.planner.source import ModelSource, resolve_model

if TYPE_CHECKING:
    from datetime import date

    from onebudget.budget.ledger import Ledger
    from onebudget.planner.policies.base import EnginePolicy, PlanRequest
    from onebudget.planner.policies.dims import Dims

HOST = "host"
LENGTH: Mapping[str, str] = {
    "onebudget": "max_seq_len", "vllm": "max_model_len", "sglang": "context_length", "trtllm": "max_seq_len",
    "llamacpp": "n_ctx",
}  # fmt: skip
"""What an engine calls the longest request."""
SEATS: Mapping[str, str] = {
    "onebudget": "max_batch_size", "vllm": "max_num_seqs", "sglang": "max_running_requests",
    "trtllm": "max_batch_size", "llamacpp": "n_seq_max",
}  # fmt: skip
"""What it calls the most requests at once."""
STEP_TOKENS: Mapping[str, str] = {
    "onebudget": "max_num_tokens", "vllm": "max_num_batched_tokens", "sglang": "chunked_prefill_size",
    "trtllm": "max_num_tokens", "llamacpp": "n_ubatch",
}  # fmt: skip
FRACTION: Mapping[str, str] = {
    "onebudget": "free_gpu_memory_fraction", "vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static",
    "trtllm": "free_gpu_memory_fraction",
}  # fmt: skip
LAYOUT = ("gpu", "tp", "pp", "ep", "dp", "kv_dtype", "weights_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, a card, an engine and what was set. ``quick``: our engine's terms by closed form;
    ``advises`` False: whether it fits is all that is asked.

    ``target_seq_len`` and ``target_concurrency``: requests of that length, and how many at once, that the plan should
    hold.
    """

    model: ModelSource
    gpu: str
    engine: str = "onebudget"
    engine_version: str | None = None
    tp: int | None = None
    pp: int = 1
    ep: int = 1
    dp: int = 1
    weights_dtype: str | None = None
    kv_dtype: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    use: str = "server"
    as_of: date | None = None
    target_seq_len: int | None = None
    target_concurrency: int | None = None
    quick: bool = False
    advises: bool = True

    @property
    def on_host(self) -> bool:
        return self.gpu.strip().lower() == HOST

    @property
    def dims(self) -> Dims:
        return dims_from_config(self.model.config, self.model.name)

    def request(self) -> PlanRequest:
        """Names resolved, contradictions refused."""
        host = GpuFacts(name=HOST, total_bytes=self.total_bytes or DEFAULT_HOST_MEMORY_BYTES) if self.on_host else None
        return make_request(
            self.model, host or self.gpu, engine=self.engine, engine_version=self.engine_version, tp=self.tp,
            pp=self.pp, ep=self.ep, dp=self.dp, weights_dtype=self.weights_dtype, kv_dtype=self.kv_dtype,
            settings=self.settings, total_bytes=None if host else self.total_bytes, free_bytes=self.free_bytes,
            use=self.use, as_of=self.as_of,
        )  # fmt: skip

    def policy(self) -> EnginePolicy:
        if self.engine != "onebudget":
            return policy_for(self.engine)
        from onebudget.planner.policies.onebudget import OnebudgetPolicy

        return OnebudgetPolicy(quick=self.quick, advises=self.advises)

    def ledger(self) -> Ledger:
        """The plain plan: what the engine would do, without answers."""
        request = self.request()
        return self.policy().plan(request).replace(request=self.document(request))

    def document(self, request: PlanRequest) -> dict[str, Any]:
        """The question as plain values, for the ledger."""
        targets = {"target_seq_len": self.target_seq_len, "target_concurrency": self.target_concurrency}
        given = {name: value for name, value in targets.items() if value is not None}
        return request_document(self.engine, request) | given | {"quick": self.quick}

    def with_settings(self, **settings: object) -> Question:
        return replace(self, settings={**self.settings, **settings})

    def changed(self, change: Mapping[str, Any]) -> Question:
        """The question with a ledger's ``changes`` entry applied: layout and card by their names here, everything else
        by the engine's."""
        here: dict[str, Any] = {name: value for name, value in change.items() if name in LAYOUT}
        if "device_memory" in change:
            here["total_bytes"] = change["device_memory"]
        rest = {name: value for name, value in change.items() if name not in (*LAYOUT, "device_memory")}
        kept = {name: value for name, value in self.settings.items() if name != "device_memory"}
        return replace(self, **here, settings={**kept, **rest})


def make_question(model: str | ModelSource, gpu: str, *, revision: str | None, offline: bool, **asked: Any) -> Question:
    """Resolve the model's and the engine's name; everything else is checked when the question is asked."""
    source = resolve_model(model, revision=revision, offline=offline) if isinstance(model, str) else model
    engine = policy_for(asked.pop("engine", "onebudget")).name
    return Question(model=source, gpu=gpu, engine=engine, **asked)
