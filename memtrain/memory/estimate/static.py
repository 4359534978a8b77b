"""Bytes that do not depend on the batch: weights, gradients, optimizer, and the device's own."""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.bitsandbytes_states import blockwise_states
from memtrain.memory.estimate.quantized import expert_bytes, linear_bytes
from memtrain.memory.estimate.sharded.sharding import share
from memtrain.memory.estimate.weights_offload import away, device_bytes, num_trained_away
from memtrain.memory.estimate.workload import DTYPE_BYTES
from memtrain.memory.hardware.calibration import Measured
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.engine_kinds import is_sharded, uses_zero
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import COMPRESSED_GROUP, SMALL_GRADIENT
from memtrain.memory.plan.units import GIB, MIB
from memtrain.recipes.sections.model import Adapter

COMMUNICATION_BYTES = 656 * MIB
"""Memory of an NCCL communicator on each of its GPUs. Source: published runs of 2 to 8 GPUs had 544 to 688 MB
beside tensors and context that runs of one GPU had not; the most of it."""

CONTEXT_BYTES = 600 * MIB
"""Memory of a CUDA context with the kernels that a step loads. Typical."""


class Static(NamedTuple):
    """Bytes on one device that live as long as the run, by owner."""

    weights: int
    """Frozen and trained, with adapters; in the precision they are stored in."""
    gradients: int
    """Of every trained weight, once a backward pass is through."""
    optimizer: int
    """Moments, from the first optimizer step on."""
    master: int
    """Float32 copies of trained weights, from the first optimizer step on."""
    reduce: int
    """Small gradients end to end, with several processes; large ones are summed in place."""


def num_trained(settings: Settings, shape: ModelShape) -> int:
    """Trained parameters."""
    return sum(count for count, _ in trained_parts(settings, shape))


def trained_parts(settings: Settings, shape: ModelShape) -> list[tuple[int, int]]:
    """(parameters, bytes of each) of the trained weights: adapters are always float32."""
    size = DTYPE_BYTES[settings.dtype]
    if settings.adapter is None:
        return [(shape.num_parameters, size)]
    return [(shape.num_adapter(settings.adapter), 4), (shape.num_saved_modules(settings.adapter), size)]


def trains_head(settings: Settings) -> bool:
    """Whether the LM head gets a gradient of its own size."""
    if settings.adapter is None:
        return True
    return _saves(settings.adapter, "lm_head")


def trains_embedding(settings: Settings) -> bool:
    """Whether the embeddings get a gradient of their own size."""
    return settings.adapter is None or _saves(settings.adapter, "embed_tokens")


def learns_embeddings(settings: Settings) -> bool:
    """Whether what comes out of the embeddings has a gradient: they are trained, or have an adapter."""
    adapter = settings.adapter
    return trains_embedding(settings) or (adapter is not None and "embed_tokens" in adapter.target_modules)


def _saves(adapter: Adapter, module: str) -> bool:
    return any(name.rsplit(".", 1)[-1] == module for name in adapter.modules_to_save)


def weights_bytes(settings: Settings, shape: ModelShape) -> int:
    """Stored weights: parameters in `dtype`, or the layers' linear maps and experts in 4 or 8 bits; adapters
    beside."""
    frozen = DTYPE_BYTES[settings.dtype] * shape.num_parameters
    if settings.quantize != "none":
        plain = shape.num_parameters - shape.num_linear_weights - shape.num_expert_weights
        frozen = DTYPE_BYTES[settings.dtype] * plain
        frozen += linear_bytes(shape, settings.quantize) + expert_bytes(shape, settings.quantize)
    if settings.adapter is None:
        return frozen
    return frozen + sum(count * each for count, each in trained_parts(settings, shape))


def reference_bytes(settings: Settings, shape: ModelShape) -> int:
    """Weights of a reference model that is held beside the policy: a copy, the start of an adapter that is
    continued (in a copy too), or none."""
    start = 0
    if settings.adapter is not None and settings.adapter.path is not None:
        start = sum(count * each for count, each in trained_parts(settings, shape))
        start = share(start, settings, of="weights")
    if settings.reference == "adapter_start":
        return start
    if settings.reference not in ("copy", "synced"):
        return 0
    bare = settings.model_copy(update={"adapter": None})
    whole = weights_bytes(bare, shape)
    if settings.weights_offload and settings.device == "cuda":
        whole -= away(bare, shape).total
    return start + share(whole, settings, of="weights") + device_bytes(bare, shape)


def sums_wide(settings: Settings, *, accumulates: bool, is_foreign: bool = False) -> bool:
    """Whether gradients are float32 whatever their weights are: where any are added to each other.

    Over the micro-batches of a step (`accumulates`), or over ranks that each have whole ones; and in float16,
    whose gradients are scaled back before they are used. `is_foreign`: another tool's step, which adds them
    in their own precision.
    """
    return not is_foreign and (
        settings.dtype == "float16"
        or (accumulates and not settings.in_backward)
        or (settings.num_processes > 1 and not is_sharded(settings))
    )


