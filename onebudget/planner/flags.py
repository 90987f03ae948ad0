"""A serving command as its user typed it, read as a plan's question: engine, model, layout, settings."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onebudget.errors import ConfigError
from onebudget.planner.engine_flags import ENGINE_FLAGS, LAYOUT, TRTLLM_OPTIONS, WORDS, EngineFlags
from onebudget.planner.policies import policy_for
from onebudget.planner.policies.formats import weight_format
from onebudget.planner.request import plain_value

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_FACTORS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30, "t": 10**12, "T": 2**40}
_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm", "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm", "sglang.launch_server": "sglang",
    "tensorrt_llm.commands.serve": "trtllm",
}  # fmt: skip
_PROGRAMS = {"vllm": "vllm", "sglang": "sglang", "trtllm-serve": "trtllm"}
_NEAR = 0.8
"""How alike a flag nobody knows must be to one that is known before it counts as misspelt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCommand:
    """What a serving command says about memory. ``tp`` and others None: not given. ``notes``: what was left aside."""

    engine: str
    model: str
    tp: int | None = None
    pp: int = 1
    ep: int = 1
    dp: int = 1
    weights_dtype: str | None = None
    revision: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``make_request``, the model and the notes left out."""
        names = ("engine", "tp", "pp", "ep", "dp", "weights_dtype", "revision", "settings")
        return {name: getattr(self, name) for name in names}


def read_command(text: str | Sequence[str]) -> ServeCommand:
    """Read ``vllm serve …``, ``python -m vllm.entrypoints…``, ``python -m sglang.launch_server …``, ``sglang serve …``
    or ``trtllm-serve …``, quoted as for a shell, with variables before it.

    Options that size nothing are passed over. Raises ``ConfigError`` for a misspelt option, with near matches, for an
    option without its value, and for a command of no known engine.
    """
    words = _split(text) if isinstance(text, str) else list(text)
    variables, words = _variables(words)
    engine, rest = _engine(words)
    reader = _Reader(ENGINE_FLAGS[engine])
    reader.read(rest)
    reader.read_variables(variables)
    return reader.command()


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"The command is not quoted as a shell wants it: {error}.", field="--from-flags") from error


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Assignments before the command, and the command."""
    if words and words[0] == "env":
        words = words[1:]
    found: dict[str, str] = {}
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, value = words[0].partition("=")
        found[name], words = value, words[1:]
    return found, words


def _engine(words: list[str]) -> tuple[str, list[str]]:
    program = Path(words[0]).name if words else ""
    if program in _PROGRAMS:
        rest = words[2:] if words[1:2] == ["serve"] else words[1:]
        return _PROGRAMS[program], rest
    if program.startswith("python") and words[1:2] == ["-m"] and words[2:3] and words[2] in _MODULES:
        return _MODULES[words[2]], words[4:] if words[3:4] == ["serve"] else words[3:]
    named = words[2] if program.startswith("python") and len(words) > 2 else program
    near = difflib.get_close_matches(named, [*_PROGRAMS, *_MODULES], n=2)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"{named!r} starts no engine that is known.{hint} A command begins with vllm serve, python -m "
        "vllm.entrypoints.openai.api_server, python -m sglang.launch_server, sglang serve or trtllm-serve.",
        field="--from-flags",
        value=named,
    )


