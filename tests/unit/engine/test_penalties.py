from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from onebudget import LLM, AllocationError, BudgetError
from onebudget.buffers import BufferManager
from onebudget.core import MAX_LOGPROBS, Request, SamplingParams, ScheduledBatch
from onebudget.device import open_device
from onebudget.device.meter import StorageMeter
from onebudget.devtools.tiny_models import tiny_model
from onebudget.engine.penalties import OWNER, PenaltyStore, late_tables
from onebudget.engine.sampler import ROWS_AT_ONCE, Sampler
from onebudget.resources import SequenceSlotManager
from onebudget.units import align_up

MIB = 2**20


class Bench:
    """A penalty store on a device of its own, with the requests that sit in its slots."""

    def __init__(self, seats: int, *, capacity_bytes: int = MIB, kind: str = "host", beams: int = 1) -> None:
        options = {"poison": True} if kind == "host" else {}
        self.device = open_device(kind, capacity_bytes=capacity_bytes, **options)  # type: ignore[call-overload]
        self.manager = BufferManager(self.device.create_stream())
        self.slots = SequenceSlotManager(seats)
        self.store = PenaltyStore(self.manager, self.slots, max_beam_width=beams)

    def seat(self, *requests: Request) -> None:
        self.slots.prepare(ScheduledBatch(context_last=list(requests)))

    def leave(self, request: Request) -> None:
        self.store.forget(request)
        self.slots.free(request)

    def step(self, logits: list[list[float]], requests: list[Request]) -> list[list[float]]:
        """The rows after penalties."""
        self.seat(*requests)
        rows = torch.tensor(logits)
        self.store.begin(requests, rows.shape[-1])
        self.store.apply(rows, requests)
        return rows.tolist()  # type: ignore[no-any-return]

    def live(self) -> int:
        return self.device.account.live_by_owner().get(OWNER, 0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(4)
    yield made
    made.store.release()
    made.device.close()


def request(number: int, prompt: list[int], **params: Any) -> Request:
    return Request(number, prompt, SamplingParams(temperature=0, **params), max_new_tokens=99)


# -- sizes and moments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seats", "beams", "vocab", "parameters", "counts", "mask"),
    [
        (4, 1, 10, 60, 160, 40),
        (256, 1, 128_256, 3_840, 131_334_144, 32_833_536),
        (64, 4, 32_000, 960, 32_768_000, 2_048_000),
    ],
)
def test_sizes(seats: int, beams: int, vocab: int, parameters: int, counts: int, mask: int) -> None:
    bench = Bench(seats, capacity_bytes=2**30, kind="fake", beams=beams)
    assert [buffer.nbytes for buffer in bench.store.buffers] == [parameters]
    one = request(0, [1], repetition_penalty=1.1, prompt_ignore_length=1)
    bench.seat(one)
    bench.store.begin([one], vocab)
    assert [buffer.nbytes for buffer in bench.store.buffers] == [parameters, counts, mask]
    assert bench.store.table_bytes == counts + mask
    assert bench.store.counts().shape == (seats, beams, vocab)
    assert late_tables(seats=seats, max_beam_width=beams, vocab_size=vocab).worst_bytes == counts + mask


@given(
    seats=st.integers(1, 40), beams=st.integers(1, 4), vocab=st.integers(1, 5000), granule=st.sampled_from([512, 4096])
)
def test_reserved_is_what_is_taken_in_whole_pages(seats: int, beams: int, vocab: int, granule: int) -> None:
    bench = Bench(seats, capacity_bytes=64 * MIB, kind="fake", beams=beams)
    one = request(0, [0], frequency_penalty=0.1, prompt_ignore_length=1)
    bench.seat(one)
    bench.store.begin([one], vocab)
    _, counts, mask = bench.store.buffers
    declared = late_tables(seats=seats, max_beam_width=beams, vocab_size=vocab, granule_bytes=granule)
    assert declared.worst_bytes == align_up(counts.nbytes, granule) + align_up(mask.nbytes, granule)
    assert (declared.name, declared.reserve) == (OWNER, True)


