from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebudget.errors import AgreementError
from onebudget.graphs.agreement import NO_GRAPH, Candidate, GraphAgreement, common_size, decide
from onebudget.graphs.keys import Tier

SCRIPT = Path(__file__).with_name("graph_ranks.py")
ROOT = Path(__file__).parents[3]
FULL, FAST = Tier.FULL, Tier.FAST


def all_of(*sizes: int, tier: Tier = FULL) -> list[Candidate]:
    return [Candidate(True, size, tier) for size in sizes]


def test_everybody_pads_to_the_largest() -> None:
    """Live sizes 3, 4, 1, 2 with buckets 1, 2, 4, 8."""
    assert common_size(all_of(4, 4, 1, 2)) == Candidate(True, 4)
    assert decide(all_of(4, 4, 4, 4)) == Candidate(True, 4)


def test_unlike_tiers_become_full() -> None:
    mixed = [*all_of(4, 4, tier=FAST), *all_of(4), *all_of(4, tier=FAST)]
    assert decide(mixed) == Candidate(True, 4, FULL)
    assert decide(all_of(4, 4, 4, 4, tier=FAST)) == Candidate(True, 4, FAST)


def test_one_that_can_not_sends_all_to_eager() -> None:
    ranks = [Candidate(True, 4), Candidate(False, 1), Candidate(True, 4), Candidate(True, 4)]
    assert common_size(ranks) == decide(ranks) == NO_GRAPH


def test_one_without_a_dummy_sends_all_to_eager() -> None:
    assert common_size(all_of(4, 4, 3, 4)) == Candidate(True, 4)
    assert decide(all_of(4, 4, 3, 4)) == NO_GRAPH


def test_lengths_are_agreed_on_too() -> None:
    assert common_size([Candidate(True, 4, longest=9), Candidate(True, 2, longest=70)]) == Candidate(
        True, 4, longest=70
    )
    assert decide([Candidate(True, 4, longest=9), Candidate(True, 4, longest=70)]) == NO_GRAPH


CANDIDATES = st.builds(Candidate, st.booleans(), st.integers(1, 8), st.sampled_from(Tier), st.integers(0, 4096))


@given(st.lists(CANDIDATES, min_size=1, max_size=6))
def test_an_answer_needs_everybody(ranks: list[Candidate]) -> None:
    agreed = decide(ranks)
    assert all(Candidate.from_row(rank.row) == rank for rank in ranks)
    if agreed.eligible:
        assert {(rank.eligible, rank.batch_size, rank.longest) for rank in ranks} == {
            (True, agreed.batch_size, agreed.longest)
        }
        assert agreed.tier is FULL or {rank.tier for rank in ranks} == {FAST}
    assert decide(ranks[::-1]) == agreed


def test_rows_have_one_size_and_every_step_two_of_them() -> None:
    rows: list[Any] = []
    agreement = GraphAgreement(lambda row: [rows.append(row) or row])  # type: ignore[func-returns-value]
    for mine in (NO_GRAPH, Candidate(True, 8, FAST, 2048)):
        assert agreement.common_size(mine).eligible is mine.eligible
        assert agreement.decide(mine) == mine
    assert [len(row) for row in rows] == [4] * 4


@pytest.mark.parametrize("rows", [[], [(1, 2, 0)], [(1, 2, 0, 0), (1,)]])
def test_broken_exchanges_are_refused(rows: list[Any]) -> None:
    with pytest.raises(AgreementError):
        GraphAgreement(lambda row: rows).decide(NO_GRAPH)


# -- four processes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda report: report["rank"])


@pytest.mark.parametrize("part", ["first", "second", "no_dummy", "lost"])
def test_ranks_never_choose_different_graphs(reports: list[dict[str, Any]], part: str) -> None:
    assert len(reports) == 4
    assert all(report[part] == reports[0][part] for report in reports)


def test_they_do_choose_graphs(reports: list[dict[str, Any]]) -> None:
    keys = [key for part in ("first", "second") for key in reports[0][part] if key is not None]
    assert len(keys) > 20
    assert {key[0] for key in keys} >= {8}
    assert {key[2] for key in keys} == {64, 256}


def test_without_a_dummy_only_an_exact_size_meets_a_graph(reports: list[dict[str, Any]]) -> None:
    with_dummy = [key for key in reports[0]["first"] if key is not None]
    without = [key for key in reports[0]["no_dummy"] if key is not None]
    assert len(without) < len(with_dummy)


def test_a_graph_that_one_rank_lost_runs_on_none(reports: list[dict[str, Any]]) -> None:
    keys = [key for key in reports[0]["lost"] if key is not None]
    assert keys and not any(key[0] == 8 and key[2] == 64 for key in keys)
