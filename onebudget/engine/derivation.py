"""What the engine feeds into the derivation: its declared reserves, the outside memory it can name, its ways out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from onebudget.attention import backend_for
from onebudget.budget.advice import Candidate
from onebudget.budget.context_workspace import ContextWorkspace, context_workspace_for
from onebudget.budget.derive import derive_budget
from onebudget.budget.estimation import why_estimation_is_off
from onebudget.budget.late import LateAllocations
from onebudget.budget.ledger import DeviceLine, HostLine, Ledger
from onebudget.budget.reserves import ReserveLine, encoder_reserve_bytes
from onebudget.engine.assembly import engine_seats, kv_cost
from onebudget.engine.dry_runs import WholeModel
from onebudget.engine.graph_budget import graph_reserves
from onebudget.engine.kv_cache import host_lines, layer_groups
from onebudget.engine.logprobs import prompt_rows_at_once
from onebudget.engine.penalties import late_tables
from onebudget.errors import BudgetError
from onebudget.models.facts import DTYPE_BYTES
from onebudget.resources.kv.division import is_plain, ledger_groups
from onebudget.units import align_up

if TYPE_CHECKING:
    from pathlib import Path

    from onebudget.budget.profile import ProfileResult
    from onebudget.config import BudgetConfig
    from onebudget.device.base import Device
    from onebudget.engine.dry_runs import DryRuns
    from onebudget.engine.encoder import MultimodalEncoder
    from onebudget.models.facts import ModelFacts

left_out: ContextVar[frozenset[str]] = ContextVar("left_out", default=frozenset())
"""Reserves that derivations leave out, so that a test can show what then goes wrong. Empty in service."""


def engine_ledger(
    folder: Path,
    facts: ModelFacts,
    dtype: str,
    config: BudgetConfig,
    profile: ProfileResult,
    *,
    device: Device,
    rounding_bytes: int | None = None,
    encoder: MultimodalEncoder | None = None,
    notes: Iterable[str] = (),
    dry: DryRuns | None = None,
    advises: bool = True,
) -> Ledger:
    """The budget of one model on one device. ``BudgetError`` with simulated ways out when it doesn't fit; without
    ``advises`` only those that take no profile of their own.

    ``dry`` answers what changes would make of the profile, and what graphs will hold; None: the model in ``folder``.
    """
    dry = dry or WholeModel(folder, facts)
    reason = why_estimation_is_off(config)
    if rounding_bytes is None:  # a dry run: nothing but rounding is outside its books
        rounding_bytes = profile.extra_cost_bytes
    granule = device.facts.granularity_bytes
    others = device.account.others_bytes
    lines, workspace = declared_reserves(facts, dtype, config, profile, granule)
    layers = layer_groups(facts, dtype, config)
    ledger = derive_budget(
        config,
        profile,
        kv_cost(facts, dtype, config),
        [*lines, *_encoder_reserves(encoder, profile), *_graph_reserves(dry, dtype, config, granule)],
        total_bytes=device.total_bytes,
        context_workspace=workspace,
        model=facts.name,
        device=DeviceLine(
            name=device.name,
            kind=device.kind,
            total_bytes=device.total_bytes,
            free_at_start_bytes=device.total_bytes - others,
            others_bytes=others,
        ),
        outside={
            "other_processes": others,
            "fragmentation": rounding_bytes - others if device.accounts_exactly else 0,
        },
        basis={"weights": "exact"},
        groups=None if is_plain(layers) else lambda kv_bytes: ledger_groups(kv_bytes, layers, config),
        host=_host_lines(profile, config),
        notes=[*notes, *([f"No profiling run took place: {reason}."] if reason else []), *_rank_notes(facts)],
        candidates=partial(_candidates, dry, facts, dtype, profile=profile, granule_bytes=granule) if advises else None,
    )
    tiers = host_lines(config, device.facts, ledger.kv_cache.bytes, facts.ranks, layers)
    return ledger.replace(host=(*ledger.host, *tiers))


def _rank_notes(facts: ModelFacts) -> list[str]:
    if not facts.attention_dp:
        return []
    return [
        f"Each of {facts.ranks} ranks has requests and a KV cache of its own, with all heads; attention, embedding and "
        "head are whole on each, and activations hold the hidden states of all ranks at once."
    ]


def declared_reserves(
    facts: ModelFacts, dtype: str, config: BudgetConfig, profile: ProfileResult, granule_bytes: int
) -> tuple[list[ReserveLine], ContextWorkspace | None]:
    """What the profile's peak doesn't hold, asked from each owner in turn: fixed bytes, and what is split against the
    pool. Without those in ``left_out``."""
    lines = [
        *_attention_reserves(facts, dtype, config, granule_bytes),
        *_sampler_reserves(facts, config, profile, granule_bytes),
        *_rounding_reserves(facts, dtype, config, granule_bytes),
    ]
    skipped = left_out.get()
    workspace = None if "context_workspace" in skipped else _context_workspace(facts, dtype, config)
    return [line for line in lines if line.name not in skipped], workspace


def _graph_reserves(dry: DryRuns, dtype: str, config: BudgetConfig, granule_bytes: int) -> list[ReserveLine]:
    return [] if "graphs" in left_out.get() else graph_reserves(dry.graphs(dtype, config), granule_bytes)


def _encoder_reserves(encoder: MultimodalEncoder | None, profile: ProfileResult) -> list[ReserveLine]:
    """Encoder output that requests may own at once, beyond the copy the profile kept alive, and its cache."""
    if encoder is None:
        return []
    reserve_bytes = encoder_reserve_bytes(
        output_budget_bytes=encoder.output_budget_bytes,
        encoder_output_bytes=profile.encoder_output_bytes,
        cache_bytes=encoder.cache_bytes,
    )
    reason = f"encoder output up to {encoder.output_budget_bytes} B, {profile.encoder_output_bytes} B of it in the peak"
    return [ReserveLine("multimodal_encoder", reserve_bytes, reason=reason, owner="encoder")]


def _host_lines(profile: ProfileResult, config: BudgetConfig) -> list[HostLine]:
    """Host memory beside the card: weights pass through it while they load, and rest in it while the engine sleeps."""
    lines = [HostLine("load_staging", profile.model_bytes, "rank")]
    if config.enable_sleep:
        lines.append(HostLine("sleep_backup", profile.model_bytes, "rank"))
    return lines


def _attention_reserves(facts: ModelFacts, dtype: str, config: BudgetConfig, granule_bytes: int) -> list[ReserveLine]:
    """Scratch whose size the load does not change: most of it is first used by decode, after the prefill peak."""
    backend = backend_for(facts)
    scratch_bytes = backend.workspace_fixed_bytes(facts, DTYPE_BYTES[dtype], config)
    return [
        ReserveLine(
            "fixed_workspace",
            align_up(scratch_bytes, granule_bytes),
            reason=f"scratch of the {backend.name} backend: {scratch_bytes} B for {config.max_batch_size} sequences of "
            f"{config.max_seq_len} tokens, in whole pages of {granule_bytes} B",
            owner="attention",
        )
    ]


def _sampler_reserves(
    facts: ModelFacts, config: BudgetConfig, profile: ProfileResult, granule_bytes: int
) -> list[ReserveLine]:
    """Penalty tables, which no dummy asks for, and what log-probabilities of prompts need above the peak."""
    late = LateAllocations()
    if config.enable_penalties:
        late.register(
            late_tables(
                seats=engine_seats(facts, config),
                max_beam_width=config.max_beam_width,
                vocab_size=facts.vocab_size,
                granule_bytes=granule_bytes,
            )
        )
    rows = prompt_rows_at_once(config)
    logits = ReserveLine(
        "logits",
        profile.prompt_logits_bytes,
        reason=f"log-probabilities of prompts, {rows} rows of {facts.vocab_size} tokens at a time, above the peak",
        owner="sampler",
        basis="measured",
    )
    return [*(replace(line, owner="sampler") for line in late.reserve_lines()), *([logits] if logits.bytes else [])]


def _context_workspace(facts: ModelFacts, dtype: str, config: BudgetConfig) -> ContextWorkspace | None:
    """Scratch that grows with what prompts attend to, as their backend declares it."""
    backend = backend_for(facts)
    rate = backend.workspace_bytes_per_token(facts, DTYPE_BYTES[dtype])
    return context_workspace_for(config, rate, chunk_bounded=backend.workspace_is_chunk_bounded(facts))


def _rounding_reserves(facts: ModelFacts, dtype: str, config: BudgetConfig, granule_bytes: int) -> list[ReserveLine]:
    """What the last page of the pool may waste, and that of the scratch where it is cut from the pool; nothing where
    the sizes are whole pages."""
    layers = layer_groups(facts, dtype, config)
    pools = {
        "the pool" if len(layers) == 1 else f"the pool of {group.name}": group.bytes_per_token * config.tokens_per_block
        for group in layers
    }
    cut = _context_workspace(facts, dtype, config)
    rounded = {**pools, "the context workspace": cut.bytes_per_token if cut else 0}
    return [
        ReserveLine(
            "fragmentation", granule_bytes - 1, reason=f"{what} rounds up to pages of {granule_bytes} B", owner="device"
        )
        for what, unit_bytes in rounded.items()
        if unit_bytes % granule_bytes
    ]


def _candidates(
    dry: DryRuns, facts: ModelFacts, dtype: str, config: BudgetConfig, profile: ProfileResult, granule_bytes: int
) -> Iterator[Candidate]:
    """Changes that alter what the profile sees, each simulated with a dry run of its own, and one that doesn't."""
    if config.enable_penalties:
        lines, _ = declared_reserves(facts, dtype, config.replace(enable_penalties=False), profile, granule_bytes)
        lines += _graph_reserves(dry, dtype, config, granule_bytes)
        yield Candidate(set={"enable_penalties": False}, reserves=tuple(lines))
    changes: list[dict[str, object]] = []
    if config.max_num_tokens > 256:
        changes.append({"max_num_tokens": 256})
    if config.max_seq_len > 512:
        changes.append({"max_seq_len": 512})
    if DTYPE_BYTES[dtype] == 4:
        changes += [{"dtype": "bf16"}, *({"dtype": "bf16", **change} for change in tuple(changes))]
    for change in changes:
        yield _simulated(dry, facts, dtype, config, change, granule_bytes)
    if config.device_memory is not None and changes:
        together = {name: value for change in changes for name, value in change.items()}
        smallest = _simulated(dry, facts, dtype, config, together, granule_bytes)
        yield _on_the_smallest_card(config, smallest)


