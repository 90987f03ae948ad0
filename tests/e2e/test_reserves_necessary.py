"""Every reserve is necessary: leave one out, and the workload that it is for runs out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from onebudget import LLM, AllocationError, ConfigError, Ledger
from onebudget.devtools.reserves import PROOFS, Proof, remove_reserve


@pytest.fixture(params=PROOFS.values(), ids=PROOFS)
def proof(request: pytest.FixtureRequest) -> Proof:
    found: Proof = request.param
    return found


def test_without_the_reserve_its_workload_runs_out_of_memory(proof: Proof, tmp_path: Path) -> None:
    folder = proof.write_model(tmp_path)
    with proof.engine(folder) as llm:
        whole, whole_pool = llm.budget, llm.engine.executor.kv.allocated_bytes
        assert [output.error for output in proof.serve(llm) if output.error] == []
        assert llm.engine.executor.last_error is None

    with remove_reserve(proof.reserve):
        with proof.engine(folder) as llm:
            cut, cut_pool = llm.budget, llm.engine.executor.kv.allocated_bytes
            failed = [output.error for output in proof.serve(llm) if output.error]
            error = llm.engine.executor.last_error
            assert isinstance(error, AllocationError)
            assert error.owner == proof.owner
            assert failed
            assert all(f"for {proof.owner}: " in message for message in failed if message)
        with proof.engine(folder) as llm:
            assert [output.error for output in proof.serve(llm, without_last=True) if output.error] == []

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
