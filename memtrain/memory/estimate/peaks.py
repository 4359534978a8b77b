"""The arithmetic prediction: peak of every phase by owner, from settings, shape and heaviest batch alone.

A moment of a step at which memory can be highest is a sum of owners; a phase's peak is its highest moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from memtrain.memory.estimate.activations import (
    after_mlp_backward,
    attention_backward,
    last_drops_forward,
    layer_backward,
    layer_boundary,
    layer_kept,
    layer_parts,
    mlp_output_backward,
    norm_backward,
    norm_kept,
    scratch_at_peak,
)
from memtrain.memory.estimate.adapter_sums import sums_forward
from memtrain.memory.estimate.adapters import rounded_adapters, without_adapters
from memtrain.memory.estimate.auxiliary_models import OF_VALUE, value_load, value_model
from memtrain.memory.estimate.backward_steps import head_step, layer_steps
from memtrain.memory.estimate.checkpoint_copies import copied_here
from memtrain.memory.estimate.experts import experts_forward, stacks_backward
from memtrain.memory.estimate.flash_scratch import SCRATCH, flash_scratch
from memtrain.memory.estimate.gradients import GradientBytes, buckets_of_ddp, gradients_in_order
from memtrain.memory.estimate.head import HeadBytes, head_bytes
from memtrain.memory.estimate.kept import kept, kept_bytes, unneeded_norm
from memtrain.memory.estimate.layer_record import first_turn, travels
from memtrain.memory.estimate.liger_layers import liger_forward
from memtrain.memory.estimate.offloaded_layers import offloaded_backward, storages_amid
from memtrain.memory.estimate.optimizer_scratch import offload_bucket, optimizer_scratch
from memtrain.memory.estimate.own_attention import final_norm_forward, own_masks
from memtrain.memory.estimate.positions import positions_and_mask
from memtrain.memory.estimate.query_norms import query_norm_backward
from memtrain.memory.estimate.sharded.fsdp2 import fsdp_moments, own_gradients, pass_moments
from memtrain.memory.estimate.sharded.zero import (
    TO_SAVE,
    Asked,
    between_steps,
    loading_moments,
    passing_weights,
    reference_weights,
    saved_whole,
    zero_moments,
)
from memtrain.memory.estimate.static import (
    copies_at_load,
    reference_bytes,
    static_bytes,
    trains_head,
    weights_bytes,
)
from memtrain.memory.estimate.streamed_layers import (
    final_norm_backward,
    forward_of_layer,
    streamed_backward,
)
from memtrain.memory.estimate.teachers import fetched_heads, taught_moment, taught_states
from memtrain.memory.estimate.weights_offload import (
    device_bytes,
    staged_here,
    trains_away,
)
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.shape import ENTERING, ModelShape
from memtrain.memory.plan.engine_kinds import shards_weights, uses_zero, writes_shards
from memtrain.memory.plan.heaviest_batch import HeadOutput, HeaviestBatch
from memtrain.memory.plan.plan import Owned, PhasePeak, Prediction
from memtrain.memory.plan.settings import Settings

Moment = dict[str, int]
"""Bytes by owner at one moment."""

ReferenceWeights = tuple[int, int]
"""Bytes of whole weights in a layer's turn and in the head's."""

LIVE = ("copy", "synced", "adapter_off", "adapter_start")
"""References that are asked between the policy's forward and backward passes."""
PHASES = ("load", "first step", "steady step", "evaluation", "saving")


def estimate(
    settings: Settings, shape: ModelShape, heaviest: HeaviestBatch, *, accumulates: bool = True
) -> Prediction:
    """Predicted peak of every phase on one device; live tensors only (see budget.overhead for the rest).

    `accumulates`: an optimizer step has several micro-batches, so gradients are there from the start of each.
    """
    load = Workload(settings, shape, heaviest)
    phases = {
        "load": [_loading(load)],
        "first step": step_moments(load, has_state=False, accumulates=accumulates),
        "steady step": [
            moment | copied_here(settings, shape)
            for moment in step_moments(load, has_state=True, accumulates=accumulates)
        ],
        "evaluation": [evaluation_moment(load)],
        "saving": [saving_moment(load)],
    }
    waiting = kept_bytes(load)

    def whole(phase: str, moment: Moment) -> int:
        beside = value_model(load, waiting, phase, moment, accumulates=accumulates)
        return total(moment) + sum(beside.values())

    highest = (
        phase_peak(name, max(moments, key=lambda moment: whole(name, moment)))
        for name, moments in phases.items()
    )
    return Prediction(phases=tuple(highest), method="arithmetic", budget_bytes=None)


