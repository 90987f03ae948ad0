"""Which virtual-memory configuration is current: a stack for the whole process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.buffers.virtual.restore import RestoreMode
from onebudget.device.streams import Stream
from onebudget.errors import StateError

if TYPE_CHECKING:
    from onebudget.buffers.virtual.pools import ScopePools


@dataclass(frozen=True, slots=True, eq=False)
class VirtualConfig:
    """How device memory is allocated while this is current. The background configuration is falsy: no virtual memory.

    ``back_stream`` is where contents are restored; ``None`` means the stream of the manager that allocates.
    ``pools`` are the private pools of the scope that made this, if one did.
    """

    tag: str
    mode: RestoreMode = RestoreMode.NONE
    back_stream: Stream | None = None
    pools: ScopePools | None = None
    background: bool = False

    def __bool__(self) -> bool:
        return not self.background


BACKGROUND = VirtualConfig("background", background=True)


class ConfigStack:
    """Push makes a configuration current in every thread of the process; pop restores the very object before it.

    Writers take a lock. Reading ``current`` is one reference load, which sees either the old or the new object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._configs: list[VirtualConfig] = [BACKGROUND]
        self.current = BACKGROUND

    def __len__(self) -> int:
        return len(self._configs) - 1

    def push(
        self,
        tag: str,
        mode: RestoreMode | str = RestoreMode.NONE,
        back_stream: Stream | None = None,
        *,
        pools: ScopePools | None = None,
    ) -> VirtualConfig:
        config = VirtualConfig(tag, RestoreMode.parse(mode), back_stream, pools)
        with self._lock:
            self._configs.append(config)
            self.current = config
        return config

    def pop(self) -> VirtualConfig:
        """Drop the current configuration and return it. ``StateError`` when none was pushed."""
        with self._lock:
            if len(self._configs) == 1:
                raise StateError("no virtual-memory configuration to pop: every pop needs a push before it")
            dropped = self._configs.pop()
            self.current = self._configs[-1]
        return dropped

    def remove(self, config: VirtualConfig) -> None:
        """Drop this very configuration, wherever it is: scopes of several threads may end in any order."""
        with self._lock:
            self._configs.remove(config)
            self.current = self._configs[-1]


config_stack = ConfigStack()
