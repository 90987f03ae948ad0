"""What the probe measured, and the two figures that follow from it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields

from onebudget.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """Samples of one profiling run, in bytes.

    ``model_bytes``: allocator-live once the weights are loaded. ``torch_peak_bytes``: the allocator's high-water mark
    over the probe. ``torch_used_bytes``: allocator-live (not reserved) after the probe with an empty allocator cache.
    ``device_used_bytes``: total minus free as the driver reports it, at the same moment. ``allocated_bytes``: the
    temporary KV pools of the probe, which sit inside the peak and will be gone in service. ``encoder_output_bytes``:
    the copy of multimodal encoder output that was kept alive during the probe. ``kv_outside_allocator``: the temporary
    KV came from another allocator, so it shows up in the extra cost instead of in the allocator's peak.
    ``prompt_logits_bytes``: by how much steps with log-probabilities of prompts rise above ``torch_peak_bytes``.
    """

    model_bytes: int
    torch_peak_bytes: int
    torch_used_bytes: int
    device_used_bytes: int
    allocated_bytes: int = 0
    encoder_output_bytes: int = 0
    kv_outside_allocator: bool = False
    prompt_logits_bytes: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name != "kv_outside_allocator":
                _check_bytes(item.name, getattr(self, item.name))
        if self.torch_peak_bytes < self.model_bytes:
            allowed = f"at least model_bytes ({self.model_bytes}), which were live throughout"
            raise ConfigError.for_field("torch_peak_bytes", self.torch_peak_bytes, allowed)
        measured = self.activation_bytes + self.extra_cost_bytes
        if self.allocated_bytes > measured:
            allowed = f"at most what the probe measured above the weights ({measured})"
            raise ConfigError.for_field("allocated_bytes", self.allocated_bytes, allowed)

    @classmethod
    def without_probe(cls, *, model_bytes: int, device_used_bytes: int) -> ProfileResult:
        """No probe ran: the peak is what the device uses now, and no activations were seen."""
        return cls(
            model_bytes=model_bytes,
            torch_peak_bytes=model_bytes,
            torch_used_bytes=model_bytes,
            device_used_bytes=device_used_bytes,
        )

    @property
    def activation_bytes(self) -> int:
        """Peak above the weights; holds the probe's temporary KV too, where that came from the same allocator."""
        return self.torch_peak_bytes - self.model_bytes

    @property
    def extra_cost_bytes(self) -> int:
        """In use on the device but unknown to the allocator: driver, communication, graph pools, other processes."""
        return max(self.device_used_bytes - self.torch_used_bytes, 0)

    @property
    def peak_bytes(self) -> int:
        return self.torch_peak_bytes + self.extra_cost_bytes


def _check_bytes(name: str, value: object) -> None:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError.for_field(name, value, "a whole number of bytes, at least 0")
