"""Bytes of a rank under DeepSpeed's ZeRO: the engine's own, beside weights, copies and states.

Source: measured with deepspeed 0.19.8 on two gloo ranks (torch 2.13, CPU, float32; 4 layers of width 256,
tied and untied, with and without checkpointing): counted live tensors told which buffers live together. Half
precision, four ranks, references and teachers are held against traces by
tests/trainers/tools/trace/test_trace_zero.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from memtrain.memory.estimate.activations import (
    after_mlp_backward,
    attention_backward,
    layer_backward,
    layer_boundary,
    layer_kept,
    mlp_output_backward,
    norm_backward,
)
from memtrain.memory.estimate.head import head_bytes
from memtrain.memory.estimate.kept import Kept
from memtrain.memory.estimate.sharded.sharding import GATHERED, groups
from memtrain.memory.estimate.sharded.zero_buckets import END, Arrival, arrivals, bucket_of
from memtrain.memory.estimate.sharded.zero_gradients import (
    ZeroGradients,
    buckets_of,
    filled_buckets,
    largest_matrix,
    layer_with_sums,
    part_bytes,
    sums_as_they_come,
    sums_at_once,
    zero_gradients,
)
from memtrain.memory.estimate.static import (
    num_trained,
    static_bytes,
    trained_parts,
    trains_head,
    weights_bytes,
)
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import MLP_NAMES, ModelShape
from memtrain.memory.plan.heaviest_batch import HeadOutput
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.zero_config import stage_of

Moment = dict[str, int]
"""Bytes by owner at one moment."""


LIVE_NUMBERS = 1_000_000_000
"""Gathered weights that stay until they are used again, by DeepSpeed's defaults.

