"""Proofs that every reserve is necessary: with all of them a workload runs to its end, without one memory runs out.

``remove_reserve`` builds engines that leave one reserve out, so that its bytes go to the KV pool. ``PROOFS`` holds one
workload per reserve; whoever adds a reserve adds its proof.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onebudget.budget.ledger import TERM_NAMES
from onebudget.core import SamplingParams
from onebudget.devtools.tiny_models import TinyKind, tiny_model
from onebudget.errors import ConfigError

if TYPE_CHECKING:
    from onebudget import LLM
    from onebudget.core import RequestOutput


@contextmanager
def remove_reserve(name: str) -> Iterator[None]:
    """Engines built inside do not hold this reserve back: its bytes go to the KV pool, and what it was for will find no
    room. For tests. ``ConfigError`` for a name that no ledger knows."""
    from onebudget.engine.derivation import left_out

    if name not in TERM_NAMES:
        raise ConfigError.for_field("name", name, f"a term of the ledger: {', '.join(TERM_NAMES)}")
    token = left_out.set(left_out.get() | {name})
    try:
        yield
    finally:
        left_out.reset(token)


@dataclass(frozen=True, slots=True)
class Job:
    """``count`` equal requests of a workload. Prompts begin with the same ``shared_tokens`` and then go ways of their
    own; with none shared, nothing is reused."""

    prompt_tokens: int
    params: SamplingParams
    count: int = 1
    shared_tokens: int = 0

    def prompt(self, number: int, vocab_size: int) -> list[int]:
        """Token ids of request ``number`` of the workload."""
        own = range(self.shared_tokens + number, self.prompt_tokens + number)
        return [place % vocab_size for place in (*range(self.shared_tokens), *own)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One reserve with a workload that needs it.

    ``owner``: whose allocation fails without the reserve. ``jobs`` without their last request run to the end even then.
    ``model``: overrides of a tiny model's config that make the reserve large beside everything else. A token or byte
    cap on the pool would keep the reserve's bytes away from it, so ``knobs`` have none. Graphs are off unless ``knobs``
    turn them on: decode then works in memory of its own.
    """

    reserve: str
    owner: str
    jobs: Sequence[Job]
    device_memory: int
    knobs: Mapping[str, Any]
    kind: TinyKind = "gqa"
    model: Mapping[str, Any] = field(default_factory=dict)

    def write_model(self, folder: Path) -> Path:
        return tiny_model(self.kind, folder, **self.model)

    def engine(self, folder: Path) -> LLM:
        """An engine that gives the pool all that the plan leaves and enforces the capacity in every step."""
        from onebudget import LLM

        return LLM(
            folder,
            strict_memory=True,
            device_memory=self.device_memory,
            free_gpu_memory_fraction=1.0,
            dtype="fp32",
            **{"enable_cuda_graphs": False, **self.knobs},
        )

    def serve(self, llm: LLM, *, without_last: bool = False) -> list[RequestOutput]:
        """Run the workload, whole or without its last request."""
        jobs = [job for job in self.jobs for _ in range(job.count)]
        if without_last:
            jobs = jobs[:-1]
        vocab: int = llm.engine.station.model.facts.vocab_size
        prompts = [job.prompt(number, vocab) for number, job in enumerate(jobs)]
        outputs: list[RequestOutput] = llm.generate(prompts, [job.params for job in jobs])
        return outputs


def _greedy(new_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True, **params)


PROOFS: Mapping[str, Proof] = {
    proof.reserve: proof
    for proof in (
        # The staging area of a decode batch is wanted after the prefill peak is over, and exceeds what that left free.
        Proof(
            reserve="fixed_workspace",
            owner="fixed_workspace",
            model={"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 16, "num_hidden_layers": 1},
            knobs={"max_batch_size": 2, "max_num_tokens": 72, "max_seq_len": 384, "tokens_per_block": 192},
            device_memory=8 << 20,
            jobs=[Job(36, _greedy(348), count=2)],
        ),
        # The batch is full, so its logits stand beside the tables, and one request wants penalties.
        Proof(
            reserve="penalty_workspace",
            owner="penalty_workspace",
            model={"vocab_size": 2048, "hidden_size": 32, "num_key_value_heads": 1},
            knobs={"max_batch_size": 384, "max_num_tokens": 384, "max_seq_len": 8, "tokens_per_block": 4},
            device_memory=16 << 20,
            jobs=[Job(1, _greedy(2), count=383), Job(1, _greedy(2, repetition_penalty=1.3, prompt_ignore_length=1))],
        ),
        # The vocabulary is wide and batches are small, so no other step holds as many rows of it.
        Proof(
            reserve="logits",
            owner="logits",
            model={"vocab_size": 8192, "hidden_size": 32},
            knobs={"max_batch_size": 2, "max_num_tokens": 128, "max_seq_len": 128, "tokens_per_block": 8},
            device_memory=16 << 20,
            jobs=[Job(20, _greedy(4)), Job(100, _greedy(4, prompt_logprobs=1))],
        ),
        # The first prompt fills the step that computes it. The others find all but 8 of their tokens cached, so they
        # start together, and that step expands four times what the profile saw.
        Proof(
            reserve="context_workspace",
            owner="context_workspace",
            kind="mla",
            model={"num_hidden_layers": 1, "num_key_value_heads": 4, "qk_nope_head_dim": 64, "v_head_dim": 64},
            knobs={"max_batch_size": 5, "max_num_tokens": 256, "max_seq_len": 264, "tokens_per_block": 8},
            device_memory=8 << 20,
            jobs=[Job(256, _greedy(1), shared_tokens=248), Job(256, _greedy(4), count=4, shared_tokens=248)],
        ),
        # Captured after the pool took its share, graphs then lie where the largest step needs room.
        Proof(
            reserve="graphs",
            owner="logits",
            model={"num_hidden_layers": 1, "vocab_size": 4096},
            knobs={
                "max_batch_size": 2,
                "max_num_tokens": 256,
                "max_seq_len": 512,
                "tokens_per_block": 16,
                "enable_penalties": False,
                "enable_cuda_graphs": True,
            },
            device_memory=8 << 20,
            jobs=[Job(8, _greedy(6)), Job(500, _greedy(2, prompt_logprobs=1))],
        ),
    )
}
