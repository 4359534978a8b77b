"""Gradients of one step in the order of its backward pass, where whole weights are trained on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memtrain.memory.estimate.adapters import head_adapter, rounded_adapters
from memtrain.memory.estimate.experts import stack_gradients
from memtrain.memory.estimate.layer_record import recorded_gradients
from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.static import gradient_bytes, largest_trained, sums_wide, trains_embedding
from memtrain.memory.estimate.weights_offload import adapter_of_layer, gradients_on_the_way, trains_away
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.sizes import backward_bucket


class GradientBytes(NamedTuple):
    """Bytes of gradients in the order of a backward pass."""

    before: int
    """Of the micro-batches before."""
    after_loss: int
    in_last: int
    """In the last layer's turn."""
    in_first: int
    in_embedding: int
    arriving: int
    """Scratch to add an embedding's gradient to the sum that is there."""
    at_step: int
    added: int
    """Scratch to add the largest matrix's gradient, in every layer."""
    of_head: int = 0
    """Gradients of an untied head and of the rows that enter it, where the former is widened to be added."""
    widens: int = 0
    """Bytes of a gradient's float32 copy for each of its own, where it is added to others."""
    after_mlp: int = 0
    """In a layer between when its MLP is through, where those of the layer before leave the device."""


def gradients_in_order(
    load: Workload, of_head: int, *, accumulates: bool, missing: Sequence[str] | None = None
) -> GradientBytes:
    """Gradients where whole weights are trained: `of_head` is the part of the head's gradient that the loss
    makes, `missing` are the maps of a layer that have none yet in its turn (None: all but the MLP's last).

    A gradient arrives in its weight's precision; where any are added to each other it is widened to float32
    first (trainers/optim/step.py), and kept so.
    """
    settings, shape = load.settings, load.shape
    trains_all = settings.adapter is None
    # What is saved beside an adapter are copies: a head and embeddings that were one are two.
    tied = shape.tied and trains_all
    is_foreign = load.batch.foreign is not None
    whole = gradient_bytes(settings, shape, accumulates=accumulates, is_foreign=is_foreign)
    is_wide = load.is_half and sums_wide(settings, accumulates=accumulates, is_foreign=is_foreign)
    size, widened = (4, 4) if is_wide else (load.a, 0)
    if trains_away(settings):
        way = gradients_on_the_way(settings, shape, size)
        stays = way.stays if accumulates else 0
        in_turn = way.in_last, way.in_first, way.in_embedding
        return GradientBytes(stays, way.stays, *in_turn, 0, way.stays, 0, after_mlp=way.after_mlp)
    num_embedding = shape.num_embedding * trains_embedding(settings)
    embedding, own_embedding = load.a * num_embedding, size * num_embedding
    there = _there_in_turn(load, missing)
    weight = (load.a + widened) * shape.largest_linear if trains_all and there else 0
    of_layer = shape.num_per_layer(expert=shape.num_expert_layers > 0) - there
    # A tied head's gradient waits for the embedding's, which is added to it: in half precision into a third;
    # where sums are wide, each is widened as it comes.
    waits = own_embedding if tied else 0
    arriving = own_embedding if is_wide else embedding if accumulates else 0
    if tied:
        arriving = waits + (embedding if load.is_half else 0)
    coming = waits if tied else embedding
    if settings.in_backward:
        # Gradients are freed by bucket as their weights are stepped; a tied head's waits for the embedding's.
        bucket = backward_bucket(whole)
        at_step = largest_trained(settings, shape) * (load.a if trains_all else 4) + bucket
        first = _first_of_layer(load)
        in_last = waits + (first if first < bucket else 0)
        in_turn = in_last, waits + bucket, embedding
        return GradientBytes(0, waits, *in_turn, arriving, at_step, 0)
    if accumulates:
        held = whole + waits
        of_rows = 2 * load.a * load.S * shape.width
        widening = 0 if tied else of_head + of_head // load.a * widened + of_rows
        in_turn = held, held, whole + coming
        return GradientBytes(
            whole, held, *in_turn, arriving, whole, weight, widening, widens=widened // load.a
        )
    waiting = max(waits, of_head * size // load.a) + 4 * sum(head_adapter(load))
    later = of_layer * size if trains_all else _adapters_missing(load, missing)
    in_first = whole - own_embedding + (waiting if tied else 0) - later
    in_embedding = whole - own_embedding + coming
    own = max(weight, size * there, recorded_gradients(load))
    turn = own if trains_all else _adapters_of_turn(load, later)
    in_turn = waiting + turn, in_first, in_embedding
    return GradientBytes(0, waiting, *in_turn, arriving, whole, 0, widens=widened // load.a)


def _there_in_turn(load: Workload, missing: Sequence[str] | None) -> int:
    """Numbers of a layer's matrices whose gradients are there in its turn.

    0 in slices, where gradients are in sums until the last slice is through, and at the MLP of experts, whose
    stacks' are counted at their own moments (`peaks`).
    """
    shape = load.shape
    if load.settings.slice_tokens:
        return 0
    if missing is None:
        return 0 if shape.num_expert_layers else shape.largest_linear
    stacks = sum(stack.num_weights for stack, _ in shape.stacks)
    later = (part for part in shape.plain_linears if part.name not in missing)
    return stacks + sum(part.num_inputs * part.num_outputs for part in later)


def buckets_of_ddp(load: Workload) -> int:
    """Bytes of the buckets in which torch's DDP sums another tool's gradients: as much as the gradients.

    Source: torch, DistributedDataParallel: "saved memory size will be equal to the total gradients size" by
    `gradient_as_bucket_view`, which accelerate leaves off.
    """
    settings = load.settings
    if load.batch.foreign is None or settings.num_processes == 1 or is_sharded(settings):
        return 0
    return gradient_bytes(settings, load.shape, accumulates=False, is_foreign=True)


def _first_of_layer(load: Workload) -> int:
    """Gradient of a layer's last map, the first to come where steps are inside the backward pass; 0 in
    slices, whose sums wait."""
    if load.settings.adapter is not None or load.settings.slice_tokens:
        return 0
    return max(load.a * load.shape.largest_linear, stack_gradients(load)[0])


def _adapters_of_turn(load: Workload, later: int) -> int:
    """Gradients of the last layer's adapters that are there in its turn; `later`: bytes of the others.

    In half precision they wait for each other as they come, where adapters are rounded together. 0 of
    experts, whose highest moment is before their stacks'.
    """
    adapter = load.settings.adapter
    assert adapter is not None, "Adapters are trained."
    if load.shape.num_expert_layers:
        return 0
    there = 4 * adapter_of_layer(adapter, load.shape) - later
    return there * load.a // 4 if rounded_adapters(load) else there


def _adapters_missing(load: Workload, missing: Sequence[str] | None) -> int:
    """Gradients of a layer's adapters that are not there in its turn: of maps that are `missing` (None: of
    all but the MLP's last), or of all where sums of slices are counted in their place."""
    adapter, shape = load.settings.adapter, load.shape
    if adapter is None:
        return 0
    if load.settings.slice_tokens:
        return 4 * adapter_of_layer(adapter, shape)
    names = (LAST,) if missing is None else missing
    maps = (part for part in shape.adapted(adapter) if part.name in names)
    named = sum(adapter.r * (part.num_inputs + part.num_outputs) for part in maps)
    if missing is not None:
        return 4 * named
    stacks = (stack for stack, _ in shape.stacks if stack.name == LAST)
    named += sum(stack.num_adapter(shape.rank_of(adapter, stack)) for stack in stacks)
    return max(0, 4 * (adapter_of_layer(adapter, shape) - named))