def test_life_line(bench: Bench) -> None:
    """Four seats, ten tokens: nothing until the first penalised request, then 160 B and 40 B that stay."""
    zeros = [0.0] * 10
    assert bench.step([zeros], [request(1, [5, 5])]) == [zeros]
    assert (bench.live(), bench.store.active_slots) == (0, 0)

    nine = request(9, [3, 3, 7], frequency_penalty=0.5, prompt_ignore_length=1)
    rows = bench.step([zeros], [nine])
    assert [buffer.nbytes for buffer in bench.store.buffers] == [60, 160, 40]
    slot = bench.slots.slot_of(nine)
    assert bench.store.prefix()[slot].nonzero().flatten().tolist() == [3]
    assert bench.store.counts()[slot, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert rows == [[0, 0, 0, -0.5, 0, 0, 0, -0.5, 0, 0]]
    assert (bench.store.has_previous[slot].item(), bench.store.active_slots) == (False, 1)

    nine.output_token_ids.append(7)
    rows = bench.step([zeros], [nine])
    assert bench.store.counts()[slot, 0, 7] == 2
    assert rows[0][7] == -1.0
    assert bench.store.has_previous[slot]

    held = bench.live()
    bench.leave(nine)
    plain = request(10, [1])
    assert bench.step([zeros], [plain]) == [zeros]
    assert bench.slots.slot_of(plain) == slot
    assert not bench.store.active[slot]
    assert bench.store.counts()[slot, 0, 7] == 2, "rows stay stale"
    bench.leave(plain)
    again = request(11, [2], presence_penalty=1.0)
    assert bench.step([zeros], [again]) == [[0, 0, -1.0, 0, 0, 0, 0, 0, 0, 0]]
    assert bench.slots.slot_of(again) == slot
    assert bench.live() == held


def test_the_mask_appears_with_the_first_prefix_to_ignore(bench: Bench) -> None:
    first = request(1, [1, 2], repetition_penalty=2.0)
    bench.step([[1.0] * 5], [first])
    assert len(bench.store.buffers) == 2
    second = request(2, [1, 2], repetition_penalty=2.0, presence_penalty=0.25, prompt_ignore_length=99)
    rows = bench.step([[1.0] * 5] * 2, [first, second])
    assert len(bench.store.buffers) == 3
    assert rows == [[1.0, 0.5, 0.5, 1.0, 1.0]] * 2, "an ignored prefix counts for the repetition penalty only"


def test_no_room_names_the_tables_and_changes_nothing() -> None:
    bench = Bench(4, capacity_bytes=8192)
    one = request(1, [1], repetition_penalty=1.5)
    bench.seat(one)
    with pytest.raises(AllocationError, match="requests without penalties go on") as refused:
        bench.store.begin([one], 1000)
    assert (refused.value.owner, refused.value.requested_bytes) == (OWNER, 16_000)
    assert (len(bench.store.buffers), bench.store.active_slots) == (1, 0)


# -- values -------------------------------------------------------------------------------------------------------


def test_values(bench: Bench) -> None:
    """2.0 seen three times, -2.0 only in the ignored prefix, and one never seen."""
    one = request(
        1, [4, 2, 2, 2], repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.1, prompt_ignore_length=1
    )
    row = bench.step([[0.3, 1.0, 2.0, 0.3, -2.0]], [one])[0]
    assert row == pytest.approx([0.3, 1.0, 0.8, 0.3, -2.5])
    assert (row[0], row[1]) == (torch.tensor(0.3).item(), 1.0)


def test_tokens_outside_the_vocabulary_are_not_counted(bench: Bench) -> None:
    one = request(1, [99, 4, -1, 1, 77], frequency_penalty=1.0, prompt_ignore_length=2)
    assert bench.step([[0.0] * 5], [one]) == [[0, -1.0, 0, 0, 0]]
    assert bench.store.prefix()[0].tolist() == [False] * 4 + [True]


def test_rows_without_penalties_beside_penalised_ones_stay_as_they_are(bench: Bench) -> None:
    """Their rows of the tables were never written."""
    plain, one = request(1, [0, 1]), request(2, [0], repetition_penalty=4.0, presence_penalty=1, frequency_penalty=1)
    rows = bench.step([[0.1, -7.0, float("-inf")]] * 2, [plain, one])
    assert rows[0] == torch.tensor([0.1, -7.0, float("-inf")]).tolist()
    assert rows[1] == pytest.approx([0.025 - 2, -7.0, float("-inf")])


def test_a_step_that_is_tried_again_counts_its_token_once(bench: Bench) -> None:
    one = request(1, [1], frequency_penalty=1.0)
    bench.step([[0.0] * 4], [one])
    one.output_token_ids.append(2)
    first = bench.step([[0.0] * 4], [one])
    assert bench.step([[0.0] * 4], [one]) == first == [[0, -1.0, -1.0, 0]]


def test_tokens_sampled_before_moving_in_are_counted(bench: Bench) -> None:
    one = request(1, [1], frequency_penalty=1.0)
    one.output_token_ids += [3, 3]
    assert bench.step([[0.0] * 4], [one]) == [[0, -1.0, 0, -2.0]]


def expected(logits: list[float], one: Request) -> list[float]:
    """The definition, token by token."""
    params = one.params
    ignored = min(params.prompt_ignore_length, one.prompt_tokens)
    counted = [*one.prompt_token_ids[ignored:], *one.output_token_ids]
    occurred = {*one.prompt_token_ids, *one.output_token_ids}
    rows = []
    for token, logit in enumerate(logits):
        if token in occurred:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.presence_penalty * (token in counted) + params.frequency_penalty * counted.count(token)
        rows.append(logit)
    return rows


tokens = st.lists(st.integers(0, 7), max_size=6)
penalised = st.builds(
    lambda prompt, first, r, p, f, ignored, steps: (
        [first, *prompt],
        {"repetition_penalty": r, "presence_penalty": p, "frequency_penalty": f, "prompt_ignore_length": ignored},
        steps,
    ),
    tokens,
    st.integers(0, 7),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([0.0, 0.6, -1.0]),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 8),
    tokens,
)


