"""The KV bookkeeping of vLLM and SGLang, without a model and without a GPU, as rounds that ``kv_manager.py`` times.

Both must be importable by the interpreter that runs the bench; ``kv_manager.py`` says how such an environment is made.
SGLang's package imports GPU kernels at its top, and its tree needs none of them: the packages on the way to the tree
are entered without running their ``__init__``, and modules that only lend names to annotations are empty stand-ins.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from kv_stream import BLOCK_TOKENS, Round, Stream, timed


def vllm_rounds(stream: Stream, num_blocks: int) -> dict[str, Round]:
    """Rounds by row name, or nothing where vLLM is not installed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    if importlib.util.find_spec("vllm") is None:
        return {}
    return VllmRounds(stream, num_blocks).rounds()


def sglang_rounds(stream: Stream) -> dict[str, Round]:
    """Rounds by row name, or nothing where SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return {}
    enter_without_kernels(Path(next(iter(spec.submodule_search_locations))))
    return SglangRounds(stream).rounds()


class VllmRounds:
    """vLLM's v1 manager for one group of 32 full-attention layers."""

    def __init__(self, stream: Stream, num_blocks: int) -> None:
        self.stream, self.num_blocks = stream, num_blocks
        hashing = import_module("vllm.utils.hashing")
        utils = import_module("vllm.v1.core.kv_cache_utils")
        utils.init_none_hash(hashing.sha256)
        self.hasher = utils.get_request_block_hasher(BLOCK_TOKENS, hashing.sha256)
        self.params = import_module("vllm.sampling_params").SamplingParams(max_tokens=16)
        self.request_class = import_module("vllm.v1.request").Request

    def manager(self, *, caching: bool) -> Any:
        interface = import_module("vllm.v1.kv_cache_interface")
        dtype = import_module("torch").bfloat16
        spec = interface.FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=dtype)
        group = interface.KVCacheGroupSpec([f"layer.{layer}" for layer in range(32)], spec)
        config = interface.KVCacheConfig(num_blocks=self.num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        return import_module("vllm.v1.core.kv_cache_manager").KVCacheManager(
            config,
            max_model_len=131072,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_caching=caching,
        )

    def requests(self, prompts: Sequence[list[int]], *, hashed: bool) -> list[Any]:
        return [
            self.request_class(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling_params=self.params,
                pooling_params=None,
                block_hasher=self.hasher if hashed else None,
            )
            for number, prompt in enumerate(prompts)
        ]

    def serve(self, manager: Any, requests: Sequence[Any]) -> None:
        for request in requests:
            blocks, cached, *_ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, request.num_prompt_tokens - cached, cached, blocks) is not None
            manager.free(request)

    def allocate_free(self) -> tuple[float, int]:
        manager, requests = self.manager(caching=False), self.requests(self.stream.unique, hashed=False)
        return timed(lambda: self.serve(manager, requests), len(requests))

    def allocate_free_unique(self) -> tuple[float, int]:
        manager, requests = self.manager(caching=True), self.requests(self.stream.unique, hashed=True)
        return timed(lambda: self.serve(manager, requests), len(requests))

    def from_token_ids(self) -> tuple[float, int]:
        manager = self.manager(caching=True)
        prompts = self.stream.unique
        return timed(lambda: self.serve(manager, self.requests(prompts, hashed=True)), len(prompts))

    def warm(self) -> tuple[Any, list[Any]]:
        manager = self.manager(caching=True)
        self.serve(manager, self.requests(self.stream.shared[:1], hashed=True))
        return manager, self.requests(self.stream.shared[1:], hashed=True)

    def lookup(self) -> tuple[float, int]:
        manager, requests = self.warm()

        def run() -> None:
            for request in requests:
                manager.get_computed_blocks(request)

        return timed(run, len(requests))

    def serve_hits(self) -> tuple[float, int]:
        manager, requests = self.warm()
        return timed(lambda: self.serve(manager, requests), len(requests))

    def decode(self) -> tuple[float, int]:
        manager, requests = self.manager(caching=False), self.requests(self.stream.running, hashed=False)
        for request in requests:
            manager.allocate_slots(request, request.num_prompt_tokens)
            request.num_computed_tokens = request.num_prompt_tokens

        def run() -> None:
            for _ in range(self.stream.decode_steps):
                for request in requests:
                    request.append_output_token_ids(7)
                    assert manager.allocate_slots(request, 1) is not None
                    request.num_computed_tokens += 1

        return timed(run, self.stream.decode_steps * len(requests))

    def blocks(self) -> tuple[float, int]:
        pool = import_module("vllm.v1.core.block_pool").BlockPool(
            num_gpu_blocks=self.num_blocks, enable_caching=False, hash_block_size=BLOCK_TOKENS
        )

        def run() -> None:
            for _ in range(1000):
                pool.free_blocks(reversed(pool.get_new_blocks(64)))

        return timed(run, 1000)

    def construct(self) -> tuple[float, int]:
        return timed(lambda: self.manager(caching=True), 1)

    def rounds(self) -> dict[str, Round]:
        return {
            "allocate + free, reuse off": self.allocate_free,
            "allocate + store + free, unique prompts": self.allocate_free_unique,
            "the same from token ids, keys included": self.from_token_ids,
            "lookup, 63 blocks hit": self.lookup,
            "lookup + allocate + free on a hit": self.serve_hits,
            "extend by one token, 256 running": self.decode,
            "take + give back 64 blocks": self.blocks,
            "construct the manager": self.construct,
        }


