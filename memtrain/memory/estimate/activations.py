"""Activations in closed form: bytes that a layer keeps for the backward pass, and their peak.

Source: derived from the modelling code of transformers 5.23 and the autograd formulas of torch 2.13, and held
against traces of the same step by tests/trainers/tools/trace/test_trace.py. Letters: N tokens of a batch
with padding, S scored tokens, W model width, Q and K widths of all query and key heads, M MLP width, V
vocabulary, a bytes of an activation (2 in half precision, 4 in float32).
"""

from __future__ import annotations

from memtrain.memory.estimate.adapter_sums import (
    LayerParts,
    adapted_forward,
    product_from_host,
    sums_recomputed,
)
from memtrain.memory.estimate.adapters import (
    adapter_kept,
    adapts,
    kept_by,
    masks_kept,
    sums_in_place,
)
from memtrain.memory.estimate.context_parallel import (
    gathered_backward,
    gathered_forward,
    score_pairs,
    ulysses_kept,
)
from memtrain.memory.estimate.experts import (
    at_packed_experts,
    clamped_forward,
    experts_backward,
    experts_kept,
    experts_recomputed,
    widest_mlp,
)
from memtrain.memory.estimate.flash_scratch import MASKED, flash_scratch, windows_backward
from memtrain.memory.estimate.layer_record import (
    recorded_backward,
    recorded_final_backward,
    recorded_forward,
    recorded_kept,
)
from memtrain.memory.estimate.liger_layers import liger_recomputed
from memtrain.memory.estimate.own_attention import (
    dropped_backward,
    dropped_forward,
    dropped_kept,
    drops_in_steps,
    makes_own_scores,
    own_kept,
    softmax_backward,
    softmax_forward,
)
from memtrain.memory.estimate.quantized import LAST, unpacked
from memtrain.memory.estimate.query_norms import query_norm_backward
from memtrain.memory.estimate.segment_calls import call_results
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.shape import ENTERING, MLP_NAMES
from memtrain.memory.plan.sizes import packs_itself


def norm_kept(load: Workload, width: int, *, num_scales: int) -> int:
    """Kept by RMS norms over `width` numbers a token, without their outputs.

    4*N*width for the float32 copy (in float32 the input itself), its normalized form where the scale is
    trained, and 4*N for each root mean square. Fused kernels and Liger's keep the input as it came, and the
    latter.
    """
    if load.settings.liger or load.is_fused:
        return load.a * load.N * width + 4 * load.N * num_scales
    normalized = 0
    if load.trains_all:
        normalized = 4 if load.shape.family.norms_in_float else load.a
    return load.N * width * (4 + normalized) + 4 * load.N * num_scales


@once
def attention_kept(load: Workload) -> int:
    """Kept by the attention of one layer: a*N*(Q + 2K) for rotated q, k and v, a*N*Q for its output.

    And the log-sum-exp, norms on q and k, and the scores of a masked back end.
    """
    shape, N, a = load.shape, load.N, load.a
    Q, K = shape.query_width, shape.kv_width  # noqa: N806
    kept = a * N * Q + ulysses_kept(load)
    kept += dropped_kept(load) if drops_in_steps(load) else a * N * (Q + 2 * K)
    if shape.family.qk_norm != "none":
        scales = shape.num_heads + shape.num_kv_heads if shape.family.qk_norm == "head" else 2
        kept += norm_kept(load, Q + K, num_scales=scales)
    if shape.family.fused and not drops_in_steps(load):
        # q, k and v are views of one tensor, which the view of v keeps whole.
        kept += a * N * (Q + K)
    if load.settings.attention == MASKED:
        # Softmax in float32 and its copy for the product with the values, and the inverted mask; of capped
        # scores the cap's output besides.
        return kept + score_pairs(load)[0] * (shape.num_heads * (4 + a + 4 * shape.makes_scores) + 1)
    return kept + own_kept(load)


@once
def mlp_kept(load: Workload) -> int:
    """Kept by the MLP of one layer: 4*a*N*M for gate, activated gate, up and their product.

    Fused kernels and Liger's activate the gate again in the backward pass.
    """
    shape, N, a = load.shape, load.N, load.a
    keeps_gate = not (load.settings.liger or load.is_fused)
    dense = a * N * shape.mlp_width * (2 + keeps_gate + needs_product(load))
    is_mixed = shape.num_expert_layers < shape.num_layers
    return max(dense if is_mixed else 0, experts_kept(load))


