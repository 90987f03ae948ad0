"""A plan as the serving command that realises it: flags, variables, and an options file where an engine wants one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from onebudget.budget.ledger import Ledger
from onebudget.errors import BudgetError, ConfigError
from onebudget.planner.engine_flags import ENGINE_FLAGS, TRTLLM_OPTIONS, EngineFlags
from onebudget.planner.policies import policy_for
from onebudget.units import format_bytes

OPTIONS_FILE = "onebudget-options.yaml"
TARGETS = tuple(ENGINE_FLAGS)

_SAME_THING: tuple[Mapping[str, str], ...] = (
    {"onebudget": "max_seq_len", "vllm": "max_model_len", "sglang": "context_length", "trtllm": "max_seq_len",
     "llamacpp": "n_ctx"},
    {"onebudget": "max_batch_size", "vllm": "max_num_seqs", "sglang": "max_running_requests",
     "trtllm": "max_batch_size", "llamacpp": "n_seq_max"},
    {"onebudget": "max_num_tokens", "vllm": "max_num_batched_tokens", "sglang": "chunked_prefill_size",
     "trtllm": "max_num_tokens", "llamacpp": "n_ubatch"},
    {"onebudget": "tokens_per_block", "vllm": "block_size", "sglang": "page_size", "trtllm": "tokens_per_block"},
    {"onebudget": "kv_cache_dtype", "vllm": "kv_cache_dtype", "sglang": "kv_cache_dtype", "trtllm": "kv_cache_dtype"},
)  # fmt: skip
"""Names of one thing, by engine."""
_CACHE_WORDS: Mapping[str, Mapping[str, str]] = {
    "vllm": {"bf16": "auto", "fp16": "auto"},
    "sglang": {"bf16": "auto", "fp16": "auto", "fp8": "fp8_e4m3"},
    "trtllm": {"bf16": "auto", "fp16": "auto", "fp8_e4m3": "fp8"},
}
_START = {"vllm": ("vllm", "serve"), "sglang": ("python", "-m", "sglang.launch_server"), "trtllm": ("trtllm-serve",)}
_QUANTISED_AT_START = ("fp8", "awq", "gptq", "bitsandbytes", "mxfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedCommand:
    """A command for a shell: ``words`` of the program, ``environment`` before them, ``files`` it reads by name."""

    engine: str
    words: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The command as a shell takes it, an option a line."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        first, *rest = (shlex.join(group) for group in self.words)
        return " \\\n  ".join([" ".join([*variables, first]), *rest])

    def with_file(self, path: str) -> EmittedCommand:
        """The same command, reading its options from ``path``."""
        names = dict.fromkeys(self.files, path)
        words = tuple(tuple(names.get(word, word) for word in group) for group in self.words)
        return replace(self, words=words, files={names[name]: text for name, text in self.files.items()})

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"words": [word for group in self.words for word in group], "command": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the target engine is to be told."""

    model: str
    revision: str | None
    layout: Mapping[str, int]
    settings: Mapping[str, Any]
    weights_dtype: str | None
    notes: tuple[str, ...]


def emit(plan: Ledger | Mapping[str, Any], engine: str | None = None) -> EmittedCommand:
    """The command for ``engine`` (the plan's own when left out) that realises ``plan``: a ledger, or the document that
    ``plan --json`` prints.

    A plan of another engine is carried over by what it comes to: the bytes or tokens of its pool, lengths, batch
    limits. Raises ``BudgetError`` for a plan that does not fit, ``ConfigError`` for an engine without a command.
    """
    document = plan.to_dict() if isinstance(plan, Ledger) else plan
    ledger = plan if isinstance(plan, Ledger) else Ledger.from_dict(plan)
    target = _target(engine or ledger.engine)
    if not ledger.fits:
        short = format_bytes(ledger.shortfall_bytes)
        raise BudgetError(f"The plan does not fit: {short} are missing, so no command realises it.", ledger=ledger)
    asked = _asked(document, ledger, target)
    return _trtllm(asked) if target == "trtllm" else _by_flags(asked, ENGINE_FLAGS[target])


def _target(engine: str) -> str:
    name = policy_for(engine).name
    if name not in ENGINE_FLAGS:
        raise ConfigError.for_field("--for", engine, f"one of {', '.join(TARGETS)}")
    return name


def _asked(document: Mapping[str, Any], ledger: Ledger, target: str) -> _Asked:
    question = document.get("request") or {}
    given = dict(question.get("settings") or {})
    if question.get("kv_dtype") is not None:
        given.setdefault("kv_cache_dtype", question["kv_dtype"])
    settings, notes = _own(given, question, ledger), list[str]()
    if ledger.engine != target:
        settings, notes = _carried_over(given, ledger, target)
    word = settings.get("kv_cache_dtype")
    if word is not None:
        settings["kv_cache_dtype"] = _CACHE_WORDS[target].get(str(word), word)
    model = question.get("model") or ledger.model
    if not model:
        raise ConfigError("The plan does not say which model it is for, so no command can name it.", field="model")
    return _Asked(
        model=str(model), revision=question.get("revision"), layout=_layout(question), settings=settings,
        weights_dtype=question.get("weights_dtype"), notes=tuple(notes),
    )  # fmt: skip


def _layout(question: Mapping[str, Any]) -> dict[str, int]:
    return {"tp": 1, "pp": 1, "ep": 1, "dp": 1} | dict(question.get("layout") or {})


