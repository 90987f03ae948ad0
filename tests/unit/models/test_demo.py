"""The demo model: fetch, check, convert, keep; on a made-up wheel, and on the real one where it has been prepared."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from onebudget.errors import ModelError
from onebudget.models import demo
from onebudget.models.demo import SMOLLM2, WheelModel, cache_dir, demo_model_dir, ensure_demo_model, is_ready
from onebudget.models.demo_reference import demo_prompts, demo_reference_versions

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, LAYERS = 64, 4, 2, 16, 96, 2
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def _vocabulary() -> tuple[list[str], list[str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # "12" is a token with a merge, so that only the digit rule keeps digits apart.
    return [*control, *sorted(ByteLevel.alphabet()), "he", "12"], ["h e", "1 2"]


def _weights(vocabulary: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Random weights under the names and in the row order of ``transformers``."""
    rng = np.random.default_rng(0)
    block = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTER, HIDDEN),
        "mlp.up_proj": (INTER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTER),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return {f"model.{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def _neighbouring_pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row ``i`` and row ``i + d/2`` of each head beside each other, written out one row at a time."""
    half = weight.shape[0] // heads // 2
    order = [head * 2 * half + side * half + pair for head in range(heads) for pair in range(half) for side in (0, 1)]
    return weight[order]


def _write_gguf(path: Path, *, drop: str | None = None, pre: str = "smollm") -> None:
    from gguf import GGUFWriter

    tokens, merges = _vocabulary()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    renamed = {
        "model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "model.layers.": "blk.",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, weight in _weights(len(tokens)).items():
        stored = weight
        if "q_proj" in name:
            stored = _neighbouring_pairs(weight, HEADS)
        elif "k_proj" in name:
            stored = _neighbouring_pairs(weight, KV_HEADS)
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        if name != drop:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@dataclass
class FakeIndex:
    """Stands in for pip: `download … --dest FOLDER` copies one wheel, or fails; every call leaves a line in a log."""

    root: Path
    model: WheelModel
    monkeypatch: pytest.MonkeyPatch

    @property
    def wheel(self) -> Path:
        return self.root / "tiny-1.0-py3-none-any.whl"

    def publish(self, **gguf_options: Any) -> None:
        """Put a wheel with a new GGUF file there and expect exactly that file."""
        content = self.root / "tiny.gguf"
        _write_gguf(content, **gguf_options)
        data = content.read_bytes()
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(self.model.member, data)
        self.model = replace(
            self.model, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest(), wheel_bytes=self.wheel.stat().st_size
        )

    def run(self, script: str) -> None:
        self.monkeypatch.setattr(demo, "_pip", lambda: [sys.executable, "-c", script])

    def serve(self) -> None:
        self.run(
            "import pathlib, shutil, sys\n"
            f"open({str(self.root / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            "target = sys.argv[sys.argv.index('--dest') + 1]\n"
            f"shutil.copy({str(self.wheel)!r}, target)\n"
        )

    def fail(self, message: str) -> None:
        self.run(f"import sys; print('Looking for it'); sys.exit({message!r})")

    def calls(self) -> list[str]:
        log = self.root / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def ensure(self) -> Path:
        return ensure_demo_model(quiet=True, model=self.model)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(tmp_path / "cache"))
    blank = WheelModel("Tiny", "tiny", "1.0", "tiny/tiny.gguf", 0, "0" * 64, 0, 10_000)
    (tmp_path / "index").mkdir()
    fake = FakeIndex(tmp_path / "index", blank, monkeypatch)
    fake.publish()
    fake.serve()
    return fake


def _kept(folder: Path) -> set[str]:
    """What lies beside the model folder, lock files aside."""
    return {path.name for path in folder.parent.iterdir() if path.suffix != ".lock"}


class Home(NamedTuple):
    own: str | None
    xdg: str | None
    expected: str


@pytest.mark.parametrize(
    "home",
    [
        Home(None, None, "/home/u/.cache/onebudget"),
        Home(None, "/var/x", "/var/x/onebudget"),
        Home(None, "relative/x", "/home/u/.cache/onebudget"),
        Home("/data/ob", "/var/x", "/data/ob"),
        Home("~/ob", None, "/home/u/ob"),
        Home("", "", "/home/u/.cache/onebudget"),
    ],
)
def test_cache_folder_follows_the_environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    for name, value in (("ONEBUDGET_CACHE_DIR", home.own), ("XDG_CACHE_HOME", home.xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_dir() == Path(home.expected)


def test_folder_name_carries_the_hash(index: FakeIndex) -> None:
    assert SMOLLM2.sha256[:12] in demo_model_dir().name
    assert demo_model_dir(index.model) != demo_model_dir(replace(index.model, sha256="f" * 64))


def test_conversion_restores_every_weight(index: FakeIndex) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = index.ensure()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    state = model.state_dict()
    expected = _weights(model.config.vocab_size)
    assert set(state) - {"lm_head.weight"} == set(expected)
    for name, weight in expected.items():
        assert torch.equal(state[name], torch.from_numpy(weight)), name
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_conversion_keeps_settings(index: FakeIndex) -> None:
    from transformers import AutoConfig, GenerationConfig

    folder = index.ensure()
    config = AutoConfig.from_pretrained(folder)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (HIDDEN, HEAD_DIM, KV_HEADS)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.tie_word_embeddings
    generation = GenerationConfig.from_pretrained(folder)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_tokenizer_keeps_digits_and_control_tokens_apart(index: FakeIndex) -> None:
    from transformers import AutoTokenizer

    tokens, _ = _vocabulary()
    tokenizer: Any = AutoTokenizer.from_pretrained(index.ensure())
    assert tokenizer.convert_ids_to_tokens(tokenizer("he 12").input_ids) == ["he", "Ġ", "1", "2"]
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.decode(tokenizer("naïve ☃ 12\n").input_ids) == "naïve ☃ 12\n"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], return_dict=True)["input_ids"]
    assert chat == [1, tokens.index("he"), 2]


def test_second_call_asks_nobody(index: FakeIndex) -> None:
    folder = index.ensure()
    index.fail("ERROR: no network")
    assert index.ensure() == folder
    assert len(index.calls()) == 1
    assert index.calls()[0].startswith("download --no-deps --only-binary=:all:")
    assert index.calls()[0].endswith("tiny==1.0")
    assert _kept(folder) == {folder.name}


def test_pip_failure_names_what_is_needed(index: FakeIndex) -> None:
    index.fail("ERROR: Could not find a version that satisfies tiny")
    with pytest.raises(ModelError, match=r"Could not find a version .* tiny==1\.0 .* PIP_FIND_LINKS"):
        index.ensure()
    assert _kept(demo_model_dir(index.model)) == set()


def test_offline_never_starts_pip(index: FakeIndex) -> None:
    with pytest.raises(ModelError, match="offline"):
        ensure_demo_model(quiet=True, offline=True, model=index.model)
    assert index.calls() == []
    folder = index.ensure()
    assert ensure_demo_model(quiet=True, offline=True, model=index.model) == folder


@pytest.mark.parametrize("change", [{"sha256": "a" * 64}, {"nbytes": 5}])
def test_another_file_is_refused_with_both_numbers(index: FakeIndex, change: dict[str, Any]) -> None:
    right = index.model
    index.model = replace(right, **change)
    with pytest.raises(ModelError) as caught:
        index.ensure()
    for number in (right.nbytes, right.sha256, index.model.nbytes, index.model.sha256):
        assert str(number) in str(caught.value)
    assert _kept(demo_model_dir(index.model)) == set()


def test_damaged_wheel_is_refused(index: FakeIndex) -> None:
    index.wheel.write_bytes(b"not a zip")
    with pytest.raises(ModelError, match="damaged"):
        index.ensure()


def test_wheel_without_the_file_is_refused(index: FakeIndex) -> None:
    index.model = replace(index.model, member="tiny/other.gguf")
    with pytest.raises(ModelError, match=r"other\.gguf"):
        index.ensure()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"drop": "blk.1.ffn_up.weight"}, r"1 missing \['blk\.1\.ffn_up\.weight'\]"), ({"pre": "qwen2"}, "qwen2")],
)
def test_gguf_of_another_kind_is_refused(index: FakeIndex, options: dict[str, Any], message: str) -> None:
    index.publish(**options)
    with pytest.raises(ModelError, match=message):
        index.ensure()
    assert _kept(demo_model_dir(index.model)) == set()


