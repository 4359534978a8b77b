"""Memory of the device that an optimizer step takes for its time: temporaries, and states that pass by."""

from __future__ import annotations

from memtrain.memory.estimate.sharded.sharding import share
from memtrain.memory.estimate.static import (
    MASTER_BUCKET,
    OFFLOAD_BUCKET,
    largest_trained,
    num_half,
    num_trained,
    optimizer_bytes,
)
from memtrain.memory.estimate.weights_offload import trains_away
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings


def optimizer_scratch(load: Workload) -> int:
    """Temporaries of the update.

    Fused kernels have none; foreach ones hold the roots of AdamW's second moments. Master copies: float32
    gradients of a bucket, and the copies where they wait on the host. Adafactor: the update of one tensor and
    its negative, in float32; in half precision gradient and weight in float32 as well. Muon: the
    orthogonalization of one matrix, in bfloat16.
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
    # A process of FSDP2 steps its rows of every tensor.
    largest, copied = 4 * share(largest_trained(settings, shape), settings, of="weights"), 0
    if settings.master_weights and settings.shard_offload == "none":
        copied = 4 * share(num_half(settings, shape), settings, of="weights")
    bucket = max(largest, min(MASTER_BUCKET, copied)) if copied else 0
    # Float32 numbers that do not stay are made for a bucket, or fetched, and taken apart weight by weight.
    made = bucket if settings.copies != "float32" or settings.optimizer_offload else 0
    if settings.optimizer_offload and settings.copies != "stochastic":
        # Copies, or the bits beside the weights, of the bucket that comes or leaves meanwhile.
        made += _neighbour(bucket, copied, settings, shape) // (1 if settings.copies == "float32" else 2)
    made += 2 * largest if settings.copies != "float32" else 0
    trained = share(num_trained(settings, shape), settings, of="weights")
    stepped = max(largest, min(MASTER_BUCKET, 4 * trained))
    # Both moments of a bucket; and three steps of one tensor's on the way into 8 bits.
    expanded = 2 * stepped + 3 * largest if settings.compressed_moments else 0
    return bucket + made + expanded


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
        made = wide if settings.copies == "float32" else 4 * wide
    return made + (5 * wide if settings.compressed_moments else 0)


def offload_bucket(load: Workload) -> int:
    """Moments that are on the device at once while they wait on the host otherwise: of two buckets."""
    settings, shape = load.settings, load.shape
    if not settings.optimizer_offload:
        return 0
    number_bytes = 4 if settings.master_weights else load.a
    all_bytes = optimizer_bytes(settings, shape)
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
