"""What one layer and the head keep for the backward pass, and the most they hold at once, in closed form.

Source: derived from the modelling code of transformers 5.23 and the autograd formulas of torch 2.13, and held
against traces of the same step by tests/trainers/test_trace.py. Letters: N tokens of a micro-batch with
padding, S scored tokens, W model width, Q and K widths of all query and key heads, M MLP width, V vocabulary,
a bytes of an activation (2 in half precision, 4 in float32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memtrain.memory.settings import Settings
from memtrain.memory.shape import MLP_NAMES, ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class HeaviestBatch(NamedTuple):
    """The micro-batch that needs the most memory."""

    rows: int
    """Sequences."""
    tokens: int
    """Their tokens, without padding."""
    scored_tokens: int
    """Tokens that the loss scores; `tokens` where it is not known."""
    longest: int
    """Tokens of the longest sequence: padded rows are all as long."""


@dataclass(frozen=True, slots=True)
class Load:
    """One micro-batch on one model under some settings, in the letters of the formulas."""

    settings: Settings
    shape: ModelShape
    batch: HeaviestBatch

    @property
    def a(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.settings.dtype]

    @property
    def is_half(self) -> bool:
        """Float32 copies are made where norms and losses compute wide."""
        return self.a == 2

    @property
    def trains_all(self) -> bool:
        """Every weight is trained, none is frozen."""
        return self.settings.adapter is None

    @property
    def N(self) -> int:  # noqa: N802
        """Tokens that enter the model, padding included."""
        if self.settings.padding_free:
            tokens, rows = self.batch.tokens, 1
        else:
            tokens, rows = self.batch.longest, self.batch.rows
        multiple = self.settings.pad_to_multiple_of
        return rows * (-(-tokens // multiple) * multiple if multiple else tokens)

    @property
    def S(self) -> int:  # noqa: N802
        """Tokens that the loss scores: the last of a row predicts nothing."""
        return max(0, min(self.batch.scored_tokens, self.batch.tokens - self.batch.rows))


def norm_kept(load: Load, width: int, *, num_scales: int) -> int:
    """Kept by RMS norms over `width` numbers a token, without their outputs.

    4*N*width for the float32 copy (in float32 the input itself), its normalized form where the scale is
    trained, and 4*N for each root mean square.
    """
    normalized = 0
    if load.trains_all:
        normalized = 4 if load.shape.family.norms_in_float else load.a
    return load.N * width * (4 + normalized) + 4 * load.N * num_scales


def attention_kept(load: Load) -> int:
    """Kept by the attention of one layer: a*N*(Q + 2K) for rotated q, k and v, a*N*Q for its output.

    And the log-sum-exp, norms on q and k, and the scores of a dense back end.
    """
    shape, N, a = load.shape, load.N, load.a
    Q, K = shape.query_width, shape.kv_width  # noqa: N806
    kept = a * N * (Q + 2 * K) + a * N * Q
    if shape.family.qk_norm != "none":
        scales = shape.num_heads + shape.num_kv_heads if shape.family.qk_norm == "head" else 2
        kept += norm_kept(load, Q + K, num_scales=scales)
    if load.settings.attention == "dense":
        # Softmax in float32 and its rounded copy, and the inverted mask.
        return kept + N * N * (shape.num_heads * (4 + (a if load.is_half else 0)) + 1)
    return kept + 4 * N * shape.num_heads


def mlp_kept(load: Load) -> int:
    """Kept by the MLP of one layer: 4*a*N*M for gate, activated gate, up and their product."""
    shape, N, a = load.shape, load.N, load.a
    needs_product = load.trains_all or _adapts(load, "down_proj")
    dense = a * N * shape.mlp_width * (4 if needs_product else 3)
    return (
        max(dense, experts_kept(load)) if shape.num_expert_layers < shape.num_layers else experts_kept(load)
    )


def experts_kept(load: Load) -> int:
    """Kept by a mixture of experts (grouped products), in which every token stands k times.

    Gate, up, activated gate and product of its k experts, their outputs before and after weighting, and
    the router's scores.
    """
    experts = load.shape.experts
    if experts is None:
        return 0
    copies = load.N * experts.num_per_token
    rows = copies * load.a * (3 * load.shape.width + 4 * experts.mlp_width)
    return rows + load.N * experts.num_experts * (4 + load.a) + copies * 40


def adapter_kept(load: Load) -> int:
    """Kept by the adapters of one layer: a*N*r each for x @ A, and a copy of x where there is dropout."""
    adapter = load.settings.adapter
    if adapter is None:
        return 0
    parts = load.shape.adapted(adapter)
    kept = load.a * load.N * adapter.r * len(parts)
    if adapter.dropout:
        kept += (load.a + 1) * load.N * sum(part.num_inputs for part in parts)
    if adapter.kind == "dora":
        kept += 2 * load.a * load.N * sum(part.num_outputs for part in parts)
    return kept


def layer_kept(load: Load) -> int:
    """Everything one layer keeps for its backward pass when it is not checkpointed."""
    shape, N, a = load.shape, load.N, load.a
    kept = norm_kept(load, shape.family.num_wide_norms * shape.width, num_scales=shape.family.num_wide_norms)
    # The inputs of the two groups of linear maps: q, k, v, and gate, up.
    attention_input = load.trains_all or any(
        _adapts(load, name) for name in ("q_proj", "k_proj", "v_proj", "qkv_proj")
    )
    mlp_input = load.trains_all or any(
        _adapts(load, name) for name in ("gate_proj", "up_proj", "gate_up_proj")
    )
    kept += a * N * shape.width * (attention_input + mlp_input)
    return kept + attention_kept(load) + mlp_kept(load) + adapter_kept(load)


def layer_boundary(load: Load) -> int:
    """What a checkpointed layer keeps: a*N*W, its input."""
    return load.a * load.N * load.shape.width


def layer_backward(load: Load) -> int:
    """Most that the backward of one layer holds beside what is kept.

    Gradients of the MLP's product, of its factors and of the residual stream, or those of the attention.
    """
    shape, N, a = load.shape, load.N, load.a
    experts = shape.experts
    width = max(shape.mlp_width, experts.num_per_token * experts.mlp_width if experts else 0)
    mlp = a * N * (shape.width + 3 * width)
    attention = a * N * (shape.width + 2 * shape.query_width + 2 * shape.kv_width)
    if load.settings.attention == "dense":
        attention += 2 * 4 * N * N * shape.num_heads
    norms = N * shape.width * (a + 12 if load.is_half else 12)
    return max(mlp, attention, norms) + dequantized(load)


def layer_forward(load: Load) -> int:
    """Most that one layer holds in a pass without gradients, its input included."""
    shape, N, a = load.shape, load.N, load.a
    mlp = a * N * (2 * shape.width + 3 * shape.mlp_width)
    attention = a * N * (2 * shape.width + 3 * shape.query_width + 3 * shape.kv_width)
    if load.settings.attention == "dense":
        attention += N * N * shape.num_heads * (4 + 4)
    norm = N * shape.width * (2 * a + 8)
    return max(mlp, attention, norm) + dequantized(load)


def dequantized(load: Load) -> int:
    """Weights of the largest linear map in the precision of the computation, while they are multiplied."""
    if load.settings.quantize == "none":
        return 0
    return load.a * max(part.num_inputs * part.num_outputs for part in load.shape.linears)


class HeadBytes(NamedTuple):
    """The LM head and the loss: the final norm, then full logits or tiles of them."""

    norm: int
    """Kept by the final norm, with its output."""
    kept: int
    """Kept from the loss's forward pass to its backward pass."""
    forward: int
    """Most at once during the loss's forward pass, with `kept`."""
    backward: int
    """Most at once during the loss's backward pass, with `kept`."""
    weight_gradient: int
    """Bytes of the head's gradient, counted within `kept` or `backward`."""


