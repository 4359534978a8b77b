"""Memory of the device that an optimizer step takes for its time: temporaries, and states that pass by."""

from __future__ import annotations

from memtrain.memory.estimate.auxiliary_models import headless
from memtrain.memory.estimate.sharded.sharding import share
from memtrain.memory.estimate.static import (
    gradient_bytes,
    largest_trained,
    num_half,
    num_trained,
    optimizer_bytes,
    sums_wide,
)
from memtrain.memory.estimate.weights_offload import trains_away
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import COMPRESSED_GROUP, MASTER_BUCKET, OFFLOAD_BUCKET, backward_bucket

PACKED = 3 + 1 / 4 + (1 + 4 / COMPRESSED_GROUP) / 4
"""Float32 sizes of a tensor whose second moment goes into 8 bits: its root, two of the three that make codes,
a mask of a byte a number, and the first moment's codes and scales. Seen in a trace."""


def optimizer_scratch(load: Workload, *, accumulates: bool) -> int:
    """Temporaries of the update.

    Fused kernels have none; foreach ones hold the roots of AdamW's second moments. Adafactor: the update of
    one tensor and its negative, in float32; in half precision gradient and weight in float32 as well. Muon:
    the orthogonalization of one matrix, in bfloat16. Master copies and 8-bit moments: see `_of_bucket`.
    """
    settings, shape = load.settings, load.shape
    saved = 0 if settings.adapter is None else shape.num_saved_modules(settings.adapter)
    if trains_away(settings) and not saved:
        return 0
    moments = OPTIMIZERS[settings.optimizer].moments
    if load.batch.foreign is not None and load.batch.foreign.is_foreach and settings.optimizer == "adamw":
        return 0 if settings.optimizer_offload else optimizer_bytes(settings, shape) // 2
    if moments == "factored":
        return scratch_of_tensor(load, largest_trained(settings, shape))
    if moments == "of matrices":
        return scratch_of_tensor(load, shape.largest_linear, is_map=load.trains_all)
    return _of_bucket(load, accumulates=accumulates)


def _of_bucket(load: Workload, *, accumulates: bool) -> int:
    """Float32 bytes of a bucket of weights: the numbers that do not stay, gradients that are not float32
    already, and moments that are 8 bits between steps, with what the largest tensor takes to be packed.

    A process of FSDP2 steps its rows of every tensor.
    """
    settings, shapes = load.settings, _trained_shapes(load)
    largest, copied = 4 * share(largest_trained(settings, load.shape), settings, of="weights"), 0
    if settings.master_weights and settings.shard_offload == "none":
        copied = 4 * share(sum(num_half(settings, one) for one in shapes), settings, of="weights")
    trained = 4 * share(sum(num_trained(settings, one) for one in shapes), settings, of="weights")
    most = MASTER_BUCKET
    if settings.in_backward:
        # So many gradients wait for each other, and the one that comes last.
        waiting = backward_bucket(gradient_bytes(settings, load.shape, accumulates=False))
        most = min(most, largest + 4 * waiting // load.a)
    bucket = max(largest, min(most, copied)) if copied else 0
    is_wide = sums_wide(settings, accumulates=accumulates)
    # Float32 numbers that do not stay are made for a bucket, or fetched, and taken apart weight by weight.
    made = bucket if settings.copies != "float32" or settings.optimizer_offload else 0
    if settings.optimizer_offload and settings.copies != "stochastic":
        # Copies, or the bits beside the weights, of the bucket that comes or leaves meanwhile.
        made += _neighbour(bucket, copied, settings, load.shape) // (1 if settings.copies == "float32" else 2)
    moments = largest if settings.copies != "float32" else 0
    if settings.optimizer_offload and copied <= bucket:
        # Moments of the only bucket have left by then.
        moments = 0
    if settings.compressed_moments:
        moments = 2 * max(largest, min(most, trained)) + round(PACKED * largest)
    return (0 if is_wide else bucket) + made + moments


def _trained_shapes(load: Workload) -> tuple[ModelShape, ...]:
    """Shapes of the models that one optimizer steps: the policy's, and that of a value model of its own."""
    return (load.shape, headless(load.shape)) if load.settings.value == "own" else (load.shape,)


def scratch_of_tensor(load: Workload, num_weights: int, *, is_map: bool = True) -> int:
    """Temporaries of the update of one tensor by itself, as inside a backward pass; see `optimizer_scratch`.

    `is_map`: a matrix that Muon orthogonalizes.
    """
    settings, wide = load.settings, 4 * num_weights
    moments = OPTIMIZERS[settings.optimizer].moments
    if moments == "factored":
        return num_weights * (16 if load.is_half and load.trains_all else 8)
    if moments == "of matrices":
        return num_weights * (2 * load.a + 2 * 4) if is_map else 0
    made = 0
    if settings.master_weights:
        made = wide if settings.copies == "float32" else 2 * wide
    if settings.compressed_moments:
        return made + round((2 + PACKED) * wide)
    return made + (wide if made > wide else 0)


def offload_bucket(load: Workload) -> int:
    """Moments that are on the device at once while they wait on the host otherwise: of two buckets."""
    settings, shape = load.settings, load.shape
    if not settings.optimizer_offload:
        return 0
    number_bytes = 4 if settings.master_weights else load.a
    all_bytes = sum(optimizer_bytes(settings, one) for one in _trained_shapes(load))
    of_largest = 2 * share(largest_trained(settings, shape), settings, of="weights") * number_bytes
    bucket = max(of_largest, min(OFFLOAD_BUCKET, all_bytes))
    linear = share(shape.largest_linear, settings, of="weights")
    of_linear = 0 if settings.adapter is not None else 2 * linear * number_bytes
    return bucket + min(max(OFFLOAD_BUCKET, of_linear), max(0, all_bytes - bucket))


def _neighbour(bucket: int, all_bytes: int, settings: Settings, shape: ModelShape) -> int:
    """Float32 bytes of the bucket beside the largest one: the largest tensors lie apart, with layers between
    them."""
    linear = share(shape.largest_linear, settings, of="weights")
    of_linear = 0 if settings.adapter is not None else 4 * linear
    return min(max(MASTER_BUCKET, of_linear), max(0, all_bytes - bucket))