class _Reader:
    """Options of one command, gathered by the place they belong to."""

    def __init__(self, flags: EngineFlags) -> None:
        self.flags = flags
        self.found: dict[str, Any] = {}
        self.notes: list[str] = []

    def read(self, words: list[str]) -> None:
        at = 0
        while at < len(words):
            word, at = words[at], at + 1
            if not word.startswith("-"):
                self._take_model(word)
                continue
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            at = self._option(name, values, words, at)

    def read_variables(self, variables: Mapping[str, str]) -> None:
        known = policy_for(self.flags.engine).known_settings
        for name, value in variables.items():
            if name in known:
                self.found[name] = _value(value)
            elif name.startswith(("VLLM_", "SGLANG_", "TRTLLM_")):
                self.notes.append(f"The variable {name} sizes nothing that is modelled.")

    def _option(self, written: str, values: list[str], words: list[str], at: int) -> int:
        """Take one option and what belongs to it; returns where the next one begins."""
        name = written.lstrip("-").replace("-", "_")
        base, dot, key = name.partition(".")
        if dot and base in self.flags.places:
            value, at = self._one_value(written, values, words, at)
            self.found.setdefault(self.flags.places[base], {})[key] = _value(value)
            return at
        if name.startswith("no_") and name[3:] in self.flags.switches:
            self.found[self.flags.places[name[3:]]] = False
            return at
        if name in self.flags.switches:
            self.found[self.flags.places[name]] = _switch(written, values[0]) if values else True
            return at
        if name in self.flags.lists:
            while at < len(words) and not words[at].startswith("-"):
                values, at = [*values, words[at]], at + 1
            self.found[self.flags.places[name]] = _list(written, values)
            return at
        if name in self.flags.places:
            value, at = self._one_value(written, values, words, at)
            self.found[self.flags.places[name]] = value if self.flags.places[name] in WORDS else _value(value)
            return at
        return self._passed_over(written, name, values, words, at)

    def _passed_over(self, written: str, name: str, values: list[str], words: list[str], at: int) -> int:
        switches = {*self.flags.other_switches, *(f"no_{each}" for each in self.flags.other_switches)}
        if name in switches:
            return at
        if name not in self.flags.other_values:
            near = difflib.get_close_matches(name, self.flags.known, n=3, cutoff=_NEAR)
            if near:
                flags = " or ".join("--" + each.replace("_", self.flags.dash) for each in near)
                raise ConfigError(
                    f"{self.flags.engine} has no option {written}; did you mean {flags}?", field=written, value=written
                )
            self.notes.append(f"The option {written} is not known here, so it changed nothing.")
        while not values and at < len(words) and not words[at].startswith("--"):
            values, at = [words[at]], at + 1
        return at

    def _one_value(self, written: str, values: list[str], words: list[str], at: int) -> tuple[str, int]:
        if values:
            return values[0], at
        if at >= len(words) or words[at].startswith("--"):
            raise ConfigError(f"{written} needs a value.", field=written)
        return words[at], at + 1

    def _take_model(self, word: str) -> None:
        if "model" in self.found:
            raise ConfigError(
                f"The command names two models, {self.found['model']} and {word}: an option before {word} may take "
                "no value.",
                field="--from-flags",
                value=word,
            )
        self.found["model"] = word

    def command(self) -> ServeCommand:
        """Everything together, an options file included: what it says counts more than the options."""
        if "options_file" in self.found:
            self.found.update(read_options(Path(str(self.found.pop("options_file"))), self.notes))
        if not self.found.get("model"):
            raise ConfigError(f"The {self.flags.engine} command names no model.", field="--from-flags")
        sizes = {name: _ranks(name, self.found[name]) for name in LAYOUT if name in self.found}
        if self.found.get("expert_parallel") is True:
            sizes["ep"] = sizes.get("tp", 1) * sizes.get("dp", 1)
        return ServeCommand(
            engine=self.flags.engine, model=str(self.found["model"]), **{"tp": 1} | sizes,
            weights_dtype=self._weights_dtype(), revision=self.found.get("revision"), settings=self._settings(),
            notes=tuple(self.notes),
        )  # fmt: skip

    def _settings(self) -> dict[str, object]:
        settings = {name: value for name, value in self.found.items() if name not in (*LAYOUT, *WORDS)}
        length = settings.get("max_model_len")
        if length in (-1, "auto"):
            del settings["max_model_len"]
            self.notes.append("The length that fits is chosen when the engine starts; the plan takes the model's own.")
        return settings

    def _weights_dtype(self) -> str | None:
        """The format on the card: a quantisation that sizes weights, or 32 bits where they are asked for."""
        given = self.found.get("weights_dtype")
        if given is not None:
            try:
                weight_format(str(given), None)
            except ConfigError:
                self.notes.append(f"The quantisation {given} is taken from the checkpoint.")
            else:
                return str(given)
        return "fp32" if str(self.found.get("dtype")) in ("float32", "float") else None


def read_options(path: Path, notes: list[str]) -> dict[str, Any]:
    """What an options file of TensorRT-LLM says, by place. ``ConfigError`` for one that can't be read."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"The options file {path} can't be read: {' '.join(str(error).split())}.", field=str(path)
        ) from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"The options file {path} holds no settings: it must be a mapping.", field=str(path))
    return options_from(document, notes)


def options_from(document: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The same from a mapping that was read already. Keys that size nothing are named in ``notes``."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if name == "kv_cache_config" and isinstance(value, Mapping):
            flat |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            flat[str(name)] = value
    found: dict[str, Any] = {}
    for key, value in flat.items():
        if key in TRTLLM_OPTIONS:
            place = TRTLLM_OPTIONS[key]
            if place != "kv_cache_manager":
                found[place] = value
            elif value != "auto":
                found[place] = "v2" if value else "v1"
            continue
        near = difflib.get_close_matches(key, TRTLLM_OPTIONS, n=2, cutoff=_NEAR)
        if near and near[0] != key:
            raise ConfigError(f"trtllm has no option {key}; did you mean {' or '.join(near)}?", field=key, value=value)
        notes.append(f"The option {key} is not known here, so it changed nothing.")
    return found


def _value(text: str) -> object:
    """A word as a value; ``8k`` and ``20G`` are numbers, as engines read them."""
    match = _NUMBER.fullmatch(text)
    if match is not None:
        whole, _, decimals = match[1].partition(".")
        return int(whole + decimals) * _FACTORS[match[2]] // 10 ** len(decimals)
    return plain_value(text)


def _list(written: str, values: Sequence[str]) -> list[object]:
    words = [word for value in values for word in value.strip("[]").replace(",", " ").split()]
    if not words:
        raise ConfigError(f"{written} needs at least one value.", field=written)
    return [_value(word) for word in words]


def _switch(written: str, text: str) -> bool:
    value = plain_value(text)
    if isinstance(value, bool):
        return value
    raise ConfigError.for_field(written, text, "true or false")


def _ranks(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError.for_field(name, value, "a whole number of at least 1")
