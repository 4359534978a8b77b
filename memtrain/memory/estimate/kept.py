"""Bytes that layers keep from the forward to the backward pass, under every treatment of activations."""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.activations import (
    attention_kept,
    keeps_its_input,
    layer_boundary,
    layer_kept,
    mlp_kept,
    needs_product,
    norm_kept,
)
from memtrain.memory.estimate.adapters import adapts, masks_kept
from memtrain.memory.estimate.layer_record import recorded_at_work, recorded_embeddings, recorded_kept
from memtrain.memory.estimate.offloaded_layers import waiting_storages
from memtrain.memory.estimate.own_attention import masked_kept
from memtrain.memory.estimate.positions import positions, positions_and_mask
from memtrain.memory.estimate.static import learns_embeddings
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.shape import ENTERING
from memtrain.memory.plan.sizes import packs_itself


class Kept(NamedTuple):
    """Bytes kept by all layers together.

    A layer at work (`layer_backward`) holds what it kept, so that is not to be counted twice.
    """

    everything: int
    """By all layers, when the last one is at work."""
    of_last: int
    """Of these by the last layer that is at work."""
    beside_first: int
    """Beside the first layer."""
    at_loss: int
    """By all layers, when none is at work."""


def kept_bytes(load: Workload) -> int:
    """Bytes that all layers keep for the backward pass."""
    return kept(load).at_loss


def kept_despite(load: Workload) -> int:
    """Bytes that a layer keeps although it is checkpointed: with 8-bit weights the inputs of its linear maps.

    Source: bitsandbytes 0.50.2, autograd/_functions.py: MatMul8bitLt holds its input as an attribute, which
    hooks on saved tensors do not see. Seen on a CPU by tests/trainers/tools/trace/test_trace_bits.py.
    """
    if load.settings.quantize != "8bit" or packs_itself(load.settings):
        return 0
    shape = load.shape
    dense = shape.width + shape.mlp_width if shape.num_expert_layers < shape.num_layers else 0
    return load.a * load.N * (shape.width + shape.query_width + dense)


@once
def kept_whole(load: Workload, every: int = 0) -> int:
    """Bytes kept by all layers of which none is checkpointed, or every n-th: the first, and so on."""
    num_layers = load.shape.num_layers
    if load.record is None:
        whole = (num_layers - (-(-num_layers // every) if every else 0)) * layer_kept(load)
        return whole if every else whole - (num_layers - load.shape.num_sliding_layers) * masked_kept(load)
    return sum(size for at, size in enumerate(recorded_kept(load)) if not every or at % every)


@once
def kept(load: Workload) -> Kept:
    """The bytes that layers keep.

    Of inputs that wait on the host, one is there besides those of the last `offload_keep` layers: the last
    that left, or the next that is fetched.
    """
    settings, num_layers = load.settings, load.shape.num_layers
    every, full = settings.checkpoint_every, layer_kept(load)
    boundary, tables = layer_boundary(load), positions_and_mask(load)
    if settings.offload == "all":
        waiting = waiting_storages(load)
        return Kept(waiting + tables, waiting, tables, waiting + tables)
    if settings.slice_tokens:
        return _kept_streamed(load)
    if not every:
        tables = positions(load)
        if load.record is not None:
            tables += recorded_embeddings(load)
            everything = kept_whole(load) + tables
            return Kept(everything, recorded_at_work(load), tables, everything)
        everything = kept_whole(load) - unneeded_in_first(load) + tables
        return Kept(everything, full, tables, everything)
    is_away = settings.offload == "boundaries"
    count = -(-num_layers // every)
    stay = min(count, settings.offload_keep + 1) if is_away else count
    everything = stay * boundary + count * kept_despite(load) + kept_whole(load, every) + tables
    is_last_plain = (num_layers - 1) % every != 0
    # What was held may be a tensor that the layer keeps. Where the last one left too, the one before
    # it is fetched by then.
    keeps_input = keeps_its_input(load)
    is_one_ahead = is_away and not settings.offload_keep and count > 1
    last = full if load.record is None else recorded_kept(load)[-1]
    shared = boundary if keeps_input and not is_one_ahead else 0
    of_first = boundary if keeps_input and (not is_away or settings.offload_keep >= count) else 0
    return Kept(
        everything - shared, last - shared if is_last_plain else 0, boundary + tables - of_first, everything
    )


def unneeded_norm(load: Workload) -> int:
    """Bytes that the first norm of all does not keep, where frozen embeddings need no gradient; 0 without a
    norm before the first maps."""
    if load.record is not None:
        return 0
    family = load.shape.family
    begins_with_maps = family.norms_after and family.num_wide_norms == 2
    if learns_embeddings(load.settings) or begins_with_maps:
        return 0
    return norm_kept(load, load.shape.width, num_scales=1)


def unneeded_in_first(load: Workload) -> int:
    """Bytes that the first layer does not keep, of what layers keep: frozen embeddings need no gradient, nor
    does what comes before its first adapted map."""
    shape, of_first = load.shape, unneeded_norm(load)
    if learns_embeddings(load.settings):
        return 0
    is_plain = shape.counts is None and load.settings.quantize != "8bit"
    if not is_plain:
        return of_first
    if adapts(load, *ENTERING):
        # What is dropped of an input without a gradient needs no mask.
        return of_first + masks_kept(load, *ENTERING)
    # Norms after the attention and after the MLP; some families have no others.
    num_norms, norms_after = shape.family.num_wide_norms, shape.family.norms_after
    of_norm = norm_kept(load, shape.width, num_scales=1)
    # Experts have their highest moment in a forward pass, to whose end the backbone holds the embeddings.
    before_attention = attention_kept(load) - layer_boundary(load) * (shape.num_expert_layers > 0)
    if adapts(load, "o_proj"):
        return of_first + before_attention - load.a * load.N * shape.query_width
    before_mlp = (num_norms - norms_after) * of_norm + before_attention
    if shape.num_expert_layers:
        return before_mlp
    wide = load.a * load.N * shape.mlp_width
    has_gate, has_up = (adapts(load, name, "gate_up_proj") for name in ("gate_proj", "up_proj"))
    if has_gate or has_up:
        # The activated gate is for the gradient of the other factor alone, the gate and that for its own.
        alone = 0 if has_gate and has_up else 1 + has_up
        is_one_kernel = load.is_fused or load.settings.liger
        return before_mlp + (0 if is_one_kernel else alone * wide)
    return before_mlp + mlp_kept(load) - wide * needs_product(load)


def _kept_streamed(load: Workload) -> Kept:
    """The same where every layer goes over the row in slices: its input is all that it keeps.

    What waits on the host is there while it is used.
    """
    settings, count = load.settings, load.shape.num_layers
    boundary, tables = layer_boundary(load), positions_and_mask(load)
    stay = count if settings.offload == "none" else min(count, settings.offload_keep)
    everything = max(1, stay) * boundary + tables
    return Kept(everything, 0, boundary + tables, stay * boundary + tables)