def _loading(load: Workload) -> Moment:
    """The model as it is loaded: each rank of FSDP2 reads its own rows, DeepSpeed cuts whole weights.

    transformers' Trainer cuts as it reads: `deepspeed.zero.Init` under ZeRO-3, FSDP from the host.
    """
    resting = _resting(load, has_state=False) | {
        "batch": 0,
        "master copies": copies_at_load(load.settings, load.shape),
    }
    if uses_zero(load.settings) and load.batch.foreign is None:
        return max(loading_moments(load, resting, weights_bytes(load.settings, load.shape)), key=total)
    return resting


def total(moment: Moment) -> int:
    """Bytes of all owners."""
    return sum(moment.values())


def phase_peak(phase: str, moment: Moment) -> PhasePeak:
    """The peak of a phase with its owners, largest first, empty ones left out."""
    owners = sorted(((name, size) for name, size in moment.items() if size), key=lambda item: -item[1])
    return PhasePeak(
        phase=phase,
        num_bytes=total(moment),
        owners=tuple(Owned(owner=name, num_bytes=size) for name, size in owners),
    )


def step_moments(load: Workload, *, has_state: bool, accumulates: bool) -> list[Moment]:
    """The moments of one optimizer step at which memory can be highest, in the order of the step."""
    settings, shape = load.settings, load.shape
    if uses_zero(settings):
        resting, last = _resting(load, has_state=has_state), _resting(load, has_state=True)
        head = head_bytes(load, trains_head=trains_head(settings))
        passing = reference_pass(load, head, reference_weights(load))
        asked = Asked(passing, taught_moment(load), taught_states(load))
        return zero_moments(load, resting, last, kept(load), asked, holds=accumulates)
    if shards_weights(settings):
        return _sharded_moments(load, has_state=has_state, accumulates=accumulates)
    head = head_bytes(load, trains_head=trains_head(settings))
    resting = _resting(load, has_state=has_state or settings.in_backward)
    held = kept(load)
    made = gradients_in_order(
        load, head.weight_gradient, accumulates=accumulates and not settings.in_backward
    )
    is_away = settings.offload == "all"
    backward = offloaded_backward(load) + made.added if is_away else layer_backward(load)
    if made.added and not is_away:
        backward = max(backward, mlp_output_backward(load) + made.added)
    backward = max(backward, _stacks_backward(load, made))
    kernel = 0 if is_away else scratch_at_peak(load)
    inner, final_backward = {"recomputation": backward - kernel, SCRATCH: kernel}, norm_backward(load)
    if settings.slice_tokens:
        inner, final_backward = streamed_backward(load), final_norm_backward(load)
    loss = {"gradients": made.before, "activations": held.at_loss + head.norm}
    loss |= {"head's weight": fetched_heads(load)}
    reduced = static_bytes(settings, shape).reduce
    scratch = optimizer_scratch(load, accumulates=accumulates) + offload_bucket(load)
    return [
        resting | {"gradients": made.before, "activations": _in_forward(load)} | taught_states(load),
        resting | {"gradients": made.before} | taught_moment(load),
        resting | loss | {"logits": head.kept, "reference's pass": reference_pass(load, head)},
        resting | loss | {"logits": head.forward},
        resting | loss | {"logits": head.backward},
        resting | loss | {"logits": made.of_head},
        resting | loss | {"gradients": made.after_loss, "logits": final_backward, "head's weight": 0},
        *(resting | inner | turn for turn in _turns(load, made)),
        *(resting | turn for turn in _attention_turns(load, head.weight_gradient, accumulates=accumulates)),
        *(resting | moment for moment in _middle_moments(load, made, inner)),
        *(resting | moment for moment in _steps_in_backward(load, made, loss)),
        resting
        | {"gradients": made.in_embedding, "activations": load.a * load.N * shape.width}
        | {"recomputation": made.arriving},
        resting | {"gradients": made.at_step, "reduce buffers": reduced or resting["reduce buffers"]},
        *_value_moments(load, resting | {"gradients": made.at_step}, accumulates=accumulates),
        _resting(load, has_state=True) | {"gradients": made.at_step, "optimizer scratch": scratch},
    ]


def _value_moments(load: Workload, rest: Moment, *, accumulates: bool) -> list[Moment]:
    """The highest moment of a value model's own backward pass, when all gradients of the policy are there."""
    if load.settings.value != "own":
        return []
    own = value_load(load)
    *passes, _ = step_moments(own, has_state=True, accumulates=accumulates)
    highest = max(map(total, passes)) - total(_resting(own, has_state=True))
    return [rest | {OF_VALUE: highest}]


