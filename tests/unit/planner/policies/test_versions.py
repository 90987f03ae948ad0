"""Versions as people write them."""

from __future__ import annotations

from datetime import date

import pytest

from onebudget.errors import ConfigError
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.settings import check_settings, fraction, switch, whole
from onebudget.planner.policies.versions import newest, read_version


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.10.2 (V1)", (0, 10, 2)),
        ("0.7.x (V0)", (0, 7, 3)),
        ("0.20.2rc1.dev9+g01d4d1ad3", (0, 20, 2)),
        ("v0.11.0", (0, 11, 0)),
        ("0.26+ class (2026-08)", (0, 26, 0)),
        ("main 2024-12 (V0)", (0, 6, 6)),
        ("0.9.x (V1, 2025-06)", (0, 9, 2)),
    ],
)
def test_text_names_a_version(text: str, number: tuple[int, int, int]) -> None:
    assert read_version("vllm", text).number == number


def test_without_a_version_the_newest_before_the_date() -> None:
    assert read_version("vllm", None, date(2024, 11, 21)).number == (0, 6, 4)
    assert not read_version("vllm", None).given
    assert read_version("vllm", "0.1.dev19754+g3a0914114").number == newest("vllm")


def test_a_version_far_beyond_is_refused() -> None:
    with pytest.raises(ConfigError, match="a version of vllm"):
        read_version("vllm", "7.1.0")


def test_misspelt_settings_and_engines_get_near_matches() -> None:
    known = {"gpu_memory_utilization": "", "max_model_len": ""}
    with pytest.raises(ConfigError, match="did you mean gpu_memory_utilization"):
        check_settings("vllm", {"gpu_memory_utilisation": 0.9}, known)
    with pytest.raises(ConfigError, match="Did you mean vllm"):
        policy_for("vlm")
    assert check_settings("vllm", {"--max-model-len": "8k"}, known) == {"max_model_len": "8k"}


def test_values_are_read_as_numbers() -> None:
    settings = {"a": "8k", "b": "8K", "c": "0.5", "d": "off", "e": -1, "f": 1.5}
    assert (whole(settings, "a"), whole(settings, "b")) == (8000, 8192)
    assert fraction(settings, "c", 0.9) == 0.5
    assert not switch(settings, "d", default=True)
    with pytest.raises(ConfigError):
        whole(settings, "e")
    with pytest.raises(ConfigError):
        fraction(settings, "f", 0.9)