def gradient_bytes(
    settings: Settings, shape: ModelShape, *, accumulates: bool, is_foreign: bool = False
) -> int:
    """Gradients of the weights that a process steps, after a backward pass."""
    least = 4 if sums_wide(settings, accumulates=accumulates, is_foreign=is_foreign) else 0
    total = sum(count * max(size, least) for count, size in trained_parts(settings, shape))
    return share(total, settings, of="gradients")


def static_bytes(settings: Settings, shape: ModelShape) -> Static:
    """Weights, gradients, moments and master copies of one process: all of them, or its shards."""
    parts = trained_parts(settings, shape)
    gradients = sum(count * size for count, size in parts)
    copied = num_half(settings, shape)
    is_away = shards_wait(settings)
    weights = share(weights_bytes(settings, shape), settings, of="weights")
    # On a CPU the host's memory is the device's.
    is_elsewhere = settings.device == "cuda"
    own_gradients = share(gradients, settings, of="gradients")
    master = share(copy_size(settings) * copied, settings, of="states")
    if uses_zero(settings):
        # DeepSpeed steps float32 copies, of float32 weights too.
        master = share(4 * num_trained(settings, shape), settings, of="states")
    if settings.adapter is None:
        # An adapter is float32 itself: copies are of modules that stay.
        master = _stays(master, settings, shape)
    sums_whole = settings.num_processes > 1 and not is_sharded(settings)
    return Static(
        weights=0 if is_away else weights - (away(settings, shape).total if is_elsewhere else 0),
        gradients=0 if is_away else own_gradients,
        optimizer=0 if waits_on_host(settings) else _stays(optimizer_bytes(settings, shape), settings, shape),
        master=0 if waits_on_host(settings) else master,
        reduce=small_gradients(settings, shape) if sums_whole else 0,
    )


def _stays(num_bytes: int, settings: Settings, shape: ModelShape) -> int:
    """Part of a state of the trained weights whose weights are on the device."""
    gone = num_trained_away(settings, shape) if settings.device == "cuda" else 0
    if not gone:
        return num_bytes
    sizes = [
        (count, max(size, 4 if settings.master_weights else 0))
        for count, size in trained_parts(settings, shape)
    ]
    # The first part is a model's weights, or an adapter's.
    whole = sum(count * size for count, size in sizes)
    return num_bytes * (whole - gone * sizes[0][1]) // max(1, whole)


def copy_size(settings: Settings) -> int:
    """Bytes a half-precision weight that stay of its float32 number between steps."""
    return {"float32": 4, "split": 2, "stochastic": 0}[settings.copies] if settings.master_weights else 0


def copies_at_load(settings: Settings, shape: ModelShape) -> int:
    """Bytes of float32 copies while a model is loaded: all that stay, or the largest on its way."""
    if not (settings.master_weights and settings.optimizer_offload and settings.device == "cuda"):
        return static_bytes(settings, shape).master
    return share(copy_size(settings) * largest_trained(settings, shape), settings, of="states")