def _stacks_backward(load: Workload, made: GradientBytes) -> int:
    """Most that a layer of experts holds in its backward pass with the gradients of its stacks, which stay
    where they are the first ones, or leave for the host with their layer's; 0 where none is trained."""
    settings = load.settings
    if settings.offload == "all":
        return 0
    stays = trains_away(settings) or (not made.before and not settings.in_backward)
    return stacks_backward(load, layer_kept(load), stays=stays, widens=made.widens)


def _turns(load: Workload, made: GradientBytes) -> list[Moment]:
    """Gradients and kept bytes beside the last layer, the first, and, where small gradients wait for each
    other to be stepped, which none did in the last, the layer before that."""
    held = kept(load)
    is_needed = load.settings.slice_tokens > 0 or load.settings.offload == "all"
    unneeded = 0 if is_needed else unneeded_norm(load)
    turns: list[Moment] = [
        {"gradients": made.in_last, "activations": held.everything - held.of_last},
        {"gradients": made.in_first, "activations": max(0, held.beside_first - unneeded)},
    ]
    if load.record is not None and not is_needed:
        first = first_turn(load)
        turns[1] |= {"recomputation": first.num_bytes - first.kernel + made.added, SCRATCH: first.kernel}
    if load.settings.offload == "all" and (load.settings.liger or travels(load)):
        turns[1] |= {"recomputation": offloaded_backward(load, is_first=True) + made.added}
    if load.settings.in_backward and load.shape.num_layers > 2:
        before = held.everything - held.of_last - (held.of_last or layer_boundary(load))
        turns.append({"gradients": made.in_first, "activations": max(held.beside_first, before)})
    return turns


def _attention_turns(load: Workload, of_head: int, *, accumulates: bool) -> list[Moment]:
    """Turns of layers at their attention, and at the norms of its queries, when the gradients of all maps
    after these are there; none where they are in any case, or leave as they come."""
    settings = load.settings
    leaves = settings.in_backward or trains_away(settings) or settings.offload == "all"
    if accumulates or leaves or settings.slice_tokens or load.record is not None:
        return []
    kernel = flash_scratch(load)
    at_norm = query_norm_backward(load, norm_kept(load, load.shape.width, num_scales=1))
    turns: list[Moment] = []
    for missing, held, scratch in ((ENTERING, attention_backward(load), kernel), (("q_proj",), at_norm, 0)):
        made = gradients_in_order(load, of_head, accumulates=False, missing=missing)
        inner = {"recomputation": held - scratch, SCRATCH: scratch}
        turns += [turn | inner for turn in _turns(load, made)]
    return turns


def _middle_moments(load: Workload, made: GradientBytes, inner: Moment) -> list[Moment]:
    """A layer between the last and the first, where gradients leave for the host: its own come while those of
    the layer before are on their way, and inputs of all layers before it wait."""
    if not trains_away(load.settings) or load.shape.num_layers < 3:
        return []
    held = kept(load)
    beside = max(held.beside_first, held.everything - held.of_last - layer_boundary(load))
    moments: list[Moment] = [{"gradients": made.in_first, "activations": beside} | inner]
    if not load.settings.slice_tokens and load.settings.adapter is None:
        left = {"recomputation": after_mlp_backward(load), SCRATCH: 0}
        moments.append({"gradients": made.after_mlp, "activations": beside} | left)
    return moments


def _steps_in_backward(load: Workload, made: GradientBytes, loss: Moment) -> list[Moment]:
    """Moments of steps of single tensors amid a backward pass, which no other gradient is needed for."""
    of_head, moments = head_step(load), list[Moment]()
    if of_head is not None:
        step = {"logits": of_head.beside, "optimizer scratch": of_head.scratch}
        moments.append(loss | {"gradients": made.after_loss + of_head.gradient} | step)
    for (gradient, scratch, beside), turn in product(layer_steps(load), _turns(load, made)):
        step = {"optimizer scratch": scratch, "recomputation": beside}
        moments.append(turn | {"gradients": turn["gradients"] + gradient} | step)
    return moments


def _in_forward(load: Workload) -> int:
    """Activations in a forward pass: several are on their way where they are offloaded. Where layers keep
    theirs, experts and PEFT's sums hold more in the last one than is kept."""
    if load.settings.offload == "all":
        held = storages_amid(load)
        if not travels(load):
            held = max(layer_kept(load) + 2 * layer_boundary(load), held)
        return held + positions_and_mask(load)
    if load.settings.slice_tokens and load.settings.offload == "boundaries":
        return forward_of_layer(load) + positions_and_mask(load)
    if load.settings.checkpoint_every or load.settings.slice_tokens or load.settings.weights_offload:
        return 0
    if load.record is not None:
        # Among the moments of the layer's own passes.
        return 0
    parts = layer_parts(load)
    held = experts_forward(load, keeps_input=parts.keeps_input)
    held = max(held, liger_forward(load, parts), sums_forward(load, parts), last_drops_forward(load))
    masks = own_masks(load)
    norm = final_norm_forward(load) if masks else 0
    return kept(load).at_loss + masks + max(held, norm)


