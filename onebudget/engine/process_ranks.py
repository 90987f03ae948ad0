"""The group over ``torch.distributed``: gloo between hosts' memory, NCCL beside it between GPUs.

A rank that fails writes why into the shared store, then closes its connections: whoever waits for it in a collective
operation wakes at once, finds the reason in the store, and raises it. A rank that dies without a word closes its
connections as well; one that hangs runs into the timeout.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from onebudget.engine.rank_failure import LOST, RankFailure
from onebudget.engine.rank_signals import HeldInterrupt, Terminated, TerminationSignal
from onebudget.engine.ranks import RankGroup
from onebudget.errors import AgreementError, ConfigError

T = TypeVar("T")

_FAILURE, _EXPLAINING = "failure", "explaining"
_POLL_SECONDS = 0.02
_SIGN_OF_LIFE_SECONDS = 3
_EXPLANATION_SECONDS = 300
# A dead peer is noticed at once all the same: its connection closes.
_PATIENCE, _IDLE = timedelta(minutes=10), timedelta(days=30)


class ProcessRanks(RankGroup):
    """This process as one of ``size`` ranks."""

    def __init__(self, rank: int, size: int, local_rank: int, *, device: str, timeout_seconds: int) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self.failure: RankFailure | None = None
        self._timeout_seconds = timeout_seconds
        self._stage = "start"
        self._interrupt = HeldInterrupt()
        self._open = True
        self._leader_knows = True
        self._when_parted: list[Callable[[], None]] = []
        backend = _backend(device, local_rank)
        timeout = timedelta(seconds=timeout_seconds)
        try:
            store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
            self._store = PrefixStore("onebudget", store)
            dist.init_process_group(
                backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout
            )
            self._control = dist.new_group(backend="gloo", timeout=timeout)
            self._patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self._idle = dist.new_group(backend="gloo", timeout=_IDLE)
        except (RuntimeError, ValueError) as error:
            self._disconnect()
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise AgreementError(
                f"rank {rank} of {size} can't reach the others at {where} within {timeout_seconds} s: "
                f"{str(error).splitlines()[0]}"
            ) from error
        self._termination = TerminationSignal()

    @property
    def speaks(self) -> bool:
        return self.leads or not self._leader_knows

    # -- exchange ---------------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(found, value, group=self._control))
        return found

    def broadcast(self, value: T) -> T:
        return self._share(value, lambda: self._control)

    def await_work(self, value: T) -> T:
        with self.guard("wait for work"):
            return self._share(value, lambda: self._idle)

    def meet(self) -> None:
        self._exchange(lambda: dist.barrier(group=self._patient))

    def lead(self, work: Callable[[], T]) -> T:
        with self.guard(self._stage):
            return self.await_work(work() if self.leads else None)  # type: ignore[return-value]

    def _share(self, value: T, group: Callable[[], Any]) -> T:
        box: list[Any] = [value if self.leads else None]
        self._exchange(lambda: dist.broadcast_object_list(box, src=0, group=group()))
        return box[0]  # type: ignore[no-any-return]

    def _exchange(self, work: Callable[[], object]) -> None:
        """Run a collective operation; what goes wrong with it is somebody's failure, and everybody's."""
        self._require_open()
        with self.guard(self._stage):
            work()

    def _require_open(self) -> None:
        if self.failure is not None:
            raise AgreementError(f"the ranks have parted: {self.failure.sentence}")
        if not self._open:
            raise AgreementError("the ranks have parted: their group is closed")

    # -- stages and failures ----------------------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with self.guard(name):
            yield
            self.gather(None)

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        outer, self._stage = self._stage, name
        try:
            yield
        except BaseException as error:
            if self.failure is not None or not self._open:
                raise
            told = self._fail(error)
            if told is error:
                raise
            raise told from error
        finally:
            self._stage = outer

    @contextmanager
    def explaining(self) -> Iterator[None]:
        with suppress(RuntimeError):
            self._store.set(_EXPLAINING, str(self.rank))
        yield

    def _fail(self, error: BaseException) -> BaseException:
        """Agree with the others on one failure, part, and return what this rank raises."""
        found = self._found()
        if found is None:
            lost = _is_connection_error(error)
            found = self._publish(self._silent_rank() if lost else self._own_failure(error))
        self.failure = found
        self._termination.leaving()
        _clear_frames(error)
        self._disconnect()
        self._leave_together(found, 1 if isinstance(error, Terminated) else self._timeout_seconds)
        own = found.kind != LOST and (found.rank == self.rank or found.same_as(error))
        return error if own else found.error()

    def _own_failure(self, error: BaseException) -> RankFailure:
        return RankFailure.of(error, rank=self.rank, stage=self._stage)

    def _found(self) -> RankFailure | None:
        """The failure that some rank has published; waits while one is about to."""
        deadline = time.monotonic() + _EXPLANATION_SECONDS
        with suppress(RuntimeError):  # the store went with its host
            while not self._store.check([_FAILURE]):
                if not self._store.check([_EXPLAINING]) or self._store.get(_EXPLAINING) == str(self.rank).encode():
                    return None
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECONDS)
            return RankFailure.from_json(self._store.get(_FAILURE))
        return None

    def _publish(self, failure: RankFailure) -> RankFailure:
        """Make ``failure`` known; returns the one that was first."""
        with suppress(RuntimeError):
            return RankFailure.from_json(self._store.compare_set(_FAILURE, "", failure.to_json()))
        return failure

    def _silent_rank(self) -> RankFailure:
        """Who broke the connection without a word."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = others if len(others) == 1 else self._await("here", others, _SIGN_OF_LIFE_SECONDS)
        reason = (
            f"it was killed, it crashed, or it gave no sign for {self._timeout_seconds} s. Its own output may say "
            "more; a rank killed without a word often ran out of host memory."
        )
        return RankFailure(silent[0] if silent else self.rank, self._stage, LOST, reason)

    def _leave_together(self, failure: RankFailure, seconds: int) -> None:
        """Wait until every rank that can has seen the failure: one that exits early may take the store along."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        if failure.kind == LOST:
            others = [rank for rank in others if rank != failure.rank]
        missing = self._await("seen", others, seconds)
        self._leader_knows = 0 in others and 0 not in missing

    def _await(self, word: str, others: list[int], seconds: float) -> list[int]:
        """Say ``word`` and wait for the others to; returns the ranks that did not."""
        deadline, missing = time.monotonic() + seconds, others
        with suppress(RuntimeError):
            self._store.set(f"{word}/{self.rank}", "1")
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not self._store.check([f"{word}/{rank}"])]
                if missing:
                    time.sleep(_POLL_SECONDS)
        return missing

    # -- steps ------------------------------------------------------------------------------------------------

    def begin_step(self, digest: Callable[[], int]) -> None:
        mine = torch.tensor([int(self._interrupt.seen), digest()], dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self.guard("generate"):
            self._exchange(lambda: dist.all_gather(rows, mine, group=self._control))
        if any(int(row[0]) for row in rows):
            raise KeyboardInterrupt
        differing = [rank for rank, row in enumerate(rows) if int(row[1]) != int(rows[0][1])]
        if differing:
            raise AgreementError(
                f"rank {differing[0]} stands at another point than rank 0: requests must be submitted, cancelled and "
                "read alike on all ranks."
            )

    @contextmanager
    def hold_interrupts(self) -> Iterator[None]:
        with self._interrupt:
            yield

    # -- end --------------------------------------------------------------------------------------------------

    def when_parted(self, action: Callable[[], None]) -> None:
        self._when_parted.append(action)

    def close(self, *, wait: bool = True) -> None:
        if not self._open:
            self._termination.restore()
            return
        if wait and self.failure is None:
            with suppress(AgreementError):
                self.gather(None)
        self._disconnect()
        self._termination.restore()

    def _disconnect(self) -> None:
        """Close every connection of this process. Nothing may hold on to a group, or it would stay open."""
        if not self._open:
            return
        self._open = False
        self._control = self._patient = self._idle = None
        for action in self._when_parted:
            action()
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


def _backend(device: str, local_rank: int) -> str:
    """What the default group exchanges over.

    On the host device the accelerators of the machine must be out of sight: transformers spreads a model over the
    accelerator it finds.
    """
    if dist.is_initialized():
        raise ConfigError("torch.distributed is initialised already; this process must leave that to the engine.")
    if device.startswith("cuda"):
        torch.cuda.set_device(local_rank)
        return "cpu:gloo,cuda:nccl"
    if torch.accelerator.is_available():
        raise ConfigError(
            "several ranks on the host device would be spread over this machine's accelerators: hide them "
            "(CUDA_VISIBLE_DEVICES= with no value), or use --device cuda.",
            field="device",
            value=device,
        )
    return "gloo"


def _clear_frames(error: BaseException) -> None:
    """Drop the variables of the frames that failed, there and on the way: they hold connections open."""
    chain: list[BaseException | None] = [error]
    for last in chain:
        if last is not None:
            traceback.clear_frames(last.__traceback__)
            chain += [cause for cause in (last.__cause__, last.__context__) if cause not in chain]


def _is_connection_error(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
