from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from onebudget.core import Request, SamplingParams, ScheduledBatch
from onebudget.errors import UnknownKeyError
from onebudget.resources import BaseResourceManager, ResourceKind, ResourceManager


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
        self._note("update")

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
