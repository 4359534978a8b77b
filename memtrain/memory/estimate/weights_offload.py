"""Weights that live in host memory: bytes on the device and on the host, and the time of a pass with them."""

# f: seconds to fetch a layer, c: to compute it, g: to send its gradients, s: to step it on the host.

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.quantized import expert_bytes
from memtrain.memory.estimate.workload import DTYPE_BYTES
from memtrain.memory.hardware.devices import CPU_RATES, Hardware
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import NUM_BUFFERS, moves_trained
from memtrain.recipes.sections.model import Adapter

PACKED_BYTES = 0.5
"""Bytes of a linear map's 4-bit weight that travel; its scales are few, and stay on the device. Those of
experts travel with them."""

HOST_CORES = 5
"""Cores that use a host's whole bandwidth: two channels of DDR5, 40 GB/s, at the rate measured of a core
(`CPU_RATES`). Servers have more channels: this is the slow end."""


class Away(NamedTuple):
    """Bytes of weights that live on the host."""

    layers: int
    """Of all layers."""
    layer: int
    """Of the largest of them: one buffer."""
    trained: int
    """Of the layer with most of them, those that are trained there: the size of its gradients."""
    embedding: int
    """Fetched for the lookup; 0 where it stays on the device."""
    head: int
    """Fetched for the loss; 0 where it stays, or is the embedding's."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.layers + self.embedding + self.head


NOTHING = Away(0, 0, 0, 0, 0)


def away(settings: Settings, shape: ModelShape) -> Away:
    """Weights that live on the host: of a model with an adapter the layers', with the adapter's or without;
    else the embedding's and the head's too.

    Source: trainers/model/streamed/layer_weights.py; held against traces by
    tests/trainers/tools/trace/test_trace.py.
    """
    if not settings.weights_offload:
        return NOTHING
    size = DTYPE_BYTES[settings.dtype]
    largest = shape.num_per_layer(expert=shape.num_expert_layers > 0)
    if settings.adapter is None:
        ends = size * shape.num_embedding, size * shape.num_head
        return Away(size * shape.num_layer_parameters, size * largest, size * largest, *ends)
    frozen = size * shape.num_layer_parameters
    if settings.quantize != "none":
        linear, experts = shape.num_linear_weights, shape.num_expert_weights
        frozen = size * (shape.num_layer_parameters - linear - experts)
        frozen += round(PACKED_BYTES * linear) + expert_bytes(shape, settings.quantize)
    of_largest = round(frozen * largest / shape.num_layer_parameters)
    if not settings.adapters_offload:
        return Away(frozen, of_largest, 0, 0, 0)
    trained = 4 * adapter_of_layer(settings.adapter, shape)
    return Away(frozen + 4 * num_trained_away(settings, shape), of_largest + trained, trained, 0, 0)


def adapter_of_layer(adapter: Adapter, shape: ModelShape) -> int:
    """Trained parameters that an adapter adds to the layer where it adds most."""
    is_mixed = shape.num_expert_layers > 0
    kinds = {True} if shape.num_expert_layers == shape.num_layers else {is_mixed, False}
    return max(shape.num_adapter_per_layer(adapter, expert=kind) for kind in kinds)


def trains_away(settings: Settings) -> bool:
    """Whether the trained weights live on the host, on a machine where that is another memory."""
    return moves_trained(settings) and settings.device == "cuda"


def fetched_head(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the head's weight while the loss is computed, where it lives on the host."""
    found = away(settings, shape)
    return (found.head or found.embedding) if settings.adapter is None else 0