@given(st.lists(penalised, min_size=1, max_size=8), st.lists(st.floats(-4, 4), min_size=8, max_size=8))
def test_random_lives_match_the_definition(lives: list[Any], logits: list[float]) -> None:
    """Requests come and go over three seats; each step's rows are those of the definition."""
    bench = Bench(3)
    waiting = [(request(number, prompt, **params), steps) for number, (prompt, params, steps) in enumerate(lives)]
    running: list[tuple[Request, list[int]]] = []
    while waiting or running:
        while waiting and len(running) < 3:
            running.append(waiting.pop(0))
        present = [one for one, _ in running]
        for row, one in zip(bench.step([logits] * len(present), present), present, strict=True):
            assert row == pytest.approx(expected(logits, one), abs=1e-5)
        for one, steps in list(running):
            if len(one.output_token_ids) == len(steps):
                bench.leave(one)
                running.remove((one, steps))
            else:
                one.output_token_ids.append(steps[len(one.output_token_ids)])
    assert bench.store.active_slots == 0
    bench.device.close()


# -- in the sampler -----------------------------------------------------------------------------------------------


def test_penalties_come_before_barred_tokens_and_the_choice(bench: Bench) -> None:
    sampler = Sampler(0, bench.store)
    one = request(1, [1], repetition_penalty=10.0, min_tokens=1)
    one.end_token_ids = frozenset([2])
    bench.seat(one)
    assert sampler.sample(torch.tensor([[1.0, 5.0, 4.0, 0.9]]), [one]) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, ROWS_AT_ONCE + 8])
def test_penalties_and_logprobs_take_no_more_than_the_costliest_sampling(dtype: torch.dtype, rows: int) -> None:
    """The profile samples with both filters and nothing else, so that must be the peak."""
    vocab = 2048
    filtered = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 1}
    penalties = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "prompt_ignore_length": 1,
    }
    loads: dict[str, dict[str, Any]] = {
        "filtered": filtered,
        "penalised": {"temperature": 0, **penalties},
        "everything": {**filtered, **penalties, "logprobs": MAX_LOGPROBS},
    }
    peaks = {}
    for name, params in loads.items():
        bench = Bench(rows, capacity_bytes=64 * MIB)
        members = [Request(number, [1, 2, 3], SamplingParams(**params), max_new_tokens=9) for number in range(rows)]
        bench.seat(*members)
        sampler = Sampler(0, bench.store)
        with torch.no_grad():
            logits = torch.randn(rows, vocab).to(dtype)
            with StorageMeter(bench.device):
                sampler.sample(logits, members)
            for one in members:
                one.output_token_ids.append(5)
            bench.device.reset_peak()
            with StorageMeter(bench.device):
                sampler.sample(logits, members)
        peaks[name] = bench.device.account.peak_by_owner()["activations"]
    assert peaks["everything"] == peaks["filtered"] > peaks["penalised"]


