"""Recorded operations: equal results after inputs changed, memory by liveness, and what a recording refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")

import torch

from onebudget.buffers import BufferManager
from onebudget.device import open_device
from onebudget.device.base import Device
from onebudget.device.meter import StorageMeter
from onebudget.errors import StateError
from onebudget.graphs.host_graph import HostGraph, HostGraphBackend
from onebudget.graphs.recording import Recorder, out_variant
from onebudget.units import MIB

aten = torch.ops.aten
Compute = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def device() -> Iterator[Device]:
    with open_device("host", capacity_bytes=64 * MIB, poison=True) as device:
        yield device


def capture(device: Device, compute: Compute, example: torch.Tensor) -> HostGraph:
    graph, _ = HostGraphBackend(BufferManager(device.create_stream())).capture(lambda: (compute(example),), None)
    assert isinstance(graph, HostGraph)
    return graph


WEIGHT = torch.linspace(-1, 1, 12 * 12).view(12, 12)
TABLE = torch.linspace(-3, 3, 40).view(10, 4)

COMPUTATIONS: dict[str, Compute] = {
    "linear": lambda x: torch.nn.functional.linear(x, WEIGHT),
    "linear of three dimensions": lambda x: torch.nn.functional.linear(x[None], WEIGHT, WEIGHT[0])[0],
    "norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "gated": lambda x: torch.nn.functional.silu(x[:, :6]) * x[:, 6:],
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (12,)),
    "softmax": lambda x: torch.softmax(x.float(), -1),
    "rotated": lambda x: torch.cat((-x[..., 6:], x[..., :6]), -1) * x.cos() + x.sin(),
    "joined on the first axis": lambda x: torch.cat((x, x[:1] * 2, x.new_empty((0, 12)))),
    "joined with an empty one of no shape": lambda x: torch.cat((torch.empty(0), x), 1) + 1,
    "joined of unlike types": lambda x: torch.cat((x.to(torch.bfloat16), x[:, :3], x.long()), -1),
    "views": lambda x: x.view(-1, 3, 4).transpose(1, 2).reshape(-1, 12).contiguous()[:, ::2],
    "half": lambda x: (x.to(torch.bfloat16) @ WEIGHT.to(torch.bfloat16)).float(),
    "in place": lambda x: x.clone().add_(1).mul_(x).clamp_(-2, 2),
    "empty filled": lambda x: torch.empty_like(x).copy_(x * 2) + x.new_empty(x.shape).fill_(3),
    "top two": lambda x: torch.topk(x, 2, dim=-1).values,
    "chosen": lambda x: TABLE[x.argmax(-1) % 10],
    "looked up": lambda x: torch.nn.functional.embedding(x.abs().long() % 10, TABLE),
    "made from numbers": lambda x: x + torch.arange(12) + torch.full((12,), 0.5),
    "given where": lambda x: torch.where(x > 0, x, -2 * x).cumsum(-1),
    "written into": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "sorted": lambda x: x.gather(-1, x.sort(-1).indices),
}


def example(seed: int, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS.keys())
def test_replay_equals_the_computation_on_changed_inputs(device: Device, compute: Compute) -> None:
    static = example(0)
    graph = capture(device, compute, static)
    for seed in range(1, 4):
        static.copy_(example(seed))
        graph.replay()
        assert torch.equal(graph.outputs[0], compute(static))


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS.keys())
def test_meta_tensors_tell_the_bytes(device: Device, compute: Compute) -> None:
    """A recording of shapes alone plans the same arena, as long as the numbers from outside are shapes too."""

    def planned(x: torch.Tensor) -> tuple[int, int]:
        recorder = Recorder()
        with torch.no_grad(), recorder:
            outputs = (compute(x),)
        recording = recorder.finish(outputs)
        return recording.plan()[1], recording.workspace_bytes

    global WEIGHT, TABLE
    real = planned(example(0, rows=64))
    kept = WEIGHT, TABLE
    try:
        WEIGHT, TABLE = WEIGHT.to("meta"), TABLE.to("meta")
        with torch.device("meta"):
            assert planned(example(0, rows=64).to("meta")) == real
    finally:
        WEIGHT, TABLE = kept


def deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        x = torch.nn.functional.silu(torch.nn.functional.linear(x, WEIGHT)) + x
    return x


def test_the_arena_is_the_peak_and_not_the_sum(device: Device) -> None:
    static = example(0, rows=512)
    tensor_bytes = static.numel() * 4
    meter = StorageMeter(device)
    device.reset_peak()
    with torch.no_grad(), meter:
        deep(static)
    eager_peak = device.sample().alloc_peak
    backend = HostGraphBackend(BufferManager(device.create_stream()))
    graph, pool = backend.capture(lambda: (deep(static),), None)
    assert backend.pool_bytes(pool) <= eager_peak * 5 // 4
    assert eager_peak < 5 * tensor_bytes  # while 120 of them were made
    assert isinstance(graph, HostGraph)
    assert graph.operations >= 90
    assert device.used_by_owner()["graphs"] == backend.pool_bytes(pool)


def test_pool_bytes_stay_over_a_thousand_replays_and_come_back(device: Device) -> None:
    backend = HostGraphBackend(BufferManager(device.create_stream()))
    static = example(0)
    graph, pool = backend.capture(lambda: (deep(static),), None)
    held, used = backend.pool_bytes(pool), device.used_bytes()
    address = graph.outputs[0].data_ptr()
    for _ in range(1000):
        graph.replay()
    assert (backend.pool_bytes(pool), device.used_bytes()) == (held, used)
    assert graph.outputs[0].data_ptr() == address
    graph.reset()
    backend.release_pool(pool)
    device.empty_cache()
    assert device.used_bytes() == 0


def test_smaller_graphs_live_in_the_memory_of_larger_ones(device: Device) -> None:
    backend = HostGraphBackend(BufferManager(device.create_stream()))
    inputs = [example(0, rows) for rows in (64, 16, 1)]
    pool, held, graphs = None, [], []
    for static in inputs:
        graph, pool = backend.capture(lambda static=static: (deep(static),), pool)
        graphs.append(graph)
        held.append(backend.pool_bytes(pool))
    assert len(set(held)) == 1
    for static, graph in zip(inputs, graphs, strict=True):
        graph.replay()
        assert torch.equal(graph.outputs[0], deep(static))


def test_a_host_value_changed_after_capture_has_no_effect(device: Device) -> None:
    """The trap: numbers are frozen where Python put them into a call; only what lies in a tensor can change."""
    scale, offset = [2.0], torch.tensor([1.0])
    static = torch.ones(3)
    graph = capture(device, lambda x: x * scale[0] + offset, static)
    scale[0] = 100.0
    graph.replay()
    assert graph.outputs[0].tolist() == [3.0, 3.0, 3.0]
    offset.fill_(5.0)
    static.fill_(10.0)
    graph.replay()
    assert graph.outputs[0].tolist() == [25.0, 25.0, 25.0]


def test_a_replaced_input_is_not_seen(device: Device) -> None:
    holder = [torch.ones(2)]
    graph = capture(device, lambda _: holder[0] + 1, torch.ones(1))
    holder[0] = torch.full((2,), 9.0)
    graph.replay()
    assert graph.outputs[0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x * x.sum().item(), "_local_scalar_dense"),
        (lambda x: x[: int(x.argmax())], "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: torch.masked_select(x, x > 0), "masked_select"),
        (torch.unique, "unique"),
        (lambda x: x if torch.equal(x, x) else -x, "equal"),
        (lambda x: x.repeat_interleave(x[:, 0].long().abs(), 0), "repeat_interleave"),
    ],
)
def test_operations_that_depend_on_values_are_refused_by_name(device: Device, compute: Compute, name: str) -> None:
    before = device.used_bytes()
    with pytest.raises(StateError, match=name):
        capture(device, compute, example(0))
    assert device.used_bytes() == before


def test_a_recording_keeps_nothing_alive(device: Device) -> None:
    recorder = Recorder()
    seen: list[int] = []
    with torch.no_grad(), recorder:
        x = example(0, rows=256)
        with StorageMeter(device):
            for _ in range(20):
                x = x * 2
                seen.append(device.sample().alloc_live)
    assert max(seen) <= 2 * 256 * 12 * 4


@pytest.mark.parametrize(
    ("operation", "written"),
    [
        (aten.mm.default, "aten::mm.out"),
        (aten.mul.Tensor, "aten::mul.out"),
        (aten.mean.dim, "aten::mean.out"),
        (aten.pow.Tensor_Scalar, "aten::pow.Tensor_Scalar_out"),
        (aten.cat.default, "aten::cat.out"),
        (aten.embedding.default, None),
        (aten.native_layer_norm.default, None),
        (aten.sort.default, None),
    ],
)
def test_results_are_written_in_place_only_where_a_kernel_does_it(operation: object, written: str | None) -> None:
    """An ``out=`` that only computes and copies would hide its temporary."""
    found = out_variant(operation)
    assert (found and found[0].name()) == written
