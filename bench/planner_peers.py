"""Other planners, asked the question of ``accuracy.py``: how many KV tokens does an engine get on this card?

Only those that name a capacity can answer: kvfit and modelinfo. Both look at the weights' headers, so a model folder is
made whose ``model.safetensors`` has every tensor's name, shape and type and a hole for its data (no disk is used).
kvfit asks the hub and nothing else: a server on the loopback address stands in for the hub. Neither knows quantised
layouts from a config alone, so they are asked about 16-bit models.

    python -m venv peers && peers/bin/pip install kvfit modelinfo-cli
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onebudget.units import GIB

SECONDS = 60
MODELINFO_CARDS = (("H100", 80), ("H200", 141), ("B200", 192))
_TORCH_TO_SAFETENSORS = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_RUN_KVFIT = "import sys, kvfit.hf, kvfit.cli; kvfit.hf.HF_BASE = sys.argv.pop(1); sys.exit(kvfit.cli.main())"


@dataclass(frozen=True, slots=True)
class Question:
    """One card's share of one model: ``total_bytes`` of the card, ``utilization`` the share the engine may use."""

    config: dict[str, Any]
    total_bytes: int
    utilization: float
    tp: int
    max_model_len: int


@dataclass
class Peers:
    """Asks the peers installed in ``bin_folder``. A peer that fails, refuses or is not there answers None."""

    bin_folder: Path
    _folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)
    _made: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        handler = partial(Hub, root=Path(self._folder.name))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._folder.cleanup()

    def answers(self, question: Question) -> dict[str, int | None]:
        """KV tokens by peer."""
        name = self._model(question.config)
        return {"kvfit": self._kvfit(name, question), "modelinfo": self._modelinfo(name, question)}

    def _model(self, config: dict[str, Any]) -> str:
        text = json.dumps(config, sort_keys=True)
        if text not in self._made:
            name = f"peers/model-{len(self._made)}"
            write_model(Path(self._folder.name) / name, config)
            self._made[text] = name
        return self._made[text]

    def _kvfit(self, name: str, question: Question) -> int | None:
        hub = f"http://127.0.0.1:{self._server.server_port}"
        answer = self._run(
            "python", "-c", _RUN_KVFIT, hub, name, "--json",
            "--device-memory-gib", f"{question.total_bytes / GIB:.4f}", "--hardware", "h100",
            "--gpus", str(question.tp), "--tp", str(question.tp), "--utilization", str(question.utilization),
            "--context", str(question.max_model_len), "--allow-context-overflow",
        )  # fmt: skip
        try:
            return kvfit_tokens(json.loads(answer), question) if answer else None
        except (ValueError, KeyError, TypeError):
            return None

    def _modelinfo(self, name: str, question: Question) -> int | None:
        file = Path(self._folder.name) / name / "model.safetensors"
        # It takes cards from its own table only, so the share is scaled to the same bytes of the next larger one.
        usable_gib = question.utilization * question.total_bytes / GIB
        card, card_gib = next(((name, gib) for name, gib in MODELINFO_CARDS if gib >= usable_gib), (None, 1))
        if card is None:
            return None
        answer = self._run(
            "modelinfo", str(file), "--vllm", "--gpu", f"{question.tp}x{card}" if question.tp > 1 else card,
            "--topology", "nvlink", "--gpu-util", f"{usable_gib / card_gib:.6f}",
        )  # fmt: skip
        found = re.search(r"~([\d,]+) Tokens", answer or "")
        return int(found.group(1).replace(",", "")) if found else None

    def _run(self, program: str, *arguments: str) -> str | None:
        command = [str(self.bin_folder / program), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout


def kvfit_tokens(document: dict[str, Any], question: Question) -> int:
    """Tokens in what it leaves after the weights; it names whole sequences itself."""
    layout = document["concurrency"]["best_any_fabric"]["layout"]
    left_gib = layout["budget_per_rank_gib"] - layout["weights_per_rank_gib"] - layout["fixed_cache_per_rank_gib"]
    return int(left_gib / layout["kv_per_sequence_per_rank_gib"] * question.max_model_len)


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """``config.json`` and a weights file that is all header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind, shape, nbytes in tensors(config):
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    folder.mkdir(parents=True)  # not before: a model that can't be built leaves nothing behind
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def tensors(config: dict[str, Any]) -> list[tuple[str, str, list[int], int]]:
    """Name, type, shape and bytes of every stored tensor, from the modelling code on meta."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    known = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known, dtype=torch.bfloat16)
    tied = {"lm_head.weight"} if getattr(known, "tie_word_embeddings", False) else set()
    return [
        (name, _TORCH_TO_SAFETENSORS[str(tensor.dtype)], list(tensor.shape), tensor.nbytes)
        for name, tensor in model.state_dict().items()
        if name not in tied
    ]


class Hub(SimpleHTTPRequestHandler):
    """The few answers of the hub that are asked for: metadata, whole small files, ranges of large ones."""

    def __init__(self, *arguments: Any, root: Path) -> None:
        self.root = root
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        found = re.match(r"(?:api/models/)?(?P<name>[^/]+/[^/]+)(?:/resolve/[^/]+/(?P<file>.+))?", path)
        folder = self.root / found["name"] if found else None
        if found is None or folder is None or not folder.is_dir():
            self.send_error(404)
        elif found["file"]:
            self._file(folder / found["file"])
        else:
            self._answer(json.dumps(metadata(found["name"], folder)).encode())

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        size = path.stat().st_size
        first, last = (int(asked[1]), int(asked[2])) if asked else (0, size - 1)
        with path.open("rb") as file:
            file.seek(first)
            content = file.read(min(last, size - 1) - first + 1)
        self._answer(content, f"bytes {first}-{last}/{size}" if asked else None)

    def _answer(self, content: bytes, content_range: str | None = None) -> None:
        self.send_response(206 if content_range else 200)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


def metadata(name: str, folder: Path) -> dict[str, Any]:
    files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(folder.iterdir())]
    return {"id": name, "modelId": name, "sha": "0" * 40, "siblings": files, "tags": [], "private": False}