def _own(given: dict[str, Any], question: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    """The plan's settings; a plan without them still says which cap bound and how long a block is."""
    if question:
        return given
    known = policy_for(ledger.engine).known_settings
    found = {cap.name: cap.value for cap in ledger.caps if cap.binding and cap.name in known and cap.value is not None}
    return found | given


def _carried_over(given: Mapping[str, Any], ledger: Ledger, target: str) -> tuple[dict[str, Any], list[str]]:
    settings: dict[str, Any] = {}
    carried = set()
    for names in _SAME_THING:
        own, other = names.get(ledger.engine), names.get(target)
        if own is not None and other is not None and own in given:
            settings[other] = given[own]
            carried.add(own)
    pool = ledger.kv_cache
    if target == "vllm":
        settings["kv_cache_memory_bytes"] = pool.bytes
    else:
        settings["max_total_tokens" if target == "sglang" else "max_tokens"] = pool.tokens
    notes = [f"Planned for {ledger.engine}: {target} gets the same pool, {pool.tokens:,} tokens, as an absolute size."]
    left = sorted(set(given) - carried)
    if left:
        notes.append(f"{target} has nothing like {', '.join(left)} of {ledger.engine}.")
    return settings, notes


def _by_flags(asked: _Asked, flags: EngineFlags) -> EmittedCommand:
    notes = list(asked.notes)
    head = [*_START[flags.engine], *([asked.model] if flags.engine == "vllm" else ["--model-path", asked.model])]
    groups: list[tuple[str, ...]] = [tuple(head), *_revision(asked), *_ranks(asked, flags, notes)]
    groups += _quantisation(asked, flags, notes)
    environment: dict[str, str] = {}
    for name, value in asked.settings.items():
        flag = flags.flag_for(name)
        if flag is None:
            environment[name] = str(int(value)) if isinstance(value, bool) else _word(value)
        else:
            groups += _option(flags, name, flag, value)
    return EmittedCommand(
        engine=flags.engine, words=tuple(groups), environment=environment, notes=tuple(notes)
    )  # fmt: skip


def _option(flags: EngineFlags, name: str, flag: str, value: Any) -> list[tuple[str, ...]]:
    if name in flags.switches:
        if value in (True, "true", "True", 1):
            return [(flag,)]
        return [("--no-" + flag[2:],)] if flags.engine == "vllm" else []
    if name in flags.lists:
        return [(flag, *(str(each) for each in value))]
    return [(flag, _word(value))]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value)


def _revision(asked: _Asked) -> list[tuple[str, ...]]:
    return [("--revision", asked.revision)] if asked.revision else []


def _ranks(asked: _Asked, flags: EngineFlags, notes: list[str]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    for name, count in asked.layout.items():
        flag = flags.flag_for(name)
        if count > 1 and flag is not None:
            groups.append((flag, str(count)))
    if flags.engine == "vllm" and asked.layout["ep"] > 1:
        groups.append(("--enable-expert-parallel",))
        everywhere = asked.layout["tp"] * asked.layout["dp"]
        if asked.layout["ep"] != everywhere:
            notes.append(f"vLLM divides experts among all {everywhere} ranks, not among {asked.layout['ep']}.")
    if flags.engine == "trtllm" and asked.layout["dp"] > 1:
        notes.append(f"Start {asked.layout['dp']} such servers: dp is not one command's.")
    return groups


def _quantisation(asked: _Asked, flags: EngineFlags, notes: list[str]) -> list[tuple[str, ...]]:
    """A format that the engine makes when it loads, or reads from the checkpoint by name."""
    kind, flag = asked.weights_dtype, flags.flag_for("weights_dtype")
    if kind is None:
        return []
    if flag is not None and kind.startswith(_QUANTISED_AT_START):
        return [(flag, kind)]
    if kind == "fp32" and flag is not None:
        return [("--dtype", "float32")]
    notes.append(f"The checkpoint must hold {kind} weights: no option makes them.")
    return []


def _trtllm(asked: _Asked) -> EmittedCommand:
    """Batch limits as flags; what the KV cache is like in the options file."""
    import yaml

    flags, notes = ENGINE_FLAGS["trtllm"], list(asked.notes)
    groups: list[tuple[str, ...]] = [(*_START["trtllm"], asked.model), *_revision(asked)]
    groups += [*_ranks(asked, flags, notes), *_quantisation(asked, flags, notes)]
    keys = {place: key for key, place in TRTLLM_OPTIONS.items() if key.startswith("kv_cache_config.")}
    cache: dict[str, Any] = {}
    for name, value in asked.settings.items():
        if name == "kv_cache_manager":
            cache["use_kv_cache_manager_v2"] = value == "v2"
        elif name in keys:
            cache[keys[name].partition(".")[2]] = value
        else:
            groups += _option(flags, name, str(flags.flag_for(name)), value)
    if not cache:
        return EmittedCommand(engine="trtllm", words=tuple(groups), notes=tuple(notes))
    text = yaml.safe_dump({"kv_cache_config": cache}, sort_keys=False)
    groups.append(("--extra_llm_api_options", OPTIONS_FILE))
    return EmittedCommand(engine="trtllm", words=tuple(groups), files={OPTIONS_FILE: text}, notes=tuple(notes))
