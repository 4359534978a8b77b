"""Predicted time of an optimizer step: good for ordering candidates, not for a schedule.

Time on the device is operations over rate for matrix products, bytes over bandwidth for everything else. What
is offloaded leaves in the forward pass and comes back in the backward pass: in each the longer of computing
and copying counts, with a tenth of the other for imperfect overlap. The host launches operators meanwhile.
Source: the roofline model (Williams et al. 2009, doi:10.1145/1498765.1498785); operators and bytes of a layer
were counted by a dispatch mode around one more Llama layer: torch 2.13, transformers 5.23, bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.activations import layer_boundary, layer_kept
from memtrain.memory.estimate.adapters import adapter_traffic
from memtrain.memory.estimate.attention_time import attention_time
from memtrain.memory.estimate.bitsandbytes_states import blockwise_states
from memtrain.memory.estimate.context_parallel import num_gathered_kv, ulysses_width
from memtrain.memory.estimate.experts import stack_ranks
from memtrain.memory.estimate.kept import kept_whole
from memtrain.memory.estimate.sharded.communication import (
    CommunicationTime,
    HostShardTime,
    communication_time,
    waiting,
)
from memtrain.memory.estimate.static import num_trained, offloaded_states, static_bytes, trains_head
from memtrain.memory.estimate.weights_offload import Pass, away, host_step_s, num_trained_away, pass_time
from memtrain.memory.estimate.workload import DTYPE_BYTES, Workload
from memtrain.memory.hardware.devices import Hardware, Rates
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import NUM_BUFFERS, tile_tokens

FORWARD_OPERATORS, BACKWARD_OPERATORS = 47, 75
"""Operators of one layer that are launched (views left out)."""
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 3.9, 6.7
"""Bytes that one layer reads and writes outside matrix products and attention, over what the layer keeps."""
FUSED_OPERATORS, FUSED_TRAFFIC = 0.64, 0.55
"""Shares of both that fused kernels leave: 78 operators of a layer in place of 122; of the bytes, over what a
layer keeps, 2.8 of 4.1 forward and 3.6 of 9.2 backward. Counted on traces of Qwen3-0.6B
(benchmarks/kernel_counts.py). Compiled layers are taken to fuse as much: what a compiler makes is its own."""
REPLAY_OPERATORS = 12
"""Operators of a micro-batch that is replayed: its tensors are copied to their places, and one graph started.
Of the pool nothing is added to a plan's peak: a capture makes the tensors of the pass it is made of."""
STEP_LAUNCHES = 2.2
"""Host time of an operator in a step over that of a bare one on a GPU, which `memtrain calibrate` measures:
modules, views and the graph come beside. Measured on a core of an x86 server, layers of Llama 32 wide: 11 us
forward and 8 backward for each operator that is counted here, a bare sum 1.8. So 7 us come to the 6 of a
launch. Steps of short rows that Qwen published took 12 to 16 us for each (docs/published.md)."""
MERGED_TRAFFIC = 32
"""Bytes read and written for each number of an attention output that is merged: both in float32 and as they
were, counted in trainers/model/attention/two_part.py."""
OVERLAP_LOSS = 0.1
UNMEASURED_OFFLOADING = 0.5
"""Share of the bus's rate that full offloading is taken to reach until `memtrain calibrate` has measured the
machine: every tensor of a layer is copied alone, from and to tens of GiB of pinned memory. Taste."""
WITH_A_PASS = ("copy", "adapter_off", "adapter_start", "synced")
"""References that are computed in every step: one more forward pass."""


class StepTime(NamedTuple):
    """Seconds of one optimizer step of one process."""

    seconds: float
    products_s: float
    """Matrix products and attention."""
    traffic_s: float
    """Time of operations that only move bytes: norms, activations, the loss's softmax, dequantization."""
    optimizer_s: float
    launch_s: float
    copy_s: float
    """Between host and device."""
    waits_s: float
    """Time for which the device waits for operators that the host has not launched yet."""


