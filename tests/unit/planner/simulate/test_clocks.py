from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from onebudget.errors import ConfigError
from onebudget.planner.simulate import RooflineClock, StepWork, read_step_table

ROUND = RooflineClock(
    gpu="round", weight_bytes=8_000, flops_per_token=100, kv_bytes_per_token=10, flops_per_attended_pair=4,
    bandwidth_bytes_per_s=1_000, peak_flops=2_000, bandwidth_efficiency=0.5, compute_efficiency=0.5,
    step_overhead_s=0.25, request_overhead_s=0.5,
)  # fmt: skip


def test_decoding_waits_for_memory() -> None:
    work = StepWork(generation_requests=2, generation_kv_tokens=30)
    assert ROUND.host_seconds(work) == 0.25 + 2 * 0.5
    assert ROUND.card_seconds(work) == 8_000 / 500 + 30 * 10 / 500


def test_prompts_wait_for_arithmetic() -> None:
    work = StepWork(context_tokens=400, prompts=1, attended_pairs=100_000, cached_context_tokens=50)
    assert ROUND.card_seconds(work) == 400 * 100 / 1_000 + 100_000 * 4 / 1_000


def test_every_figure_is_stated() -> None:
    stated = ROUND.stated()
    assert {"gpu", "weight_bytes", "bandwidth_efficiency", "compute_efficiency", "step_overhead_s", "formula"} <= set(
        stated
    )


@pytest.mark.parametrize("wrong", [{"peak_flops": 0.0}, {"bandwidth_efficiency": 0.0}, {"weight_bytes": -1}])
def test_unusable_figures_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(ROUND, **wrong)  # type: ignore[arg-type]


def table(folder: Path, text: str) -> Path:
    path = folder / "times"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_read_between_its_rows(tmp_path: Path) -> None:
    clock = read_step_table(table(tmp_path, "tokens,seconds\n100,1.0\n200,2.0\n50,1.0\n"))
    seconds = [clock.card_seconds(StepWork(context_tokens=tokens)) for tokens in (1, 50, 75, 150, 300)]
    assert seconds == [1.0, 1.0, 1.0, 1.5, 3.0]
    assert clock.host_seconds(StepWork()) == 0


def test_a_table_blends_between_numbers_of_requests(tmp_path: Path) -> None:
    rows = '[{"batch": 1, "tokens": 1, "seconds": 1}, {"batch": 5, "tokens": 5, "seconds": 2}]'
    clock = read_step_table(table(tmp_path, rows))
    assert [clock.card_seconds(StepWork(generation_requests=batch)) for batch in (1, 3, 5, 9)] == [1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names nothing"),
        ("tokens,time\n1,2\n", "names time, tokens"),
        ("tokens,seconds\n", "no row"),
        ("tokens,seconds\n1,fast\n", "row 1 has seconds = 'fast'"),
        ("tokens,seconds\n1,-1\n", "row 1 has seconds = '-1'"),
        ("tokens,seconds\n1,1\n1,2\n", "row 2 gives a second time for 1 tokens"),
        ('{"tokens": 1}', "not a list of objects"),
        ("[1]", "not a list of objects"),
        ("[", "not JSON"),
    ],
)
def test_unusable_tables_say_why(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_step_table(table(tmp_path, text))


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_step_table(tmp_path / "nowhere")