Source: deepspeed 0.19.8, zero/config.py, `stage3_max_live_parameters` and `stage3_max_reuse_distance`."""

TO_SAVE = "states to save"
"""Owner of weights that the main rank gathers in host memory for writing."""


def between_steps(settings: Settings, shape: ModelShape) -> Moment:
    """Bytes that stage 3 holds from its beginning: this rank's part of all gradients, and the reduce
    buffer."""
    if stage_of(settings) < 3:
        return {}
    return {"gradients": part_bytes(settings, shape), "reduce buffers": _bucket(settings, shape)}


def loading_moments(load: Workload, resting: Mapping[str, int], whole: int) -> list[Moment]:
    """The moments at which DeepSpeed's engine is made; `whole`: all weights of the policy.

    Stages 1 and 2 lay all trained weights end to end beside themselves; then they make a rank's part of all
    gradients in float32 and let it go, or, where a wrapper of their own keeps half-precision weights (stage
    1), the states. Stage 3 makes what it keeps, and a buffer of the largest weight; before, it cuts one
    weight after another, beside references and teachers that are whole (a teacher's largest is its head).

    Source: deepspeed 0.19.8, stage_1_and_2.py and bf16_optimizer.py (`initialize_optimizer_states`),
    stage3.py; seen in traces.
    """
    settings, shape, count = load.settings, load.shape, load.settings.num_processes
    part = part_bytes(settings, shape)
    if stage_of(settings) < 3:
        is_wrapped = stage_of(settings) == 1 and settings.dtype != "float32"
        states = static_bytes(settings, shape).optimizer if is_wrapped else 0
        laid_out = sum(number * size for number, size in trained_parts(settings, shape))
        return [
            dict(resting) | {"master copies": 0, "gathered weights": laid_out},
            dict(resting) | {"gradients": 0 if is_wrapped else part, "optimizer": states},
        ]
    largest, teacher = (
        load.a * max(shape.num_embedding, shape.num_head, largest_matrix(shape)),
        load.batch.teacher,
    )
    cut = (largest if teacher is None else teacher.head // GATHERED) // count
    beside = {name: count * resting.get(name, 0) for name in ("reference", "teacher")}
    cutting = dict(resting) | beside | {"weights": whole, "master copies": 0, "gathered weights": cut}
    trained = largest if settings.adapter is None else 0
    return [cutting, dict(resting) | between_steps(settings, shape) | {"gathered weights": trained}]


def gathered_module(load: Workload) -> int:
    """Bytes of the largest module that stage 3 gathers, module by module, not layer by layer."""
    if stage_of(load.settings) < 3:
        return 0
    shape = load.shape
    return _live(load, load.a * max(shape.num_embedding, shape.num_head, largest_matrix(shape)))


def whole_adapters(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the adapters of all layers, which stage 3 does not let go of in a pass once it has them."""
    if stage_of(settings) < 3 or settings.adapter is None:
        return 0
    return 4 * shape.num_adapter(settings.adapter)


def passing_weights(load: Workload) -> tuple[Moment, Moment]:
    """Weights that stage 3 has gathered in a layer and in the head, in a pass without gradients."""
    if stage_of(load.settings) < 3:
        return {}, {}
    beside = whole_adapters(load.settings, load.shape)
    layer, head = _live(load, load.a * largest_matrix(load.shape)), gathered_module(load)
    if load.settings.reference == "copy":
        layer, head = map(max, (layer, head), reference_weights(load))
    return {"gathered weights": layer + beside}, {"gathered weights": head + beside}


def reference_weights(load: Workload) -> tuple[int, int]:
    """Bytes of whole weights in a layer's turn and in the head's of a reference's pass under stage 3: a copy
    lies in FSDP2's shards, and the policy itself is gathered module by module."""
    if stage_of(load.settings) < 3:
        return 0, 0
    if load.settings.reference in ("adapter_off", "adapter_start"):
        return load.a * largest_matrix(load.shape), gathered_module(load)
    cut = groups(load.settings.model_copy(update={"adapter": None}), load.shape)
    outer = max(cut.head.weights, cut.embedding.weights)
    return cut.root.weights + GATHERED * cut.layer.weights, cut.root.weights + GATHERED * outer


def _live(load: Workload, needed: int) -> int:
    """Bytes of weights that stage 3 has gathered where so many are needed: in another tool's run as many
    stay as DeepSpeed's defaults let, which every known file of a tool has (`LIVE_NUMBERS`)."""
    if load.batch.foreign is None:
        return needed
    return max(needed, load.a * min(load.shape.num_parameters, LIVE_NUMBERS))


class Asked(NamedTuple):
    """Bytes of the passes that a step asks of other models."""

    reference: int
    """Pass of a reference between the policy's two, with the weights that it gathers."""
    before: Moment
    """A teacher's pass before the student's."""
    taught: Moment
    """A teacher's side, from before the student's pass until the loss is made."""


def zero_moments(
    load: Workload,
    resting: Mapping[str, int],
    last: Mapping[str, int],
    kept: Kept,
    asked: Asked,
    *,
    holds: bool,
) -> list[Moment]:
    """The moments of an optimizer step at which memory can be highest, on the rank that needs the most.

    `resting`: what rests from the step's start on, `last`: at its end. `kept`: see estimate. `holds`: the
    step has several micro-batches, so gradients are there from the start of each.
    """
    settings, shape = load.settings, load.shape
    head = head_bytes(load, trains_head=trains_head(settings))
    is_third = stage_of(settings) == 3
    made = zero_gradients(load, holds=holds)
    outer = load.a * max(shape.num_embedding, shape.num_head)
    rest: Moment = dict(resting) | {"reduce buffers": _bucket(settings, shape)}
    teacher = load.batch.teacher
    of_teacher = {"teacher's pass": 0 if teacher is None else teacher.head}
    # In stages 1 and 2 the bucket is made as the first gradient comes, and let go after the last micro-batch.
    ahead = rest if is_third or holds else dict(resting)
    forward = {"gradients": made.before, "activations": kept.at_loss + head.norm} | of_teacher
    seen = {"gathered weights": _live(load, outer) + whole_adapters(settings, shape) if is_third else 0}
    return [
        ahead | {"gradients": made.before} | asked.before,
        ahead | {"gradients": made.before} | asked.taught,
        ahead | forward | {"logits": head.kept, "reference's pass": asked.reference},
        ahead | forward | seen | {"logits": head.forward},
        rest | forward | seen | {"logits": head.backward},
        *(rest | moment for moment in _backward_moments(load, kept, made, forward, outer, holds=holds)),
        *([rest | _at_embedding(load)] if is_third and settings.adapter is None else []),
        *_update(load, resting, last),
    ]


def _backward_moments(
    load: Workload, kept: Kept, made: ZeroGradients, loss: Moment, outer: int, *, holds: bool
) -> Iterator[Moment]:
    """The moments of the layers' backward pass, and of the norm before them. `loss`: what the loss had."""
    settings = load.settings
    if sums_as_they_come(load, holds=holds):
        yield from _summing_moments(load, kept, loss, holds=holds)
        return
    norm = {"gradients": made.after_loss, "logits": norm_backward(load), "teacher's pass": 0}
    if stage_of(settings) == 3:
        norm["gathered weights"] = whole_adapters(settings, load.shape)
    yield loss | norm
    backward, summing = _gathered_again(load, outer), {"recomputation": layer_with_sums(load)}
    in_last = summing if sums_at_once(load) else {"recomputation": layer_backward(load)}
    of_last = {"activations": kept.everything - kept.of_last, "gradients": made.in_last}
    yield backward | in_last | of_last
    yield backward | summing | {"activations": _below(load, kept), "gradients": made.later}


def _summing_moments(load: Workload, kept: Kept, loss: Moment, *, holds: bool) -> Iterator[Moment]:
    """Moments of stage 2 when gradients come, and when a bucket is summed that has no room for one.

    The head's gradient waits for that of an embedding that it is; to that it is added, in half precision
    into a third.
    """
    shape, embedding = load.shape, load.a * load.shape.num_embedding
    for one in arrivals(buckets_of(load), holds=holds):
        beside = embedding * shape.tied
        if one.layer == END:
            made = 2 + load.is_half if shape.tied else 1
            beside = 0 if one.copies else embedding * made
        moment = {"gradients": one.gradients + beside, "summed bucket": one.copies}
        yield _at_arrival(load, kept, loss, one) | moment


def _at_arrival(load: Workload, kept: Kept, loss: Moment, one: Arrival) -> Moment:
    """Activations when a gradient comes, and what its layer, or the final norm, holds beside them."""
    num_layers = load.shape.num_layers
    if one.layer == END:
        return {"activations": layer_boundary(load)}
    if one.layer == num_layers:
        # At the end of the norm its gradient has the place of what it kept.
        return loss | {"logits": 0 if one.copies else norm_backward(load), "teacher's pass": 0}
    below = kept.everything - kept.of_last - kept.beside_first
    held = kept.beside_first + below * one.layer // max(1, num_layers - 1)
    return {"activations": held, "recomputation": _layer_at(load, one)}


def _layer_at(load: Workload, one: Arrival) -> int:
    """Bytes of a layer when the gradient of one of its matrices comes: the last, another of the MLP, or of
    the attention."""
    if load.record is not None:
        return layer_backward(load)
    if one.place == 0:
        return mlp_output_backward(load) if one.copies else layer_backward(load)
    num_of_mlp = sum(part.name in MLP_NAMES for part in load.shape.linears)
    return after_mlp_backward(load) if one.place < num_of_mlp else attention_backward(load)


def _update(load: Workload, resting: Mapping[str, int], last: Mapping[str, int]) -> list[Moment]:
    """While the update is made gradients lie once as they came and once end to end; where stage 2 sums those
    of half-precision weights they lie so already. Stages 1 and 2 take their norm in float64 before, in the
    first step before there is a state.

    Source: deepspeed 0.19.8, stage_1_and_2.py, get_grad_norm_direct and `_get_preflattened_grad_partition`.
    """
    settings, shape = load.settings, load.shape
    part, is_third = part_bytes(settings, shape), stage_of(settings) == 3
    is_flat = stage_of(settings) == 2 and load.is_half and load.trains_all
    made = part * (1 if is_flat else 2)
    wide = min(8 * shape.largest_tensor, 2 * part) if is_flat else part
    norm = [] if is_third else [dict(resting) | {"gradients": made + wide}]
    held = _bucket(settings, shape) if is_third else 0
    return [*norm, dict(last) | {"reduce buffers": held, "gradients": made}]


def _below(load: Workload, kept: Kept) -> int:
    """Bytes kept beside the layer below the last: by all layers but these two, where there are more."""
    every, num_layers = load.settings.checkpoint_every, load.shape.num_layers
    if num_layers < 3:
        return kept.beside_first
    is_plain = not load.settings.slice_tokens and (not every or (num_layers - 2) % every != 0)
    own = layer_kept(load) if is_plain else 0
    return max(kept.beside_first, kept.everything - (kept.of_last or layer_boundary(load)) - own)


def _gathered_again(load: Workload, outer: int) -> Moment:
    """Weights that stage 3 has gathered in a layer's backward pass: a layer's where it is computed again, and
    a frozen head that log-probs are computed from again."""
    settings, shape = load.settings, load.shape
    if stage_of(settings) < 3:
        return {}
    # Of a frozen map the weights are let go at once, unless DoRA's norms read them before.
    keeps = settings.adapter is None or settings.adapter.kind == "dora"
    is_layer = settings.checkpoint_every > 0 and keeps
    needed = _layer(load) if is_layer else load.a * largest_matrix(shape)
    is_head = not trains_head(settings) and load.batch.asks is HeadOutput.LOGPS
    return {"gathered weights": _live(load, needed) + outer * is_head + whole_adapters(settings, shape)}


def _at_embedding(load: Workload) -> Moment:
    """Gradients of an embedding in stage 3, and a copy in which they are sent, while those of the layers that
    wait in the bucket are laid end to end in float32, and its own then; or of a tied one the head's, and in
    half precision the sum of both."""
    shape, whole = load.shape, load.a * load.shape.num_embedding
    sent = max(2 * whole + 4 * filled_buckets(load)[1], whole + 4 * shape.num_embedding)
    added = (3 + load.is_half) * whole if shape.tied else 0
    return {"gradients": part_bytes(load.settings, shape) + max(sent, added)}


def saved_whole(settings: Settings, shape: ModelShape) -> int:
    """Bytes that the main rank gathers in host memory to save them: states, and weights that are cut."""
    trained = num_trained(settings, shape)
    moments = 2 * 4 * trained if settings.optimizer == "adamw" else 0
    copies = 4 * trained if settings.master_weights else 0
    whole = settings.model_copy(update={"engine": "ddp"})
    weights = weights_bytes(whole, shape) if stage_of(settings) == 3 and settings.adapter is None else 0
    return moments + copies + weights


def _bucket(settings: Settings, shape: ModelShape) -> int:
    """The buffer that gradients are reduced in: in stage 3 one, of the float32 numbers that ranks exchange;
    else of the weights' precision, two of them where that goes on beside the computation.

    Source: deepspeed 0.19.8, stage3.py (`ipg_buckets`) and stage_1_and_2.py; seen in traces.
    """
    if stage_of(settings) == 3:
        return 4 * bucket_of(shape)
    size = 4 if settings.dtype == "float32" else 2
    return bucket_of(shape) * size * (2 if settings.device == "cuda" else 1)


def _layer(load: Workload) -> int:
    """Bytes of the weights of a whole layer, or of their gradients."""
    return load.a * load.shape.num_per_layer(expert=load.shape.num_expert_layers > 0)
