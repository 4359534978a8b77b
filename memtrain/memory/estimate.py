"""The arithmetic prediction: peak of every phase by owner, from settings, shape and heaviest batch alone.

A moment of a step at which memory can be highest is a sum of owners; a phase's peak is its highest moment.
"""

from __future__ import annotations

from memtrain.memory.activations import (
    HeaviestBatch,
    Load,
    head_bytes,
    layer_backward,
    layer_boundary,
    layer_forward,
    layer_kept,
)
from memtrain.memory.budget import largest_trained, num_trained, static_bytes, trains_head
from memtrain.memory.plan import Owned, PhasePeak, Prediction
from memtrain.memory.settings import Settings
from memtrain.memory.shape import ModelShape

Moment = dict[str, int]
"""Bytes by owner at one moment."""

PHASES = ("load", "first step", "steady step", "evaluation", "saving")


def estimate(
    settings: Settings, shape: ModelShape, heaviest: HeaviestBatch, *, accumulates: bool = True
) -> Prediction:
    """Predicted peak of every phase on one device; live tensors only (see budget.overhead for the rest).

    `accumulates`: an optimizer step has several micro-batches, so gradients are there from the start of each.
    """
    load = Load(settings, shape, heaviest)
    phases = {
        "load": [{"weights": static_bytes(settings, shape).weights}],
        "first step": step_moments(load, has_state=False, accumulates=accumulates),
        "steady step": step_moments(load, has_state=True, accumulates=accumulates),
        "evaluation": [evaluation_moment(load)],
        "saving": [saving_moment(load)],
    }
    return Prediction(
        phases=tuple(phase_peak(name, max(moments, key=total)) for name, moments in phases.items()),
        method="arithmetic",
        budget_bytes=None,
    )


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


def step_moments(load: Load, *, has_state: bool, accumulates: bool) -> list[Moment]:
    """The moments of one optimizer step at which memory can be highest, in the order of the step."""
    settings, shape = load.settings, load.shape
    static = static_bytes(settings, shape)
    head = head_bytes(load, trains_head=trains_head(settings))
    before = static.gradients if accumulates else 0
    base = {"weights": static.weights, "reduce buffers": static.reduce}
    if has_state:
        base |= {"optimizer": static.optimizer, "master copies": static.master}
    kept, again = _kept_and_recomputed(load)
    gradient_of_head = head.weight_gradient if settings.adapter is None else 0
    last_layer = layer_kept(load) if settings.checkpoint_every != 1 else 0
    size = load.a
    embedding = size * shape.num_embedding if settings.adapter is None else 0
    batch = {"batch": 8 * 4 * load.N}
    backward = layer_backward(load)
    moments: list[Moment] = [
        base | batch | {"gradients": before, "activations": kept + head.norm, "logits": head.forward},
        base | batch | {"gradients": before, "activations": kept + head.norm, "logits": head.backward},
        base
        | batch
        | {
            "gradients": max(before, gradient_of_head) if not accumulates else before,
            "activations": kept,
            "recomputation": again + backward,
        },
        base
        | batch
        | {
            "gradients": before or static.gradients - (0 if shape.tied else embedding),
            "activations": max(last_layer, layer_boundary(load)),
            "recomputation": again + backward,
        },
        base
        | batch
        | {"gradients": static.gradients + (embedding if accumulates or shape.tied else 0)}
        | {"activations": load.a * load.N * shape.width},
    ]
    after = base | {"optimizer": static.optimizer, "master copies": static.master}
    moments.append(after | {"gradients": static.gradients, "optimizer scratch": optimizer_scratch(load)})
    return moments


def optimizer_scratch(load: Load) -> int:
    """Temporaries of the update: float32 copies of one tensor's gradient and step with master copies; nothing
    with a fused kernel; whole matrices for muon's orthogonalization and adafactor's update."""
    settings = load.settings
    largest = largest_trained(settings, load.shape)
    if settings.optimizer == "sgd" or num_trained(settings, load.shape) == 0:
        return 0
    if settings.optimizer == "muon":
        return 4 * load.a * max(p.num_inputs * p.num_outputs for p in load.shape.linears)
    if settings.optimizer == "adafactor":
        return 8 * largest
    return 8 * largest if settings.master_weights else 0


def evaluation_moment(load: Load) -> Moment:
    """A forward pass without gradients between two steps."""
    static = static_bytes(load.settings, load.shape)
    head = head_bytes(load, trains_head=False)
    base = {
        "weights": static.weights,
        "reduce buffers": static.reduce,
        "optimizer": static.optimizer,
        "master copies": static.master,
        "batch": 8 * 4 * load.N,
    }
    layer = base | {"activations": layer_forward(load)}
    scores = base | {"activations": layer_boundary(load), "logits": head.forward}
    return max(layer, scores, key=total)


def saving_moment(load: Load) -> Moment:
    """Weights and states are written tensor by tensor, the largest is copied once."""
    static = static_bytes(load.settings, load.shape)
    return {
        "weights": static.weights,
        "reduce buffers": static.reduce,
        "optimizer": static.optimizer,
        "master copies": static.master,
    }


def _kept_and_recomputed(load: Load) -> tuple[int, int]:
    """(kept by all layers between forward and backward, kept again by the layer that is recomputed)."""
    settings, num_layers = load.settings, load.shape.num_layers
    every = settings.checkpoint_every
    num_checkpointed = -(-num_layers // every) if every else 0
    boundary = 0 if settings.offload != "none" else layer_boundary(load)
    full = layer_kept(load)
    plain = (num_layers - num_checkpointed) * (full if settings.offload != "all" else 0)
    if settings.offload == "all":
        return 2 * layer_boundary(load), full
    return num_checkpointed * boundary + plain, full if num_checkpointed else 0