class SglangRounds:
    """SGLang's radix cache with a page as long as our block. It has no block tables and its allocator is a stand-in
    that does nothing, so only what its tree does is compared."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.tree = import_module("sglang.srt.mem_cache.radix_cache")
        self.params = import_module("sglang.srt.mem_cache.base_prefix_cache")
        self.value = import_module("torch").arange(1024)

    def cache(self) -> Any:
        return self.tree.RadixCache.create_simulated(mock_allocator=NoAllocator(), page_size=BLOCK_TOKENS)

    def keys(self, prompts: Sequence[list[int]]) -> list[Any]:
        return [self.tree.RadixKey(array("q", prompt), None) for prompt in prompts]

    def insert_all(self, cache: Any, keys: Sequence[Any]) -> None:
        for key in keys:
            cache.insert(self.params.InsertParams(key=key, value=self.value))

    def insert(self) -> tuple[float, int]:
        cache, keys = self.cache(), self.keys(self.stream.unique)
        return timed(lambda: self.insert_all(cache, keys), len(keys))

    def match(self) -> tuple[float, int]:
        cache, keys = self.cache(), self.keys(self.stream.shared)
        self.insert_all(cache, keys[:1])

        def run() -> None:
            for key in keys[1:]:
                cache.match_prefix(self.params.MatchPrefixParams(key=key))

        return timed(run, len(keys) - 1)

    def match_insert(self) -> tuple[float, int]:
        cache, keys = self.cache(), self.keys(self.stream.half_shared)

        def run() -> None:
            for key in keys:
                cache.match_prefix(self.params.MatchPrefixParams(key=key))
                cache.insert(self.params.InsertParams(key=key, value=self.value))

        return timed(run, len(keys))

    def evict(self) -> tuple[float, int]:
        cache = self.cache()
        self.insert_all(cache, self.keys(self.stream.leaves))

        def run() -> None:
            for _ in range(len(self.stream.leaves) // 2):
                cache.evict(self.params.EvictParams(num_tokens=1024))

        return timed(run, len(self.stream.leaves) // 2)

    def rounds(self) -> dict[str, Round]:
        return {
            "tree: insert 64 new blocks": self.insert,
            "tree: match 63 blocks": self.match,
            "tree: match + insert, half shared": self.match_insert,
            "tree: evict 64 blocks, 1,000 leaves": self.evict,
        }


class NoAllocator:
    device = "cpu"

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None


NAMES_ONLY = tuple(
    f"sglang.{name}"
    for name in (
        "kernels", "srt.distributed", "srt.disaggregation", "srt.layers", "srt.managers.schedule_batch",
        "srt.mem_cache.memory_pool", "srt.observability",
    )
)  # fmt: skip


def enter_without_kernels(root: Path) -> None:
    """Make modules below ``root`` importable although the packages above them can't be."""
    for name in ("sglang", "sglang.srt", "sglang.srt.configs"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    sys.meta_path.insert(0, EmptyModules())


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for everything in ``NAMES_ONLY`` with modules in which each name is an empty class."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(NAMES_ONLY):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class EmptyModule(types.ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        empty = type(name, (), {})
        setattr(self, name, empty)
        return empty
