"""Every reserve is necessary: leave one out, and the workload that it is for runs out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from onebudget import AllocationError, BudgetConfig, ConfigError, Ledger, open_device
from onebudget.budget.profile import ProfileResult
from onebudget.core import Request, SamplingParams
from onebudget.devtools.reserves import PROOFS, Job, Proof, remove_reserve
from onebudget.devtools.tiny_models import TINY_KINDS, tiny_config, tiny_model
from onebudget.engine.build import build_engine
from onebudget.engine.derivation import declared_reserves
from onebudget.engine.graph_budget import declare_graphs, graph_reserves
from onebudget.models.facts import facts_from_config
from onebudget.models.load import read_facts
from onebudget.progress import SilentProgress

PROVED_HERE = {"fragmentation"}
"""The rounding of pages has no workload of its own: a test below goes through the places where the pool may end."""


@pytest.fixture(params=PROOFS.values(), ids=PROOFS)
def proof(request: pytest.FixtureRequest) -> Proof:
    found: Proof = request.param
    return found


def test_without_the_reserve_its_workload_runs_out_of_memory(proof: Proof, tmp_path: Path) -> None:
    folder = proof.write_model(tmp_path)
    with proof.engine(folder) as llm:
        whole, whole_pool = llm.budget, llm.engine.executor.kv.allocated_bytes
        answers = [output.token_ids for output in proof.serve(llm) if output.error is None]
        assert len(answers) == sum(job.count for job in proof.jobs)
        assert llm.engine.executor.last_error is None

    with remove_reserve(proof.reserve):
        with proof.engine(folder) as llm:
            cut, cut_pool = llm.budget, llm.engine.executor.kv.allocated_bytes
            outputs = proof.serve(llm)
            error = llm.engine.executor.last_error
            held = llm.engine.station.device.account.live_by_owner()
            assert held.get("activations", 0) <= cut.term("activations").bytes // 100, "the error holds no large tensor"
            assert "logits" not in held
        failed = [number for number, output in enumerate(outputs) if output.error]
        assert isinstance(error, AllocationError)
        assert error.owner == proof.owner
        assert failed
        assert all(f"for {proof.owner}: " in (outputs[number].error or "") for number in failed)
        assert all(
            output.token_ids == answers[number] for number, output in enumerate(outputs) if number not in failed
        ), "who didn't want what found no room is answered as ever"
        with proof.engine(folder) as llm:
            fewer = [output.error for output in proof.serve(llm, without_last=True)]
        assert fewer == [None] * (len(answers) - 1)

    removed = whole.term(proof.reserve).bytes - cut.term(proof.reserve).bytes
    assert removed > 0
    assert cut.term(proof.reserve).bytes == 0
    assert cut.kv_cache.bytes - whole.kv_cache.bytes == removed
    assert abs(cut_pool - whole_pool - removed) < block_bytes(whole)
    for ledger in (whole, cut):
        assert [cap.name for cap in ledger.caps] == ["free_gpu_memory_fraction"]
        assert ledger.term("fraction_slack").bytes == ledger.unassigned_bytes == 0


def block_bytes(ledger: Ledger) -> int:
    return ledger.kv_cache.bytes_per_token * ledger.kv_cache.tokens_per_block


def test_every_reserve_that_the_engine_declares_has_a_proof(tmp_path: Path) -> None:
    declared: set[str] = set()
    profile = ProfileResult(
        model_bytes=0, torch_peak_bytes=0, torch_used_bytes=0, device_used_bytes=0, prompt_logits_bytes=1
    )
    for kind in TINY_KINDS:
        facts = facts_from_config(tiny_config(kind).to_dict(), name=kind)
        for knobs in ({}, {"enable_chunked_prefill": False}, {"tokens_per_block": 7}):
            lines, workspace = declared_reserves(facts, "float32", BudgetConfig(**knobs), profile, 4096)
            declared |= {line.name for line in lines}
            declared |= {"context_workspace"} if workspace else set()
    folder = tiny_model("gqa", tmp_path)
    graphs = declare_graphs(folder, read_facts(folder), "float32", BudgetConfig())
    declared |= {line.name for line in graph_reserves(graphs, 4096)}
    assert declared == set(PROOFS) | PROVED_HERE


def test_without_the_rounding_reserve_the_last_page_of_the_pool_is_missing_elsewhere(tmp_path: Path) -> None:
    """Pages are large here. Wherever in a page the pool ends, the largest step fits beside the largest scratch with the
    reserve; without it, what fits depends on where that is."""
    folder = tiny_model("gqa", tmp_path)
    capacities = [24 * PAGE + eighth * PAGE // 8 for eighth in range(8)]
    assert [full_step_fits(folder, capacity) for capacity in capacities] == [True] * 8
    with remove_reserve("fragmentation"):
        assert not all(full_step_fits(folder, capacity) for capacity in capacities)


PAGE = 1 << 17  # also the size of the scratch, so that no slack is hidden there
FULL_STEP = [
    Job(250, SamplingParams(max_tokens=6, ignore_eos=True)),
    Job(250, SamplingParams(max_tokens=6, ignore_eos=True)),
    Job(128, SamplingParams(max_tokens=1)),
]


def full_step_fits(folder: Path, capacity_bytes: int) -> bool:
    """Two requests generate up to ``max_seq_len``, then a prompt uses up a step's tokens."""
    config = BudgetConfig(
        dtype="fp32", free_gpu_memory_fraction=1.0, max_batch_size=2, max_num_tokens=128, max_seq_len=256,
        tokens_per_block=8, enable_penalties=False, enable_cuda_graphs=False,
    )  # fmt: skip
    device = open_device("host", capacity_bytes=capacity_bytes, granularity_bytes=PAGE)
    engine = build_engine(folder, config, device, SilentProgress(), strict_memory=True)
    for number, job in enumerate(FULL_STEP):
        prompt = [number] * job.prompt_tokens
        engine.executor.submit(Request(number, prompt, job.params, max_new_tokens=job.params.max_tokens))
    while engine.executor.has_work:
        engine.executor.step()
    engine.close()
    assert engine.executor.last_error is None or isinstance(engine.executor.last_error, AllocationError)
    return engine.executor.last_error is None


def test_only_reserves_that_exist_can_be_removed() -> None:
    with pytest.raises(ConfigError, match="fixed_workspace"), remove_reserve("fixed_workspaces"):
        pass
