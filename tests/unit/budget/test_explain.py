from __future__ import annotations

from onebudget.budget.explain import diff, explain_diff
from onebudget.budget.ledger import Admission, Cap, Change, DeviceLine, HostLine, KVCacheLine, KVGroup, Ledger, Term
from onebudget.units import GIB, MIB


def ledger(**changes: object) -> Ledger:
    values: dict[str, object] = {
        "model": "tiny",
        "device": DeviceLine(name="H100"),
        "capacity_bytes": 10 * GIB,
        "terms": (
            Term("weights", "models", 4 * GIB, "exact", "load", why="2 B * 2147483648 parameters"),
            Term("activations", "engine", GIB, "modelled", high_bytes=2 * GIB),
        ),
        "kv_cache": KVCacheLine(
            bytes=4 * GIB,
            tokens=104_857,
            blocks=3_276,
            tokens_per_block=32,
            bytes_per_token=40_960,
            max_concurrency_at_max_seq_len=25.59375,
        ),
        "caps": (
            Cap("free_gpu_memory_fraction", 0.9, 4 * GIB + 512 * MIB),
            Cap("kv_max_tokens", 104_857, 4 * GIB, True),
        ),
        "unassigned_bytes": GIB,
    }
    return Ledger(**(values | changes))  # type: ignore[arg-type]


def test_every_term_cap_and_the_pool_has_a_line() -> None:
    text = ledger().explain()
    assert "tiny on H100" in text
    assert f"{4 * GIB} B  weights: 2 B * 2147483648 parameters [exact]" in text
    assert "activations: no reason recorded [modelled, 1.00 GiB to 2.00 GiB]" in text
    assert "unassigned" in text
    assert "104,857 tokens at 40,960 B, 3,276 blocks of 32, 25.59 requests" in text
    binding = [line for line in text.splitlines() if "(binds)" in line]
    assert len(binding) == 1
    assert "kv_max_tokens" in binding[0]


def test_the_amounts_of_the_lines_add_up() -> None:
    lines = ledger().explain().splitlines()
    taken = [int(line.split(" B ")[0].split()[-1]) for line in lines if line.startswith(("-", "="))]
    assert sum(taken) == 10 * GIB


def test_the_tail_says_what_else_matters() -> None:
    changed = ledger(
        kv_cache=KVCacheLine(tokens_per_block=32),
        unassigned_bytes=5 * GIB,
        fits=False,
        shortfall_bytes=7,
        changes=(Change({"max_seq_len": 512}, MIB, True),),
        admission=Admission(0),
        host=(HostLine("host_kv_tier", GIB, "host"),),
        notes=("graphs were not captured",),
        warnings=("tight",),
    )
    text = changed.explain()
    for expected in (
        "kv_cache: does not fit",
        "may attend to 0 tokens",
        "Does not fit: 7 B (7 B) missing.",
        "Would help: max_seq_len = 512 (pool + 1.00 MiB, fits)",
        "Host memory: host_kv_tier 1.00 GiB per host",
        "Note: graphs were not captured",
        "Warning: tight",
    ):
        assert expected in text


def test_groups_are_listed() -> None:
    pool = KVCacheLine(bytes=4 * GIB, tokens=1, blocks=1, groups=(KVGroup("window 1024", 4 * GIB, 7, 81_920, 1024),))
    assert "window 1024: 7 blocks at 81,920 B per token" in ledger(kv_cache=pool).explain()


def test_difference_lists_only_what_changed() -> None:
    after = ledger(
        terms=(Term("weights", "models", 4 * GIB), Term("graphs", "graphs", 512 * MIB)),
        unassigned_bytes=GIB + 512 * MIB,
    )
    lines = {line.name: (line.before, line.after) for line in diff(ledger(), after)}
    assert lines == {
        "activations": (GIB, 0),
        "graphs": (0, 512 * MIB),
        "unassigned_bytes": (GIB, GIB + 512 * MIB),
    }
    assert "graphs: 0 B -> 512.00 MiB (+512.00 MiB)" in explain_diff(ledger(), after)
    assert "activations: 1.00 GiB -> 0 B (-1.00 GiB)" in explain_diff(ledger(), after)


def test_difference_covers_caps_admission_and_verdict() -> None:
    after = ledger(caps=(Cap("free_gpu_memory_fraction", 0.8, 1),), admission=Admission(5), fits=False)
    text = explain_diff(ledger(), after)
    assert "free_gpu_memory_fraction: 0.9 -> 0.8" in text
    assert "kv_max_tokens: 104,857 -> none" in text
    assert "attended_tokens_cap: none -> 5" in text
    assert "fits: True -> False" in text


def test_equal_ledgers() -> None:
    assert diff(ledger(), ledger()) == ()
    assert explain_diff(ledger(), ledger()) == "nothing changed"
