"""Compiled layers: conditions, exclusions, and the reason why none are compiled by default."""

from __future__ import annotations

import shutil

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.rules.ledger import DecisionLog

PATH = "model.compile"
COMPILERS = ("c++", "g++", "clang++")
IN_PARTS = "a part of a layer is another function than the layer that is compiled"
"""Reason against layers that pass a slice, or with weights that are brought in."""


def decide_compile(ledger: DecisionLog, facts: PlannerInputs) -> bool:
    """Whether decoder layers are compiled; reported where the recipe asks."""
    wanted = ledger.asked.recipe.model.compile
    if wanted == "auto":
        # Not measured on a GPU yet.
        return False
    if wanted == "on" and (reason := _cannot(ledger, facts)):
        ledger.refuse(f"layers cannot be compiled: {reason}", PATH, "set it to off")
        return False
    why = (
        "each layer is compiled by itself; its memory is predicted as that of the uncompiled layer"
        if wanted == "on"
        else ""
    )
    ledger.decide("compile", wanted, why, PATH)
    return wanted == "on"


def _cannot(ledger: DecisionLog, facts: PlannerInputs) -> str:
    """The reason, whatever else is chosen; empty where there is none."""
    recipe, shape = ledger.asked.recipe, facts.shape
    if reason := _lacks(ledger, facts.hardware):
        return reason
    if facts.hardware.device == "cpu" and recipe.memory.measure_peaks:
        return (
            "on a CPU live tensors are counted operator by operator, which no compiled layer can be under "
            "(memory.measure_peaks: false)"
        )
    if recipe.model.liger == "on" or recipe.model.kernels == "fused":
        own = "model.liger: on" if recipe.model.liger == "on" else "model.kernels: fused"
        return f"{own} has its own kernels for their norms and MLPs"
    if recipe.model.quantize != "none":
        return "their weights are quantized, by kernels that torch.compile does not see into"
    drops = recipe.model.adapter is not None and recipe.model.adapter.dropout > 0
    if drops or shape.hidden_dropout:
        return "the model drops numbers at random, and compiled passes draw them in another order"
    if recipe.cluster.sharing > 1:
        return "rows are shared by processes (cluster.context_parallel), which was not tried together"
    return ""


def _lacks(ledger: DecisionLog, hardware: Hardware) -> str:
    if hardware.device == "cuda" and not ledger.has("triton"):
        return "triton, which writes the kernels, is not installed"
    if hardware.device == "cpu" and not any(shutil.which(name) for name in COMPILERS):
        return f"there is no C++ compiler here ({', '.join(COMPILERS)})"
    return ""
