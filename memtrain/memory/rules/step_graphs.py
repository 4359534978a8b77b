"""CUDA graphs of the training step: where its passes are recorded and replayed, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrain.memory.model_shape.length_rules import own_layers
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import gib
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.memory.rules.ledger import DecisionLog

PATH = "train.cuda_graphs"
BY_TENSORS = (
    AttentionBackend.TORCH_VARLEN,
    AttentionBackend.FLASH,
    AttentionBackend.FLASH3,
    AttentionBackend.TRANSFORMERS,
)
"""Attention whose kernels read from tensors where a row's segments begin, or that takes padded rows."""

UNTRIED = (
    "it ran on no GPU yet; on takes it, and compares the first replay of each shape with its pass by hand"
)
"""Reason for which `auto` leaves a step as it is, until tests/gpu/test_captured_steps.py passed on a GPU."""


def decide_step_graphs(
    ledger: DecisionLog, settings: Settings, shape: ModelShape, config: Mapping[str, Any], too_much: int = 0
) -> bool:
    """Whether passes of a step are replayed from CUDA graphs; told on a GPU, or where asked.

    `too_much`: bytes above the budget with gradients that stay. Refused where the recipe asks for what cannot
    be.
    """
    wanted = ledger.asked.recipe.train.cuda_graphs
    reason = cannot_record(settings, shape, config)
    if too_much and not reason:
        reason = (
            f"gradients stay where recordings accumulate, which needs {gib(too_much)} more than there are"
        )
    if wanted == "on" and reason:
        ledger.refuse(f"the passes of a step cannot be captured: {reason}", PATH, "set it to auto")
        return False
    if wanted == "auto":
        reason = reason or UNTRIED
    is_on = wanted != "off" and not reason
    if wanted != "auto" or settings.device == "cuda":
        why = reason or "one call starts all kernels of a forward or backward pass"
        ledger.decide("step_graphs", "on" if is_on else "off", why if wanted != "off" else "", PATH)
    return is_on


def cannot_record(settings: Settings, shape: ModelShape, config: Mapping[str, Any]) -> str:
    """The reason why a step's passes are not recorded; empty where there is none."""
    if settings.device != "cuda":
        return "CUDA graphs are of a GPU"
    return recorded_nowhere(settings) or _by_rows(settings, shape, config)


def recorded_nowhere(settings: Settings) -> str:
    """The reason against recordings that strategies give, whatever the device and the model."""
    reasons = {
        "gradients are exchanged with other processes while they are made": settings.num_processes > 1,
        "weights are stepped in the backward pass, by an optimizer on the host": settings.in_backward,
        "weights live on the host, and a layer's place on the device is another's a moment later": (
            settings.weights_offload
        ),
        "activations leave for the host, on a stream of their own": settings.offload != "none",
        "layers are computed in slices, whose number is the row's": settings.slice_tokens > 0,
        "layers are compiled, which was not tried together": settings.compiled,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _by_rows(settings: Settings, shape: ModelShape, config: Mapping[str, Any]) -> str:
    if shape.experts is not None:
        return "which tokens go to an expert is known in the pass, and the host reads it"
    if kinds := own_layers(config):
        return f"{', '.join(kinds)} layers make their kernels of one row's length"
    if settings.device == "cuda" and settings.attention not in BY_TENSORS:
        return f"{settings.attention} is called for each segment of a row, as the host counts them"
    if shape.sliding_window is not None and settings.attention != AttentionBackend.TRANSFORMERS:
        return "sliding windows are cut from where the segments of a row begin, by the host"
    return ""
