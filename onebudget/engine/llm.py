"""The public front: prompts in, answers out, inside the budget."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from onebudget.config import DEFAULT_HOST_MEMORY_BYTES, KNOBS, UNBUILT_KNOBS, BudgetConfig, resolve_environment
from onebudget.core import Request, RequestOutput, SamplingParams
from onebudget.device import open_device
from onebudget.engine.admission import admitted_new_tokens, refuse_what_never_fits
from onebudget.engine.build import Engine, build_engine
from onebudget.engine.dealing import Dealt, EveryRank
from onebudget.engine.measured import measured_terms
from onebudget.engine.memory_report import memory_report
from onebudget.engine.prompts import Message, Prompt, as_prompts, tokenize
from onebudget.engine.ranks import RankGroup, open_ranks
from onebudget.engine.session import Session, StreamChunk, Throughput
from onebudget.engine.sleep import SleepReport
from onebudget.engine.text import TextBuilder
from onebudget.errors import ConfigError, RequestError, StateError
from onebudget.models.files import resolve_model
from onebudget.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from onebudget.budget.ledger import Ledger
    from onebudget.device.base import Device
    from onebudget.engine.executor import Executor

logger = logging.getLogger(__name__)

__all__ = ["LLM", "StreamChunk"]


class LLM:
    """A model served inside one memory budget.

    ``model``: a folder, a hub id, or None for the demo model. ``device``: ``"host"`` with ``device_memory`` bytes of
    declared capacity, or ``"cuda[:N]"``. ``strict_memory`` keeps the meter on in every step, so that a step that would
    not fit on the card fails as it would there. All other keywords are the knobs of ``BudgetConfig``.

    Raises ``ConfigError`` for a bad knob, ``ModelError`` for unusable files, and ``BudgetError`` carrying the whole
    ledger when the model can't be served within the memory. Not thread-safe.

    Under torchrun each process makes one, with the same arguments, and holds its part of the model; all of them make
    the same calls, and the prompts of rank 0 are what is served. Only knobs that say how much memory there is may
    differ. A failure of one rank is raised by all. With ``attention_dp`` the requests of a call are dealt to the ranks:
    each has all of attention and the cache of its own requests, and only the layers behind attention are divided.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "host",
        strict_memory: bool = False,
        attention_dp: bool = False,
        progress: Progress | None = None,
        revision: str | None = None,
        offline: bool = False,
        **knobs: Any,
    ) -> None:
        self._progress = progress or SilentProgress()
        self._engine: Engine | None = None
        self.interrupted = False
        self._ranks = open_ranks(device)
        with self._ranks.guard("start"):
            config = _resolved(knobs)
            _refuse_unbuilt(config)
            if device == "host" and config.device_memory is None:
                config = config.replace(device_memory=DEFAULT_HOST_MEMORY_BYTES)
            folder = _model_folder(model, revision, offline)
            opened = _open(device, config, self._ranks)
            self._engine = build_engine(
                folder, config, opened, self._progress,
                strict_memory=strict_memory, ranks=self._ranks, attention_dp=attention_dp,
            )  # fmt: skip
        self._engine.executor.set_listener(self._on_token)
        self._engine.executor.set_reporter(partial(memory_report, self._engine))
        self._dealing = Dealt(self._ranks) if attention_dp else EveryRank()
        self._sessions: dict[int, Session] = {}
        self._next_id = 0
        self._throughput = Throughput()

    # -- facts ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The running engine; ``StateError`` after ``close``."""
        if self._engine is None:
            raise StateError("this LLM is closed")
        return self._engine

    @property
    def budget(self) -> Ledger:
        """The ledger the engine runs inside."""
        return self.engine.ledger

    @property
    def config(self) -> BudgetConfig:
        return self.engine.config

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The model's own generation defaults: greedy unless its generation config samples."""
        defaults = self.engine.generation_defaults
        if not getattr(defaults, "do_sample", False):
            return SamplingParams(temperature=0.0)
        return SamplingParams(
            temperature=_given(defaults, "temperature", 1.0),
            top_p=_given(defaults, "top_p", 1.0),
            top_k=_given(defaults, "top_k", 0),
        )

    # -- generation -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_on_interrupt: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts (texts, token ids or chat messages), in their order.

        A request that can't run comes back with ``finish_reason="refused"`` and the reason; the others go on. Without
        ``sampling_params`` the model's generation defaults apply. On Ctrl-C everything unfinished is cancelled; then
        ``KeyboardInterrupt`` is raised, or with ``return_on_interrupt`` what was finished is returned and
        ``interrupted`` set.
        """
        sessions, own = self._submit_all(prompts, sampling_params, streaming=False)
        try:
            with self._progress.stage("generate", len(own)) as stage:
                stage.advance(sum(session.request.finished for session in own))
                with closing(self._run(own)) as steps:
                    for finished in steps:
                        stage.advance(len(finished))
        except KeyboardInterrupt:
            self.interrupted = True
            # The interrupt may have come before the first step.
            self._end(own, self.engine.executor, self.tokenizer)
            if not return_on_interrupt:
                raise
        outputs = self._dealing.outputs(sessions, own)
        mine = {session.request.id for session in own}
        self._throughput.add_elsewhere(output for output in outputs if output.request_id not in mine)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several through the model's chat template."""
        return self.generate(messages, sampling_params)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Like ``generate``, but yields text as it settles, and the output with the last chunk of each request.

        Leaving the loop early cancels what is unfinished. Several streams, and calls of ``generate`` between their
        chunks, share the steps. ``ConfigError`` with ``attention_dp``.
        """
        if isinstance(self._dealing, Dealt):
            raise ConfigError(
                "stream() gives text while this process computes it, and with attention_dp other ranks compute a part: "
                "use generate()."
            )
        sessions, _ = self._submit_all(prompts, sampling_params, streaming=True)
        for _ in self._run(sessions):
            yield from (session.chunk() for session in sessions if session.has_news)
        yield from (session.chunk() for session in sessions if session.has_news)

    def abort(self, request_id: int) -> None:
        """Cancel one request between two steps; unknown or finished ids are ignored."""
        session = self._sessions.get(request_id)
        if session is not None:
            self.engine.executor.cancel(session.request)

    # -- sleep ------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None) -> SleepReport:
        """Let memory leave the device between two requests; the KV cache loses its contents.

        ``level`` 1 keeps the weights in host memory, 2 drops them too, to be read from their files again. ``tags``
        chooses among ``model``, ``kv_cache`` and ``workspace``; None means all. The report says what came free and who
        still holds what. Needs ``enable_sleep=True``; ``StateError`` while requests are running.
        """
        return self.engine.sleeper.sleep(level, tags)

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Bring back what sleeps, all or by tag, at the same addresses and with the same weights.

        ``AllocationError`` with the numbers when the device has no room now; everything sleeps on then, and ``wake``
        can be tried again.
        """
        self.engine.sleeper.wake(tags)

    # -- reports ----------------------------------------------------------------------------------------------

    def memory_report(self) -> dict[str, Any]:
        """The ledger's lines beside what is held now and was used at the peak, with what differs by more than 5 %
        flagged; KV blocks per attention window, the device's pool, and the counters."""
        return memory_report(self.engine)

    def run_report(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The JSON document of ``onebudget run``: the ledger, what was measured, the requests, the counters."""
        return {
            **self.budget.to_dict(),
            "dtype": self.engine.station.model.dtype,
            "measured": measured_terms(self.engine),
            "requests": [output.to_dict() for output in outputs],
            "throughput": self._throughput.to_dict(),
            "counters": self.engine.executor.counters.to_dict(),
        }

    # -- end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything; requests still inside are cancelled. Safe to call again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _run(self, sessions: list[Session]) -> Generator[list[Request], None, None]:
        """Step until all of ``sessions`` ended, and those of other ranks; whatever is left when the caller stops early
        is cancelled."""
        executor, tokenizer = self.engine.executor, self.tokenizer
        started = time.perf_counter()
        try:
            with self._ranks.hold_interrupts():
                while self._dealing.unfinished(sessions):
                    self._ranks.begin_step(executor.digest)
                    with self._ranks.guard("generate"):
                        finished = executor.step()
                    yield [self._sessions[r.id].settle(tokenizer) for r in finished if r.id in self._sessions]
        finally:
            self._end(sessions, executor, tokenizer)
            self._throughput.add(time.perf_counter() - started, sessions)

    def _end(self, sessions: list[Session], executor: Executor, tokenizer: Any) -> None:
        """Cancel what is unfinished, write the texts, forget the sessions. Safe to call again, and after ``close``."""
        if self._engine is not None and not all(session.request.finished for session in sessions):
            executor.drain()
        for session in sessions:
            executor.cancel(session.request)
            session.settle(tokenizer)
            self._sessions.pop(session.request.id, None)

    def _on_token(self, request: Request) -> None:
        if request.id in self._sessions:
            self._sessions[request.id].on_token()

    def _submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        streaming: bool,
    ) -> tuple[list[Session], list[Session]]:
        """Sessions of all prompts, and those among them that this rank computes, which are submitted."""
        self.interrupted = False
        self.engine.sleeper.require_awake()
        prompts, sampling_params = self._ranks.await_work((prompts, sampling_params))
        listed = as_prompts(prompts)
        params = self._params_of(sampling_params, len(listed))
        sessions = [self._admit(prompt, wanted, streaming) for prompt, wanted in zip(listed, params, strict=True)]
        own = self._dealing.own(sessions)
        for session in own:
            if not session.request.finished:
                self._sessions[session.request.id] = session
                self.engine.executor.submit(session.request)
        return sessions, own

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.default_sampling_params
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise ConfigError(f"{count} prompts came with {len(given)} sampling_params: give one for all, or one each.")
        return given

    def _admit(self, prompt: Prompt, params: SamplingParams, streaming: bool) -> Session:
        """A session whose request can run, or has ended as refused."""
        executor = self.engine.executor
        end = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.engine.end_token_ids)
        request = Request(self._next_id, [], params, max_new_tokens=0, end_token_ids=end)
        self._next_id += 1
        builder = TextBuilder(self.tokenizer, params.stop) if streaming or params.stop else None
        session = Session(request, builder)
        try:
            request.prompt, request.prompt_token_ids = tokenize(self.tokenizer, prompt)
            request.max_new_tokens = admitted_new_tokens(
                request.prompt_token_ids,
                params,
                config=self.config,
                vocab_size=self.engine.station.model.facts.vocab_size,
            )
            refuse_what_never_fits(request, executor.resources.block_budgets(request), self.config)
        except RequestError as refused:
            request.finish("refused", str(refused))
        return session


def _resolved(knobs: Mapping[str, Any]) -> BudgetConfig:
    """The knobs as given, and what the environment sets beside them."""
    resolved = resolve_environment(BudgetConfig(**knobs), os.environ)
    for adjustment in resolved.adjustments:
        logger.info("%s", adjustment)
    return resolved.config


def _refuse_unbuilt(config: BudgetConfig) -> None:
    """A knob that the derivation knows but this engine does not act on yet must not look as if it did."""
    unbuilt = sorted(name for name in config.given & UNBUILT_KNOBS if getattr(config, name) != KNOBS[name].default)
    if unbuilt:
        raise ConfigError(
            f"{', '.join(unbuilt)}: this engine does not act on that yet. Leave it out.", field=unbuilt[0]
        )


def _given(defaults: object, name: str, otherwise: Any) -> Any:
    value = getattr(defaults, name, None)
    return otherwise if value is None else value


def _model_folder(model: str | Path | None, revision: str | None, offline: bool) -> Path:
    if model is None:
        from onebudget.models.demo import ensure_demo_model

        return ensure_demo_model(offline=offline)
    return resolve_model(model, revision=revision, offline=offline)


def _open(device: str, config: BudgetConfig, ranks: RankGroup) -> Device:
    if device == "cuda" and ranks.shared:
        device = f"cuda:{ranks.local_rank}"
    if device == "host":
        return open_device("host", capacity_bytes=config.device_memory or DEFAULT_HOST_MEMORY_BYTES)
    if config.device_memory is not None:
        raise ConfigError(
            f"device_memory declares the capacity of the host device; {device} has its own. Leave it out."
        )
    return open_device(device)