def head_bytes(load: Load, *, trains_head: bool) -> HeadBytes:
    """The head under `settings.loss`; S rows of the final norm's output are picked before it."""
    shape, a = load.shape, load.a
    norm = norm_kept(load, shape.width, num_scales=1)
    picked = a * load.S * shape.width
    weight_gradient = a * shape.vocab_size * shape.width if trains_head else 0
    form = _full_head if load.settings.loss == "full" else _chunked_head
    kept, forward, backward = form(load, trains_head)
    # The gradient of the picked rows is scattered into one of all rows.
    back_to_rows = a * load.S * shape.width + a * load.N * shape.width
    return HeadBytes(
        norm=norm,
        kept=picked + kept,
        forward=picked + a * load.N * shape.width + forward,
        backward=picked + max(backward, weight_gradient + back_to_rows),
        weight_gradient=weight_gradient,
    )


def _full_head(load: Load, trains_head: bool) -> tuple[int, int, int]:
    """Full logits: the log-softmax is kept in float32 (4*S*V), three of them are held at most (12*S*V).

    Forward: the logits before and after scaling beside it. Backward: the gradients of it and of the logits.
    """
    logits = 4 * load.S * load.shape.vocab_size
    cap = logits if load.shape.logit_softcap else 0
    return logits + cap, 3 * logits + cap, 3 * logits + cap


def _chunked_head(load: Load, trains_head: bool) -> tuple[int, int, int]:
    """Tiles of T x V float32 logits within `loss_tile_bytes`; see trainers/losses.

    A head that is frozen, in float32, or smaller than a tile: gradients are formed in the forward pass, and
    d_hidden (a*S*W) with d_weight (4*V*W) is kept. Otherwise the backward pass forms the tiles again, columns
    outer: 4*S*W for d_hidden, a*V*W for d_weight, and the tile's budget again for sums and widened weights.
    """
    shape, a, tile_bytes = load.shape, load.a, load.settings.loss_tile_bytes
    row = 4 * shape.vocab_size
    T = min(load.S, max(1, tile_bytes // (row * (1 + shape.logit_softcap))))  # noqa: N806
    tile = T * row * (1 + shape.logit_softcap)
    hidden = a * load.S * shape.width
    # Without a kernel that sums half products wide, weights are widened a tile's budget at a time.
    widened = (
        min(tile_bytes, 4 * shape.vocab_size * shape.width) + 2 * 4 * T * shape.width if load.is_half else 0
    )
    wide_weight = 4 * shape.vocab_size * shape.width
    if not trains_head or not load.is_half or wide_weight <= tile_bytes:
        kept = hidden + (wide_weight if trains_head else 0)
        return (
            kept,
            kept + tile + widened,
            kept + (a * shape.vocab_size * shape.width if trains_head and load.is_half else 0),
        )
    columns = min(shape.vocab_size, max(256, tile_bytes // (8 * shape.width)))
    block = 4 * columns * shape.width
    rows = min(load.S, max(1, tile_bytes // (8 * columns)))
    inner = 4 * rows * columns + 4 * rows * shape.width + 2 * block
    backward = 4 * load.S * shape.width + a * shape.vocab_size * shape.width + inner
    return 0, tile + widened, backward


def _adapts(load: Load, name: str) -> bool:
    adapter = load.settings.adapter
    if adapter is None:
        return False
    fused = {"down_proj": "down_proj"}.get(name, name)
    return any(part.name == fused for part in load.shape.adapted(adapter))


def is_mlp(name: str) -> bool:
    """Whether a linear map belongs to the MLP of a layer."""
    return name in MLP_NAMES
