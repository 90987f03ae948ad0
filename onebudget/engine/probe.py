"""The profiling run: build a temporary engine, let its managers' dummies run, and sample what the device saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from onebudget.attention import backend_for
from onebudget.budget.estimation import why_estimation_is_off
from onebudget.budget.probe_load import dummy_lengths, limit_probe_pool, probe_pool, resolve_probe_config
from onebudget.budget.profile import ProfileResult
from onebudget.core import MAX_LOGPROBS, Request, SamplingParams
from onebudget.device.meter import StorageMeter
from onebudget.engine import logprobs
from onebudget.engine.assembly import build_executor, kv_cost
from onebudget.engine.encoder import dummy_output
from onebudget.engine.executor import Executor
from onebudget.engine.logprobs import kept_hidden_bytes, prompt_rows_at_once
from onebudget.engine.stages import Stages
from onebudget.errors import AllocationError, ModelError
from onebudget.models.facts import DTYPE_BYTES
from onebudget.units import ceil_div

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.engine.station import Station
    from onebudget.progress import Progress

DUMMY_TOKEN_ID = 1
# The costliest sampling there is: both filters sort the whole vocabulary.
_COSTLY_SAMPLING = SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, seed=0, ignore_eos=True)
_PROMPT_LOGPROBS = replace(_COSTLY_SAMPLING, prompt_logprobs=MAX_LOGPROBS)


def probe_batches(config: BudgetConfig, *, spread: bool = True) -> list[list[int]]:
    """Prompt lengths of the batches of fresh prompts the profile runs, each using ``max_num_tokens`` up.

    The first holds the longest prompts. The second, with ``spread``, divides the same tokens among ``max_batch_size``
    prompts, so that the largest step is also seen with the most rows to sample; steps behind a full cache show that
    too.
    """
    longest = dummy_lengths(
        max_num_tokens=config.max_num_tokens, net_max_seq_len=config.max_seq_len, max_batch_size=config.max_batch_size
    )
    rows = min(config.max_batch_size, config.max_num_tokens)
    if not spread or rows <= len(longest):
        return [longest]
    each, rest = divmod(sum(longest), rows)
    return [longest, [each + (row < rest) for row in range(rows)]]


def measure(station: Station, config: BudgetConfig, progress: Progress) -> tuple[ProfileResult, int]:
    """Profile the placed model on its device; returns the samples and the bytes lost to rounding outside them.

    Where estimation is off nothing runs, and the peak is what the device uses now. The device is as before when this
    returns or raises. ``BudgetError`` when the dummies don't fit.
    """
    device = station.device
    device.empty_cache()
    device.reset_peak()
    before = device.sample()
    model_bytes = before.alloc_live
    if why_estimation_is_off(config):
        used = before.total - before.free
        return ProfileResult.without_probe(model_bytes=model_bytes, device_used_bytes=used), used - model_bytes
    batches = probe_batches(config, spread=not full_cache_tells(station, config))
    encoded = dummy_output(station.encoder, StorageMeter(device))
    encoder_output_bytes = 0 if encoded is None else encoded.untyped_storage().nbytes()
    with _probe_executor(station, config, batches) as executor:
        with progress.stage("profile", len(batches)) as stage:
            for lengths in executor.kv.dummy_lengths():
                run_dummies(executor, lengths)
                stage.advance(1)
        peak_bytes = max(device.sample().alloc_peak, run_full_cache(executor, station))
        encoded = None
        executor.runner.scratch.start_anew()
        device.empty_cache()
        sample, allocated_bytes = device.sample(), executor.kv.allocated_bytes
        prompt_logits_bytes = _prompt_logits_bytes(station, config, executor, peak_bytes - sample.alloc_live)
    profile = ProfileResult(
        model_bytes=model_bytes,
        torch_peak_bytes=peak_bytes,
        torch_used_bytes=sample.alloc_live,
        device_used_bytes=sample.total - sample.free,
        allocated_bytes=allocated_bytes,
        encoder_output_bytes=encoder_output_bytes,
        prompt_logits_bytes=prompt_logits_bytes,
    )
    return profile, sample.total - sample.free - sample.alloc_live


def full_cache_tells(station: Station, config: BudgetConfig) -> bool:
    """Whether steps behind a full cache belong to the profile; too short requests have no room for them."""
    return backend_for(station.model.facts).profiles_full_cache and config.max_seq_len >= 4


def run_full_cache(executor: Executor, station: Station, *, keep_marks: bool = False) -> int:
    """Run the largest steps behind a full cache: of prompt pieces alone, of pieces beside generation, and of generation
    alone. Returns their peak without the scratch.

    Requests that generate beside prompt pieces need masks, and pieces behind a prefix need more than fresh prompts.
    Dummies pretend that their prefix is cached. Their scratch is a reserve of its own, so it is taken off step by step:
    it only grows at the beginning of a step. With ``keep_marks`` the device's high-water marks go on instead.
    """
    if not full_cache_tells(station, executor.config):
        return 0
    generating, pieces = _full_cache_dummies(executor.config)
    alone = _pieces(executor.config, executor.config.max_num_tokens, first_number=0, new_tokens=1)
    device, peak_bytes = station.device, 0
    with executor.plain_steps():
        for arriving in (alone, generating, pieces, []):
            for dummy in arriving:
                executor.submit(dummy)
            if executor.has_work:
                if not keep_marks:
                    device.reset_peak()
                _step(executor)
                peak_bytes = max(peak_bytes, device.sample().alloc_peak - executor.runner.scratch.held_bytes)
        while executor.has_work:
            _step(executor)
    return peak_bytes


def _full_cache_dummies(config: BudgetConfig) -> tuple[list[Request], list[Request]]:
    """Requests that generate in the second and third step, and those whose pieces join in the second.

    As few pieces as can use up the step's tokens leave the most seats to generation. One that generates is shorter, so
    that lengths differ and a mask is needed. In the third step all have reached ``max_seq_len``.
    """
    longest, rows = config.max_seq_len, min(config.max_batch_size, config.max_num_tokens)
    num_generating = rows - min(rows, ceil_div(config.max_num_tokens, max(1, longest - 2))) if longest >= 4 else 0
    generating = [_pretender(number, longest - 2 - (number == 0), 1, 3) for number in range(num_generating)]
    tokens = config.max_num_tokens - num_generating
    return generating, _pieces(config, tokens, first_number=num_generating, new_tokens=2)


def _pieces(config: BudgetConfig, tokens: int, *, first_number: int, new_tokens: int) -> list[Request]:
    """As few prompt pieces behind long prefixes as use ``tokens`` up; those of the free seats at most."""
    most = config.max_seq_len - 2
    pieces: list[Request] = []
    while most > 1 and tokens > 0 and first_number + len(pieces) < config.max_batch_size:
        size = min(tokens, most)
        pieces.append(_pretender(first_number + len(pieces), config.max_seq_len - 1, size, new_tokens))
        tokens -= size
    return pieces


def _pretender(number: int, prompt_tokens: int, computed_tokens: int, new_tokens: int) -> Request:
    """A dummy of which only the last ``computed_tokens`` of the prompt remain to be computed."""
    return Request(
        -1 - number,
        [DUMMY_TOKEN_ID] * prompt_tokens,
        replace(_COSTLY_SAMPLING, max_tokens=new_tokens),
        max_new_tokens=new_tokens,
        is_dummy=True,
        pretended_tokens=prompt_tokens - computed_tokens,
    )


def _prompt_logits_bytes(station: Station, config: BudgetConfig, executor: Executor, peak_bytes: int) -> int:
    """What log-probabilities of prompts need beyond ``peak_bytes``, the peak above what is live all the time.

    Rows of the vocabulary are seen with one short dummy. In the largest step they stand beside what its layers leave,
    after the peak inside the layers and before that of sampling, so often these two cover them.
    """
    rows = prompt_rows_at_once(config)
    if rows + 1 > max(map(max, probe_batches(config))):
        return 0  # a single row, and sampling one takes more
    station.device.reset_peak()
    run_dummies(executor, [rows + 1], _PROMPT_LOGPROBS)
    rows_bytes = station.device.peak_by_owner().get(logprobs.OWNER, 0)
    facts, element_bytes = station.model.facts, DTYPE_BYTES[station.model.dtype]
    return max(0, kept_hidden_bytes(config, facts.hidden_size, element_bytes) + rows_bytes - peak_bytes)


@contextmanager
def _probe_executor(station: Station, config: BudgetConfig, batches: Sequence[Sequence[int]]) -> Iterator[Executor]:
    free_bytes = station.device.free_bytes()
    largest = max((probe_pool(lengths, config) for lengths in batches), key=lambda pool: pool.blocks)
    needed = probe_pool(batches[0], config)
    cost = kv_cost(station.model.facts, station.model.dtype, config)
    pool = limit_probe_pool(replace(largest, dummy_blocks=needed.dummy_blocks), config, cost, free_bytes)
    blocks = station.ranks.minimum(pool.blocks)  # one rank's dummies must not wait where another's run
    settings = resolve_probe_config(config, pool, free_bytes=free_bytes).config
    awake = replace(station, stages=Stages(station.device))  # the probe's memory is gone before anything can sleep
    executor = build_executor(awake, settings, blocks, metered=True, probe_lengths=batches)
    try:
        yield executor
    finally:
        executor.shutdown()
        station.device.empty_cache()


def run_dummies(
    executor: Executor, lengths: Sequence[int], params: SamplingParams = _COSTLY_SAMPLING, *, new_tokens: int = 1
) -> None:
    """Serve one batch of dummy requests to the end.

    ``AllocationError`` when a step ran out of memory, ``RuntimeError`` with the message of any other failure.
    """
    for number, length in enumerate(lengths):
        dummy = Request(-1 - number, [DUMMY_TOKEN_ID] * length, params, max_new_tokens=new_tokens, is_dummy=True)
        executor.submit(dummy)
    with executor.plain_steps():
        while executor.has_work:
            _step(executor)


def _step(executor: Executor) -> None:
    failed = next((request for request in executor.step() if request.finish_reason == "error"), None)
    if failed is not None:
        if isinstance(executor.last_error, AllocationError | ModelError):
            raise executor.last_error
        raise RuntimeError(f"the profiling run failed: {failed.error}") from executor.last_error
