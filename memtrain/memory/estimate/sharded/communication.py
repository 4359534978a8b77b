"""Bytes that processes send each other in a step, and the time that this takes, by engine.

With n processes a sum that all get brings each 2*(n-1)/n of it, a gathered or scattered one (n-1)/n. Source:
Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 7; Zhao et al. 2023 (FSDP), arXiv:2304.11277,
section 3.2. Links between devices are taken to be as fast as the one to the host: what they are is not known.
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.static import (
    gradient_bytes,
    num_trained,
    static_bytes,
    trained_parts,
    weights_bytes,
)
from memtrain.memory.hardware.devices import CPU_RATES, Rates
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.engine_kinds import is_sharded, shards_weights, uses_zero
from memtrain.memory.plan.settings import Settings

COLLECTIVE_S = {"cpu": 3e-3, "cuda": 5e-5}
"""Time that a small collective takes. Source: cpu: measured, two gloo ranks on two cores, torch 2.13; cuda:
typical of NCCL, not measured."""
MODULES_OF_LAYER = 9
"""Modules of a layer with weights of their own, which DeepSpeed gathers one by one: seven maps, two norms."""


class CommunicationTime(NamedTuple):
    """Seconds of communication."""

    forward: float = 0.0
    """In the forward pass of a micro-batch."""
    backward: float = 0.0
    """In its backward pass."""
    last: float = 0.0
    """In the backward pass of the last micro-batch of a step."""
    after: float = 0.0
    """Once a step, while nothing is computed."""
    is_ahead: bool = True
    """Whether the passes communicate while they compute; DeepSpeed's stage 3 fetches nothing ahead here."""


def num_groups(settings: Settings, shape: ModelShape) -> int:
    """Groups of weights that a pass gathers one after another."""
    return shape.num_layers * (MODULES_OF_LAYER if uses_zero(settings) else 1) + 2


def communication_time(settings: Settings, shape: ModelShape, rates: Rates) -> CommunicationTime:
    """Communication of a run's engine; nothing with one process."""
    count = settings.num_processes
    if count == 1:
        return CommunicationTime()
    part = (count - 1) / count / rates.host_bytes_per_s
    # Whatever the weights are, gradients are summed in float32.
    gradients = 4 * num_trained(settings, shape)
    if settings.engine == "ddp":
        return CommunicationTime(last=2 * part * gradients)
    if not shards_weights(settings):
        reduced, trained = part * gradients, trained_parts(settings, shape)
        gathered = sum(number * size for number, size in trained)
        every = reduced if settings.engine == "zero2" else 0.0
        return CommunicationTime(backward=every, last=reduced - every, after=part * gathered)
    gathered = part * weights_bytes(settings, shape) + _starts(settings, shape)
    summed = part * gradients
    return CommunicationTime(
        gathered, gathered + summed + _starts(settings, shape), is_ahead=not uses_zero(settings)
    )


def _starts(settings: Settings, shape: ModelShape) -> float:
    return num_groups(settings, shape) * COLLECTIVE_S[settings.device]


class HostShardTime(NamedTuple):
    """Seconds for shards that wait in host memory (`cluster.cpu_offload`)."""

    forward: float = 0.0
    """To the device, in the forward pass of a micro-batch."""
    backward: float = 0.0
    """To the device and back, in its backward pass."""
    after: float = 0.0
    """Once a step."""
    step: float = 0.0
    """The optimizer's step, which the host makes."""


def waiting(settings: Settings, shape: ModelShape, rates: Rates) -> HostShardTime:
    """Time of copies to the host and of the step there; nothing where shards stay on the device.

    A rank's host memory moves as much as that of one core. Taste: nothing of it was measured.
    """
    if settings.shard_offload == "none" or not is_sharded(settings) or settings.device == "cpu":
        return HostShardTime()
    count, bus = settings.num_processes, rates.host_bytes_per_s
    trained = sum(number * size for number, size in trained_parts(settings, shape)) / count
    # Gradients, weights and states are read, and all but gradients written.
    step = 2 * (waiting_bytes(settings, shape) - trained) / CPU_RATES.bytes_per_s
    if settings.shard_offload == "optimizer":
        every = trained / bus if settings.engine != "zero1" else 0.0
        return HostShardTime(
            backward=every, after=(trained + (trained if not every else 0.0)) / bus, step=step
        )
    own = weights_bytes(settings, shape) / count / bus
    return HostShardTime(forward=own, backward=own + trained / bus, step=step)


def waiting_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of host memory that the shards of one process take."""
    if settings.device == "cpu" or settings.shard_offload == "none":
        return 0
    here = static_bytes(settings.model_copy(update={"shard_offload": "none"}), shape)
    states = here.optimizer + here.master
    if settings.shard_offload == "optimizer":
        # DeepSpeed's float32 gradients wait beside the states.
        return states + 4 * -(-num_trained(settings, shape) // settings.num_processes)
    return states + gradient_bytes(settings, shape, accumulates=True) + here.weights
