"""What host and fake devices share: books with a ceiling, software streams, the arena pool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from onebudget.device.account import Account
from onebudget.device.base import Device
from onebudget.device.facts import DeviceFacts
from onebudget.device.pool import Arena, ArenaPool, ArenaSource
from onebudget.device.streams import QueueStream, Stream, Touchable
from onebudget.errors import ConfigError


class SoftwareDevice(Device, ArenaSource):
    """A card whose capacity is enforced by its books."""

    accounts_exactly = True

    def __init__(self, facts: DeviceFacts, *, torch_device: str, others_bytes: int = 0) -> None:
        check_capacity(facts, others_bytes)
        account = Account(facts.total_bytes, others_bytes)
        super().__init__(facts, torch_device=torch_device, account=account)

    def _create_stream(self) -> Stream:
        return QueueStream(self)

    def _create_pool(self) -> ArenaPool:
        return ArenaPool(self, self)

    @abstractmethod
    def make_arena(self, nbytes: int) -> Arena: ...

    @abstractmethod
    def _copy_now(self, target: int, source: int, nbytes: int) -> None: ...

    @abstractmethod
    def _fill_now(self, address: int, value: int, nbytes: int) -> None: ...

    def _copy(self, target: int, source: int, nbytes: int, stream: Stream | None,
              touches: tuple[Touchable, ...]) -> None:  # fmt: skip
        self._in_order(stream, lambda: self._copy_now(target, source, nbytes), touches)

    def _fill(self, address: int, value: int, nbytes: int, stream: Stream | None,
              touches: tuple[Touchable, ...]) -> None:  # fmt: skip
        self._in_order(stream, lambda: self._fill_now(address, value, nbytes), touches)

    def _in_order(self, stream: Stream | None, work: Callable[[], None], touches: tuple[Touchable, ...]) -> None:
        if stream is None:
            work()
        else:
            assert isinstance(stream, QueueStream)
            stream.run(work, touches)

    def _close(self) -> None:
        if self._vmm is not None:
            self._vmm.close()
        pool = self.existing_pool
        if isinstance(pool, ArenaPool):
            pool.close()


def check_capacity(facts: DeviceFacts, others_bytes: int) -> None:
    granule = facts.granularity_bytes
    if granule <= 0 or granule % 512:
        raise ConfigError.for_field("granularity_bytes", granule, "a positive multiple of 512")
    if facts.total_bytes <= 0:
        raise ConfigError.for_field("capacity_bytes", facts.total_bytes, "positive")
    if not 0 <= others_bytes <= facts.total_bytes:
        raise ConfigError.for_field("others_bytes", others_bytes, f"between 0 and the capacity {facts.total_bytes}")
