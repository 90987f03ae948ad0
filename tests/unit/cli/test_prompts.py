from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from onebudget.cli.prompts import PromptLine, read_prompts
from onebudget.errors import ConfigError


def written(tmp_path: Path, content: str | bytes, name: str = "prompts.txt") -> Path:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_plain_lines_are_prompts_and_blank_ones_are_not(tmp_path: Path) -> None:
    lines = read_prompts(written(tmp_path, "\ufeffone \n\n  two\n{three}\n"))
    assert [line.prompt for line in lines] == ["one", "two", "{three}"]


def test_json_lines_bring_prompt_or_messages_or_ids_and_sampling(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "stop": "x"},
        {"messages": [{"role": "user", "content": "b"}], "seed": None, "stop": ["x", "y"]},
        {"prompt": [1, 2, 3], "ignore_eos": True},
    ]
    lines = read_prompts(written(tmp_path, "\n".join(map(json.dumps, entries)), "prompts.jsonl"))
    assert [line.prompt for line in lines] == ["a", [{"role": "user", "content": "b"}], [1, 2, 3]]
    first = lines[0].params({"max_tokens": 64, "temperature": 0.0, "top_k": 7})
    assert (first.max_tokens, first.temperature, first.top_k, first.stop) == (3, 0.5, 7, ("x",))
    assert lines[1].params({"seed": 4}).seed == 4
    assert lines[1].params({}).stop == ("x", "y")
    assert lines[2].params({}).ignore_eos


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: str, name: str) -> None:
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_prompts(written(tmp_path, content, name))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("plain", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", 'either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": []}', "token ids"),
        ('{"prompt": [-1]}', "token ids"),
        ('{"prompt": [true]}', "token ids"),
        ('{"prompt": 3}', "token ids"),
        ('{"messages": [{"role": "user"}]}', '"content"'),
        ('{"prompt": "a", "max_token": 3}', "did you mean max_tokens"),
        ('{"prompt": "a", "lora": "x"}', "no field 'lora'"),
        ('{"prompt": "a", "max_tokens": "many"}', "max_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens = 0"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "temperature": NaN}', "temperature"),
        ('{"prompt": "a", "top_p": 2}', "top_p"),
        ('{"prompt": "a", "stop": 3}', "stop"),
        ('{"prompt": "a", "stop_token_ids": ["x"]}', "stop_token_ids"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, reason: str) -> None:
    file = written(tmp_path, f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(f"{file}, line 3: ")
    assert reason in str(caught.value)


def test_bytes_that_are_not_text_are_named_by_their_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2: not text in UTF-8"):
        read_prompts(written(tmp_path, b"fine\n\xff\xfe\n"))


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            read_prompts(path)


def test_a_dash_reads_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert read_prompts(Path("-")) == [PromptLine("one"), PromptLine("two")]