def small_gradients(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the gradients that are summed end to end: norms, biases, and matrices below 1 MiB."""
    # Of which gradients are sent together their weights decide; float32 is what is sent.
    size, sent = DTYPE_BYTES[settings.dtype], 4
    if settings.adapter is None:
        maps = [(part.num_inputs * part.num_outputs, shape.num_layers) for part in shape.linears]
        matrices = [*maps, (shape.num_embedding, 1), (shape.num_head, 1)]
        vectors = sent * shape.num_vectors
    else:
        size, vectors = 4, 0
        rank, parts = settings.adapter.r, shape.adapted(settings.adapter)
        widths = [width for part in parts for width in (part.num_inputs, part.num_outputs)]
        matrices = [(rank * width, shape.num_layers) for width in widths]
    return vectors + sum(sent * each * count for each, count in matrices if size * each < SMALL_GRADIENT)


def shards_wait(settings: Settings) -> bool:
    """Whether a rank's weights and gradients, and with them its states, are in another memory than the
    passes."""
    return settings.device == "cuda" and settings.shard_offload == "parameters"


def waits_on_host(settings: Settings) -> bool:
    """Whether optimizer states are in another memory than the weights. On a CPU it is the same one."""
    return settings.device == "cuda" and (settings.optimizer_offload or settings.shard_offload != "none")


def offloaded_states(settings: Settings, shape: ModelShape) -> int:
    """Bytes of one process that wait on the host by `optimizer_offload`: moments, and float32 copies of
    weights or their bits."""
    if not settings.optimizer_offload or settings.device == "cpu":
        return 0
    copies = share(copy_size(settings) * num_half(settings, shape), settings, of="states")
    return optimizer_bytes(settings, shape) + copies


def num_half(settings: Settings, shape: ModelShape) -> int:
    """Trained parameters that are no float32 numbers themselves."""
    return sum(count for count, size in trained_parts(settings, shape) if size < 4)


def optimizer_bytes(settings: Settings, shape: ModelShape) -> int:
    """Moments of one process: all of them, or its shards; see `moments_bytes`."""
    return share(moments_bytes(settings, shape), settings, of="states")


def moments_bytes(settings: Settings, shape: ModelShape) -> int:
    """Moments of all trained weights, wherever they wait.

    adamw: 2 numbers a trained weight, in its dtype, or float32 beside master copies. 8-bit: 2 bytes and
    scales. paged: what is too small to be paged. adafactor: a row and a column for each matrix. muon: 1
    number a matrix weight, 2 for the rest. sgd: none.
    """
    moments = sum(
        count * (4 if settings.master_weights else size) for count, size in trained_parts(settings, shape)
    )
    if settings.optimizer == "adamw" and settings.compressed_moments:
        # A byte for each, and a float32 scale for 32 (trainers/optim/compressed_moments.py).
        return round(2 * (1 + 4 / COMPRESSED_GROUP) * num_trained(settings, shape))
    if settings.optimizer == "adamw":
        return 2 * moments
    moments_kind = OPTIMIZERS[settings.optimizer].moments
    if moments_kind == "blockwise":
        return blockwise_states(settings, shape).device
    if moments_kind == "factored":
        return 4 * _rows_and_columns(settings, shape)
    if moments_kind == "of matrices":
        if settings.adapter is not None:
            return moments
        size = moments // max(1, shape.num_parameters)
        return moments + size * (shape.num_embedding + shape.num_head + shape.num_vectors)
    return 0


def largest_trained(settings: Settings, shape: ModelShape) -> int:
    """Numbers in the largest trained tensor, the largest copy of a step over one tensor at a time."""
    if settings.adapter is not None:
        widest = max((max(p.num_inputs, p.num_outputs) for p in shape.adapted(settings.adapter)), default=0)
        return max(settings.adapter.r * widest, shape.num_saved_modules(settings.adapter))
    return shape.largest_tensor


def _rows_and_columns(settings: Settings, shape: ModelShape) -> int:
    """Second moments of Adafactor. Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4."""
    if settings.adapter is not None:
        return num_trained(settings, shape) // max(1, settings.adapter.r) * 2
    embeddings = (1 if shape.tied else 2) * (shape.vocab_size + shape.width)
    return shape.num_rows_and_columns + embeddings + shape.num_vectors


class Overhead(NamedTuple):
    """Memory that a device needs beside live tensors."""

    context: int
    """CUDA context and loaded kernels, or the interpreter and its libraries."""
    workspace: int
    """Matrix-product workspaces and the scratch of single kernels."""
    communication: int
    """Buffers of the collectives."""
    slack: float
    """Memory that the allocator reserves beyond live tensors, as a share of them."""

    @property
    def fixed(self) -> int:
        """Bytes that do not grow with the tensors."""
        return self.context + self.workspace + self.communication


def overhead(settings: Settings) -> Overhead:
    """Defaults until the device has been measured."""
    slack = slack_share(settings)
    if settings.beside_bytes is not None:
        return Overhead(context=settings.beside_bytes, workspace=0, communication=0, slack=slack)
    if settings.device == "cpu":
        return Overhead(context=450 * MIB, workspace=0, communication=0, slack=slack)
    communication = num_communicators(settings) * COMMUNICATION_BYTES
    return Overhead(context=CONTEXT_BYTES, workspace=2 * 32 * MIB, communication=communication, slack=slack)


def slack_share(settings: Settings) -> float:
    """The allocator's part where no trace was replayed, as a share of live tensors.

    Source: benchmarks/results/allocator_slack.json, 17 replays of whole models. With expandable segments
    2.5 % is enough in all of them, and 5 % in most without a block given back. Without segments the highest
    was 13.1 % where logits are never whole, and 25.7 % where they are: blocks of gigabytes leave holes that
    little fits. Published runs of the same forms agree (docs/memory.md).
    """
    if settings.device == "cpu":
        return 0.02
    if settings.expandable_segments:
        return 0.05
    return 0.26 if settings.loss == "full" else 0.15


def measured_beside(settings: Settings, measured: Measured | None) -> int | None:
    """Memory of a process beside tensors, on a device that was measured; None: not measured."""
    if measured is None:
        return None
    each = measured.communication_bytes or COMMUNICATION_BYTES
    return measured.beside_bytes + each * num_communicators(settings)


def num_communicators(settings: Settings) -> int:
    """NCCL communicators of a process: of all processes, of the processes that share its rows, and
    DeepSpeed's copy of the first."""
    if settings.device == "cpu" or settings.num_processes == 1:
        return 0
    return 1 + (settings.context_parallel > 1) + uses_zero(settings)


def needed(tensor_bytes: int, settings: Settings) -> int:
    """Bytes of the device that a peak of live tensors needs."""
    extra = overhead(settings)
    return round(tensor_bytes * (1 + extra.slack)) + extra.fixed


def usable(budget_bytes: int, settings: Settings) -> int:
    """Bytes of live tensors that fit a budget: `needed` the other way round."""
    extra = overhead(settings)
    return max(0, int((budget_bytes - extra.fixed) / (1 + extra.slack)))


def host_overhead(settings: Settings) -> int:
    """Host memory of a node's training processes beside the tensors kept there on purpose."""
    return settings.num_processes * (3 * GIB if settings.device == "cuda" else 0)
