from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from onebudget.core import Request, SamplingParams, ScheduledBatch
from onebudget.errors import ConfigError, UnknownKeyError
from onebudget.resources import BaseResourceManager, BlocksTotal, ResourceKind, ResourceManager


@dataclass
class Spy(BaseResourceManager):
    name: str
    calls: list[str] = field(default_factory=list)
    fails_in: str = ""

    def max_resource_count(self) -> int:
        return 0

    def needed_to_completion(self, request: Request) -> int:
        return 0

    def _note(self, hook: str) -> None:
        if hook == self.fails_in:
            raise RuntimeError(hook)
        self.calls.append(f"{hook} {self.name}")

    def prepare(self, batch: ScheduledBatch) -> None:
        self._note("prepare")

    def update(self, batch: ScheduledBatch, attn_meta: object = None, kv_elem_bytes: int | None = None) -> None:
        self._note("update" if attn_meta is None else f"update with {attn_meta} {kv_elem_bytes}")

    def free(self, request: Request) -> None:
        self._note("free")

    def shutdown(self) -> None:
        self._note("shutdown")


def one_request() -> Request:
    return Request(0, [1], SamplingParams(), max_new_tokens=1)


def dispatcher(calls: list[str], fails_in: str = "") -> ResourceManager:
    return ResourceManager(
        {ResourceKind.SEQ_SLOT: Spy("slot", calls), ResourceKind.KV: Spy("kv", calls, fails_in=fails_in)}
    )


def test_prepare_and_update_forward_free_and_shutdown_backward() -> None:
    calls: list[str] = []
    managers = dispatcher(calls)
    managers.prepare(ScheduledBatch())
    managers.update(ScheduledBatch())
    managers.free(one_request())
    managers.shutdown()
    assert calls == [
        "prepare slot", "prepare kv", "update slot", "update kv",
        "free kv", "free slot", "shutdown kv", "shutdown slot",
    ]  # fmt: skip


def test_a_failing_hook_is_not_hidden_and_earlier_managers_keep_what_they_gave() -> None:
    calls: list[str] = []
    managers = dispatcher(calls, fails_in="prepare")
    with pytest.raises(RuntimeError, match="prepare"):
        managers.prepare(ScheduledBatch())
    managers.free(one_request())
    assert calls == ["prepare slot", "free kv", "free slot"]


def test_managers_by_kind() -> None:
    managers = ResourceManager({ResourceKind.KV: Spy("kv")})
    assert managers(ResourceKind.KV) is next(iter(managers))
    with pytest.raises(UnknownKeyError, match="no manager of kind 'seq_slot'") as missing:
        managers(ResourceKind.SEQ_SLOT)
    assert isinstance(missing.value, KeyError)


def test_hooks_of_the_base_class_do_nothing() -> None:
    class Counts(BaseResourceManager):
        def max_resource_count(self) -> int:
            return 3

        def needed_to_completion(self, request: Request) -> int:
            return 1

    manager = Counts()
    manager.prepare(ScheduledBatch())
    manager.update(ScheduledBatch())
    manager.free(one_request())
    manager.shutdown()
    assert list(manager.dummy_lengths()) == []


def test_counts_are_the_contract() -> None:
    class Without(BaseResourceManager):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Without()  # type: ignore[abstract]


KINDS = {
    ResourceKind.SEQ_SLOT: "slot",
    ResourceKind.PEFT: "peft",
    ResourceKind.KV: "kv",
    ResourceKind.DRAFT_KV: "draft",
}


def spies(calls: list[str], kinds: dict[ResourceKind, str] = KINDS) -> dict[ResourceKind, BaseResourceManager]:
    return {kind: Spy(name, calls) for kind, name in kinds.items()}


def test_order_of_hooks_of_a_step() -> None:
    """The cache comes after what it may depend on; the batch is trimmed when all are prepared, and published last."""
    calls: list[str] = []
    managers = ResourceManager(
        spies(calls), fit=lambda batch: calls.append("trim"), publish=lambda batch: calls.append("publish")
    )
    managers.prepare(ScheduledBatch())
    managers.update(ScheduledBatch(), "meta", 2)
    managers.free(one_request())
    assert calls == [
        "prepare slot", "prepare peft", "prepare draft", "prepare kv", "trim", "publish",
        "update slot", "update peft", "update draft", "update with meta 2 kv",
        "free kv", "free draft", "free peft", "free slot",
    ]  # fmt: skip


