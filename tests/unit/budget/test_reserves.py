from __future__ import annotations

import pytest

from onebudget.budget.reserves import (
    ReserveLine,
    encoder_reserve_bytes,
    indexer_logits_bytes,
    logits_bytes,
    penalty_table_bytes,
    penalty_workspace_bytes,
    seat_count,
)
from onebudget.errors import ConfigError
from onebudget.units import GIB, MIB


def test_penalty_workspace_of_added_seats() -> None:
    nbytes = penalty_workspace_bytes(
        max_num_sequences=512, sequences_without_headroom=256, max_beam_width=1, vocab_size=128_256
    )
    assert nbytes == 131_334_144 + 32_833_536 == 164_167_680


@pytest.mark.parametrize(("seats", "vocab"), [(256, 128_256), (255, 128_256), (512, 0)])
def test_no_added_seats_no_workspace(seats: int, vocab: int) -> None:
    nbytes = penalty_workspace_bytes(
        max_num_sequences=seats, sequences_without_headroom=256, max_beam_width=1, vocab_size=vocab
    )
    assert nbytes == 0


def test_penalty_tables() -> None:
    assert penalty_table_bytes(num_sequences=256, max_beam_width=1, vocab_size=128_256) == 131_334_144 + 32_833_536
    assert penalty_table_bytes(num_sequences=64, max_beam_width=4, vocab_size=32_000) == 32_768_000 + 2_048_000
    assert penalty_table_bytes(num_sequences=4, max_beam_width=1, vocab_size=10) == 160 + 40


@pytest.mark.parametrize(
    ("pp_size", "headroom", "overlap", "seats"),
    [
        (1, False, False, 256),
        (1, False, True, 256),
        (1, True, False, 256),
        (1, True, True, 512),
        (4, False, True, 1024),
        (4, True, True, 1024),
    ],
)
def test_seats(pp_size: int, headroom: bool, overlap: bool, seats: int) -> None:
    assert seat_count(max_batch_size=256, pp_size=pp_size, headroom=headroom, overlap=overlap) == seats


@pytest.mark.parametrize(
    ("tokens", "length", "nbytes"),
    [
        (8192, 131_072, 4 * GIB),
        (8192, 32_768, GIB),
        (4096, 4096, 64 * MIB),
        (32_768, 131_072, 8 * GIB),
    ],
)
def test_indexer_logits(tokens: int, length: int, nbytes: int) -> None:
    assert indexer_logits_bytes(max_num_tokens=tokens, max_seq_len=length) == nbytes


def test_indexer_element_budget_may_be_set() -> None:
    assert indexer_logits_bytes(max_num_tokens=8192, max_seq_len=131_072, element_budget=1000) == 4000


@pytest.mark.parametrize(("budget", "seen", "cache", "nbytes"), [(100, 30, 0, 70), (100, 130, 0, 0), (100, 100, 7, 7)])
def test_encoder_reserve_is_what_the_probe_did_not_see(budget: int, seen: int, cache: int, nbytes: int) -> None:
    assert encoder_reserve_bytes(output_budget_bytes=budget, encoder_output_bytes=seen, cache_bytes=cache) == nbytes


def test_rows_of_logits() -> None:
    assert logits_bytes(rows=8, vocab_size=49_152) == 8 * 49_152 * 4
    assert logits_bytes(rows=8, vocab_size=49_152, element_bytes=2, copies=3) == 8 * 49_152 * 6


@pytest.mark.parametrize("bad", [-1, 1.5])
def test_a_reserve_is_a_whole_number(bad: object) -> None:
    with pytest.raises(ConfigError, match="fixed_workspace"):
        ReserveLine("fixed_workspace", bad)  # type: ignore[arg-type]


def test_a_reserve_has_one_of_two_kinds() -> None:
    assert ReserveLine("x", 1).kind == "adds_to_peak"
    with pytest.raises(ConfigError, match="cuts_kv"):
        ReserveLine("x", 1, "subtracts")  # type: ignore[arg-type]
