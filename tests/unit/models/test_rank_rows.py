"""Rows of all ranks before a layer that is cut, own rows behind it; a plan that leaves attention whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onebudget import LLM
from onebudget.devtools.tiny_models import tiny_model
from onebudget.errors import ConfigError, ModelError
from onebudget.models import rank_rows, tensor_parallel
from onebudget.models.load import read_facts
from onebudget.models.rank_rows import RankRows, current_rows, share_rows


@pytest.mark.parametrize(("rank", "start", "own"), [(0, 0, 3), (1, 3, 1), (2, 4, 7)])
def test_rows_lie_in_rank_order(rank: int, start: int, own: int) -> None:
    rows = RankRows((3, 1, 7), rank)
    assert (rows.total, rows.start, rows.own) == (11, start, own)


class Doubled(torch.nn.Module):
    """A layer that notes what it sees."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.flat, self.seen = flat, torch.empty(0)

    def forward(self, hidden: Any) -> Any:
        self.seen = hidden.clone()
        return (hidden[0] * 2, "scores") if self.flat else hidden * 2


@pytest.mark.parametrize("flat", [False, True])
def test_a_layer_sees_the_rows_of_all_ranks_and_each_keeps_its_own(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden = (3, 1, 2), torch.arange(6 * 4, dtype=torch.float32).reshape(1, 6, 4) - 7
    pieces = hidden.split(tokens, dim=1)
    sent: list[Any] = []
    monkeypatch.setattr(rank_rows.dist, "all_reduce", sent.append)
    layers = [Doubled(flat=flat) for _ in tokens]
    share_rows(layers)
    for rank, (layer, piece) in enumerate(zip(layers, pieces, strict=True)):
        token = current_rows.set(RankRows(tokens, rank))
        layer(piece)
        current_rows.reset(token)
    assert torch.equal(sum(sent), hidden)
    monkeypatch.setattr(rank_rows.dist, "all_reduce", lambda buffer: buffer.copy_(hidden))
    for rank, (layer, piece) in enumerate(zip(layers, pieces, strict=True)):
        token = current_rows.set(RankRows(tokens, rank))
        output = layer(piece)
        current_rows.reset(token)
        assert torch.equal(layer.seen, hidden)
        if flat:
            assert output[1] == "scores"
            assert torch.equal(output[0], piece[0] * 2)
        else:
            assert torch.equal(output, piece * 2)


def test_outside_a_forward_of_all_ranks_such_a_layer_refuses() -> None:
    layer = Doubled()
    share_rows([layer])
    with pytest.raises(LookupError):
        layer(torch.zeros(1, 2, 4))


# -- which parts are cut ----------------------------------------------------------------------------------------


def test_only_what_stands_behind_attention_keeps_its_rules() -> None:
    plan = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.attention.dense": "rowwise",
        "layers.*.input_layernorm": "sequence_parallel",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.feed_forward.experts": "moe_tp_experts",
        "lm_head": "colwise_gather_output",
    }
    kept = tensor_parallel._behind_attention(plan)
    assert list(kept) == ["layers.*.mlp.up_proj", "layers.*.feed_forward.experts"]
    assert kept == {name: plan[name] for name in kept}


def test_heads_stay_whole_where_ranks_have_their_own_requests(tmp_path: Path) -> None:
    folder = tiny_model("gqa", tmp_path, num_attention_heads=6, num_key_value_heads=3, hidden_size=96)
    facts = read_facts(folder)
    with pytest.raises(ModelError, match="3 KV heads, which 2 ranks can't share evenly"):
        tensor_parallel.facts_of_rank(folder, facts, 2)
    dealt = tensor_parallel.facts_of_rank(folder, facts, 2, attention_dp=True)
    assert dealt == replace(facts, ranks=2, attention_dp=True)
    assert dealt.cache_cost("float32") == facts.cache_cost("float32")


def test_a_plan_for_attention_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model("gqa", tmp_path)
    monkeypatch.setattr(tensor_parallel, "_plan_of", lambda folder: {"layers.*.self_attn.q_proj": "colwise"})
    with pytest.raises(ModelError, match="nothing to divide over 2 ranks but attention"):
        tensor_parallel.facts_of_rank(folder, read_facts(folder), 2, attention_dp=True)


@pytest.mark.parametrize(
    ("width", "ranks", "element_bytes", "usable"),
    [(128, 3, 4, "2, 4, 8, 16, 32"), (128, 32, 2, "2, 4, 8, 16"), (6, 2, 4, None), (96, 5, 2, "2, 3, 4, 6, 12")],
)
def test_experts_are_cut_into_rows_that_grouped_products_can_read(
    width: int, ranks: int, element_bytes: int, usable: str | None
) -> None:
    with pytest.raises(ModelError) as caught:
        tensor_parallel.refuse_ragged_experts(width, ranks, element_bytes)
    assert str(caught.value).endswith(f"{usable} ranks would do." if usable else "they run on one rank only.")
    for size in map(int, (usable or "").split(", ") if usable else ()):
        tensor_parallel.refuse_ragged_experts(width, size, element_bytes)


def test_a_process_alone_refuses_to_deal_requests(tmp_path: Path) -> None:
    folder = tiny_model("gqa", tmp_path)
    with pytest.raises(ConfigError, match="attention_dp deals requests to several ranks") as caught:
        LLM(folder, device_memory="8MiB", attention_dp=True)
    assert (caught.value.field, caught.value.value) == ("attention_dp", True)
