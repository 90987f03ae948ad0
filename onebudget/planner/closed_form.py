"""What a dry run of our engine would find, from the widths in a config alone: no torch, a millisecond.

Each phase of a step keeps a few tensors alive, whose widths per token add up; the widest phase is the peak. Counts of
tensors follow from the modelling code that transformers has for a family: which projections are fused, whether
attention or routing weights are computed in float32, in what order tensors die.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onebudget.units import align_up, ceil_div

if TYPE_CHECKING:
    from onebudget.config import BudgetConfig
    from onebudget.planner.policies.dims import Dims

SORTED_ROWS = 32
"""Rows that the sampler sorts at once."""
SORT_BYTES = 29
"""Per vocabulary entry of such a row: float32 logits, sorted values with their int64 order, probabilities, sums."""
_ID_BYTES = 8
_PROMPT_ROWS = 64
_ROUNDING_BYTES = 512
_POSITION_BYTES = 13  # masks and indices of a token beside the static inputs
_FUSED_GATES = ("phi3", "granitemoehybrid")
_FLOAT_ROTATION = ("cohere",)
_NORMED_OUTPUT = ("olmo2", "olmo3")
_QK_NORM = ("qwen3", "gemma3", "olmo2", "olmo3", "minimax_m2", "glm4_moe")
_FLOAT_ROUTING = ("deepseek", "glm4_moe", "minimax", "kimi")
_DENSE_EXPERTS = ("llama4",)
_WITHOUT_ROTATION = ("opt", "gpt2", "granitemoehybrid")
_TWO_ROTATIONS = ("gemma3", "gemma4")


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the high-water marks of a step. ``activation_bytes`` is the larger of layers and sampler, with the
    static inputs; ``prompt_logits_bytes`` is by how much log-probabilities of prompts rise above it."""

    layers_bytes: int
    sampler_bytes: int
    inputs_bytes: int
    prompt_logits_bytes: int

    @property
    def activation_bytes(self) -> int:
        return max(self.layers_bytes, self.sampler_bytes) + self.inputs_bytes


def closed_form_peak(dims: Dims, config: BudgetConfig, element_bytes: int, *, tp: int = 1) -> Peak:
    """High-water marks of the largest step on one of ``tp`` ranks. ``Dims`` are of the whole model."""
    tokens, rows = config.max_num_tokens, min(config.max_batch_size, config.max_num_tokens)
    layers = tokens * _layer_elements(dims, tp) * element_bytes + tokens * _rotation_bytes(dims, element_bytes)
    sampler = rows * dims.vocab * element_bytes + SORT_BYTES * min(rows, SORTED_ROWS) * dims.vocab
    inputs = static_input_bytes(config, groups=_groups(dims, config)) + tokens * _POSITION_BYTES
    activation = max(layers, sampler) + inputs
    prompt_rows = max(1, min(_PROMPT_ROWS, tokens - 1, config.max_seq_len - 2))
    kept = align_up(tokens * dims.hidden * element_bytes, _ROUNDING_BYTES)
    prompt = kept + prompt_rows * dims.vocab * 2 * 4
    longest = min(tokens, max(1, config.max_seq_len - 1))
    return Peak(layers, sampler, inputs, max(0, prompt - activation) if prompt_rows < longest else 0)


def static_input_bytes(config: BudgetConfig, *, groups: int = 1) -> int:
    """Ids and positions per token, rows per sequence, and slots and two block tables for each group of layers."""
    blocks = ceil_div(config.max_seq_len, config.tokens_per_block)
    shared = 2 * config.max_num_tokens + 2 * config.max_batch_size
    each = config.max_num_tokens + config.max_batch_size * (1 + 2 * blocks)
    return _ID_BYTES * (shared + groups * each)


def _groups(dims: Dims, config: BudgetConfig) -> int:
    return len({min(layer.window or config.max_seq_len, config.max_seq_len) for layer in dims.layers})


def _family(dims: Dims, families: tuple[str, ...]) -> bool:
    return dims.family.startswith(families)


def _rotation_bytes(dims: Dims, element_bytes: int) -> int:
    """Sines and cosines of a token; some models rotate windowed layers by another base."""
    if _family(dims, _WITHOUT_ROTATION):
        return 0
    return 2 * (2 if _family(dims, _TWO_ROTATIONS) else 1) * (dims.rope or dims.head_dim) * element_bytes


