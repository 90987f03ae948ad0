"""What a plan is good for: the longest request, the most requests at once, and what keeps either from being more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from onebudget.budget.ledger import Answers, Ledger
from onebudget.errors import ConfigError
from onebudget.planner.question import LENGTH, SEATS

if TYPE_CHECKING:
    from onebudget.planner.question import Question

MOST_LENGTH = 2**24
"""Longer requests are of no interest, and a model that names no limit needs one."""
_LENGTH_STEP = 16
_FEW_TRIES = 8


def answers_of(question: Question, ledger: Ledger) -> Answers:
    """Answers for a plan that was just made; zeros where nothing fits."""
    length = longest_asked(question, ledger)
    largest, bound = largest_length(question, ledger)
    at = question.target_seq_len or length
    concurrency = concurrency_at(question, ledger, at)
    seats = _seats(question)
    whole = int(concurrency)
    wanted = question.target_concurrency
    at_target = None if wanted is None else length_for(question, wanted, largest)
    return Answers(
        max_seq_len=length,
        largest_seq_len=largest,
        seq_len_bound_by=bound,
        at_seq_len=at,
        concurrency=round(concurrency, 4),
        largest_concurrency=whole if seats is None else min(whole, seats),
        concurrency_bound_by=SEATS[question.engine] if seats is not None and seats <= whole else "kv_cache",
        target_concurrency=wanted,
        largest_seq_len_at_target=at_target,
        meets_target=meets_target(question, ledger),
        second_instance_free_bytes=_left_for_another(ledger),
    )


def meets_target(question: Question, ledger: Ledger) -> bool:
    """Whether the plan holds what was asked of it: a target, or else that it fits."""
    if not ledger.fits or (question.target_seq_len is None and question.target_concurrency is None):
        return ledger.fits
    length = question.target_seq_len or longest_asked(question, ledger)
    if length > (question.dims.max_len or MOST_LENGTH):
        return False
    wanted, seats = question.target_concurrency or 1, _seats(question)
    return concurrency_at(question, ledger, length) >= wanted and (seats is None or seats >= wanted)


def longest_asked(question: Question, ledger: Ledger) -> int:
    """``max_seq_len`` of the plan: what was set, or the engine's default for the model."""
    given = question.settings.get(LENGTH[question.engine])
    model = question.dims.max_len or MOST_LENGTH
    if question.engine == "llamacpp" and not _number(given):  # the tools may have chosen a shorter one
        return next((int(cap.value) for cap in ledger.caps if cap.name == "n_ctx" and cap.value), model)
    if question.engine == "onebudget":
        from onebudget.config import DEFAULT_MAX_SEQ_LEN

        return min(_number(given) or DEFAULT_MAX_SEQ_LEN, model)
    return _number(given) or model


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _seats(question: Question) -> int | None:
    """Most requests at once where that is a setting: given, or the default of our own engine."""
    given = _number(question.settings.get(SEATS[question.engine]))
    if given:
        return given
    if question.engine != "onebudget":
        return None
    from onebudget.config import KNOBS

    return int(KNOBS["max_batch_size"].default)


def at_length(question: Question, length: int) -> Ledger | None:
    """The plan with another longest request; None where the engine refuses that length."""
    try:
        return replace(question.with_settings(**{LENGTH[question.engine]: length}), advises=False).ledger()
    except ConfigError:
        return None


def _as_much_on_cards(ledger: Ledger, other: Ledger) -> bool:
    """Whether another plan keeps as many weights on the cards. llama.cpp makes any context fit by moving layers to the
    host, which is another plan."""
    return ledger.engine != "llamacpp" or other.term("weights").bytes >= ledger.term("weights").bytes


def concurrency_at(question: Question, ledger: Ledger, length: int) -> float:
    """Requests of ``length`` tokens that the cache holds at once. Where all layers attend to everything they share the
    plan's tokens; otherwise the engine says, asked with that as the longest request."""
    kv = ledger.kv_cache
    if not ledger.fits or length <= 0:
        return 0.0
    if length == longest_asked(question, ledger) and kv.max_concurrency_at_max_seq_len:
        return kv.max_concurrency_at_max_seq_len
    if question.engine == "onebudget" and not kv.groups:
        block = max(kv.tokens_per_block, 1)
        return kv.blocks / -(-length // block)
    other = at_length(question, length)
    if other is None or not other.fits or not _as_much_on_cards(ledger, other):
        return 0.0
    return other.kv_cache.max_concurrency_at_max_seq_len


def largest_length(question: Question, ledger: Ledger) -> tuple[int, str]:
    """The longest request that can be served, and what bounds it: ``model`` or ``kv_cache``."""
    limit = question.dims.max_len or MOST_LENGTH

    def holds(asked: Question) -> Callable[[int], bool]:
        def test(length: int) -> bool:
            other = at_length(asked, length)
            if other is None or not other.fits or not _as_much_on_cards(ledger, other):
                return False
            return other.kv_cache.max_concurrency_at_max_seq_len >= 1

        return test

    if question.engine != "onebudget" or question.quick:
        found = largest_that_holds(holds(question), limit)
    else:
        guess = largest_that_holds(holds(replace(question, quick=True)), limit)
        found = _near(holds(question), guess, limit) if guess else 0
    return found, "model" if found >= limit else "kv_cache"


def length_for(question: Question, wanted: int, largest: int) -> int:
    """The longest requests of which ``wanted`` are held at once, by closed form for our own engine."""
    seats = {SEATS[question.engine]: wanted} if question.engine == "onebudget" else {}
    asked = replace(question, quick=True).with_settings(**seats)

    def holds(length: int) -> bool:
        other = at_length(asked, length)
        return other is not None and other.fits and other.kv_cache.max_concurrency_at_max_seq_len >= wanted

    return largest_that_holds(holds, largest)


def largest_that_holds(holds: Callable[[int], bool], limit: int) -> int:
    """The largest length up to ``limit`` that holds, to whole blocks; 0 when none does."""
    if holds(limit):
        return limit
    low, high = 0, limit
    while high - low > _LENGTH_STEP:
        middle = (low + high) // 2 // _LENGTH_STEP * _LENGTH_STEP or _LENGTH_STEP
        if middle in (low, high):
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _near(holds: Callable[[int], bool], guess: int, limit: int) -> int:
    """The largest length that holds, looked for close to a good guess first."""
    if guess >= limit and holds(limit):
        return limit
    low, high, stride = 0, limit, max(guess // 256 // _LENGTH_STEP, 1) * _LENGTH_STEP
    at = min(guess, limit - 1) // _LENGTH_STEP * _LENGTH_STEP
    for _ in range(_FEW_TRIES):
        if at <= 0:
            break
        if holds(at):
            low, at = at, min(at + stride, limit)
        else:
            high, at = at, max(at - stride, low)
        stride *= 2
        if low and high < limit:
            break
    while high - low > _LENGTH_STEP:
        middle = (low + high) // 2 // _LENGTH_STEP * _LENGTH_STEP
        if middle <= low:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _left_for_another(ledger: Ledger) -> int:
    """What the fraction and the caps leave, less a context as large as this instance's."""
    left = ledger.unassigned_bytes + ledger.term("fraction_slack").bytes
    return max(0, left - ledger.term("context").bytes) if ledger.fits else 0