def _truncate_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)


def _lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _lose_manifest(folder: Path) -> None:
    (folder / demo.MANIFEST).unlink()


@pytest.mark.parametrize("damage", [_truncate_weights, _lose_tokenizer, _lose_manifest])
def test_damaged_folder_is_made_again(index: FakeIndex, damage: Callable[[Path], None]) -> None:
    folder = index.ensure()
    damage(folder)
    assert not is_ready(folder)
    assert index.ensure() == folder
    assert is_ready(folder)
    assert len(index.calls()) == 2


def test_leftovers_of_a_killed_run_are_removed(index: FakeIndex) -> None:
    folder = demo_model_dir(index.model)
    leftover = folder.parent / f".{folder.name}-killed"
    leftover.mkdir(parents=True)
    (leftover / "half.gguf").write_bytes(b"x")
    index.ensure()
    assert _kept(folder) == {folder.name}


def test_interruption_leaves_nothing(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        index.ensure()
    assert _kept(demo_model_dir(index.model)) == set()


def test_two_callers_at_once_fetch_once(index: FakeIndex) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(index.ensure())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [demo_model_dir(index.model)] * 2
    assert len(index.calls()) == 1


def test_full_disk_is_refused_before_the_download(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * index.model.wheel_bytes + index.model.nbytes + index.model.converted_bytes
    usage = shutil.disk_usage(index.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    with pytest.raises(ModelError, match="ONEBUDGET_CACHE_DIR"):
        index.ensure()
    assert index.calls() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    assert is_ready(index.ensure())


def test_cache_that_is_a_file_is_a_model_error(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(index.wheel))
    with pytest.raises(ModelError, match="could not be stored"):
        index.ensure()


def test_missing_libraries_are_named(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "REQUIRED_MODULES", ("json", "no_such_library"))
    with pytest.raises(ModelError, match=r"\(no_such_library\).*onebudget\[run\]"):
        index.ensure()


def test_module_without_torch_or_transformers() -> None:
    code = (
        "import sys, onebudget.models.demo as d; d.demo_prompts(); d.is_ready(d.demo_model_dir());"
        "print([m for m in ('torch', 'transformers', 'numpy', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_command_prints_the_folder_or_the_reason(
    index: FakeIndex, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ensure_demo_model", index.ensure)
    assert demo.main() == 0
    assert capsys.readouterr().out.strip() == str(demo_model_dir(index.model))
    monkeypatch.setenv("ONEBUDGET_CACHE_DIR", str(index.root / "other"))
    index.fail("ERROR: no index")
    assert demo.main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no index" in captured.err


def test_prompts_are_well_formed() -> None:
    prompts = demo_prompts()
    assert len(prompts) == 8
    assert demo_reference_versions()["weights_sha256"] == SMOLLM2.sha256
    assert any("capital of France" in prompt.messages[-1]["content"] for prompt in prompts)
    for prompt in prompts:
        assert set(prompt.greedy) == {"float32", "bfloat16"}
        for answer in prompt.greedy.values():
            assert all(0 <= token < 49152 for token in answer.token_ids)
            stopped = answer.token_ids[-1] == 2
            assert stopped != (len(answer.token_ids) == prompt.max_tokens)
            assert answer.min_margin > 0


@pytest.mark.demo
def test_prompt_ids_come_from_the_chat_template(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model)
    for prompt in demo_prompts():
        made = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=True)
        assert tuple(made["input_ids"]) == prompt.prompt_token_ids
        answer = prompt.greedy["float32"].token_ids
        assert tokenizer.decode(list(answer), skip_special_tokens=True) == prompt.text


@pytest.mark.demo
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_answer_is_reproduced(demo_model: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    prompt = next(p for p in demo_prompts() if "capital of France" in p.messages[-1]["content"])
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=getattr(torch, dtype))
    ids = torch.tensor([prompt.prompt_token_ids])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=prompt.max_tokens, do_sample=False)
    assert tuple(made[0, ids.shape[1] :].tolist()) == prompt.greedy[dtype].token_ids
    assert "Paris" in prompt.text


@pytest.mark.demo
def test_converted_demo_model_is_complete(demo_model: Path) -> None:
    from safetensors import safe_open

    manifest = json.loads((demo_model / demo.MANIFEST).read_text())
    assert manifest["sha256"] == SMOLLM2.sha256
    with safe_open(demo_model / "model.safetensors", "np") as weights:
        names = list(weights.keys())
        elements = sum(int(np.prod(weights.get_slice(name).get_shape())) for name in names)
    assert len(names) == 272
    assert elements == 134_515_008
