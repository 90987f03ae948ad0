"""The engine on a GPU beside transformers on the same GPU: the same tokens, inside its ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from onebudget import LLM, SamplingParams
from onebudget.devtools.tiny_models import TINY_KINDS, TinyKind, tiny_model
from onebudget.models.demo import demo_model_dir, is_ready

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
TEXTS = ("The budget of a card", "One, two, three,", "Once upon a time there was a very small cache", "A")


def reference_ids(folder: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy answers of transformers, one prompt at a time, in float32 on the GPU."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda:0").eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda:0")
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(output[0, len(prompt) :].tolist())
    del model
    torch.cuda.empty_cache()
    return answers


def check_engine(folder: Path, **knobs: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [list(tokenizer(text).input_ids) for text in TEXTS]
    expected = reference_ids(folder, prompts)
    with LLM(folder, device="cuda:0", dtype="fp32", max_seq_len=256, kv_max_tokens=4096, **knobs) as llm:
        ledger = llm.budget
        assert sum(term.bytes for term in ledger.terms) + ledger.kv_cache.bytes + ledger.unassigned_bytes == (
            ledger.capacity_bytes
        )
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
        device = llm.engine.station.device
        assert ledger.capacity_bytes == device.total_bytes
        assert device.used_bytes() <= ledger.capacity_bytes - ledger.unassigned_bytes
        assert [output.error for output in outputs] == [None] * len(prompts)
        assert [output.token_ids for output in outputs] == expected
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_tiny_model_answers_as_transformers_does(kind: TinyKind, tmp_path: Path) -> None:
    check_engine(tiny_model(kind, tmp_path / kind))


def test_long_prompts_in_small_steps_answer_the_same(tmp_path: Path) -> None:
    check_engine(tiny_model("gqa", tmp_path / "gqa"), max_num_tokens=32, max_batch_size=4)


def test_the_demo_model_answers_as_transformers_does() -> None:
    folder = demo_model_dir()
    if not is_ready(folder):
        pytest.skip(f"the demo model is not in {folder}")
    check_engine(folder)
