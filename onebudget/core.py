"""Requests and batches: the words scheduler, managers and engine share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from numbers import Real
from typing import Literal, TypeGuard

from onebudget.errors import ConfigError

FinishReason = Literal["stop", "length", "refused", "cancelled", "error"]
MAX_LOGPROBS = 20
"""Most alternatives per token that log-probabilities are given for."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen.

    ``temperature=0`` is greedy. ``top_k=0`` and ``top_p=1`` switch those filters off. The same ``seed``
    draws the same tokens whatever else runs in the batch. ``stop`` texts end the output before the text;
    ``stop_token_ids`` end it like the model's own end tokens. ``min_tokens`` bars end tokens until that
    many tokens exist.

    Penalties look at the tokens of prompt and answer. ``repetition_penalty`` divides positive logits of tokens that
    occurred and multiplies negative ones; ``presence_penalty`` is subtracted once from the logits of such tokens,
    ``frequency_penalty`` as often as they occurred. The first ``prompt_ignore_length`` tokens of the prompt count for
    the repetition penalty only; the prompt's whole length makes presence and frequency look at the answer alone.

    ``logprobs`` and ``prompt_logprobs``: log-probabilities of each token of answer and prompt and of that many
    likeliest ones, of the model itself, before penalties and temperature.

    None for a penalty switches it off. Raises ``ConfigError`` naming field, value and allowed range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    prompt_ignore_length: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        for name, default in _DEFAULTS_OF_NONE.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name, usable, allowed in self._rules():
            if not usable:
                raise ConfigError.for_field(name, getattr(self, name), allowed)

    def _rules(self) -> list[tuple[str, bool, str]]:
        return [
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 1, "an integer of at least 1"),
            ("temperature", _is_number(self.temperature) and self.temperature >= 0, "0 or more"),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", _is_int(self.top_k) and self.top_k >= 0, "0 (off) or a positive integer"),
            ("seed", self.seed is None or _is_int(self.seed), "an integer or None"),
            ("stop", _all(self.stop, lambda text: isinstance(text, str) and text != ""), "non-empty texts"),
            ("stop_token_ids", _all(self.stop_token_ids, _is_token), "token ids"),
            ("min_tokens", _is_int(self.min_tokens) and self.min_tokens >= 0, "0 or a positive integer"),
            ("repetition_penalty", _is_number(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", _is_number(self.presence_penalty), "a number"),
            ("frequency_penalty", _is_number(self.frequency_penalty), "a number"),
            ("logprobs", _is_logprobs(self.logprobs), f"None or an integer from 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", _is_logprobs(self.prompt_logprobs), f"None or an integer from 0 to {MAX_LOGPROBS}"),
            ("n", _is_int(self.n) and self.n == 1, "1 (several answers to one prompt are not built yet)"),
            (
                "prompt_ignore_length",
                _is_int(self.prompt_ignore_length) and self.prompt_ignore_length >= 0,
                "0 or a positive integer",
            ),
        ]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether tokens must be counted for this request."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


_DEFAULTS_OF_NONE = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "prompt_ignore_length": 0,
}  # fmt: skip


def _as_tuple(values: object) -> object:
    """A collection as a tuple, None as an empty one; anything else stays what it is, for the rules to refuse."""
    return tuple(values or ()) if values is None or isinstance(values, Iterable) else values


def _all(values: object, usable: Callable[[object], bool]) -> bool:
    return isinstance(values, tuple) and all(map(usable, values))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: object) -> bool:
    return _is_int(value) and value >= 0


