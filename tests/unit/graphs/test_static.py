"""Static inputs: sizes by the bucket limit, written in place only, shadows that no upload is still reading."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

import torch

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.errors import ConfigError, StateError
from onebudget.graphs.host_graph import HostGraphBackend
from onebudget.graphs.static import ExtraInput, StaticTensors, prefer_pinned, static_tokens
from onebudget.units import MIB


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=4 * MIB, poison=True) as device:
        yield device


@pytest.fixture
def make(device: Device) -> Iterator[Callable[..., StaticTensors]]:
    made: list[StaticTensors] = []

    def build(tokens: int = 32, max_bucket: int = 8, **options: object) -> StaticTensors:
        manager = BufferManager(device.create_stream())
        made.append(StaticTensors(manager, tokens=tokens, max_bucket=max_bucket, **options))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for static in made:
        static.release()


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_bucket": 256, "max_draft_len": 3, "max_num_tokens": 8192}, 1024),
        ({"max_bucket": 256, "max_draft_len": 3, "max_num_tokens": 16384}, 1024),
        ({"max_bucket": 256, "beam_width": 4, "max_num_tokens": 512}, 512),
        ({"max_bucket": 8, "max_num_tokens": 2048}, 8),
        ({"max_bucket": 8, "max_num_tokens": 2048, "mixed_encoder_decoder": True}, 2048),
    ],
)
def test_tokens_follow_the_bucket_limit(limits: dict[str, int], tokens: int) -> None:
    assert static_tokens(**limits) == tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(("axes", "positions"), [(1, 4096), (3, 12288)])
def test_bytes_of_1024_tokens(make: Callable[..., StaticTensors], axes: int, positions: int) -> None:
    static = make(tokens=1024, max_bucket=256, axes=axes)
    sizes = [buffer.capacity_bytes for buffer in static.buffers]
    assert sizes == [4096, positions, 4 * 256]
    assert static.host_bytes == static.device_bytes == sum(sizes)


def test_ids_start_as_ones_and_positions_as_zeros(make: Callable[..., StaticTensors]) -> None:
    static = make()
    assert static["input_ids"].tolist() == [1] * 32
    assert static["position_ids"].tolist() == [[0] * 32]
    assert static["input_ids"].dtype is static["position_ids"].dtype is torch.int32


def test_twenty_live_tokens_and_a_tail_of_dummies(make: Callable[..., StaticTensors]) -> None:
    """Batch 5 with drafts of 3, padded to 8: 32 tokens are sliced, 20 are copied in, 12 keep what they held."""
    static = make()
    static.stage("input_ids", list(range(100, 132)))
    static.upload("input_ids", 32)
    static.stage("input_ids", list(range(20)))
    static.upload("input_ids", 20)
    assert static["input_ids"][:32].tolist() == [*range(20), *range(120, 132)]


def test_another_tensor_is_refused_and_the_old_one_untouched(make: Callable[..., StaticTensors]) -> None:
    static = make()
    before, address = static["seq_lens"], static["seq_lens"].data_ptr()
    static.set_static("seq_lens", before)
    with pytest.raises(StateError, match="graph-visible buffers must be updated in place"):
        static.set_static("seq_lens", torch.tensor([17, 33, 1, 1], dtype=torch.int32))
    assert static["seq_lens"] is before
    assert static["seq_lens"].data_ptr() == address
    assert static["seq_lens"].tolist() == [1] * 8


def test_lengths_of_two_steps_are_carried_over_by_the_graph(device: Device, make: Callable[..., StaticTensors]) -> None:
    """The host writes 16 bytes and launches: the copy to the device is a node of the graph."""
    static = make()
    lengths = static["seq_lens"]

    def forward() -> tuple[torch.Tensor]:
        static.upload_in_graph(4)
        return (lengths[:4] * 10,)

    graph, _ = HostGraphBackend(BufferManager(device.create_stream())).capture(forward, None)
    for wanted in ([17, 33, 1, 1], [18, 34, 1, 1]):
        static.stage("seq_lens", wanted)
        assert lengths[:4].tolist() != wanted
        graph.replay()
        static.launched()
        assert lengths[:4].tolist() == wanted
        assert graph.outputs[0].tolist() == [10 * length for length in wanted]
    assert lengths[4:].tolist() == [1] * 4


def test_without_captured_copies_the_upload_comes_before_the_launch(
    device: Device, make: Callable[..., StaticTensors]
) -> None:
    static = make(capture_h2d=False)
    lengths = static["seq_lens"]

    def forward() -> tuple[torch.Tensor]:
        static.upload_in_graph(4)
        return (lengths[:4] * 10,)

    graph, _ = HostGraphBackend(BufferManager(device.create_stream())).capture(forward, None)
    assert graph.operations == 1  # type: ignore[attr-defined]
    static.stage("seq_lens", [17, 33, 1, 1])
    static.upload("seq_lens", 4)
    graph.replay()
    assert graph.outputs[0].tolist() == [170, 330, 10, 10]


def test_one_flag_switches_shadows_and_copy(device: Device, make: Callable[..., StaticTensors]) -> None:
    assert prefer_pinned(device)
    assert {str(buffer.kind) for buffer in make().host_buffers} == {"pinned"}
    assert {str(buffer.kind) for buffer in make(capture_h2d=False).host_buffers} == {"cpu"}


class Gate:
    """An event that tells when it was waited for."""

    log: list[str]

    def __init__(self, log: list[str]) -> None:
        self.log = log
        log.append("recorded")

    def synchronize(self) -> None:
        self.log.append("waited")


def test_a_shadow_is_refilled_after_its_upload_alone(make: Callable[..., StaticTensors]) -> None:
    log: list[str] = []
    static = make(new_event=lambda: Gate(log))
    static.stage("input_ids", [1, 2])
    assert log == []
    static.upload("input_ids", 2)
    static.stage("position_ids", [0, 1])
    assert log == ["recorded"]
    static.stage("input_ids", [3, 4])
    static.stage("input_ids", [5, 6])
    assert log == ["recorded", "waited"]
    static.launched()
    static.stage("seq_lens", [1])
    assert log == ["recorded", "waited", "recorded", "waited"]


EXTRAS = (
    ExtraInput("rows", "int64", ("batch", 3)),
    ExtraInput("scale", "float32", (2,), source="device"),
    ExtraInput("slots", "int64", ("tokens",), fill=7),
)
GOOD = {
    "rows": torch.arange(6).view(2, 3),
    "scale": torch.tensor([0.5, 2.0]),
    "slots": torch.tensor([4, 5]),
}


def test_symbols_stand_for_the_largest_bucket(make: Callable[..., StaticTensors]) -> None:
    static = make(extras=EXTRAS)
    assert {name: tuple(static[name].shape) for name in GOOD} == {"rows": (8, 3), "scale": (2,), "slots": (32,)}
    assert static["slots"].tolist() == [7] * 32
    static.write(GOOD)
    assert static["rows"][:2].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert static["scale"].tolist() == [0.5, 2.0]
    assert static["slots"][:3].tolist() == [4, 5, 7]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", torch.zeros(2, 3)),
        ("rows", torch.zeros(2, 4, dtype=torch.int64)),
        ("rows", torch.zeros(9, 3, dtype=torch.int64)),
        ("rows", torch.zeros(6, dtype=torch.int64)),
        ("slots", None),
        ("slots", [1, 2]),
        ("slots", torch.zeros(33, dtype=torch.int64)),
        ("scale", torch.zeros(3)),
    ],
)
def test_wrong_extra_inputs_are_named(make: Callable[..., StaticTensors], name: str, value: object) -> None:
    given = {key: item for key, item in (GOOD | {name: value}).items() if item is not None}
    with pytest.raises(ConfigError, match=name):
        make(extras=EXTRAS).write(given)


@pytest.mark.parametrize("dims", [("batch", "tokens"), ("heads",), (0,)])
def test_wrong_declarations_are_refused(dims: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError, match="dims of input rows"):
        ExtraInput("rows", "int64", dims)  # type: ignore[arg-type]


def test_more_than_the_buffer_is_refused(make: Callable[..., StaticTensors]) -> None:
    static = make(extras=EXTRAS)
    with pytest.raises(ConfigError, match="seq_lens"):
        static.stage("seq_lens", [1] * 9)
    with pytest.raises(ConfigError, match="rows"):
        static.stage_rows("rows", [[1, 2, 3, 4]])


def test_release_gives_everything_back(device: Device) -> None:
    static = StaticTensors(BufferManager(device.create_stream()), tokens=64, max_bucket=8, extras=EXTRAS)
    assert device.used_by_owner()["graphs"] > 0
    static.release()
    static.release()
    device.empty_cache()
    assert device.used_bytes() == device.host_bytes == 0
