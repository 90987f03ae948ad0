"""One piece of memory that several ranks see at the same address."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Multicast(ABC):
    """One rank's part. The first rank creates and offers a ticket, the others join with it, then all map.

    ``close`` gives this rank's part up and is idempotent; the memory lives until every rank has closed, and an
    implementation may leave it mapped here for as long as tensors made from it live.
    """

    address: int = 0
    nbytes: int = 0

    @abstractmethod
    def create(self, nbytes: int) -> object:
        """Make the memory and return a ticket that can be sent to other processes of this machine."""

    @abstractmethod
    def join(self, ticket: object, nbytes: int) -> None:
        """Open what another rank created."""

    @abstractmethod
    def propose_address(self, attempt: int) -> int:
        """A place to try; another one for every attempt."""

    @abstractmethod
    def try_map(self, address: int) -> bool:
        """Map here; ``False`` when something of this process is in the way."""

    @abstractmethod
    def unmap(self) -> None:
        """Take the mapping away again."""

    @abstractmethod
    def close(self) -> None: ...