def _simulated(
    dry: DryRuns, facts: ModelFacts, dtype: str, config: BudgetConfig, change: Mapping[str, object], granule_bytes: int
) -> Candidate:
    wanted = config.replace(**change)
    wanted_dtype = "bfloat16" if "dtype" in change else dtype
    profile = dry.profile(wanted_dtype, wanted)
    lines, workspace = declared_reserves(facts, wanted_dtype, wanted, profile, granule_bytes)
    lines += _graph_reserves(dry, wanted_dtype, wanted, granule_bytes)
    return Candidate(
        set=change,
        profile=profile,
        cost=kv_cost(facts, wanted_dtype, wanted),
        context_workspace=workspace,
        reserves=tuple(lines),
    )


def _on_the_smallest_card(config: BudgetConfig, change: Candidate) -> Candidate:
    """The same change with just as much device memory as it needs."""
    assert config.device_memory is not None
    assert change.profile is not None
    assert change.cost is not None
    needed_bytes = config.device_memory
    try:
        derive_budget(
            config.replace(**change.set), change.profile, change.cost, change.reserves or (),
            total_bytes=needed_bytes, context_workspace=change.context_workspace,
        )  # fmt: skip
    except BudgetError as short:
        needed_bytes += short.ledger.shortfall_bytes if short.ledger else 0
    return replace(change, set={**change.set, "device_memory": needed_bytes}, total_bytes=needed_bytes)
