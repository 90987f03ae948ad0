"""Scopes in which device memory is virtual: ``virtual_memory_scope`` and its relatives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from onebudget.buffers.virtual.config import VirtualConfig, config_stack
from onebudget.buffers.virtual.manager import virtual_memory_manager
from onebudget.buffers.virtual.pools import ScopePools
from onebudget.buffers.virtual.restore import RestoreMode
from onebudget.device.base import Device
from onebudget.device.streams import Stream

_lock = threading.Lock()
_scopes: list[ScopePools] = []


@contextmanager
def virtual_memory_scope(
    tag: str,
    mode: RestoreMode | str = RestoreMode.NONE,
    *,
    back_stream: Stream | None = None,
    device: Device | None = None,
) -> Iterator[ScopePools]:
    """Make device memory virtual for the length of the block, under ``tag``.

    Every ``gpu`` and ``gpu_sync`` buffer made meanwhile, *in any thread of the process*, can be put to sleep with
    ``release_with_tag(tag)`` and comes back at the same address with ``materialize_with_tag(tag)``; ``mode`` says what
    becomes of its contents (``none``, ``memset``, ``cpu``, ``pinned``). Scopes nest: the inner one counts, and the
    outer one goes on with a new private pool.

    ``device`` routes the framework's own allocations too, where the device knows how; ``back_stream`` is where contents
    are restored (default: the stream of the buffer manager that allocated).
    """
    scope = ScopePools(tag, device)
    config = _open(scope, tag, mode, back_stream)
    try:
        yield scope
    finally:
        _close(scope, config)


@contextmanager
def maybe_virtual_memory_scope(
    enable: bool,
    tag: str,
    mode: RestoreMode | str = RestoreMode.NONE,
    *,
    back_stream: Stream | None = None,
    device: Device | None = None,
) -> Iterator[ScopePools | None]:
    """``virtual_memory_scope`` when ``enable``, else nothing."""
    if not enable:
        yield None
        return
    with virtual_memory_scope(tag, mode, back_stream=back_stream, device=device) as scope:
        yield scope


@contextmanager
def preserve_contents() -> Iterator[ScopePools | None]:
    """Inside a scope that loses contents, keep those of what is made in this block: same tag, backed up on the host.

    For small metadata that must survive sleep at the same address. Elsewhere it changes nothing.
    """
    config = config_stack.current
    if not config or config.mode.keeps_contents:
        yield None
        return
    with virtual_memory_scope(config.tag, RestoreMode.CPU, back_stream=config.back_stream) as scope:
        yield scope


def release_with_tag(tag: str, *, discard: bool = False) -> int:
    """Take the physical memory of everything under ``tag`` away and return how many chunks were tried.

    An unknown tag, or one that is asleep already, is 0. ``discard`` gives contents up even where the scope's mode
    would keep them; they are undefined after the next ``materialize_with_tag``.

    Call at a step boundary: nothing may use the memory, and nothing may touch tensors made from it until
    ``materialize_with_tag``.
    """
    return virtual_memory_manager().release_with_tag(tag, discard=discard)


def materialize_with_tag(tag: str) -> int:
    """Bring everything under ``tag`` back at its old addresses, contents as the mode says; how many chunks came.

    Waits for the restores. On an error all chunks are asleep as before, except the lost one (``take_bad_handles``).
    """
    count = virtual_memory_manager().materialize_with_tag(tag)
    virtual_memory_manager().synchronize(tag)
    return count


def _open(scope: ScopePools, tag: str, mode: RestoreMode | str, back_stream: Stream | None) -> VirtualConfig:
    mode = RestoreMode.parse(mode)
    with _lock, ExitStack() as undo:
        parent = _scopes[-1] if _scopes else None
        if parent is not None and parent.inside:
            parent.leave()
            undo.callback(parent.enter)
        scope.enter()
        _scopes.append(scope)
        undo.pop_all()
        return config_stack.push(tag, mode, back_stream, pools=scope)


def _close(scope: ScopePools, config: VirtualConfig) -> None:
    with _lock, ExitStack() as steps:
        _scopes.remove(scope)
        if _scopes and not _scopes[-1].inside and scope.inside:
            steps.callback(_scopes[-1].enter)
        if scope.inside:
            steps.callback(scope.leave)
        config_stack.remove(config)
