"""The profile's encoder pass: run alone, its output kept alive as a copy, the rest of its budget reserved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from onebudget.config import BudgetConfig
from onebudget.devtools.tiny_models import tiny_model
from onebudget.engine.derivation import engine_ledger
from onebudget.engine.probe import measure
from onebudget.engine.station import fake_station
from onebudget.progress import SilentProgress

CONFIG = BudgetConfig(max_seq_len=64, max_batch_size=4, max_num_tokens=64, enable_penalties=False)
PATCHES, WIDTH = 4096, 256


class PatchEncoder:
    """Two layers over patches; the dummy pass returns a view of its batch, as encoders do."""

    output_budget_bytes = 3 * PATCHES * WIDTH * 4
    cache_bytes = 1 << 20

    def __init__(self) -> None:
        with torch.device("meta"):
            self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def encode_dummies(self) -> torch.Tensor:
        return self.layers(torch.empty(1, PATCHES, WIDTH, device="meta"))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("gqa", tmp_path_factory.mktemp("model") / "gqa")


def test_encoder_pass_and_kept_output_are_in_the_peak_and_its_budget_is_reserved(folder: Path) -> None:
    station = fake_station(folder, "float32")
    bare, _ = measure(station, CONFIG, SilentProgress())
    seeing = replace(station, encoder=PatchEncoder())
    profile, rounding = measure(seeing, CONFIG, SilentProgress())

    output_bytes, hidden_bytes = PATCHES * WIDTH * 4, PATCHES * 4 * WIDTH * 4
    assert profile.encoder_output_bytes == output_bytes
    # The hidden layer's input and output of GELU stand together, more than anything this small language model needs.
    assert profile.torch_peak_bytes - bare.model_bytes >= 2 * hidden_bytes > bare.activation_bytes + output_bytes
    assert profile.torch_used_bytes == bare.torch_used_bytes, "the copy is gone before the second sample"

    ledger = engine_ledger(
        folder, station.model.facts, "float32", CONFIG, profile,
        device=station.device, rounding_bytes=rounding, encoder=seeing.encoder,
    )  # fmt: skip
    assert ledger.term("multimodal_encoder").bytes == 2 * output_bytes + (1 << 20)
    station.close()