def reference_pass(load: Workload, head: HeadBytes, gathered: ReferenceWeights = (0, 0)) -> int:
    """Bytes of a reference's forward pass while the policy's activations wait; 0 where none is asked then:
    completions that a sampler wrote are scored before the step.

    `gathered`: whole weights, where a reference lies in parts, in a layer and in the head.
    """
    is_before = load.batch.asks is not HeadOutput.LOGPS or load.settings.sampler != "none"
    if is_before or load.settings.reference not in LIVE:
        return 0
    asked = without_adapters(load) if load.settings.reference == "adapter_off" else load
    in_layer, in_head = gathered
    passing = max(forward_of_layer(asked) + in_layer, head.evaluation + in_head)
    return passing + positions_and_mask(load)


def _sharded_moments(load: Workload, *, has_state: bool, accumulates: bool) -> list[Moment]:
    """The same where weights are in shards: layers are gathered, and gradients leave as they are made."""
    asked = reference_pass(load, head_bytes(load, trains_head=trains_head(load.settings)))
    resting, last = _resting(load, has_state=has_state), _resting(load, has_state=True)
    own = own_gradients(load, accumulates=accumulates)
    scratch = optimizer_scratch(load, accumulates=accumulates) + offload_bucket(load)
    return [
        resting | taught_moment(load),
        *fsdp_moments(load, resting, kept(load), taught_states(load), holds=accumulates, asked=asked),
        last | {"gradients": own, "optimizer scratch": scratch},
    ]


def _resting(load: Workload, *, has_state: bool) -> Moment:
    """Bytes held from the start of a step: weights, master copies, batch, and states but for the first."""
    held = dict(_held(load))
    return held if has_state else held | {"optimizer": 0}


@once
def _held(load: Workload) -> Mapping[str, int]:
    """Bytes held through every step but the first."""
    static = static_bytes(load.settings, load.shape)
    return {
        "weights": static.weights + rounded_adapters(load),
        "reference": reference_bytes(load.settings, load.shape),
        "teacher": load.batch.teacher.weights if load.batch.teacher is not None else 0,
        "layer buffers": device_bytes(load.settings, load.shape) + staged_here(load.settings, load.shape),
        "master copies": static.master,
        "optimizer": static.optimizer,
        "reduce buffers": buckets_of_ddp(load),
        "batch": 4 * 8 * load.num_whole + replayed_bytes(load),
    }


def replayed_bytes(load: Workload) -> int:
    """The sampler's choices of experts in a micro-batch: as they come, and as indices."""
    experts = load.shape.experts
    if not load.settings.router_replay or experts is None:
        return 0
    return (2 + 8) * load.N * load.shape.num_expert_layers * experts.num_per_token


def evaluation_moment(load: Workload) -> Moment:
    """A forward pass without gradients between two steps."""
    base = _resting(load, has_state=True) | copied_here(load.settings, load.shape)
    if shards_weights(load.settings) and not uses_zero(load.settings):
        taught = base | taught_states(load)
        sharded = (moment for read in load.passes for moment in pass_moments(read, taught))
        return max(base | taught_moment(load), *sharded, key=total)
    in_layer: Moment = {}
    in_head: Moment = {}
    if uses_zero(load.settings):
        base |= between_steps(load.settings, load.shape)
        in_layer, in_head = passing_weights(load)
    base |= {"head's weight": fetched_heads(load)}
    passes = [base | taught_moment(load)]
    for read in load.passes:
        layer = in_layer | {"activations": forward_of_layer(read) + positions_and_mask(read)}
        head = head_bytes(read, trains_head=trains_head(load.settings))
        scores = in_head | {"activations": 0, "logits": head.evaluation}
        passes += [base | layer | taught_states(load), base | scores]
    return max(passes, key=total)


def saving_moment(load: Workload) -> Moment:
    """Weights and states are written from where they are; DeepSpeed's are gathered in host memory first where
    the main process writes all."""
    resting = _resting(load, has_state=True) | copied_here(load.settings, load.shape)
    if not uses_zero(load.settings):
        return resting
    # What is copied is copied as it is gathered, a tensor at a time.
    is_there = load.settings.device == "cpu" and not load.settings.background_save
    is_there = is_there and not writes_shards(load.settings)
    saved = {TO_SAVE: saved_whole(load.settings, load.shape) if is_there else 0}
    return resting | between_steps(load.settings, load.shape) | saved