def test_cross_attention_and_compression_come_after_the_cache() -> None:
    kinds = {kind: kind.value for kind in reversed(ResourceKind)}
    order = ResourceManager(spies([], kinds)).order
    assert order[-3:] == (ResourceKind.KV, ResourceKind.CROSS_KV, ResourceKind.KV_COMPRESSION)
    assert order[:4] == (ResourceKind.SPEC, ResourceKind.SEQ_SLOT, ResourceKind.PEFT, ResourceKind.DRAFT_KV)


def test_another_order_must_name_every_manager_once() -> None:
    managers = ResourceManager(spies([]))
    for wrong in (
        [ResourceKind.KV, ResourceKind.SEQ_SLOT, ResourceKind.PEFT],
        [ResourceKind.KV, ResourceKind.KV, ResourceKind.SEQ_SLOT, ResourceKind.PEFT],
        [*KINDS, ResourceKind.SPEC],
    ):
        with pytest.raises(ConfigError, match="each of"):
            managers.reorder(wrong)
        assert managers.order[-1] is ResourceKind.KV
    wanted = (ResourceKind.KV, ResourceKind.SEQ_SLOT, ResourceKind.DRAFT_KV, ResourceKind.PEFT)
    managers.reorder(wanted)
    assert managers.order == wanted


def test_managers_of_users_take_no_kind_that_is_there() -> None:
    with pytest.raises(ConfigError, match="'kv'"):
        ResourceManager(spies([]), extra=[(ResourceKind.KV, Spy("mine"))])
    assert ResourceManager(spies([]), extra=[(ResourceKind.SPEC, Spy("mine"))]).order[-1] is ResourceKind.KV


def test_a_manager_that_is_not_there() -> None:
    assert ResourceManager({}).get(ResourceKind.PEFT) is None


def test_a_free_that_fails_does_not_keep_the_others_from_theirs() -> None:
    calls: list[str] = []
    managers = ResourceManager(
        {ResourceKind.SEQ_SLOT: Spy("slot", calls), ResourceKind.KV: Spy("kv", calls, fails_in="free")}
    )
    with pytest.raises(RuntimeError, match="free"):
        managers.free(one_request())
    assert calls == ["free slot"]


@dataclass
class Counted(Spy):
    """A pool that knows what a request needs, or does not."""

    budget: tuple[BlocksTotal, BlocksTotal] | None = None

    def kv_block_budget_applies(self) -> bool:
        return self.budget is not None

    def request_kv_block_budget(self, request: Request) -> tuple[BlocksTotal, BlocksTotal] | None:
        return self.budget


def test_budgets_of_pools_in_order_and_one_warning_for_each_that_does_not_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = (BlocksTotal(3), BlocksTotal(9))
    managers = ResourceManager(
        {
            ResourceKind.CROSS_KV: Counted("cross", budget=known),
            ResourceKind.DRAFT_KV: Counted("draft"),
            ResourceKind.KV: Counted("kv", budget=known),
            ResourceKind.SEQ_SLOT: Counted("slot"),
        }
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert managers.block_budgets(one_request()) == [
                (ResourceKind.KV, *known),
                (ResourceKind.CROSS_KV, *known),
            ]
    assert len(caplog.records) == 1
    assert "draft_kv" in caplog.text
    assert managers.unchecked_pools() == [ResourceKind.DRAFT_KV]


def test_unchecked_pools_are_named_once_where_beams_make_them_dangerous(caplog: pytest.LogCaptureFixture) -> None:
    managers = ResourceManager({ResourceKind.KV: Counted("kv")})
    with caplog.at_level(logging.WARNING):
        managers.warn_of_unchecked_pools(max_beam_width=1)
        assert not caplog.records
        managers.warn_of_unchecked_pools(max_beam_width=4)
        managers.warn_of_unchecked_pools(max_beam_width=4)
    assert len(caplog.records) == 1
