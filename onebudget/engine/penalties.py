"""Token counts for repetition, presence and frequency penalties: small parameters from the start, vocabulary-sized
tables from the first penalised request on.

No profile sees the tables, because its requests carry no penalties; ``late_tables`` declares them with the sizes that
``PenaltyStore`` allocates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from onebudget.budget.late import LateAllocation, penalty_tables
from onebudget.errors import AllocationError
from onebudget.units import format_bytes

if TYPE_CHECKING:
    from onebudget.buffers import Buffer, BufferManager
    from onebudget.core import Request
    from onebudget.resources import SequenceSlotManager

OWNER = "penalty_workspace"
PARAMETER_OWNER = "static_inputs"


def late_tables(*, seats: int, max_beam_width: int, vocab_size: int, granule_bytes: int = 1) -> LateAllocation:
    """Both tables of ``seats`` slots, each in whole pages of ``granule_bytes``."""
    return penalty_tables(
        num_sequences=seats, max_beam_width=max_beam_width, vocab_size=vocab_size, granule_bytes=granule_bytes
    )


class PenaltyStore:
    """Parameters per slot ``[seats]``, counts ``[seats * beams, vocab]`` int32 and prefix mask ``[seats, vocab]`` bool.

    The counts appear at the first sampling step with a penalised request, the mask at the first one with a penalised
    request that ignores a prefix of its prompt; neither goes away before ``release``. Rows of a slot are cleared when
    a penalised request moves in and stay stale, unread, under any other, so contents may be lost while no request is
    inside. ``slots`` says who sits where; ``scope`` is entered around every allocation.

    ``has_previous`` (a token was counted) and ``beam_slot`` (always False: no beam search yet) mirror on the device
    what the host knows anyway, for sampling inside a captured graph.
    """

    def __init__(
        self,
        manager: BufferManager,
        slots: SequenceSlotManager,
        *,
        max_beam_width: int = 1,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._manager = manager
        self._slots = slots
        self._seats = slots.max_resource_count()
        self._beams = max_beam_width
        self._scope = scope
        self.allocate()

    def allocate(self) -> None:
        """Take the parameters' memory; also after it was lost. Nobody sits anywhere then."""
        self._folded: dict[int, int] = {}  # penalised request -> its output tokens that are counted
        self._moved_in: dict[int, int] = {}  # slot -> request seen there last
        self._counts: Buffer | None = None
        self._prefix: Buffer | None = None
        with self._scope():
            self._parameters = self._manager.gpu(self._seats * 15, owner=PARAMETER_OWNER)
        self._map_parameters()

    def _map_parameters(self) -> None:
        """Six tensors over one buffer: three float32, three bool."""
        memory, seats = self._parameters.as_tensor(), self._seats
        floats = memory[: seats * 12].view(torch.float32).view(3, seats)
        flags = memory[seats * 12 :].view(torch.bool).view(3, seats)
        self.repetition, self.presence, self.frequency = floats
        self.active, self.has_previous, self.beam_slot = flags
        self.repetition.fill_(1.0)
        self.presence.zero_()
        self.frequency.zero_()
        flags.zero_()

    @property
    def buffers(self) -> list[Buffer]:
        """What exists by now."""
        return [buffer for buffer in (self._parameters, self._counts, self._prefix) if buffer is not None]

    @property
    def table_bytes(self) -> int:
        return sum(buffer.capacity_bytes for buffer in (self._counts, self._prefix) if buffer is not None)

    @property
    def active_slots(self) -> int:
        """Slots with a penalised request; while there are none, ``apply`` launches nothing."""
        return len(self._folded)

    def counts(self) -> torch.Tensor:
        """int32 ``[seats, beams, vocab]``: how often each token occurred. Rows of inactive slots are undefined."""
        assert self._counts is not None
        return self._counts.as_tensor().view(self._seats, self._beams, -1)

    def prefix(self) -> torch.Tensor:
        """bool ``[seats, vocab]``: tokens of the ignored prefix."""
        assert self._prefix is not None
        return self._prefix.as_tensor()

    # -- moving in and out ------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Request], vocab_size: int) -> None:
        """Before a step's sampling: tables for the first who needs them, clean slots for those who moved in.

        ``AllocationError`` when the tables have no room; nothing was changed then.
        """
        penalised = [request for request in requests if request.params.penalised]
        if penalised:
            self._require_tables(penalised, vocab_size)
        for request in requests:
            slot = self._slots.slot_of(request)
            if self._moved_in.get(slot) != request.id:
                self._move_in(request, slot)

    def forget(self, request: Request) -> None:
        """The request ended. Its flags on the device stay until somebody else moves in."""
        self._folded.pop(request.id, None)
        self._moved_in = {slot: number for slot, number in self._moved_in.items() if number != request.id}

    def _require_tables(self, penalised: Sequence[Request], vocab_size: int) -> None:
        if self._counts is None:
            self._counts = self._take((self._seats * self._beams, vocab_size), "int32")
        if self._prefix is None and any(request.params.prompt_ignore_length for request in penalised):
            self._prefix = self._take((self._seats, vocab_size), "bool")

    def _take(self, shape: tuple[int, int], dtype: str) -> Buffer:
        try:
            with self._scope():
                return self._manager.gpu(shape, dtype, owner=OWNER)
        except AllocationError as full:
            raise AllocationError(
                full.requested_bytes,
                full.free_bytes,
                kind=full.kind,
                tag=full.tag,
                owner=OWNER,
                detail=f"Penalties need {format_bytes(full.requested_bytes)} for tables of {shape[0]} rows and "
                f"{shape[1]} tokens; requests without penalties go on.",
            ) from None

    def _move_in(self, request: Request, slot: int) -> None:
        """Flags of the one before fall, whoever comes; a penalised request finds rows that hold its own tokens only."""
        self.active[slot] = request.params.penalised
        self.has_previous[slot] = False
        self._moved_in[slot] = request.id
        if request.params.penalised:
            self.repetition[slot] = request.params.repetition_penalty
            self.presence[slot] = request.params.presence_penalty
            self.frequency[slot] = request.params.frequency_penalty
            self._seed(request, slot)

    def _seed(self, request: Request, slot: int) -> None:
        """Count the prompt and what was sampled before, for every beam; the ignored prefix goes to the mask."""
        ignored = min(request.params.prompt_ignore_length, request.prompt_tokens)
        counts = self.counts()[slot]
        counts.zero_()
        for rows in counts:
            _add(rows, [*request.prompt_token_ids[ignored:], *request.output_token_ids])
        if self._prefix is not None:
            mask = self.prefix()[slot]
            mask.zero_()
            if ignored:
                mask[_inside(request.prompt_token_ids[:ignored], mask)] = True
        self._folded[request.id] = len(request.output_token_ids)

    # -- a step -----------------------------------------------------------------------------------------------

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Rewrite float32 ``logits`` ``[len(requests), vocab]`` in place, one row per request that ``begin`` saw.

        A token that occurred has its logit divided by the repetition penalty when positive and multiplied when
        negative; one that was counted loses the presence penalty, and the frequency penalty as often as it was
        counted. Temporaries stay below those of filtered sampling over the same rows.
        """
        if not any(request.params.penalised for request in requests):
            return
        slots = torch.tensor([self._slots.slot_of(request) for request in requests], device=logits.device)
        self._fold(requests, slots)
        active = self.active[slots][:, None]
        counts = self.counts()[slots, 0] * active
        counted = counts > 0
        if any(request.params.repetition_penalty != 1 for request in requests):
            occurred = counted if self._prefix is None else counted | (self.prefix()[slots] & active)
            factor = self.repetition[slots][:, None]
            repeated = torch.where(logits < 0, logits * factor, logits / factor)
            logits.copy_(torch.where(occurred, repeated, logits))
            del occurred, repeated
        logits.sub_(counted * self.presence[slots][:, None])
        logits.sub_(counts * self.frequency[slots][:, None])

    def _fold(self, requests: Sequence[Request], slots: torch.Tensor) -> None:
        """Count the tokens sampled since the last time, each once."""
        rows, tokens = [], []
        for row, request in enumerate(requests):
            folded = self._folded.get(request.id)
            if folded is not None:
                fresh = request.output_token_ids[folded:]
                rows += [row] * len(fresh)
                tokens += fresh
                self._folded[request.id] = len(request.output_token_ids)
        if not rows:
            return
        seats = slots[torch.tensor(rows, device=slots.device)]
        self.has_previous[seats] = True
        beam = torch.zeros_like(seats)
        sampled = torch.tensor(tokens, device=slots.device)
        self.counts().index_put_((seats, beam, sampled), torch.ones_like(sampled, dtype=torch.int32), accumulate=True)

    def release(self) -> None:
        """Give everything back. Safe to call again."""
        for buffer in self.buffers:
            if not buffer.released:
                buffer.release()


def _inside(token_ids: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    """Distinct ids within the vocabulary of ``row``: placeholders of other modalities lie outside."""
    inside = sorted({token for token in token_ids if 0 <= token < row.shape[-1]})
    return torch.tensor(inside, dtype=torch.int64, device=row.device)


def _add(row: torch.Tensor, token_ids: Sequence[int]) -> None:
    occurrences = Counter(token for token in token_ids if 0 <= token < row.shape[-1])
    if occurrences:
        tokens = torch.tensor(list(occurrences), dtype=torch.int64, device=row.device)
        row[tokens] = torch.tensor(list(occurrences.values()), dtype=torch.int32, device=row.device)
