"""Cards by the names people use."""

from __future__ import annotations

from pathlib import Path

import pytest

from onebudget.errors import ConfigError
from onebudget.planner.catalogue.gpus import all_gpus, find_gpu, parse_gpu
from onebudget.planner.catalogue.models import find_model, model_names
from onebudget.planner.policies.dims import dims_from_config
from onebudget.units import GIB


@pytest.mark.parametrize("name", ["H100-SXM-80GB", "h100", "NVIDIA H100 80GB HBM3", "H100 SXM5", "h100-sxm-80gb"])
def test_one_card_has_many_names(name: str) -> None:
    assert find_gpu(name).name == "H100-SXM-80GB"
    assert find_gpu(name).total_bytes == 81089 * 2**20


def test_names_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="A100-SXM-80GB"):
        find_gpu("A100")
    with pytest.raises(ConfigError, match="--gpu-total"):
        find_gpu("")


def test_a_card_nobody_knows_needs_its_size() -> None:
    with pytest.raises(ConfigError, match="Did you mean H100"):
        find_gpu("H1000")
    unknown = find_gpu("H1000", total_bytes=24 * GIB)
    assert (unknown.total_bytes, unknown.known, unknown.context_bytes) == (24 * GIB, False, None)


def test_a_given_size_replaces_the_catalogues() -> None:
    assert find_gpu("L4", total_bytes=22 * GIB).total_bytes == 22 * GIB
    assert find_gpu("L4", total_bytes=22 * GIB).sms == find_gpu("L4").sms


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [("H100-SXM-80GBx8", "H100-SXM-80GB", 8), ("8xH200", "H200", 8), ("RTX-4090", "RTX-4090", 1), ("L4 x 2", "L4", 2)],
)
def test_cards_are_counted(text: str, name: str, count: int) -> None:
    assert parse_gpu(text) == (name, count)


@pytest.mark.parametrize("text", ["H100x0", "0xH100", "H100x99999"])
def test_absurd_counts(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_gpu(text)


def test_every_card_is_found_by_each_of_its_names() -> None:
    gpus = all_gpus()
    assert len(gpus) > 55
    for gpu in gpus:
        assert gpu.total_bytes > 2 * GIB and gpu.source
        assert find_gpu(gpu.name) == gpu


def test_people_add_cards_and_models_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBUDGET_CATALOGUE", str(tmp_path))
    (tmp_path / "gpus.toml").write_text(
        '[[gpu]]\nname = "L4-24GB"\ntotal_bytes = 7\n[[gpu]]\nname = "Mine"\ntotal_bytes = 9\n'
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "me__mine.json").write_text('{"model_type": "llama"}')
    assert (find_gpu("l4-24gb").total_bytes, find_gpu("mine").total_bytes) == (7, 9)
    assert find_model("mine") == ("me/mine", {"model_type": "llama"})
    (tmp_path / "gpus.toml").write_text("[[gpu]]\n")
    with pytest.raises(ConfigError, match="no list of cards"):
        find_gpu("Mine")


def test_every_model_of_the_catalogue_says_what_sizing_needs() -> None:
    names = model_names()
    assert len(names) >= 60
    for name in names:
        found = find_model(name)
        assert found is not None
        dims = dims_from_config(found[1], name)
        assert dims.hidden and dims.vocab and dims.layers and dims.head_dim