# -- in the engine ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, dtype="fp32", device_memory="768MiB", max_num_tokens=128, max_seq_len=128) as made:
        yield made


@pytest.mark.demo
@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_greedy_with_a_repetition_penalty_equals_generate(llm: LLM, demo_model: Path, penalty: float) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    prompts = ["The sea, the sea, the sea", "One two three one two three one two"]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, repetition_penalty=penalty)
    for output in llm.generate(prompts, params):
        ids = torch.tensor([output.prompt_token_ids])
        answer = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False,
            repetition_penalty=penalty, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert output.token_ids == answer[0, ids.shape[1] :].tolist()


@pytest.mark.demo
def test_penalties_keep_words_from_coming_back(llm: LLM) -> None:
    free, penalised = llm.generate(
        ["one two one two one two"] * 2,
        [
            SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
            SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0),
        ],
    )
    assert len(set(penalised.token_ids)) > len(set(free.token_ids))


@pytest.mark.demo
def test_the_ledger_reserves_the_tables_of_every_seat(llm: LLM) -> None:
    term = llm.budget.term("penalty_workspace")
    assert term.bytes == 8 * 49_152 * (4 + 1)
    assert (term.basis, term.phase) == ("declared", "reserve")
    held = {entry["name"]: entry["bytes"] for entry in llm.memory_report()["terms"]}
    assert held.get("penalty_workspace", 0) in (0, 8 * 49_152 * 4)


def test_giving_them_up_is_a_way_out_where_it_helps(tmp_path: Path) -> None:
    """The device lacks half of the tables."""
    folder = tiny_model("gqa", tmp_path, vocab_size=4096)
    knobs: dict[str, Any] = {
        "dtype": "fp32", "max_batch_size": 256, "max_num_tokens": 256, "max_seq_len": 16,
        "free_gpu_memory_fraction": 1.0,
    }  # fmt: skip
    with LLM(folder, device_memory=32 * MIB, **knobs) as llm:
        needed = 32 * MIB - llm.budget.kv_cache.bytes
        tables = llm.budget.term("penalty_workspace").bytes
    with pytest.raises(BudgetError) as short:
        LLM(folder, device_memory=needed - tables // 2, **knobs)
    assert short.value.ledger is not None
    assert {"enable_penalties": False} in [change.set for change in short.value.ledger.changes]
    with LLM(folder, device_memory=needed - tables // 2, enable_penalties=False, **knobs) as llm:
        assert llm.budget.fits


def test_tables_sleep_and_come_back(tmp_path: Path) -> None:
    """Their contents are lost meanwhile, and nobody reads them before writing."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, repetition_penalty=1.5)
    mixed = [params, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)]
    with LLM(
        tiny_model("gqa", tmp_path), dtype="fp32", device_memory=16 * MIB, max_seq_len=64, max_num_tokens=64,
        enable_sleep=True,
    ) as llm:  # fmt: skip
        before = [output.token_ids for output in llm.generate([[5, 6, 5, 6]] * 2, mixed)]
        assert before[0] != before[1]
        assert llm.sleep(1).still_held_bytes == {}
        llm.wake()
        assert [output.token_ids for output in llm.generate([[5, 6, 5, 6]] * 2, mixed)] == before


@pytest.mark.demo
def test_without_the_tables_penalised_requests_are_refused(demo_model: Path) -> None:
    with LLM(
        demo_model, dtype="fp32", device_memory="768MiB", max_num_tokens=64, max_seq_len=64, enable_penalties=False
    ) as llm:
        assert llm.budget.term("penalty_workspace").bytes == 0
        refused, served = llm.generate(
            ["a", "a"], [SamplingParams(presence_penalty=0.1), SamplingParams(max_tokens=1, temperature=0)]
        )
        assert refused.finish_reason == "refused"
        assert "enable_penalties" in (refused.error or "")
        assert served.finish_reason == "length"
