"""Gradients of a rank under DeepSpeed's ZeRO, in the order of a step's backward pass.

Source: deepspeed 0.19.8, stage_1_and_2.py and stage3.py; held against traces by
tests/trainers/tools/trace/test_trace_zero.py.
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.activations import (
    after_mlp_backward,
    attention_backward,
    layer_backward,
    mlp_output_backward,
)
from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.sharded.zero_buckets import Cut, bucket_of, cut_of, largest_part
from memtrain.memory.estimate.static import num_trained, static_bytes, waits_on_host
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.shape import MLP_NAMES, ModelShape
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.zero_config import stage_of


class ZeroGradients(NamedTuple):
    """Bytes of gradients in the order of a backward pass."""

    before: int
    """Of the micro-batches before."""
    after_loss: int
    in_last: int
    """In the last layer's turn."""
    later: int
    """In the turns of the layers before it."""


def zero_gradients(load: Workload, *, holds: bool) -> ZeroGradients:
    """Gradients of the rank that needs the most: in stage 1 whole ones, which stay until the last micro-batch
    is through; in stages 2 and 3 as long as they are not summed, and a rank's part.

    A tied head's gradient waits for the embedding's. In stage 2 those of whole weights are counted as they
    come (zero_buckets.py).
    """
    settings, shape, trains_all = load.settings, load.shape, load.settings.adapter is None
    part, matrix = part_bytes(settings, shape), load.a * largest_matrix(shape) * trains_all
    waits = load.a * shape.num_embedding * (trains_all and shape.tied)
    of_head = waits if shape.tied else load.a * shape.num_head * trains_all
    if stage_of(settings) == 3:
        return ZeroGradients(part, part + of_head, part + waits, part + waits)
    if stage_of(settings) == 2 or sums_as_they_come(load, holds=holds):
        before = holds * (largest_part(buckets_of(load)) if trains_all else part)
        return ZeroGradients(before, *(part * (1 + holds),) * 3)
    whole = static_bytes(settings, shape).gradients
    if holds:
        return ZeroGradients(whole, whole + waits, whole + waits + matrix, whole + waits + matrix)
    if not trains_all:
        return ZeroGradients(0, whole, whole, whole)
    of_layer = load.a * shape.num_per_layer(expert=shape.num_expert_layers > 0)
    of_embedding = 0 if shape.tied else load.a * shape.num_embedding
    later = whole - of_layer - of_embedding + matrix
    return ZeroGradients(0, min(whole, of_head), min(whole, of_head + matrix), max(later, of_head + matrix))


def sums_as_they_come(load: Workload, *, holds: bool) -> bool:
    """Whether gradients of whole weights are summed, and let go, in the order of zero_buckets.py: in stage 2,
    and in stage 1 those of float32 weights in a step of one micro-batch, where sums overlap the backward
    pass: on a GPU."""
    settings, stage = load.settings, stage_of(load.settings)
    overlaps = stage == 1 and settings.device == "cuda" and not holds and not load.is_half
    return load.trains_all and (stage == 2 or overlaps)


def sums_at_once(load: Workload) -> bool:
    """Whether any gradient is summed by the last layer's turn: a head of its own fills the bucket, or a layer
    is larger."""
    shape = load.shape
    before_next = max(shape.num_head + largest_matrix(shape), shape.num_per_layer(expert=False))
    return not load.trains_all or bucket_of(shape) < before_next


def layer_with_sums(load: Workload) -> int:
    """Most that a layer holds in its backward pass: in stage 3 with gradients of its weights as they come,
    and with the float32 numbers, end to end, in which full buckets are summed."""
    plain = layer_backward(load)
    if not load.trains_all or stage_of(load.settings) < 3:
        return plain
    at_last = mlp_output_backward(load) + load.a * largest_matrix(load.shape)
    moments = {LAST: at_last} | dict.fromkeys(MLP_NAMES - {LAST}, after_mlp_backward(load))
    summing = (
        moments.get(name, attention_backward(load)) + 4 * count
        for name, count in filled_buckets(load)[0].items()
    )
    return max(plain, at_last, *summing)


@once
def filled_buckets(load: Workload) -> tuple[dict[str, int], int]:
    """(numbers of the fullest bucket that is summed as the gradient of a map of a layer comes, by the map's
    name; numbers that wait in the bucket when all layers are through). Of vectors only the last norm's scale
    is counted, by which a head that fills the bucket is summed before the layers."""
    shape, bucket = load.shape, bucket_of(load.shape)
    if shape.counts is not None or shape.num_expert_layers:
        return {LAST: bucket}, min(bucket, shape.num_layer_parameters)
    waiting, most = shape.num_head + shape.width, dict[str, int]()
    if waiting > bucket:
        waiting = shape.width
    for part in [*reversed(shape.linears)] * shape.num_layers:
        count = part.num_inputs * part.num_outputs
        if waiting + count > bucket:
            most[part.name] = max(waiting, most.get(part.name, 0))
            waiting = 0
        waiting += count
    return most, waiting


def buckets_of(load: Workload) -> Cut:
    """The weights of stage 2, as they are cut and summed."""
    settings = load.settings
    away = waits_on_host(settings)
    return cut_of(load.shape, settings.num_processes, bucket_of(load.shape), load.a, is_away=away)


def part_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the float32 gradients of one rank; none where its states wait on the host, and they beside
    them.

    Source: deepspeed 0.19.8, stage3.py (`grad_partitions_flat_buffer` lies on `self.device`, which is the
    host's with `offload_optimizer`) and stage_1_and_2.py (`single_partition_of_fp32_groups`).
    """
    if waits_on_host(settings):
        return 0
    return 4 * -(-num_trained(settings, shape) // settings.num_processes)


def largest_matrix(shape: ModelShape) -> int:
    """Numbers of the largest matrix of a layer."""
    return max(part.num_inputs * part.num_outputs for part in shape.linears)
