"""The virtual clock: how long a step would take on a card that is not there.

A roofline: weights are read once per step, or the step's arithmetic takes longer than that; attention reads the KV
cache, or its arithmetic takes longer. Every figure the clock uses is in what it says about itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from onebudget.errors import ConfigError

DEFAULT_BANDWIDTH_EFFICIENCY = 0.8
DEFAULT_COMPUTE_EFFICIENCY = 0.6
DEFAULT_STEP_OVERHEAD_S = 0.002
DEFAULT_REQUEST_OVERHEAD_S = 0.00001
DEFAULT_HOST_LINK_BYTES_PER_S = 25_000_000_000
"""What 16 lanes of PCIe 4 carry."""


@dataclass(slots=True)
class StepWork:
    """What one step computes.

    ``context_tokens`` of ``prompts`` requests, and one token for each of ``generation_requests``. ``attended_pairs``
    counts, over the context tokens, the tokens each one attends to; ``cached_context_tokens`` those of the same prompts
    that were in the cache before the step; ``generation_kv_tokens`` the cached tokens of the generating requests.
    ``copied_bytes`` went between the device and tiers below it to make room or to bring prefixes back.
    """

    context_tokens: int = 0
    prompts: int = 0
    attended_pairs: int = 0
    cached_context_tokens: int = 0
    generation_requests: int = 0
    generation_kv_tokens: int = 0
    copied_bytes: int = 0

    @property
    def tokens(self) -> int:
        return self.context_tokens + self.generation_requests

    @property
    def requests(self) -> int:
        return self.prompts + self.generation_requests


class StepClock(Protocol):
    """Says how long a step takes: first the host to launch it, then the card to compute it."""

    def host_seconds(self, work: StepWork) -> float: ...

    def card_seconds(self, work: StepWork) -> float: ...

    def stated(self) -> Mapping[str, Any]:
        """Every figure it uses, as JSON takes it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineClock:
    """Seconds of the card = larger of (weights read, their arithmetic) + larger of (KV read, its arithmetic) + copies.

    With ``weight_bytes`` read once per step at ``bandwidth_bytes_per_s`` times its efficiency; ``flops_per_token`` for
    all products with weights (2 per weight a token meets) at ``peak_flops`` times its efficiency;
    ``kv_bytes_per_token`` read for each cached token a request attends to; ``flops_per_attended_pair`` for scores and
    weighted sums (4 per head, head dimension and attending layer). Efficiencies are shares of the vendor's figures that
    kernels reach; the overheads are what the host takes per step and per request. Copies between the device and tiers
    below it go over a link of ``host_link_bytes_per_s`` before the step.
    """

    gpu: str
    weight_bytes: int
    flops_per_token: int
    kv_bytes_per_token: int
    flops_per_attended_pair: int
    bandwidth_bytes_per_s: int
    peak_flops: float
    bandwidth_efficiency: float = DEFAULT_BANDWIDTH_EFFICIENCY
    compute_efficiency: float = DEFAULT_COMPUTE_EFFICIENCY
    step_overhead_s: float = DEFAULT_STEP_OVERHEAD_S
    request_overhead_s: float = DEFAULT_REQUEST_OVERHEAD_S
    host_link_bytes_per_s: int = DEFAULT_HOST_LINK_BYTES_PER_S

    def __post_init__(self) -> None:
        for name in (
            "bandwidth_bytes_per_s",
            "host_link_bytes_per_s",
            "peak_flops",
            "bandwidth_efficiency",
            "compute_efficiency",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError.for_field(name, getattr(self, name), "a number above 0")
        for name in ("weight_bytes", "flops_per_token", "kv_bytes_per_token", "flops_per_attended_pair"):
            if getattr(self, name) < 0:
                raise ConfigError.for_field(name, getattr(self, name), "a number of at least 0")

    def host_seconds(self, work: StepWork) -> float:
        return self.step_overhead_s + work.requests * self.request_overhead_s

    def card_seconds(self, work: StepWork) -> float:
        bandwidth = self.bandwidth_bytes_per_s * self.bandwidth_efficiency
        flops = self.peak_flops * self.compute_efficiency
        linear = max(self.weight_bytes / bandwidth, work.tokens * self.flops_per_token / flops)
        read_tokens = work.generation_kv_tokens + work.cached_context_tokens
        pairs = work.attended_pairs + work.generation_kv_tokens
        attention = max(read_tokens * self.kv_bytes_per_token / bandwidth, pairs * self.flops_per_attended_pair / flops)
        return linear + attention + work.copied_bytes / self.host_link_bytes_per_s

    def stated(self) -> dict[str, Any]:
        return {
            "kind": "roofline",
            "formula": "host: step_overhead + requests * request_overhead; card: max(weight_bytes / bandwidth, tokens "
            "* flops_per_token / flops) + max(kv_tokens * kv_bytes_per_token / bandwidth, attended_pairs * "
            "flops_per_attended_pair / flops) + copied_bytes / host_link, where bandwidth and flops are the card's "
            "times their efficiency",
            **asdict(self),
        }