def needs_product(load: Workload) -> bool:
    """Whether the last map of the MLP keeps its input."""
    return load.trains_all or _keeps_input(load, LAST)


@once
def layer_kept(load: Workload) -> int:
    """Bytes that one layer keeps for its backward pass when it is not checkpointed, at most."""
    shape, N, a = load.shape, load.N, load.a
    if load.record is not None:
        return max(recorded_kept(load))
    kept = norm_kept(load, shape.family.num_wide_norms * shape.width, num_scales=shape.family.num_wide_norms)
    # The inputs of the two groups of linear maps: q, k, v, and gate, up.
    attention_input = keeps_attention_input(load)
    mlp_input = keeps_mlp_input(load)
    # What was dropped after the attention and after the MLP: a mask and a product each.
    kept += a * N * shape.width * (attention_input + mlp_input + 4 * shape.hidden_dropout)
    return kept + attention_kept(load) + mlp_kept(load) + adapter_kept(load)


def keeps_mlp_input(load: Workload) -> bool:
    """Whether the first maps of the MLP keep their input."""
    return load.trains_all or _keeps_input(load, "gate_proj", "up_proj", "gate_up_proj")


def keeps_attention_input(load: Workload) -> bool:
    """Whether the first maps of the attention keep their input."""
    return load.trains_all or _keeps_input(load, *ENTERING)


def keeps_its_input(load: Workload) -> bool:
    """Whether a layer's input itself is among what it keeps.

    The first norm keeps it in float32 and in a fused kernel; without a norm before, the first maps do. A
    record counts what a layer makes alone.
    """
    if load.record is not None:
        return False
    family = load.shape.family
    if family.norms_after and family.num_wide_norms == 2:
        return keeps_attention_input(load)
    return not load.is_half or load.is_fused or load.settings.liger


@once
def layer_parts(load: Workload) -> LayerParts:
    """Bytes that one layer keeps, with what is among them."""
    return LayerParts(layer_kept(load), mlp_kept(load), needs_product(load), keeps_mlp_input(load))


@once
def layer_boundary(load: Workload) -> int:
    """Bytes that a checkpointed layer keeps: a*N*W, its input."""
    return load.a * load.N * load.shape.width


@once
def layer_backward(load: Workload) -> int:
    """Peak of a layer during its backward pass, kept tensors included.

    In the MLP: everything kept, and the gradients of the product's two factors and of the residual stream
    (the product itself is gone by then; Liger writes them over the factors, and the product's own is there).
    In the attention: what it kept, its gradients, and the kernel's scratch. Packed weights are unpacked at
    other moments; bitsandbytes' 8-bit products hold copies of their rows besides. A norm after the MLP goes
    before both, while all that the layer kept is there; the one between is highest where the MLP is narrow.
    """
    if load.record is not None:
        return recorded_backward(load).num_bytes
    if load.settings.quantize == "8bit" and load.shape.experts is None and not packs_itself(load.settings):
        return max(mlp_backward(load), attention_backward(load)) + dequantized(load)
    made = max(mlp_backward(load), attention_backward(load), unpacking_backward(load))
    made = max(made, _norm_between_backward(load))
    if load.shape.family.norms_after and not load.settings.liger:
        made = max(made, layer_kept(load) + _inner_norm_backward(load))
    return max(
        made,
        sums_recomputed(load, layer_parts(load)),
        product_from_host(load, layer_parts(load)),
        liger_recomputed(load, layer_parts(load)),
        experts_recomputed(load, layer_kept(load), keeps_input=keeps_mlp_input(load)),
    )


