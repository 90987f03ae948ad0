from __future__ import annotations

import io
from pathlib import Path

import pytest

from onebudget.errors import ConfigError
from onebudget.planner.simulate import SyntheticLoad, Trace, TraceRequest, read_trace, synthetic_trace, write_trace

CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,110,27\n"
)
LINES = (
    '{"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n'
)


def written(folder: Path, text: str, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_counts_from_its_first_request(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, CSV, "azure.csv"))
    assert trace.name == "azure"
    assert trace.requests == (TraceRequest(0.0, 4808, 10), TraceRequest(1.5, 110, 27))
    assert trace.longest_tokens == 4818


def test_json_lines_bring_prefixes(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, LINES + "\n"))
    assert trace.requests == (TraceRequest(0.0, 700, 5, (0, 1)), TraceRequest(1.0, 512, 1, (0,)))


def test_requests_are_put_in_order(tmp_path: Path) -> None:
    first, second = LINES.splitlines()
    trace = read_trace(written(tmp_path, f"{second}\n{first}\n"))
    assert [request.arrival_s for request in trace.requests] == [0.0, 1.0]
    assert [request.prompt_tokens for request in trace.requests] == [700, 512]


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = written(tmp_path, LINES + "broken\n")
    assert len(read_trace(path, limit=2).requests) == 2
    with pytest.raises(ConfigError, match="line 3 is not JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "begins with no request"),
        ("a,b\n1,2\n", "no known form"),
        (CSV.splitlines()[0] + "\n", "holds no request"),
        (CSV.replace("4808", "many"), "line 2: ContextTokens = 'many' has to be tokens"),
        (CSV.replace("110,27", "110,0"), "line 3: GeneratedTokens = '0' has to be tokens, from 1 to 2147483647"),
        (CSV.replace("110,27", "110"), "line 3: GeneratedTokens = 'None'"),
        (CSV.replace("2023-11-16 18:17:05.4799600", "yesterday"), "line 3: TIMESTAMP = 'yesterday' has to be a moment"),
        (CSV.replace("18:17:05.4799600", "18:17:05+00:00"), "line 3: TIMESTAMP .* time zone"),
        (LINES.replace("700", '"700"', 1).replace('"700"', "7.5"), "line 1: input_length = '7.5'"),
        (LINES.replace("[0, 1]", "[0]"), "line 1 has 1 hash_ids for 700 tokens, which are 2 blocks"),
        (LINES.replace("[0, 1]", "[0, -1]"), "line 1: hash_ids"),
        (LINES.replace("[0, 1]", "[0, true]"), "line 1: hash_ids"),
        (LINES.replace("500,", "null,", 1), "line 1: timestamp = 'None' has to be milliseconds"),
        (LINES + "[]\n", "line 3 is not an object"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        read_trace(written(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(tmp_path / "nowhere.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read_trace(tmp_path / "binary")


@pytest.mark.parametrize("prefixes", [True, False])
def test_written_traces_read_back(tmp_path: Path, prefixes: bool) -> None:
    trace = synthetic_trace(3, SyntheticLoad(requests=50))
    if not prefixes:
        bare = (TraceRequest(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests)
        trace = Trace(trace.name, tuple(bare))
    text = io.StringIO()
    write_trace(trace, text)
    assert read_trace(written(tmp_path, text.getvalue())).requests == trace.requests


def test_rate_moves_arrivals_only() -> None:
    trace = Trace("two", (TraceRequest(0.0, 1, 1), TraceRequest(8.0, 2, 3)))
    assert trace.at_rate(4).requests == (TraceRequest(0.0, 1, 1), TraceRequest(2.0, 2, 3))
    assert trace.at_rate(1) is trace
    for rate in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="above 0"):
            trace.at_rate(rate)


def test_synthetic_traces_depend_on_their_seed_alone() -> None:
    load = SyntheticLoad(requests=300, longest_tokens=6000)
    trace = synthetic_trace(1, load)
    assert trace == synthetic_trace(1, load)
    assert trace != synthetic_trace(2, load)
    assert all(len(r.prefix_ids or ()) == -(-r.prompt_tokens // 512) for r in trace.requests)
    assert max(request.prompt_tokens for request in trace.requests) <= 6000
    heads = [request.prefix_ids[:2] for request in trace.requests if request.prefix_ids]
    assert len(set(heads)) == load.system_prompts


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"requests_per_s": 0.0}, {"continues": 1.5}, {"system_prompts": 0}])
def test_unusable_loads_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        synthetic_trace(0, SyntheticLoad(**wrong))  # type: ignore[arg-type]
