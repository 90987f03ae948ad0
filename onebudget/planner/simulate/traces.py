"""Request traces: when each request came, how long prompt and answer were, and which beginnings prompts share."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from onebudget.errors import ConfigError
from onebudget.units import ceil_div

PREFIX_BLOCK_TOKENS = 512
"""Tokens that one id of ``prefix_ids`` stands for; the last id of a prompt may stand for fewer."""
CSV_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
KNOWN_FORMS = (
    f"a CSV with the columns {', '.join(CSV_COLUMNS)}, or JSON lines with {', '.join(JSON_FIELDS)} "
    f"(milliseconds, tokens, tokens, ids of {PREFIX_BLOCK_TOKENS}-token blocks)"
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. ``arrival_s`` counts from the trace's first request.

    ``prefix_ids`` names the 512-token blocks of the prompt in order: prompts that begin with the same ids begin with
    the same tokens. None: nothing is known, and nothing is shared.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of the longest request."""
        return max((request.prompt_tokens + request.output_tokens for request in self.requests), default=0)

    def first(self, count: int | None) -> Trace:
        return self if count is None else replace(self, requests=self.requests[:count])

    def at_rate(self, factor: float) -> Trace:
        """The same requests, ``factor`` times as many per second."""
        if not factor > 0:
            raise ConfigError.for_field("rate", factor, "a number above 0")
        if factor == 1:
            return self
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s / factor) for r in self.requests))


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """The requests in ``path``, of either form; only the first ``limit`` are read.

    Raises ``ConfigError`` naming file, line and what is wrong there.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            requests = _in_order(path, islice(_rows(path, file), limit))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror or error}.", field="TRACE", value=str(path)
        ) from error
    except UnicodeDecodeError as error:
        raise _unusable(path, "it is not text in UTF-8") from error
    except csv.Error as error:
        raise _unusable(path, f"its CSV is broken: {error}") from error
    if not requests:
        raise _unusable(path, "it holds no request")
    return Trace(path.stem, requests)


def write_trace(trace: Trace, file: TextIO) -> None:
    """As JSON lines where the trace has prefix ids, else as CSV; ``read_trace`` gives the same requests back."""
    if any(request.prefix_ids is not None for request in trace.requests):
        for request in trace.requests:
            file.write(json.dumps(dict(zip(JSON_FIELDS, _json_values(request), strict=True))) + "\n")
        return
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    start = datetime(2000, 1, 1)
    for request in trace.requests:
        moment = start + timedelta(seconds=request.arrival_s)
        writer.writerow([moment.isoformat(" ", "microseconds"), request.prompt_tokens, request.output_tokens])


def _json_values(request: TraceRequest) -> tuple[int, int, int, list[int]]:
    milliseconds = round(request.arrival_s * 1000)
    return milliseconds, request.prompt_tokens, request.output_tokens, list(request.prefix_ids or ())


def _rows(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    head = file.readline()
    file.seek(0)
    if head.lstrip().startswith("{"):
        return _json_rows(path, file)
    if [name.strip() for name in head.strip().split(",")] == list(CSV_COLUMNS):
        return _csv_rows(path, file)
    raise _unusable(path, "its first line is of no known form" if head.strip() else "it begins with no request")


def _csv_rows(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    reader = csv.DictReader(file, skipinitialspace=True)
    start: datetime | None = None
    for row in reader:
        moment = _moment(path, reader.line_num, row["TIMESTAMP"])
        start = start or moment
        try:
            arrival = (moment - start).total_seconds()
        except TypeError:
            raise _bad(
                path, reader.line_num, "TIMESTAMP", row["TIMESTAMP"], "with a time zone like the first"
            ) from None
        yield TraceRequest(
            arrival,
            _count(path, reader.line_num, row, "ContextTokens"),
            _count(path, reader.line_num, row, "GeneratedTokens"),
        )


def _moment(path: Path, line: int, text: str | None) -> datetime:
    try:
        return datetime.fromisoformat((text or "").strip())
    except ValueError:
        raise _bad(path, line, "TIMESTAMP", text, "a moment like 2023-11-16 18:17:03.97") from None


def _json_rows(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    start: float | None = None
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _unusable(path, f"line {line} is not JSON") from error
        if not isinstance(row, dict):
            raise _unusable(path, f"line {line} is not an object")
        milliseconds = _milliseconds(path, line, row.get("timestamp"))
        start = milliseconds if start is None else start
        prompt = _count(path, line, row, "input_length")
        output = _count(path, line, row, "output_length")
        yield TraceRequest((milliseconds - start) / 1000, prompt, output, _prefix_ids(path, line, row, prompt))


def _milliseconds(path: Path, line: int, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise _bad(path, line, "timestamp", value, "milliseconds")
    return value


def _prefix_ids(path: Path, line: int, row: Mapping[str, Any], prompt_tokens: int) -> tuple[int, ...]:
    ids = row.get("hash_ids")
    usable = isinstance(ids, list) and all(type(one) is int and 0 <= one < 2**31 for one in ids)
    if not usable:
        raise _bad(path, line, "hash_ids", ids, "a list of integers from 0 to 2147483647")
    assert isinstance(ids, list)
    wanted = ceil_div(prompt_tokens, PREFIX_BLOCK_TOKENS)
    if len(ids) != wanted:
        raise _unusable(
            path, f"line {line} has {len(ids)} hash_ids for {prompt_tokens} tokens, which are {wanted} blocks"
        )
    return tuple(ids)


def _count(path: Path, line: int, row: Mapping[str, Any], name: str) -> int:
    """A number of tokens; text in a CSV, a number in JSON."""
    value = row.get(name)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not 1 <= number < 2**31:
        raise _bad(path, line, name, value, f"tokens, from 1 to {2**31 - 1}")
    return number


def _in_order(path: Path, requests: Iterable[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Sorted by arrival; a trace may have neighbours in the wrong order, and then its clock starts at the earliest."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start = ordered[0].arrival_s if ordered else 0.0
    if start == 0:
        return tuple(ordered)
    return tuple(replace(request, arrival_s=request.arrival_s - start) for request in ordered)


def _bad(path: Path, line: int, name: str, value: object, allowed: str) -> ConfigError:
    shown = str(value) if value is None or len(str(value)) <= 60 else str(value)[:57] + "..."
    return _unusable(path, f"line {line}: {name} = {shown!r} has to be {allowed}")


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a usable trace: {reason}. A trace is {KNOWN_FORMS}.",
        field="TRACE",
        value=str(path),
        allowed=KNOWN_FORMS,
    )