def device_bytes(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the buffers of one model."""
    return min(NUM_BUFFERS, shape.num_layers) * away(settings, shape).layer


def staged_here(settings: Settings, shape: ModelShape) -> int:
    """Blocks in which gradients leave, where the host's memory is the device's: two layers', and an end's."""
    if settings.device != "cpu" or not moves_trained(settings):
        return 0
    found = away(settings, shape)
    return 2 * found.trained + max(found.embedding, found.head)


def num_trained_away(settings: Settings, shape: ModelShape) -> int:
    """Trained parameters that live, and are stepped, on the host."""
    if not moves_trained(settings):
        return 0
    if settings.adapter is None:
        return shape.num_layer_parameters + shape.num_embedding + shape.num_head
    return shape.num_adapter(settings.adapter) - shape.num_outer_adapter(settings.adapter)


class OnTheWay(NamedTuple):
    """Bytes of gradients on the device that leave it layer by layer, in the order of a backward pass."""

    stays: int
    """Of weights that live on the device: the final norm's."""
    in_last: int
    """In the last layer's turn, when its activations are highest: the first of its own."""
    in_first: int
    """In another's: these, and the gradients of the layer before on their way to the host."""
    after_mlp: int
    """In another's when its MLP is through: nearly all of its own, and those of the layer before."""
    in_embedding: int
    """At the end of a layer's turn, all of its own and those of the layer before; or the embedding's."""


def gradients_on_the_way(settings: Settings, shape: ModelShape, size: int) -> OnTheWay:
    """The gradients of weights that are trained on the host; `size`: bytes of a sum of a model's own weights
    that stays.

    A layer in slices has its own sums elsewhere (`streamed_backward`).
    """
    at_home = away(settings, shape)
    if settings.adapter is None:
        stays = size * (shape.num_parameters - num_trained_away(settings, shape))
    else:
        stays = size * shape.num_saved_modules(settings.adapter) + 4 * shape.num_outer_adapter(
            settings.adapter
        )
    # Of an adapter they are made while the layer's activations go.
    own, whole = 0, 0
    if not settings.slice_tokens and settings.adapter is None:
        whole = at_home.trained
        own = DTYPE_BYTES[settings.dtype] * _last_map(shape)
    return OnTheWay(
        stays=stays,
        in_last=stays + own,
        in_first=stays + own + at_home.trained,
        after_mlp=stays + whole + at_home.trained,
        in_embedding=stays + at_home.trained + max(whole, at_home.embedding),
    )


def _last_map(shape: ModelShape) -> int:
    """Weights of the MLP's last map, the first of a layer whose gradient is made; gradients of stacks of
    experts are counted at their own moments (`experts_backward`)."""
    return 0 if shape.num_expert_layers == shape.num_layers else shape.largest_linear


class Pass(NamedTuple):
    """Seconds of each part of a pass over one layer."""

    compute: float
    fetch: float
    send: float = 0.0
    step: float = 0.0


def pass_time(num_layers: int, one: Pass, num_there: int = 0) -> float:
    """Seconds of a pass over all layers, copies and the host's steps included; simulated, layer by layer.

    A buffer is fetched when the layer that was in it is through; gradients leave on the bus's other direction
    and are stepped in their order. `num_there`: first layers of the pass that are in the buffers already.
    """
    computed = [0.0] * (num_layers + NUM_BUFFERS)
    fetched = sent = stepped = 0.0
    for number in range(num_layers):
        if number >= num_there:
            freed = computed[number - NUM_BUFFERS] if number >= NUM_BUFFERS else 0.0
            fetched = max(fetched, freed) + one.fetch
        before = computed[number - 1] if number else 0.0
        computed[number] = max(before, fetched if number >= num_there else 0.0) + one.compute
        sent = max(sent, computed[number]) + one.send
        stepped = max(stepped, sent) + one.step
    return max(computed[num_layers - 1], stepped)


def host_step_s(settings: Settings, shape: ModelShape, hardware: Hardware) -> float:
    """Seconds of the host's optimizer step: gradients read, weights and states read and written."""
    count = num_trained_away(settings, shape)
    if not count:
        return 0.0
    size, copies = DTYPE_BYTES[settings.dtype] if settings.adapter is None else 4, 0
    if settings.master_weights and size < 4:
        copies = {"float32": 4, "split": 2, "stochastic": 0}[settings.copies]
    moments = 2 * (4 if settings.master_weights else size)
    if OPTIMIZERS[settings.optimizer].moments != "two":
        moments = 0
    moved = count * (size + 2 * (size + copies + moments))
    return moved / (CPU_RATES.bytes_per_s * min(HOST_CORES, hardware.num_cores))