def unpacking_backward(load: Workload) -> int:
    """Bytes at the MLP's packed maps in a layer's backward pass; 0 where weights are not packed.

    At the last map: everything kept (of a mixture its outputs make room for their gradient), the gradient
    that comes in, and the map as it is unpacked, or unpacked beside the gradient that it makes; those of the
    MLP's factors are not there yet. At the maps before it what the MLP kept is gone, and these are.
    """
    if load.settings.quantize == "none":
        return 0
    shape, N, a = load.shape, load.N, load.a
    k, width = shape.experts.num_per_token if shape.experts else 0, widest_mlp(load)
    coming = a * N * shape.width
    last, largest = (unpacked(shape, a, load.settings, last=one) for one in (True, False))
    at_last = layer_kept(load) + max(last.most, last.whole + a * N * width)
    made = a * N * shape.width * max(1, k)
    before = layer_kept(load) - mlp_kept(load) + 2 * a * N * width + max(largest.most, largest.whole + made)
    return coming + max(at_last, before + at_packed_experts(load))


@once
def scratch_at_peak(load: Workload) -> int:
    """Share of `layer_backward` that is flash attention's own scratch, where its moment is the higher."""
    if load.record is not None:
        return recorded_backward(load).kernel
    return flash_scratch(load) if attention_backward(load) > mlp_backward(load) else 0


@once
def mlp_backward(load: Workload) -> int:
    """Bytes at the MLP's moment of a layer's backward pass.

    The product's gradient has the product's place; where nothing kept that, it is there besides. Liger writes
    gradients over the factors. A norm after the MLP is through.
    """
    shape, N, a = load.shape, load.N, load.a
    of_experts = 0
    if shape.experts is not None:
        clamped = layer_kept(load) + a * N * shape.width + clamped_forward(load)
        of_experts = max(experts_backward(load, layer_kept(load)), clamped)
    if shape.num_expert_layers == shape.num_layers:
        return of_experts
    if load.settings.liger:
        # Where PEFT's layer adapts the last map, gradients of two products and their sum.
        adds = load.settings.adapter is not None and needs_product(load)
        factors = 1 + (adds and not sums_in_place(load))
    else:
        factors = 2 + (not needs_product(load) and (load.is_fused or not adapts(load, LAST)))
    # The mask of what was dropped before the last map is gone.
    made = a * N * (shape.width + factors * shape.mlp_width)
    made -= 0 if load.settings.liger else masks_kept(load, LAST)
    left = layer_kept(load) - shape.family.norms_after * norm_kept(load, shape.width, num_scales=1)
    return max(left + made, of_experts)


@once
def after_mlp_backward(load: Workload) -> int:
    """Bytes in a layer's backward pass when the gradients of its MLP's weights are there.

    What the MLP kept is gone; gradients of its factors and of its input stay, of experts for every copy of a
    token.
    """
    shape, experts = load.shape, load.shape.experts
    width = 2 * shape.mlp_width + 3 * shape.width
    if experts is not None:
        width = 2 * experts.num_per_token * (shape.width + experts.mlp_width) + shape.width
    return layer_kept(load) - mlp_kept(load) + load.a * load.N * width


@once
def mlp_output_backward(load: Workload) -> int:
    """Bytes at the MLP's last map in a layer's backward pass, where its weight's gradient is added:
    everything kept, and the gradients of its output and of its input."""
    return layer_kept(load) + load.a * load.N * (load.shape.width + widest_mlp(load))


@once
def attention_backward(load: Workload) -> int:
    """Bytes at the attention's moment, the kernel's own scratch included."""
    shape, N, a = load.shape, load.N, load.a
    of_norm = norm_kept(load, shape.width, num_scales=1)
    attention = attention_kept(load) + of_norm
    attention += a * N * (2 * shape.width + 2 * shape.query_width + 2 * shape.kv_width)
    attention += gathered_backward(load) + flash_scratch(load) + windows_backward(load)
    attention += call_results(load)[1]
    if load.settings.attention == MASKED:
        # Gradients of the softmax's output and input; the rounded copy of the output is gone.
        held, at_once = score_pairs(load)
        made = (6 if load.is_half else 4) if held else 8 + a + 4 * shape.makes_scores
        attention += at_once * shape.num_heads * made
    before_mlp = kept_to_attention(load) + a * N * shape.width
    if makes_own_scores(load):
        attention = softmax_backward(load, before_mlp)
    elif drops_in_steps(load):
        attention = max(dropped_backward(load, before_mlp), before_mlp + dropped_forward(load))
    return max(attention, query_norm_backward(load, of_norm))


