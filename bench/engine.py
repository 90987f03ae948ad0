"""Our engine beside transformers on one machine: same weights, prompts, dtype, threads and process.

Each row runs our engine and the peer in turn, round by round, so that a drifting machine hits both. Figures are
medians with quartiles. Our side includes scheduling, sampling and text. The bandwidth limit is the time to read the
weights and the attended KV once per step at the read bandwidth measured in the same run.

    python bench/engine.py [--rounds 9] [--dtype auto|bf16|fp32] [--requests 1 8 16] [--json-file out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from onebudget import LLM, SamplingParams
from onebudget.models.demo import ensure_demo_model

Serve = Callable[[Sequence[list[int]]], list[list[int]]]
PROMPT_TOKENS, NEW_TOKENS = 256, 32
STORY = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, wrote the weather into a book and listened "
    "to the sea. On some nights ships answered with their horns; on others only the wind came, and he read letters. "
)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Ratios are peer time over our time, round by round: above 1 we are faster."""

    peer: str
    requests: int
    our_tokens_per_second: float
    peer_tokens_per_second: float
    ratio_median: float
    ratio_quartiles: tuple[float, float]
    our_seconds: list[float]
    peer_seconds: list[float]
    ids_equal: int
    decode_step_ms: float
    fraction_of_bandwidth_limit: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--json-file", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = ensure_demo_model()
    bandwidth = read_bandwidth()
    # Rounds repeat their prompts: with reuse on, our side would skip work that the peer does.
    knobs = {"device_memory": "4GiB", "max_batch_size": 16, "max_num_tokens": 4096, "enable_block_reuse": False}
    with LLM(folder, dtype=arguments.dtype, **knobs) as llm:
        peer = Peer(folder, llm.engine.station.model.dtype)
        rows = []
        for requests in arguments.requests:
            prompts = make_prompts(llm.tokenizer, requests)
            rows.append(compare(llm, peer.session, "generate", prompts, arguments.rounds, bandwidth))
            if requests > 1:
                batching = Continuous(peer, requests)
                rows.append(compare(llm, batching.session, "continuous batching", prompts, arguments.rounds, bandwidth))
                batching.close()
        document = {
            "dtype": llm.engine.station.model.dtype,
            "threads": torch.get_num_threads(),
            "read_bandwidth_bytes_per_second": bandwidth,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "rows": [asdict(row) for row in rows],
        }
    show(rows, document)
    if arguments.json_file:
        arguments.json_file.write_text(json.dumps(document, indent=1))


def read_bandwidth() -> float:
    """Bytes per second of summing 512 MiB, the median of seven passes."""
    block = torch.ones(2**27)
    return block.numel() * 4 / statistics.median(timed(block.sum)[0] for _ in range(7))


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Different prompts of ``PROMPT_TOKENS`` real tokens each."""
    ids = tokenizer(STORY * 40).input_ids
    return [ids[start : start + PROMPT_TOKENS] for start in range(3, 3 + 7 * count, 7)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


class Peer:
    """transformers on the same weights with its own attention."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.config = transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=2, bos_token_id=1
        )

    def generate(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=self.config)
        return [row[ids.shape[1] :].tolist() for row in output]

    @contextmanager
    def session(self) -> Iterator[Serve]:
        yield self.generate


class Continuous:
    """transformers' continuous batching. The manager and its warm-up are kept between sessions, so neither is timed;
    between sessions its thread stands still, so it takes no core from the other side."""

    def __init__(self, peer: Peer, requests: int) -> None:
        self._peer = peer
        self._config = transformers.generation.ContinuousBatchingConfig(
            num_blocks=requests * 2 + 8,
            max_batch_tokens=4096,
            max_requests_per_batch=requests,
            allow_block_sharing=False,
        )

    @contextmanager
    def session(self) -> Iterator[Serve]:
        with self._peer.model.continuous_batching_context_manager(
            generation_config=self._peer.config, continuous_batching_config=self._config, persistent_manager=True
        ) as manager:
            yield lambda prompts: self._generate(manager, prompts)

    @staticmethod
    def _generate(manager: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
        ids = [manager.add_request(list(prompt), max_new_tokens=NEW_TOKENS) for prompt in prompts]
        done: dict[str, list[int]] = {}
        while len(done) < len(ids):
            result = manager.get_result(timeout=60)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[request_id] for request_id in ids]

    def close(self) -> None:
        self._peer.model.destroy_cached_continuous_batching_manager()