def step_time(
    settings: Settings,
    shape: ModelShape,
    batch: HeaviestBatch,
    hardware: Hardware,
    *,
    num_micro_batches: int = 1,
) -> StepTime:
    """Time of a step of `num_micros` micro-batches like `batch` (a typical one, not the heaviest)."""
    load = Workload(settings, shape, batch)
    rates = hardware.rates_of(settings.threads, settings.num_processes)
    half = settings.dtype == "float16" or (settings.dtype == "bfloat16" and hardware.has_bfloat16)
    rate = rates.half_matmul_per_s if half else rates.single_matmul_per_s
    attention = attention_time(load, hardware, rate, _passes(load)[0])
    products = num_micro_batches * ((_layer_operations(load) + _head_operations(load)) / rate + attention)
    traffic = num_micro_batches * (_layer_traffic(load) + _head_traffic(load)) / rates.bytes_per_s
    optimizer = _optimizer_traffic(settings, shape) / rates.bytes_per_s
    in_passes = REPLAY_OPERATORS if settings.step_graphs else _layer_operators(load) + _tile_operators(load)
    launch = operator_s(hardware, rates) * (
        num_micro_batches * in_passes + _optimizer_operators(settings, shape)
    )
    copy = num_micro_batches * _copied(load) / rates.host_bytes_per_s
    if settings.offload == "all" and settings.device == "cuda" and hardware.measured is None:
        copy /= UNMEASURED_OFFLOADING
    gathering = num_micro_batches * gathered_bytes(load) / rates.host_bytes_per_s
    states = _moved_states(settings, shape) / rates.host_bytes_per_s
    # A kernel is not done before its last block is: the shorter the kernels, the more of them is waiting.
    tails = rates.kernel_s * num_micro_batches * _layer_operators(load)
    computing = products + traffic + tails
    forward = computing / sum(_passes(load))
    taught = batch.teacher.relative if batch.teacher is not None else 0.0
    again = forward * ((settings.reference in WITH_A_PASS) + bool(settings.router_aux_loss_coef) + taught)
    sent, waits = communication_time(settings, shape, rates), waiting(settings, shape, rates)
    passes = _passes_time(forward, computing - forward, copy, sent, waits, num_micro_batches)
    if settings.weights_offload:
        passes = num_micro_batches * _fetched_passes(
            load, forward / num_micro_batches, (computing - forward) / num_micro_batches, hardware
        )
        again *= 2
    if settings.slice_tokens:
        # A streamed layer's input is fetched when its turn comes: one waiting beside it is what a row costs.
        passes += (1 - OVERLAP_LOSS) * min(computing - forward, copy)
    device = again + passes + gathering + sent.after + waits.after + waits.step
    stepping = 0.0 if waits.step else _overlapped(optimizer, states)
    if not settings.in_backward:
        stepping += host_step_s(settings, shape, hardware)
    seconds = _overlapped(device + stepping, launch)
    late = max(0.0, launch - device - stepping) if settings.device == "cuda" else 0.0
    return StepTime(seconds, products, traffic, optimizer, launch, 2 * copy + states, late)


def operator_s(hardware: Hardware, rates: Rates) -> float:
    """Host time of an operator among those of a step."""
    return rates.launch_s * (STEP_LAUNCHES if hardware.device == "cuda" else 1.0)


def _passes_time(
    forward: float,
    backward: float,
    copy: float,
    sent: CommunicationTime,
    waits: HostShardTime,
    num_micro_batches: int,
) -> float:
    """Seconds of all passes of a step, with copies and communication.

    What is sent once a step hides behind the backward pass of its last micro-batch.
    """
    there, back = copy + num_micro_batches * waits.forward, copy + num_micro_batches * waits.backward
    sending_there, sending_back = num_micro_batches * sent.forward, num_micro_batches * sent.backward
    if not sent.is_ahead:
        passes = _overlapped(forward, there) + _overlapped(backward, back) + sending_there + sending_back
    else:
        passes = _overlapped(forward, there + sending_there) + _overlapped(backward, back + sending_back)
    of_last = backward / num_micro_batches
    return passes + _overlapped(of_last, sent.last) - of_last


def _fetched_passes(load: Workload, forward: float, backward: float, hardware: Hardware) -> float:
    """Seconds of a micro-batch whose layers' weights come from the host: both passes, simulated.

    What else is offloaded shares the bus. In the backward pass the last layers are in the buffers still, and
    gradients leave; a step in the backward pass is a layer's share of the host's.
    """
    settings, shape, count = load.settings, load.shape, load.shape.num_layers
    rate = hardware.rates_of(settings.threads, settings.num_processes).host_bytes_per_s
    found = away(settings, shape)
    fetch, moved = found.layers / count / rate, _copied(load) / count / rate
    send = fetch if settings.adapter is None else 4 * num_trained_away(settings, shape) / count / rate
    step = host_step_s(settings, shape, hardware) / count if settings.in_backward else 0.0
    there = pass_time(count, Pass(forward / count, fetch, moved))
    back = pass_time(count, Pass(backward / count, fetch + moved, send, step), num_there=NUM_BUFFERS)
    ends = 2 * (found.embedding + found.head) / rate
    return there + back + ends