def kept_to_attention(load: Workload) -> int:
    """Bytes that a layer keeps up to its attention's output."""
    entering = keeps_attention_input(load) * load.a * load.N * load.shape.width
    return norm_kept(load, load.shape.width, num_scales=1) + entering + attention_kept(load)


def last_drops_forward(load: Workload) -> int:
    """Bytes beside all that layers keep as the last one drops scores in steps; 0 where none does so."""
    dropping = dropped_forward(load)
    if not dropping or load.record is not None:
        return 0
    return kept_to_attention(load) - layer_kept(load) + dropping + 2 * layer_boundary(load)


@once
def layer_forward(load: Workload) -> int:
    """Most that one layer holds in a pass without gradients, with the embeddings and the residual stream.

    In the MLP at its product: its two factors and the product; or at the second factor: the first, the map as
    it is unpacked, and its output. bitsandbytes' 8-bit product is int32, then float16, then what is asked.
    """
    shape, N, a = load.shape, load.N, load.a
    if load.record is not None:
        return recorded_forward(load)
    product = a * N * 3 * shape.mlp_width + adapted_forward(load)
    factor = 2 * a * N * shape.mlp_width + dequantized(load)
    if load.settings.quantize == "8bit" and not packs_itself(load.settings):
        factor = N * shape.width + N * shape.mlp_width * (a + 6 + a * (load.settings.dtype != "float16"))
    mlp = 4 * a * N * shape.width + max(product, factor)
    attention = a * N * (3 * shape.width + 3 * shape.query_width + 3 * shape.kv_width)
    attention += gathered_forward(load)
    if load.settings.attention == MASKED:
        attention += 12 * score_pairs(load)[1] * shape.num_heads
    attention += softmax_forward(load)
    others = max(attention, experts_kept(load) + clamped_forward(load)) + dequantized(load)
    return max(mlp, others)


@once
def norm_backward(load: Workload) -> int:
    """Peak of a norm's backward pass beside its kept tensors: three float32 copies and more.

    In float32 two of the copies are the tensors themselves. In one kernel: the gradients of the picked rows,
    of its output and of its input.
    """
    if load.record is not None:
        return recorded_final_backward(load)
    if load.settings.liger or (load.is_fused and load.settings.device == "cuda"):
        return 3 * load.a * load.N * load.shape.width
    copies = 12 if load.is_half else 4
    others = 3 if load.trains_all or load.is_fused else 4
    return load.N * load.shape.width * (copies + others * load.a)


def _inner_norm_backward(load: Workload) -> int:
    """The same of a norm in a layer: the gradient of the residual stream stays besides. In half precision it
    and five float32 copies, after which the normalized form that is kept for a trained scale is gone."""
    if not load.is_half:
        return norm_backward(load) + layer_boundary(load)
    normalized = (4 if load.shape.family.norms_in_float else load.a) * load.trains_all
    return load.N * load.shape.width * (load.a + 20 - normalized)


@once
def _norm_between_backward(load: Workload) -> int:
    """Bytes at the norm between attention and MLP in a layer's backward pass, in half precision and without
    kernels of its own: all that was kept before the MLP and by the norm."""
    if not load.is_half or load.is_fused or load.settings.liger:
        return 0
    adapter, of_mlp = load.settings.adapter, mlp_kept(load)
    if adapter is not None:
        of_mlp += kept_by(load, [part for part in load.shape.adapted(adapter) if part.name in MLP_NAMES])
    of_mlp += keeps_mlp_input(load) * load.a * load.N * load.shape.width
    return layer_kept(load) - of_mlp + _inner_norm_backward(load)


@once
def dequantized(load: Workload) -> int:
    """Weights of the largest linear map, or of the experts that are unpacked at once, in the precision of the
    computation, while they are multiplied."""
    if load.settings.quantize == "none":
        return 0
    return unpacked(load.shape, load.a, load.settings).most


@once
def _keeps_input(load: Workload, *names: str) -> bool:
    """Dropout makes copies of its own, so the input itself is let go; bitsandbytes' 8-bit maps hold theirs in
    any case."""
    if load.settings.quantize == "8bit" and not packs_itself(load.settings):
        return True
    adapter = load.settings.adapter
    return adapter is not None and not adapter.dropout and adapts(load, *names)
