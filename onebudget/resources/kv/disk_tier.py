"""Evicted blocks in files: one per block, each with a checksum."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16


class DiskTier:
    """``num_slots`` files below a new folder inside ``parent``, at most ``num_slots * block_bytes`` of blocks.

    Nothing here may stop the engine: a block that is gone or damaged is a miss, and a disk that takes no more ends the
    tier's growth with one warning. The folder is removed by ``release``.
    """

    name = "disk"
    in_memory = False

    def __init__(self, parent: Path, num_slots: int, block_bytes: int) -> None:
        """``OSError`` when no folder can be made there."""
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="onebudget-kv-", dir=parent))
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._warned: set[str] = set()

    def _path(self, slot: int) -> Path:
        return self.folder / f"{slot}.kv"

    def row(self, slot: int) -> Any:
        raise NotImplementedError("files are read and written, not mapped")

    def write(self, slot: int, data: Any) -> bool:
        try:
            with self._path(slot).open("wb") as file:
                file.write(_digest(slot, data))
                file.write(data)
        except OSError as error:
            self._warn("write", f"the disk tier takes no more blocks ({error}); what it holds stays in use")
            self.discard([slot])
            return False
        return True

    def read(self, slot: int) -> bytes | None:
        try:
            content = self._path(slot).read_bytes()
        except OSError as error:
            self._warn("read", f"a block of the disk tier can't be read ({error}); it is computed again")
            return None
        digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if len(data) != self.block_bytes or digest != _digest(slot, data):
            self._warn("damage", f"a block of the disk tier is damaged ({self._path(slot)}); it is computed again")
            return None
        return data

    def discard(self, slots: Sequence[int]) -> None:
        for slot in slots:
            try:
                self._path(slot).unlink(missing_ok=True)
            except OSError as error:
                self._warn("discard", f"a block of the disk tier can't be removed ({error})")

    def release(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


def _digest(slot: int, data: Any) -> bytes:
    """Of the contents and their place, so that one file can't stand for another."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, salt=slot.to_bytes(16, "little")).digest()