def _is_number(value: object) -> bool:
    """A finite number, of whatever library."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_logprobs(value: object) -> bool:
    return value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token where it stands, its ``rank`` among all (1: the likeliest), and the likeliest
    tokens there as ``(token id, log-probability)``."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, object]:
        return {
            "token_id": self.token_id,
            "logprob": _finite(self.logprob),
            "rank": self.rank,
            "top": [{"token_id": token, "logprob": _finite(logprob)} for token, logprob in self.top],
        }


def _finite(logprob: float) -> float | None:
    """JSON knows no infinity: None for a token that the model itself rules out."""
    return logprob if math.isfinite(logprob) else None


class RequestState(IntEnum):
    """Life of a request; later states are greater. A paused request goes back to ``WAITING``.

    ``TO_COMPLETE``: the token that surely ends the request is computed and on its way to the host.
    """

    WAITING = 0
    CONTEXT = 1
    GENERATION = 2
    TO_COMPLETE = 3
    COMPLETE = 4


@dataclass(slots=True)
class Timings:
    """Seconds on the monotonic clock; ``None`` until the moment came."""

    submitted: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    finished: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - self.submitted, 6)

        return {"first_token_s": since(self.first_token), "total_s": since(self.finished)}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine.

    ``computed_tokens`` counts tokens whose K/V stand in the cache, as far as steps were launched; ``chunk_tokens`` is
    what the current step computes of the context. ``max_new_tokens`` is already limited by ``max_seq_len``.

    A paused request starts over: ``replayed_tokens`` of its answer are computed again as context. ``begun`` says
    whether the KV manager holds the sequence, ``suspended`` that it keeps it outside the device, ``released`` that the
    request ended and no manager holds anything of it.

    ``pending_tokens`` were sampled, but the host has not read them; the input of the next step is row
    ``pending_row`` of the tokens that the step before sampled. ``draft_tokens`` are computed beside the last token,
    ``rewind_tokens`` of them were rejected.
    """

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    prompt: str | None = None
    end_token_ids: frozenset[int] = frozenset()
    state: RequestState = RequestState.WAITING
    computed_tokens: int = 0
    chunk_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    timings: Timings = field(default_factory=Timings)
    is_dummy: bool = False
    pretended_tokens: int = 0
    adapter_id: int | None = None
    cache_salt: str | None = None
    media_digests: tuple[tuple[int, str], ...] = ()
    """Position in the prompt and digest of what stands there instead of text."""
    encoder_tokens: int | None = None
    arrival: float = 0.0
    """Seconds on the clock of whoever submits."""
    draft_tokens: list[int] = field(default_factory=list)
    rewind_tokens: int = 0
    replayed_tokens: int = 0
    reusable_estimate: int = 0
    """Tokens that admission expects to find in the cache."""
    begun: bool = False
    released: bool = False
    suspended: bool = False
    pauses: int = 0
    pending_tokens: int = 0
    pending_row: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def context_tokens(self) -> int:
        """Tokens to compute before the next one is sampled: the prompt, and after a pause the answer so far."""
        return len(self.prompt_token_ids) + self.replayed_tokens

    @property
    def context_token_ids(self) -> list[int]:
        """The tokens that ``context_tokens`` counts."""
        if not self.replayed_tokens:
            return self.prompt_token_ids
        return self.prompt_token_ids + self.output_token_ids[: self.replayed_tokens]

    @property
    def remaining_prompt_tokens(self) -> int:
        """Context that is still to be computed."""
        return max(0, self.context_tokens - self.computed_tokens)

    @property
    def is_last_chunk(self) -> bool:
        """Whether this step finishes the context, so that a token is sampled."""
        return self.computed_tokens + self.chunk_tokens >= len(self.prompt_token_ids) + self.replayed_tokens

    @property
    def is_first_chunk(self) -> bool:
        """Whether nothing of the sequence stands in the cache in its own name yet."""
        return not self.begun

    @property
    def finished(self) -> bool:
        return self.state is RequestState.COMPLETE

    @property
    def produced_tokens(self) -> int:
        """Tokens of the answer, those on their way to the host included."""
        return len(self.output_token_ids) + self.pending_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens this step computes."""
        if self.state is RequestState.GENERATION:
            return 1 + len(self.draft_tokens)
        return self.chunk_tokens

    def tokens_of_step(self) -> list[int]:
        """Token ids this step computes: a piece of the context, or the last sampled token and the drafts after it.

        A token that the host has not read stands there as 0.
        """
        if self.state is RequestState.GENERATION:
            last = self.output_token_ids[-1:] if self.pending_row is None else [0]
            return last + self.draft_tokens
        return self.context_token_ids[self.computed_tokens : self.computed_tokens + self.chunk_tokens]

    def pause(self) -> None:
        """Back among the waiting, to compute prompt and answer so far anew."""
        self.state = RequestState.WAITING
        self.computed_tokens = self.chunk_tokens = 0
        self.replayed_tokens = len(self.output_token_ids)
        self.draft_tokens = []
        self.rewind_tokens = 0
        self.begun = False
        self.pending_tokens, self.pending_row = 0, None

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.state = RequestState.COMPLETE
        self.finish_reason = reason
        self.error = error
        self.timings.finished = time.perf_counter()


@dataclass(slots=True)
class ScheduledBatch:
    """What one step computes: context chunks, last chunks, then generation.

    ``paused`` left the running requests to make room; ``encoder`` are requests whose encoder runs in this step.
    """

    context_chunking: list[Request] = field(default_factory=list)
    context_last: list[Request] = field(default_factory=list)
    generation: list[Request] = field(default_factory=list)
    paused: list[Request] = field(default_factory=list)
    encoder: list[Request] = field(default_factory=list)

    @property
    def context(self) -> list[Request]:
        return [*self.context_chunking, *self.context_last]

    @property
    def requests(self) -> list[Request]:
        return [*self.context_chunking, *self.context_last, *self.generation]

    @property
    def sampled(self) -> list[Request]:
        """Requests that get a token in this step, in the order of their rows."""
        return [*self.context_last, *self.generation]

    @property
    def size(self) -> int:
        return len(self.context_chunking) + len(self.context_last) + len(self.generation)

    @property
    def can_use_graph(self) -> bool:
        return not self.context_chunking and not self.context_last

    @property
    def context_tokens(self) -> int:
        if self.can_use_graph:
            return 0
        return sum([request.chunk_tokens for request in self.context])

    @property
    def tokens(self) -> int:
        return self.context_tokens + sum([1 + len(request.draft_tokens) for request in self.generation])

    def add(self, request: Request) -> None:
        if request.state is RequestState.GENERATION:
            self.generation.append(request)
        elif request.is_last_chunk:
            self.context_last.append(request)
        else:
            self.context_chunking.append(request)

    def rebin(self, context: list[Request] | None = None) -> None:
        """Split the context requests (those of the batch, or a new list) anew by whether this is their last chunk."""
        context = self.context if context is None else context
        self.context_chunking = [request for request in context if not request.is_last_chunk]
        self.context_last = [request for request in context if request.is_last_chunk]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's result. ``error`` is set when ``finish_reason`` is ``"refused"`` or ``"error"``.

    ``logprobs`` has an entry per token and ``prompt_logprobs`` one per prompt token, the first of them None because
    nothing stands before it; both are None unless asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    error: str | None
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @classmethod
    def of(cls, request: Request) -> RequestOutput:
        params, produced = request.params, len(request.output_token_ids)
        return cls(
            request.id,
            request.prompt,
            list(request.prompt_token_ids),
            request.text,
            list(request.output_token_ids),
            request.finish_reason,
            request.error,
            request.timings,
            None if params.logprobs is None else request.logprobs[:produced],
            None if params.prompt_logprobs is None else list(request.prompt_logprobs),
        )

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; log-probabilities only where they were asked for."""
        asked = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        logprobs = {
            name: [None if entry is None else entry.to_dict() for entry in entries]
            for name, entries in asked.items()
            if entries is not None
        }
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "timings": self.timings.to_dict(),
            **logprobs,
        }