def _overlapped(one: float, other: float) -> float:
    """Seconds of two things that happen at the same time, nearly."""
    return max(one, other) + OVERLAP_LOSS * min(one, other)


def num_checkpointed(settings: Settings, shape: ModelShape) -> int:
    """Layers whose forward pass is computed twice."""
    if settings.slice_tokens:
        return shape.num_layers
    return -(-shape.num_layers // settings.checkpoint_every) if settings.checkpoint_every else 0


def _passes(load: Workload) -> tuple[float, float]:
    """(forward passes of all layers, products of the backward pass over those of the forward pass)."""
    again = num_checkpointed(load.settings, load.shape) / load.shape.num_layers
    return 1 + again, 2.0 if load.trains_all else 1.0


def _layer_operations(load: Workload) -> float:
    """Multiplications and additions of all layers but for attention: 2 a weight and token."""
    shape, settings = load.shape, load.settings
    linear = 2.0 * load.N * sum(part.num_inputs * part.num_outputs for part in shape.linears)
    if shape.experts is not None:
        experts = 3 * shape.width * shape.experts.mlp_width * shape.experts.num_per_token
        # Counted layers name what stands beside their experts: attention, shared experts.
        maps = shape.linears[:4] if shape.counts is None else shape.linears
        attention_maps = sum(p.num_inputs * p.num_outputs for p in maps)
        linear = 2.0 * load.N * (attention_maps + experts)
    if settings.adapter is not None:
        linear += 2.0 * load.N * shape.num_adapter_per_layer(settings.adapter) * 2
        linear += 4.0 * load.N * _expert_adapter(load)
    if num_slices(load) > 1:
        # The backward pass makes queries, keys and values of all slices once more before it begins.
        linear_again = 2.0 * load.N * shape.width * (shape.query_width + 2 * shape.kv_width)
    else:
        linear_again = 0.0
    return shape.num_layers * (linear * sum(_passes(load)) + linear_again)


def _expert_adapter(load: Workload) -> int:
    """Parameters of adapters that a token meets among its experts."""
    shape, ranks = load.shape, stack_ranks(load)
    if shape.experts is None:
        return 0
    widths = {stack.name: stack.num_rows + stack.num_columns for stack, _ in shape.stacks}
    return shape.experts.num_per_token * sum(rank * widths[name] for name, rank in ranks.items())


def num_slices(load: Workload) -> int:
    """In how many slices a layer goes over a micro-batch."""
    return -(-load.N // load.settings.slice_tokens) if load.settings.slice_tokens else 1


def _head_operations(load: Workload) -> float:
    """2*S*V*W each for the logits, for d_hidden, for d_weight where the head is trained, and for the logits
    again where the loss forms its tiles twice."""
    products = 2.0 + trains_head(load.settings)
    if load.settings.loss == "chunked" and _forms_tiles_twice(load):
        products += 1
    return products * 2.0 * load.S * load.shape.vocab_size * load.shape.width


def _forms_tiles_twice(load: Workload) -> bool:
    wide = 4 * load.shape.vocab_size * load.shape.width
    return trains_head(load.settings) and load.is_half and wide > load.settings.loss_tile_bytes


def _layer_traffic(load: Workload) -> float:
    forward, _ = _passes(load)
    like = load
    if load.settings.compiled:
        like = Workload(load.settings.model_copy(update={"kernels": "fused"}), load.shape, load.batch)
    moved = layer_kept(like) * (FORWARD_TRAFFIC * forward + BACKWARD_TRAFFIC)
    if num_slices(load) > 1:
        # Outputs of slices are merged with those over earlier keys, in float32, each time they are made.
        moved += MERGED_TRAFFIC * load.N * load.shape.query_width * (forward + 1)
    if load.settings.liger:
        moved *= 0.6
    elif like.is_fused:
        moved *= FUSED_TRAFFIC
    moved += adapter_traffic(load, forward)
    if load.settings.quantize != "none":
        stored = 0.516 if load.settings.quantize == "4bit" else 1.0
        weights = (load.shape.num_linear_weights + load.shape.num_expert_weights) / load.shape.num_layers
        # Unpacked for each product: of every slice where a layer goes over the row in slices.
        moved += weights * (stored + 2 * load.a) * (forward + 1) * num_slices(load)
    return load.shape.num_layers * moved


def _head_traffic(load: Workload) -> float:
    """Passes over S x V float32 numbers, counted in trainers/losses; the tiles' stay partly in cache.

    Triton's kernels read a tile for its scores, and read it and write its gradient, rounded where the
    products are in half precision.
    """
    if load.settings.loss == "full":
        passes = 12.0
    elif load.fuses_tiles:
        passes = 2.5 if load.is_half else 3.0
    else:
        passes = 8 + 4 * _forms_tiles_twice(load)
    return passes * 4.0 * load.S * load.shape.vocab_size


def _optimizer_traffic(settings: Settings, shape: ModelShape) -> float:
    """Gradients read, weights and states read and written."""
    static = static_bytes(settings, shape)
    trained = DTYPE_BYTES[settings.dtype] * num_trained(settings, shape)
    passes = 3.0 if settings.optimizer == "muon" else 1.0
    return passes * (2 * static.gradients + 2 * trained + 2 * (static.optimizer + static.master))


def _layer_operators(load: Workload) -> float:
    forward, _ = _passes(load)
    adapters = 0
    if load.settings.adapter is not None:
        adapters = 6 * len(load.shape.adapted(load.settings.adapter))
    is_fused = load.is_fused or load.settings.compiled
    fused = 0.5 if load.settings.liger else FUSED_OPERATORS if is_fused else 1.0
    per_layer = fused * (FORWARD_OPERATORS * forward + BACKWARD_OPERATORS) + adapters * (forward + 2)
    return load.shape.num_layers * per_layer * num_slices(load)


def _tile_operators(load: Workload) -> float:
    tile_rows = tile_tokens(load.settings.loss_tile_bytes, load.shape.vocab_size, 1)
    tiles = -(-load.S // tile_rows) if load.settings.loss == "chunked" else 1
    return 40.0 * tiles


def _optimizer_operators(settings: Settings, shape: ModelShape) -> float:
    tensors = shape.num_layers * (9 if settings.adapter is None else 14)
    # Of weights that are put together and taken apart, and moments that are expanded and compressed.
    more = 6 * (settings.copies != "float32") + 30 * settings.compressed_moments
    plain = 12 if settings.master_weights or OPTIMIZERS[settings.optimizer].needs_matrices else 0.2
    return tensors * (plain + more)


def _copied(load: Workload) -> float:
    """Bytes one direction moves for offloaded activations."""
    settings, shape = load.settings, load.shape
    if settings.offload == "boundaries":
        away = max(0, num_checkpointed(settings, shape) - settings.offload_keep)
        return float(away * layer_boundary(load))
    if settings.offload == "all":
        return float(kept_whole(load))
    return 0.0


def gathered_bytes(load: Workload) -> float:
    """Bytes that reach a process in a micro-batch from the processes that share its rows, at a bus's speed.

    Keys and values once in every forward pass and once in the backward pass, and their float32 gradients
    back. Links between devices are faster than the bus: this is the slow end.
    """
    forward, _ = _passes(load)
    if ulysses_width(load):
        # There and back, in each forward pass and in the backward pass: all but a process's own heads.
        own = 1 - 1 / load.settings.context_parallel
        sent = own * load.a * load.N * (ulysses_width(load) + load.shape.query_width)
        return load.shape.num_layers * sent * (forward + 1)
    of_layer = num_gathered_kv(load) * load.shape.kv_width * (2 * load.a * (forward + 1) + 8)
    return load.shape.num_layers * of_layer


def _moved_states(settings: Settings, shape: ModelShape) -> float:
    """Bytes that cross the bus in a step, there and back, for optimizer states that wait on the host.

    Paged ones too: the driver moves a page to the device when its states are stepped, and another one out.
    """
    paged = 0
    if settings.device == "cuda" and OPTIMIZERS[settings.optimizer].is_paged:
        paged = blockwise_states(settings, shape).host
    return 2.0 * (offloaded_states(settings, shape) + paged)
