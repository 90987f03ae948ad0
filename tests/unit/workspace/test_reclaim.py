from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import AllocationError, ConfigError, DeviceError, StateError
from onebudget.workspace import AttentionMeta, EagerWorkspaceReclaimer, ScratchBuffer
from onebudget.workspace.reclaim import reason_not_to_reclaim, reclaimer_after_warm_up

FLOOR = 100
CARD = 64 * 1024


@pytest.fixture(params=["host", "fake"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(request.param, capacity_bytes=CARD) as device:
        yield device


def warm_meta(device: Device, floor: int = FLOOR) -> AttentionMeta:
    """Metadata after a warm-up that left ``floor`` bytes of eager scratch."""
    manager = BufferManager(device.create_stream())
    meta = AttentionMeta(ScratchBuffer(manager), ScratchBuffer(manager))
    assert meta.workspace is not None
    meta.workspace.require(floor)
    return meta


def scratch_of(meta: AttentionMeta) -> ScratchBuffer:
    assert meta.workspace is not None
    return meta.workspace


def layers(meta: AttentionMeta, *demands: int, reclaimable: bool = True) -> None:
    """What the layers of one forward do: each asks for more only when there is less."""
    scratch = meta.effective_workspace
    assert scratch is not None
    for demand in demands:
        meta.attend(supports_reclamation=reclaimable)
        if scratch.logical_bytes < demand:
            scratch.resize(demand)


def run(reclaimer: EagerWorkspaceReclaimer, meta: AttentionMeta, *demands: int, reclaimable: bool = True) -> None:
    with reclaimer.forward(meta):
        layers(meta, *demands, reclaimable=reclaimable)


TRACE = [
    # demand, capacity before, policy after, capacity after
    (80, 100, (3, 0), 100), (400, 100, (3, 0), 400), (150, 400, (2, 150), 400), (120, 400, (1, 150), 400),
    (0, 400, (1, 150), 400), (180, 400, (3, 0), 180), (90, 180, (2, 90), 180), (60, 180, (1, 90), 180),
    (50, 180, (3, 0), 100), (70, 100, (3, 0), 100), (100, 100, (3, 0), 100), (300, 100, (3, 0), 300),
    (300, 300, (3, 0), 300), (250, 300, (2, 250), 300), (300, 300, (3, 0), 300), (200, 300, (2, 200), 300),
    (210, 300, (1, 210), 300), (220, 300, (3, 0), 220),
]  # fmt: skip


def test_eighteen_forwards(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
    for number, (demand, before, state, after) in enumerate(TRACE, start=1):
        assert scratch.capacity_bytes == before, number
        run(reclaimer, meta, demand)
        assert (reclaimer.policy.remaining, reclaimer.policy.window_max_bytes) == state, number
        assert scratch.capacity_bytes == after, number
    assert reclaimer.shrink_count == 3
    assert device.used_by_owner()["fixed_workspace"] == scratch.held_bytes


# -- what holds for any load ------------------------------------------------------------------------------------

DEMANDS = st.lists(st.lists(st.integers(0, 600), min_size=1, max_size=3), max_size=30)


@given(DEMANDS)
def test_any_forwards(forwards: list[list[int]]) -> None:
    with open_device("fake", capacity_bytes=CARD) as device:
        meta = warm_meta(device)
        reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
        recent: list[int] = []
        for demands in forwards:
            before, shrinks, address = scratch.capacity_bytes, reclaimer.shrink_count, scratch.data_ptr
            inside = 0
            with reclaimer.forward(meta):
                layers(meta, *demands)
                inside = scratch.data_ptr
            demand, capacity = max(demands), scratch.capacity_bytes
            recent += [demand] if demand else []
            assert capacity >= FLOOR
            if reclaimer.shrink_count > shrinks:
                assert capacity == max(FLOOR, *recent[-3:])
            else:
                assert capacity == max(before, demand) and scratch.data_ptr == inside
                assert (inside == address) or demand > before


@pytest.mark.parametrize("steady", [101, 250, 399])
def test_steady_demand_after_a_spike_is_reached_in_three_forwards(device: Device, steady: int) -> None:
    meta = warm_meta(device)
    reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
    run(reclaimer, meta, 400)
    held = []
    for _ in range(3):
        run(reclaimer, meta, steady)
        held.append(scratch.capacity_bytes)
    assert held == [400, 400, steady]


@pytest.mark.parametrize("period", [2, 3])
def test_alternating_loads_never_shrink(device: Device, period: int) -> None:
    meta = warm_meta(device)
    reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
    for number in range(30):
        run(reclaimer, meta, 120 if number % period else 400)
        assert scratch.capacity_bytes == 400
    assert (reclaimer.shrink_count, scratch.grow_count) == (0, 2)  # the floor, then the first spike


def test_the_graph_copy_stays_where_it_is(device: Device) -> None:
    meta = warm_meta(device)
    graph = meta.for_graph()
    assert graph.effective_workspace is meta.graph_workspace is graph.graph_workspace
    layers(graph, 300, 50)
    assert meta.graph_workspace is not None
    meta.graph_workspace.seal()
    address, reclaimer = meta.graph_workspace.data_ptr, EagerWorkspaceReclaimer(meta)
    for demand in (400, 120, 120, 120, 90, 90, 90):
        run(reclaimer, meta, demand)
        run(reclaimer, graph, 300)
    assert reclaimer.shrink_count == 2 and meta.workspace_reclaimable
    assert (meta.graph_workspace.data_ptr, meta.graph_workspace.capacity_bytes) == (address, 300)


def test_dropped_metadata_is_refused_and_not_kept_alive(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer, gone = EagerWorkspaceReclaimer(meta), weakref.ref(meta)
    other = AttentionMeta(meta.workspace)
    with pytest.raises(StateError, match="metadata replaced"), reclaimer.forward(other):
        pytest.fail("the body must not run")
    del meta
    gc.collect()
    assert gone() is None
    with pytest.raises(RuntimeError, match="metadata replaced"), reclaimer.forward(other):
        pytest.fail("the body must not run")


def test_old_and_new_are_never_alive_together() -> None:
    with open_device("fake", capacity_bytes=CARD) as device:
        meta = warm_meta(device, 1024)
        reclaimer = EagerWorkspaceReclaimer(meta)
        run(reclaimer, meta, 60 * 1024)
        device.reset_peak()
        for _ in range(3):
            run(reclaimer, meta, 50 * 1024)
        assert scratch_of(meta).capacity_bytes == 50 * 1024
        assert device.sample().alloc_peak == 60 * 1024


def test_a_second_thread_is_refused(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer, seen = EagerWorkspaceReclaimer(meta), list[str]()

    def other() -> None:
        try:
            run(reclaimer, meta, 10)
        except RuntimeError as error:
            seen.append(str(error))

    with reclaimer.forward(meta):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(StateError, match="overlapping"), reclaimer.forward(meta.for_graph()):
            pytest.fail("the body must not run")
        assert reclaimer.active
    assert seen == ["overlapping forwards share eager scratch"]
    run(reclaimer, meta, 10)


# -- the protocol -----------------------------------------------------------------------------------------------


def test_warm_up_comes_first(device: Device) -> None:
    with pytest.raises(ValueError, match="warm-up must create eager scratch first"):
        EagerWorkspaceReclaimer(AttentionMeta())
    with pytest.raises(ConfigError, match="warm-up"):
        EagerWorkspaceReclaimer(AttentionMeta(ScratchBuffer(BufferManager(device.create_stream()))))


def test_a_failed_forward_forgets_the_window_and_passes_its_error(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer = EagerWorkspaceReclaimer(meta)
    run(reclaimer, meta, 400)
    run(reclaimer, meta, 150)
    with pytest.raises(KeyError, match="mine"), reclaimer.forward(meta):
        raise KeyError("mine")
    assert (reclaimer.policy.remaining, reclaimer.active) == (3, False)
    run(reclaimer, meta, 150)
    assert reclaimer.policy.remaining == 2


def test_capturing_leaves_everything_alone(device: Device) -> None:
    meta, capturing = warm_meta(device), False
    reclaimer = EagerWorkspaceReclaimer(meta, is_capturing=lambda: capturing)
    run(reclaimer, meta, 400)
    run(reclaimer, meta, 150)
    capturing = True
    with reclaimer.forward(meta):
        assert not reclaimer.active
        layers(meta, 300)
    assert (reclaimer.policy.remaining, reclaimer.policy.window_max_bytes) == (2, 150)


def test_another_stream_ends_it_for_good(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    meta, streams = warm_meta(device), [device.create_stream(), device.create_stream()]
    current = streams[0]
    reclaimer = EagerWorkspaceReclaimer(meta, current_stream=lambda: current)
    run(reclaimer, meta, 400)
    current = streams[1]
    run(reclaimer, meta, 150)
    current = streams[0]
    for _ in range(6):
        run(reclaimer, meta, 150)
    assert reclaimer.disabled and reclaimer.shrink_count == 0
    assert (reclaimer.policy.remaining, scratch_of(meta).capacity_bytes) == (3, 400)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_several_streams_end_it_too(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer = EagerWorkspaceReclaimer(meta, multi_stream=lambda: True)
    run(reclaimer, meta, 150)
    assert reclaimer.disabled


def test_removed_scratch_is_told(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer = EagerWorkspaceReclaimer(meta)
    meta.workspace = None
    with pytest.raises(StateError, match="removed by someone else"), reclaimer.forward(meta):
        pytest.fail("the body must not run")


def test_the_latch_falls_inside_a_forward(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
    run(reclaimer, meta, 400)
    run(reclaimer, meta, 150)
    run(reclaimer, meta, 150, reclaimable=False)
    assert (scratch.logical_bytes, reclaimer.policy.remaining) == (150, 3)
    for _ in range(6):
        run(reclaimer, meta, 150)
    assert (scratch.capacity_bytes, reclaimer.disabled) == (400, False)


def test_no_demand_neither_counts_nor_breaks_a_window(device: Device) -> None:
    meta = warm_meta(device)
    reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
    run(reclaimer, meta, 400)
    for demand in (150, 0, 0, 160, 0, 140):
        assert scratch.capacity_bytes == 400
        run(reclaimer, meta, demand)
    assert scratch.capacity_bytes == 160


def test_several_layers_demand_their_maximum(device: Device) -> None:
    meta = warm_meta(device, 10)
    reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
    run(reclaimer, meta, 400)
    for _ in range(3):
        run(reclaimer, meta, 40, 90, 60)
    assert scratch.capacity_bytes == 90


def test_without_forgetting_first_nothing_would_ever_be_returned(device: Device) -> None:
    """The same layers over a logical size that is never set to zero: the old demand is read for ever."""
    meta = warm_meta(device, 10)
    policy, scratch = EagerWorkspaceReclaimer(meta).policy, scratch_of(meta)
    layers(meta, 400)
    for _ in range(6):
        layers(meta, 40, 90, 60)
        assert scratch.logical_bytes == 400
        assert policy.finish_forward(scratch.logical_bytes, scratch.capacity_bytes, grew=False) is None


def test_no_room_for_the_smaller_buffer() -> None:
    """Somebody takes the memory between free and allocation: nothing is held, and serving goes on without it."""
    with open_device("fake", capacity_bytes=CARD) as device:
        manager = BufferManager(device.create_stream())
        taken: list[object] = []
        meta = warm_meta(device, 1024)
        reclaimer, scratch = EagerWorkspaceReclaimer(meta), scratch_of(meta)
        release = scratch.release

        def release_and_lose() -> None:
            release()
            taken.append(manager.gpu(CARD - 512))

        run(reclaimer, meta, 60 * 1024)
        run(reclaimer, meta, 2048)
        run(reclaimer, meta, 2048)
        scratch.release = release_and_lose  # type: ignore[method-assign]
        with pytest.raises(AllocationError) as full:
            run(reclaimer, meta, 2048)
        assert full.value.requested_bytes == 2048
        assert reclaimer.disabled and not reclaimer.active and meta.workspace is scratch
        assert (scratch.capacity_bytes, scratch.logical_bytes) == (0, 0)
        scratch.release = release  # type: ignore[method-assign]
        taken.clear()
        gc.collect()
        for _ in range(4):
            run(reclaimer, meta, 2048)
        assert scratch.capacity_bytes == 2048


def test_a_broken_device_counts_as_no_room(device: Device) -> None:
    broken = False

    @contextmanager
    def scope() -> Iterator[None]:
        if broken:
            raise DeviceError("injected")
        yield

    meta = AttentionMeta(ScratchBuffer(BufferManager(device.create_stream()), scope=scope))
    layers(meta, 1024)
    reclaimer = EagerWorkspaceReclaimer(meta)
    run(reclaimer, meta, 8192)
    run(reclaimer, meta, 2048)
    run(reclaimer, meta, 2048)
    broken = True
    with pytest.raises(AllocationError, match="injected"):
        run(reclaimer, meta, 2048)
    assert reclaimer.disabled and scratch_of(meta).capacity_bytes == 0


@pytest.mark.parametrize("trim", [False, True])
def test_memory_comes_back(device: Device, trim: bool) -> None:
    meta = warm_meta(device, 1024)
    reclaimer = EagerWorkspaceReclaimer(meta, trim_after_shrink=trim)
    run(reclaimer, meta, 48 * 1024)
    handed_out, used = device.sample().alloc_live, device.used_bytes()
    for _ in range(3):
        run(reclaimer, meta, 2048)
    assert handed_out - device.sample().alloc_live == 46 * 1024
    if trim:
        assert used - device.used_bytes() >= 32 * 1024


# -- when there is one ------------------------------------------------------------------------------------------


class OtherMeta(AttentionMeta):
    __slots__ = ()


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ({"enabled": False}, "switched off"),
        ({"speculative": True}, "speculative"),
        ({"context_parallel_size": 2}, "share the context"),
        ({"encoder_decoder": True}, "encoder"),
        ({"sparse_attention": True}, "sparse"),
        ({"compiled": True}, "compiled"),
        ({"breakable_prefill_graph": True}, "graphs of prompts"),
    ],
)
def test_what_forbids_it(
    device: Device, fact: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    meta = warm_meta(device)
    with caplog.at_level(logging.INFO):
        assert reclaimer_after_warm_up(meta, **fact) is None
    assert len(caplog.records) == 1 and reason in caplog.text


def test_metadata_that_forbids_it(device: Device) -> None:
    assert "no eager scratch" in str(reason_not_to_reclaim(AttentionMeta()))
    assert "OtherMeta" in str(reason_not_to_reclaim(OtherMeta(warm_meta(device).workspace)))
    meta = warm_meta(device)
    meta.attend(supports_reclamation=True)
    assert reason_not_to_reclaim(meta) is None and reclaimer_after_warm_up(meta) is not None
    meta.attend(supports_reclamation=False)
    meta.attend(supports_reclamation=True)
    assert "kernel" in str(reason_not_to_reclaim(meta))
