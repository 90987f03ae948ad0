"""Lists of captured batch sizes ("buckets"): a batch is padded up to the next one. No torch.

Granularity is a memory-for-throughput knob: denser lists pad less and hit more often, and every entry keeps buffers
resident for good.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from onebudget.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = 128
STEPS = ("+64", "x2")
_FIRST = (1, 2, 4, *range(8, 129, 8))
_DENSE_END, _COARSE_FROM, _COARSE_STEP = 32, 128, 64
_ENCODER_TOKENS = (*(2**power for power in range(8)), *range(256, 3073, 256))
_ENCODER_LENGTHS = (*(2**power for power in range(7)), *range(128, 1025, 128))


def default_graph_batch_sizes(
    max_batch_size: int | None = None, *, padding: bool = True, step: str = "+64"
) -> list[int]:
    """The list to capture when nobody named one: ascending, ends with ``max_batch_size`` (128 when not given).

    With padding: 1, 2, 4, multiples of 8 up to 128, from there on ``step``: every 64th or doubling. Without padding
    only an exact size hits, so it is dense up to 31 and then doubles. Raises ``ConfigError``.
    """
    largest = _at_least("max_batch_size", max_batch_size or DEFAULT_MAX_BATCH_SIZE, 1)
    if step not in STEPS:
        raise ConfigError.for_field("step", step, " or ".join(map(repr, STEPS)))
    if not padding:
        doubled = (2**power for power in range(8, (largest - 1).bit_length()))
        return _up_to((*range(1, _DENSE_END), 32, 64, 128, *doubled), largest)
    return _up_to((*_FIRST, *_coarse(largest, step)), largest)


def _coarse(largest: int, step: str) -> Iterable[int]:
    if step == "+64":
        return range(_COARSE_FROM + _COARSE_STEP, largest + 1, _COARSE_STEP)
    return (_COARSE_FROM << power for power in range(1, largest.bit_length()))


def _up_to(sizes: Iterable[int], largest: int) -> list[int]:
    """What does not exceed ``largest``, ascending, with ``largest`` itself."""
    return sorted({size for size in sizes if size <= largest} | {largest})


def chosen_graph_batch_sizes(
    sizes: Sequence[int], *, max_batch_size: int = 0, draft_thresholds: Iterable[int] = ()
) -> list[int]:
    """A user's own list, sorted. ``max_batch_size`` must be 0 (taken from the list) or its largest entry.

    Batch sizes at which a draft schedule changes its length become entries too, as far as they are inside the list.
    Raises ``ConfigError``.
    """
    if not sizes:
        raise ConfigError.for_field("graph batch sizes", list(sizes), "a list with at least one batch size")
    own = {_at_least("graph batch sizes", size, 1) for size in sizes}
    largest = max(own)
    if max_batch_size not in (0, largest):
        allowed = f"0 or {largest}, the largest of the graph batch sizes"
        raise ConfigError.for_field("largest graph batch size", max_batch_size, allowed)
    return sorted(own | {size for size in draft_thresholds if 1 <= size <= largest})


def filter_graph_batch_sizes(
    sizes: Iterable[int], *, max_batch_size: int, max_num_tokens: int, tokens_per_request: int, padding: bool
) -> list[int]:
    """Entries that can run, ascending: at most ``max_batch_size`` requests and ``max_num_tokens`` tokens.

    ``tokens_per_request``: tokens that one request brings to a step, 1 + its draft tokens. Where entries are cut off
    and batches are padded, the largest batch that can run becomes the last entry.
    """
    per_request = _at_least("tokens_per_request", tokens_per_request, 1)
    return filter_buckets(sizes, min(max_batch_size, max_num_tokens // per_request), padding=padding)


def filter_buckets(sizes: Iterable[int], limit: int, *, padding: bool) -> list[int]:
    """The same rule for buckets of any kind (tokens, lengths) and their own limit."""
    if limit < 1:
        return []
    ascending = sorted(set(sizes))
    kept = ascending[: bisect_left(ascending, limit + 1)]
    if padding and len(kept) < len(ascending) and kept[-1:] != [limit]:
        logger.warning("buckets above %d can't run; %d is captured in place of %d", limit, limit, ascending[len(kept)])
        kept.append(limit)
    return kept


def resolve_graph_batch_sizes(sizes: Iterable[int], limit: int, *, pad_to_limit: bool) -> tuple[int, ...]:
    """Entries for a scheduler that never runs more than ``limit`` requests.

    With ``pad_to_limit`` the limit takes the place of what was above it.
    """
    ascending = sorted(set(sizes))
    kept = [size for size in ascending if size <= limit]
    if pad_to_limit and len(kept) < len(ascending) and limit > 0 and kept[-1:] != [limit]:
        kept.append(limit)
    return tuple(kept)


def default_encoder_token_sizes(max_num_tokens: int) -> list[int]:
    """Packed token counts for graphs of an encoder: doubling to 128, every 256th to 3072, then doubling from 4096."""
    return _encoder_sizes(_ENCODER_TOKENS, 4096, _at_least("max_num_tokens", max_num_tokens, 1))


def default_encoder_lengths(max_seq_len: int) -> list[int]:
    """Sequence lengths for graphs of an encoder: doubling to 64, every 128th to 1024, then doubling from 2048."""
    return _encoder_sizes(_ENCODER_LENGTHS, 2048, _at_least("max_seq_len", max_seq_len, 1))


def _encoder_sizes(first: Iterable[int], doubling_from: int, largest: int) -> list[int]:
    doubled = (doubling_from << power for power in range(largest.bit_length()))
    return _up_to((*first, *(size for size in doubled if size < largest)), largest)


def encoder_padding_allowed(live: int, padded: int) -> bool:
    """Whether padding encoder features from ``live`` to ``padded`` rows is worth it: at most one eighth more."""
    return (padded - live) * 8 <= live


def bucket_for(sizes: Sequence[int], live: int) -> int | None:
    """The smallest of the ascending ``sizes`` that holds ``live`` requests; None when there is none."""
    at = bisect_left(sizes, live)
    return sizes[at] if at < len(sizes) else None


def padded_tokens(sizes: Sequence[int], histogram: Mapping[int, float]) -> float:
    """Rows of padding that ``histogram`` (batch size -> weight) meets with the ascending list ``sizes``.

    Batches above the last entry run without a graph and are not padded.
    """
    return sum(weight * ((bucket_for(sizes, live) or live) - live) for live, weight in histogram.items())


def padded_share(sizes: Sequence[int], histogram: Mapping[int, float]) -> float:
    """Padding as a share of all rows that graphs compute; 0 when no batch meets a graph."""
    padding = padded_tokens(sizes, histogram)
    live = sum(size * weight for size, weight in histogram.items() if sizes and size <= sizes[-1])
    return padding / (live + padding) if live + padding else 0.0


def hit_rate(sizes: Sequence[int], histogram: Mapping[int, float]) -> float:
    """Share of the histogram's weight that meets a graph; 0 for an empty histogram."""
    total = sum(histogram.values())
    met = sum(weight for size, weight in histogram.items() if sizes and size <= sizes[-1])
    return met / total if total else 0.0


def _at_least(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError.for_field(name, value, f"an integer of at least {low}")
    return value
