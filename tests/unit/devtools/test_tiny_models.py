from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoTokenizer

from onebudget.devtools.tiny_models import (
    BYTE_TOKENS,
    SPECIAL_TOKENS,
    TINY_KINDS,
    TINY_VOCAB,
    TinyKind,
    tiny_config,
    tiny_model,
)
from onebudget.errors import ConfigError
from onebudget.models.facts import facts_from_config, read_config

LAYERS: dict[TinyKind, set[str]] = {
    "gqa": {"full"}, "sliding": {"sliding"}, "mixed": {"sliding", "full"}, "moe": {"full"}, "mla": {"latent"},
}  # fmt: skip


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_kind_has_the_layers_it_is_made_for(kind: TinyKind, tmp_path: Path) -> None:
    facts = facts_from_config(read_config(tiny_model(kind, tmp_path / "new" / "folder")))
    assert set(facts.layers) == LAYERS[kind]
    assert facts.vocab_size == TINY_VOCAB
    assert (tmp_path / "new" / "folder" / "model.safetensors").stat().st_size < 2**21


def test_weights_depend_on_kind_seed_and_overrides_alone(tmp_path: Path) -> None:
    first, again = tiny_model("gqa", tmp_path / "a"), tiny_model("gqa", tmp_path / "b")
    other = tiny_model("gqa", tmp_path / "c", seed=1)
    tensors = [load_file(folder / "model.safetensors") for folder in (first, again, other)]
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])
    assert not tensors[0]["lm_head.weight"].equal(tensors[2]["lm_head.weight"])


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    assert tiny_config("moe", num_local_experts=6).num_local_experts == 6
    assert read_config(tiny_model("gqa", tmp_path, num_hidden_layers=1))["num_hidden_layers"] == 1


def test_an_unknown_kind_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gqa, sliding, mixed, moe, mla"):
        tiny_model("dense", tmp_path)  # type: ignore[arg-type]


def test_any_text_survives_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("gqa", tmp_path))
    assert len(tokenizer) == len(SPECIAL_TOKENS) + BYTE_TOKENS <= TINY_VOCAB
    text = "Plain, ümläute, 日本, 😀\n\ttabs  and  blanks"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer("<bos>a<eos>").input_ids[::2] == [1, 2]
    assert tokenizer.decode([1, *ids[:5], 2], skip_special_tokens=True) == "Plain"
    with pytest.raises(Exception, match="without a role"):
        tokenizer.apply_chat_template([{"content": "a"}], tokenize=False)