def ours(llm: LLM, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    return [output.token_ids for output in llm.generate(list(prompts), params)]


def compare(
    llm: LLM,
    session: Callable[[], AbstractContextManager[Serve]],
    name: str,
    prompts: list[list[int]],
    rounds: int,
    bandwidth: float,
) -> Row:
    def our_side() -> tuple[float, list[list[int]]]:
        return timed(lambda: ours(llm, prompts, NEW_TOKENS))

    def peer_side() -> tuple[float, list[list[int]]]:
        with session() as serve:
            return timed(lambda: serve(prompts))

    our_side(), peer_side()  # caches and allocators warm
    our_seconds, peer_seconds, prefill_seconds, equal = [], [], [], 0
    for number in range(rounds):
        first, second = (our_side, peer_side) if number % 2 == 0 else (peer_side, our_side)
        results = {first: first(), second: second()}
        our_seconds.append(results[our_side][0])
        peer_seconds.append(results[peer_side][0])
        prefill_seconds.append(timed(lambda: ours(llm, prompts, 1))[0])
        equal = sum(a == b for a, b in zip(results[our_side][1], results[peer_side][1], strict=True))
    ratios = [theirs / mine for mine, theirs in zip(our_seconds, peer_seconds, strict=True)]
    tokens = len(prompts) * NEW_TOKENS
    step = (statistics.median(our_seconds) - statistics.median(prefill_seconds)) / (NEW_TOKENS - 1)
    return Row(
        peer=name,
        requests=len(prompts),
        our_tokens_per_second=tokens / statistics.median(our_seconds),
        peer_tokens_per_second=tokens / statistics.median(peer_seconds),
        ratio_median=statistics.median(ratios),
        ratio_quartiles=tuple(statistics.quantiles(ratios, n=4)[::2]) if rounds > 1 else (ratios[0], ratios[0]),  # type: ignore[arg-type]
        our_seconds=our_seconds,
        peer_seconds=peer_seconds,
        ids_equal=equal,
        decode_step_ms=step * 1e3,
        fraction_of_bandwidth_limit=step_bytes(llm, len(prompts)) / bandwidth / step,
    )


def step_bytes(llm: LLM, requests: int) -> float:
    """Bytes a decode step must read: all weights once and each sequence's KV at the mean length of the run."""
    attended = requests * (PROMPT_TOKENS + NEW_TOKENS / 2)
    return llm.engine.station.model.weight_bytes + attended * llm.budget.kv_cache.bytes_per_token


def show(rows: Sequence[Row], document: dict[str, Any]) -> None:
    bandwidth = document["read_bandwidth_bytes_per_second"] / 1e9
    table = Table(title=f"{document['dtype']}, {document['threads']} threads, read bandwidth {bandwidth:.1f} GB/s")
    for column in (
        "peer",
        "requests",
        "ours tok/s",
        "peer tok/s",
        "ratio",
        "quartiles",
        "ids equal",
        "ms/step",
        "of bandwidth",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row.ratio_quartiles
        table.add_row(
            row.peer, str(row.requests), f"{row.our_tokens_per_second:.1f}", f"{row.peer_tokens_per_second:.1f}",
            f"{row.ratio_median:.2f}", f"{low:.2f}-{high:.2f}", f"{row.ids_equal}/{row.requests}",
            f"{row.decode_step_ms:.1f}", f"{row.fraction_of_bandwidth_limit:.0%}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
