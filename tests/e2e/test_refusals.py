"""What can't be served is said before it costs anything: requests one by one, cards with a ledger and ways out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from onebudget import LLM, SamplingParams
from onebudget.budget.ledger import Ledger
from onebudget.errors import BudgetError, ModelError

pytestmark = pytest.mark.demo

KNOBS: dict[str, Any] = {"dtype": "bf16", "device_memory": "400MiB", "max_seq_len": 128, "max_num_tokens": 32}
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, **KNOBS, kv_max_tokens=96) as llm:
        yield llm


def test_refused_requests_leave_the_others_alone(llm: LLM) -> None:
    """A pool of three blocks, four kinds of refusal, and two requests that are answered as if they were alone."""
    alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in ("Hello", [5] * 92)]
    outputs = llm.generate(["Hello", [5] * 129, [5] * 93, [49_152], [], [5] * 92], GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", *["refused"] * 4, "length"]
    assert [outputs[0].token_ids, outputs[5].token_ids] == alone
    for output, says in zip(
        outputs[1:5],
        [
            "129 tokens and max_seq_len is 128: shorten it by 1 tokens",
            "needs 4 KV blocks to completion (93 prompt and 4 new tokens in blocks of 32) and the pool has 3",
            "token id 49152 is outside the vocabulary: ids run from 0 to 49151",
            "no tokens",
        ],
        strict=True,
    ):
        assert says in (output.error or "")
        assert (output.text, output.token_ids) == ("", [])
        assert output.to_dict()["error"] == output.error


def test_what_a_refusal_advises_is_served(llm: LLM) -> None:
    refused = llm.generate([5] * 93, GREEDY)[0].error or ""
    assert "ask for at most 3 new tokens" in refused
    fewer = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    assert llm.generate([5] * 93, fewer)[0].finish_reason == "length"


def test_a_refused_stream_is_one_chunk(llm: LLM) -> None:
    (chunk,) = llm.stream([5] * 200, GREEDY)
    assert chunk.output is not None
    assert chunk.output.finish_reason == "refused"


def total(ledger: Ledger) -> int:
    return sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes


SMALL: dict[str, Any] = {**KNOBS, "dtype": "fp32", "device_memory": "520MiB"}


@pytest.fixture(scope="module")
def refusal(demo_model: Path) -> BudgetError:
    """float32 weights are 513 MiB: in 520 MiB there is no room for a cache."""
    with pytest.raises(BudgetError) as refused:
        LLM(demo_model, **SMALL)
    return refused.value


def test_a_card_too_small_comes_with_a_ledger_that_sums(refusal: BudgetError) -> None:
    ledger = refusal.ledger
    assert ledger is not None
    assert not ledger.fits
    assert total(ledger) == ledger.capacity_bytes == 520 * 2**20
    assert ledger.term("weights").bytes == 538_060_288
    assert "weights" in str(refusal)


def test_a_smaller_dtype_is_advised_and_serves(refusal: BudgetError, demo_model: Path) -> None:
    assert refusal.ledger is not None
    cure = {"dtype": "bf16"}
    assert cure in [change.set for change in refusal.ledger.changes]
    with LLM(demo_model, **{**SMALL, **cure}) as llm:
        assert llm.generate("Hello", GREEDY)[0].finish_reason == "length"


def test_the_card_that_is_advised_serves(refusal: BudgetError, demo_model: Path) -> None:
    assert refusal.ledger is not None
    (cure,) = (dict(change.set) for change in refusal.ledger.changes if set(change.set) == {"device_memory"})
    assert cure == {"device_memory": 520 * 2**20 + refusal.ledger.shortfall_bytes}
    with LLM(demo_model, **{**SMALL, **cure}) as llm:
        assert llm.generate("Hello", GREEDY)[0].finish_reason == "length"


def linked(folder: Path, copy: Path) -> Path:
    """The demo model again, sharing its weights."""
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            os.symlink(file, copy / file.name)
        else:
            shutil.copy(file, copy / file.name)
    return copy


def test_model_folders_that_cannot_be_served(demo_model: Path, tmp_path: Path) -> None:
    """Each is refused by what is wrong with it, before the weights are read."""
    broken: list[tuple[dict[str, Any], str]] = [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised (gptq)"),
        ({"layer_types": ["linear_attention"] * 30}, "linear layers"),
        ({"model_type": None}, "can't be loaded|architecture"),
    ]
    for number, (change, says) in enumerate(broken):
        folder = linked(demo_model, tmp_path / str(number))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ModelError) as refused:
            LLM(folder, **KNOBS)
        assert any(part in str(refused.value) for part in says.split("|")), refused.value


def test_a_download_that_broke_off_is_counted(demo_model: Path, tmp_path: Path) -> None:
    folder = linked(demo_model, tmp_path / "broken")
    (folder / "model.safetensors").unlink()
    with (demo_model / "model.safetensors").open("rb") as whole:
        (folder / "model.safetensors").write_bytes(whole.read(100_000))
    with pytest.raises(ModelError, match=r"truncated: its header declares 538,090,408 bytes and the file has 100,000"):
        LLM(folder, **KNOBS)