def _layer_elements(dims: Dims, tp: int) -> int:
    """Elements of a token that live at once in the widest phase of the widest layer."""
    phases = [_attention_elements(dims, tp), _state_elements(dims, tp)]
    if dims.intermediate and (not dims.experts or dims.dense_layers or dims.shared_intermediate):
        phases.append(_mlp_elements(dims, dims.intermediate // tp))
    if dims.experts:
        phases.append(_expert_elements(dims, tp))
    return max(phases) + _expanded_elements(dims, tp)


def _mlp_elements(dims: Dims, width: int) -> int:
    """Gate, up and their product; where gate and up are one tensor it outlives both. Beside them the residual, the
    normed input, and what the last layer left."""
    hidden = dims.hidden * (5 if _family(dims, _NORMED_OUTPUT) else 4)
    return width * (4 if _family(dims, _FUSED_GATES) else 3 if dims.gated else 2) + hidden


def _expert_elements(dims: Dims, tp: int) -> int:
    """Rows sorted by expert: two wide products in, or two of hidden width out, whose weighting may be in float32."""
    hidden, width, chosen = dims.hidden, max(1, dims.expert_intermediate // tp), dims.experts_per_token
    scores = 2 * dims.experts
    if _family(dims, _DENSE_EXPERTS):
        return dims.experts * (4 * width + hidden) + 5 * hidden + scores
    weighted = 6 if _family(dims, _FLOAT_ROUTING) else 4
    return max(weighted * chosen * hidden, chosen * (4 * width + hidden)) + 4 * hidden + scores


def _attention_elements(dims: Dims, tp: int) -> int:
    """Queries, keys and values before and after their rotation or norm."""
    if dims.is_latent:
        return 4 * dims.hidden + 3 * (dims.heads // tp) * (dims.nope + dims.rope)
    queries = dims.heads // tp * dims.head_dim
    keys = max(1, dims.kv_heads // tp) * dims.head_dim
    if _family(dims, _FLOAT_ROTATION):
        return 2 * dims.hidden + 9 * queries + 7 * keys
    if _family(dims, ("phi3",)):
        return 3 * dims.hidden + 7 * queries + 5 * keys
    if _family(dims, _QK_NORM):
        return 3 * dims.hidden + 6 * queries
    return 3 * dims.hidden + 5 * queries + 2 * keys


def _state_elements(dims: Dims, tp: int) -> int:
    """Recurrent layers: projections, the convolved copy, and gates in float32."""
    state = dims.state
    return 4 * dims.hidden + (3 * state.conv_width + 4 * state.inner) // tp if state and dims.is_hybrid else 0


def _expanded_elements(dims: Dims, tp: int) -> int:
    """Keys and values of all heads that latent attention expands a fresh prompt to, staged in the scratch."""
    return dims.heads // tp * (dims.nope + dims.rope + dims.v_head) if dims.is_latent else 0


def fixed_workspace_bytes(
    dims: Dims, config: BudgetConfig, element_bytes: int, *, tp: int = 1, fp8: bool = False
) -> int:
    """Scratch of attention whose size the load does not change: staged K and V, or staged latents with absorbed
    queries, of a full batch of longest sequences."""
    positions = align_up(config.max_seq_len, config.tokens_per_block)
    rows = config.max_batch_size * positions
    if not dims.is_latent:
        heads = max([*(layer.kv_heads for layer in dims.layers), 1])
        width = max([*(layer.kv_heads * layer.k_dim for layer in dims.layers), 0]) // heads
        return rows * 2 * max(1, heads // tp) * width * element_bytes
    cached, key_dim, heads = dims.kv_lora + dims.rope, dims.nope + dims.rope, dims.heads // tp
    absorbed = config.max_batch_size * heads * cached * element_bytes
    areas = [rows * cached if fp8 else 0, rows * cached * element_bytes, absorbed, rows * element_bytes, rows]
    tail = max(0, key_dim - dims.v_head) * element_bytes
    return sum(align_up(area, 64) for area in [*areas, positions * _ID_BYTES]) + tail + absorbed


def expanded_bytes_per_token(dims: Dims, element_bytes: int, *, tp: int = 1) -> int:
    """Context workspace of one attended token; 0 where keys are cached as they are used."""
    return _expanded_elements(dims, tp) * element_bytes


def graph_pool_bytes(dims: Dims, config: BudgetConfig, element_bytes: int, rows: int, *, tp: int = 1) -> int:
    """Memory of the largest decode graph: logits and hidden states of its rows, or what its layers need."""
    layers = (_layer_elements(dims, tp) - _expanded_elements(dims, tp)) * element_bytes
    return rows * max(dims.vocab * element_bytes + 3 * dims.hidden * element_bytes, layers)
