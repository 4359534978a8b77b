"""Host memory of a plan: tensors that wait there, and the refusal of a plan that would exhaust it."""

from __future__ import annotations

from memtrain.errors import OR, DoesNotFit, Fault
from memtrain.memory.estimate.activations import layer_boundary
from memtrain.memory.estimate.bitsandbytes_states import blockwise_states
from memtrain.memory.estimate.checkpoint_copies import copied_beside
from memtrain.memory.estimate.host_phases import (
    LAID_OUT,
    NUM_PIECES,
    PIECE_BYTES,
    WRITTEN,
    disk_bytes,
)
from memtrain.memory.estimate.kept import kept_whole
from memtrain.memory.estimate.sharded.communication import waiting_bytes
from memtrain.memory.estimate.static import (
    copy_size,
    host_overhead,
    needed,
    num_half,
    offloaded_states,
    optimizer_bytes,
    static_bytes,
)
from memtrain.memory.estimate.step_time import num_checkpointed
from memtrain.memory.estimate.weights_offload import away, num_trained_away, trains_away
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.plan import COPY, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import block_bytes
from memtrain.memory.plan.units import gib

ROW_BYTES = 64
"""Bytes of the dataset index for a row: pointers, lengths, spans and the order of an epoch, all int64; the
tokens themselves are read from a mapped file."""


STEPPED_THERE = "states of the host's weights"
"""Owner of moments and float32 copies of weights that live, and are stepped, on the host."""


def host_bytes(
    settings: Settings, shape: ModelShape, heaviest: HeaviestBatch, num_rows: int, prediction: Prediction
) -> dict[str, int]:
    """Bytes by owner, of all processes together. On a CPU the device's memory is the host's.

    weights: those of layers that live there (`memory.weights_offload`), with their gradients and states.
    offloaded activations: the inputs of checkpointed layers, or all that the layers keep. optimizer states:
    offloaded moments and float32 copies, or paged moments. shards: those that wait on the host
    (`cluster.cpu_offload`). checkpoint copy: what a save in the background writes from. processes:
    interpreter, libraries and pinned buffers.
    """
    owners = {
        "offloaded activations": _activations(settings, shape, heaviest),
        STEPPED_THERE if trains_away(settings) else "optimizer states": _states(settings, shape),
        **_weights(settings, shape),
        "shards": waiting_bytes(settings, shape),
        "dataset index": ROW_BYTES * num_rows,
    }
    copies = copied_beside(settings, shape)
    if settings.device == "cpu":
        owners = {"the run itself": needed(prediction.peak.num_bytes, settings)} | owners
    of_all = {name: size * settings.num_processes for name, size in owners.items() if size}
    of_all |= {COPY: copies} if copies else {}
    return of_all | ({"processes": host_overhead(settings)} if settings.device == "cuda" else {})


def host_shortage(owners: dict[str, int], hardware: Hardware) -> DoesNotFit | None:
    """The refusal when the owners together exceed the node's memory; None when they fit."""
    wanted = sum(owners.values())
    if wanted <= hardware.host_bytes * hardware.num_nodes:
        return None
    largest = sorted(owners.items(), key=lambda item: -item[1])[:3]
    ways = [FIXES[name] for name, size in largest if name in FIXES and _may_be_less(name, size, hardware)]
    return DoesNotFit(
        [
            Fault(
                f"the plan needs {gib(wanted)} of host memory, but only {gib(hardware.host_bytes)} are there "
                f"({', '.join(f'{name} {gib(size)}' for name, size in largest)})",
                "host memory of the machine (`memtrain plan --host-memory SIZE` plans for another)",
                OR.join(ways) or "run on a machine with more memory",
            )
        ]
    )


FIXES = {
    "offloaded activations": "set memory.activation_offloading: off, or memory.offload_disk",
    "optimizer states": "set memory.optimizer_offload: off, or optim.kind: adafactor",
    COPY: "set save.async_save: false",
    WRITTEN: "set save.layout: sharded",
    LAID_OUT: "lower cluster.processes",
    STEPPED_THERE: "set optim.copies: split",
    "weights": "set memory.weights_offload: off, or model.quantize: 4bit with an adapter",
    "gradients": "set optim.in_backward: on, or one micro-batch a step",
    "shards": "set cluster.cpu_offload: none, or take more nodes",
    "the run itself": "lower cluster.processes, or train.micro_batch_size",
    "processes": "lower cluster.processes",
}
"""Remedies for each owner."""


def _may_be_less(name: str, size: int, hardware: Hardware) -> bool:
    """Whether the remedy is left to take: one process is the fewest, and a few pieces the least of a save."""
    count = hardware.num_devices * hardware.num_nodes
    if name == WRITTEN:
        return size > count * NUM_PIECES * PIECE_BYTES
    return count > 1 or FIXES[name] != FIXES["processes"]


def on_disk(settings: Settings, shape: ModelShape, heaviest: HeaviestBatch) -> int:
    """Bytes of offloaded activations in files, of all processes together."""
    return settings.num_processes * disk_bytes(settings, _waiting(settings, shape, heaviest))


def _activations(settings: Settings, shape: ModelShape, heaviest: HeaviestBatch) -> int:
    waiting = _waiting(settings, shape, heaviest)
    return waiting if settings.offload_host_bytes is None else min(waiting, settings.offload_host_bytes)


def _waiting(settings: Settings, shape: ModelShape, heaviest: HeaviestBatch) -> int:
    """Bytes of activations that leave the device, of one process."""
    load = Workload(settings, shape, heaviest)
    waiting = 0
    if settings.offload == "all":
        waiting = kept_whole(load)
    if settings.offload == "boundaries":
        away = max(0, num_checkpointed(settings, shape) - settings.offload_keep)
        waiting = away * block_bytes(layer_boundary(load))
    return waiting


def _weights(settings: Settings, shape: ModelShape) -> dict[str, int]:
    """Weights that live on the host, of a copy too; their gradients with two layers on their way."""
    if not settings.weights_offload or settings.device == "cpu":
        return {}
    own = away(settings, shape)
    bare = settings.model_copy(update={"adapter": None})
    copies = away(bare, shape).total if settings.reference in ("copy", "synced") else 0
    found = {"weights": own.total + copies}
    count = num_trained_away(settings, shape)
    if not count:
        return found
    # Summed in float32 where a step has several micro-batches, which is not known here.
    is_one = settings.batch_size is not None and settings.micro_batch_size >= settings.batch_size
    size = own.total // count if is_one and settings.adapter is None else 4
    held = own.trained if settings.in_backward else size * count
    return found | {"gradients": held + 2 * block_bytes(own.trained) + block_bytes(own.embedding)}


def _states(settings: Settings, shape: ModelShape) -> int:
    if OPTIMIZERS[settings.optimizer].is_bitsandbytes:
        return blockwise_states(settings, shape).host
    if trains_away(settings):
        stays = static_bytes(settings, shape)
        copies = copy_size(settings) * num_half(settings, shape)
        return optimizer_bytes(settings, shape) + copies - stays.optimizer - stays.master
    return offloaded_states(settings, shape)
