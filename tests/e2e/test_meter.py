"""The meter beside two other sources: a dry run on meta tensors, and torch's own allocator events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onebudget import LLM, SamplingParams
from onebudget.core import Request
from onebudget.devtools.allocator_events import allocator_events
from onebudget.engine.dry_runs import dry_profile

pytestmark = pytest.mark.demo
TORCH_DTYPE = {"fp32": "float32", "bf16": "bfloat16"}


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def llm(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[LLM]:
    # Without graphs: a step that is replayed allocates nothing.
    with LLM(
        demo_model, dtype=request.param, device_memory="1GiB", max_num_tokens=512, max_seq_len=512, strict_memory=True,
        enable_cuda_graphs=False,
    ) as llm:  # fmt: skip
        yield llm


def test_dry_run_on_meta_tensors_plans_the_measured_activations_to_the_byte(llm: LLM, demo_model: Path) -> None:
    profile = dry_profile(demo_model, llm.engine.station.model.dtype, llm.config)
    planned = profile.activation_bytes - profile.allocated_bytes
    measured = {term["name"]: term["peak_bytes"] for term in llm.memory_report()["terms"]}
    assert planned == llm.budget.term("activations").bytes == measured["activations"]


def submit(llm: LLM, lengths: list[int], new_tokens: int) -> None:
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    for number, length in enumerate(lengths):
        llm.engine.executor.submit(Request(-100 - number, [5] * length, params, max_new_tokens=new_tokens))


def drain(llm: LLM) -> None:
    while llm.engine.executor.has_work:
        llm.engine.executor.step()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_meter_agrees_with_the_allocators_own_events(llm: LLM, phase: str) -> None:
    """Within 2 %, once what kernels allocate inside one operation is added; those operations are listed."""
    executor, device = llm.engine.executor, llm.engine.station.device
    submit(llm, [150, 80, 202, 40, 30, 10], 3)
    if phase == "decode":
        executor.step()
        executor.step()
    device.reset_peak()
    before = device.sample().alloc_live
    events = allocator_events(executor.step)
    metered = device.sample().alloc_peak - before
    drain(llm)
    hidden = events.kernel_scratch_bytes.get(events.peak_operation, 0)
    print(f"meter {metered}, allocator {events.peak_bytes} in {events.peak_operation}, inside kernels: {events}")
    assert metered <= events.peak_bytes * 1.02
    assert events.peak_bytes - hidden <= metered * 1.02
    if phase == "prefill" or llm.engine.station.model.dtype == "float32":
        assert abs(events.peak_bytes - metered) <= metered * 0.02
