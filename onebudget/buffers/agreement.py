"""Ranks that must do the same thing, or nothing."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from onebudget.errors import AgreementError, ConfigError

T = TypeVar("T")
SUBGROUP_TIMEOUT = datetime.timedelta(seconds=30)
_subgroups: dict[tuple[int, ...], Any] = {}


class RankGroup:
    """Some ranks of ``torch.distributed``, all of which make the same calls in the same order.

    A subset of the world makes its own process group at first use, which only its members take part in and which
    gives up after 30 s. Without ``torch.distributed`` there is one rank, 0.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = _checked(ranks)
        self.world_size, self.rank = _world()
        # Whoever asks for an impossible group joins the whole world once, so that the others hear of it.
        self.possible = (
            self.rank in self.ranks
            and self.ranks[-1] < self.world_size
            and (len(self.ranks) > 1 or self.world_size == 1)
        )
        self._members = self.ranks if self.possible else tuple(range(self.world_size))

    @property
    def leader(self) -> int:
        """The lowest rank."""
        return self._members[0]

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    def exchange(self, value: T) -> list[T]:
        """Every member's ``value``, in order of rank. ``AgreementError`` when a member does not answer."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        group = self._process_group()
        answers: list[Any] = [None] * len(self._members)
        try:
            dist.all_gather_object(answers, value, group=group)
        except RuntimeError as error:
            raise AgreementError(f"rank {self.rank}: ranks {self._members} did not all answer: {error}") from error
        return answers

    def agree(self, what: str, make: Callable[[], object]) -> None:
        """Raise ``AgreementError`` on every member unless ``make`` gives equal values on all; see ``together``."""
        answers = self.together(what, make)
        if self.possible and all(answer == answers[0] for answer in answers):
            return
        said = "; ".join(f"rank {rank}: {answer}" for rank, answer in zip(self._members, answers, strict=True))
        raise AgreementError(f"ranks asked for different things in {what}: {said}")

    def together(self, what: str, step: Callable[[], T]) -> list[T]:
        """Run ``step`` on every member and return all results; when one fails, all raise.

        The member that failed raises its own error, the others ``AgreementError``.
        """
        error: Exception | None = None
        result: T | None = None
        try:
            result = step()
        except Exception as raised:
            error = raised
        answers = self.exchange((None if error is None else f"{type(error).__name__}: {error}", result))
        if error is not None:
            raise error
        failed = [f"rank {rank}: {text}" for rank, (text, _) in zip(self._members, answers, strict=True) if text]
        if failed:
            raise AgreementError(f"{what} failed on other ranks: {'; '.join(failed)}")
        return [value for _, value in answers]  # type: ignore[misc]

    def _process_group(self) -> Any:
        import torch.distributed as dist

        if len(self._members) == self.world_size:
            return None
        if self._members not in _subgroups:
            _subgroups[self._members] = dist.new_group(
                list(self._members), timeout=SUBGROUP_TIMEOUT, use_local_synchronization=True
            )
        return _subgroups[self._members]


def machine_name() -> str:
    """Tells machines (and containers with their own kernel) apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}/{os.uname().machine}"


def _checked(ranks: Iterable[int]) -> tuple[int, ...]:
    try:
        found = tuple(sorted(set(ranks)))
    except TypeError:
        found = ()
    if not found or not all(isinstance(rank, int) and rank >= 0 for rank in found):
        raise ConfigError.for_field("ranks", ranks, "a set of rank numbers, zero or more")
    return found


def _world() -> tuple[int, int]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(), dist.get_rank()
