"""Kernels of norms, SwiGLU and RoPE: Liger's, fused ones of torch's operators, or transformers' own code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.hardware.packages import missing
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.memory.rules.liger_families import LIGER_ACTIVATIONS, LIGER_FAMILIES

SILU = ("silu", "swish")
PATH = "model.kernels"
TRITON_FROM = (7, 0)
COMPILED = "compiled layers have their own kernels"


def decide_kernels(
    ledger: DecisionLog, hardware: Hardware, shape: ModelShape, config: Mapping[str, Any]
) -> dict[str, object]:
    """Settings `liger`, `kernels` and `loss_kernel`.

    Refused: fused kernels beside Liger's; fused or Liger's kernels of a family without them.
    """
    why_not = _why_not(shape, config)
    uses_liger = _uses_liger(ledger, hardware, _not_ligers(config), has_fused=not why_not)
    kernels = _kernels(ledger, hardware, why_not, uses_liger)
    return {"liger": uses_liger, "kernels": kernels, "loss_kernel": _loss_kernel(ledger, hardware, shape)}


def _loss_kernel(ledger: DecisionLog, hardware: Hardware, shape: ModelShape) -> str:
    """Kernels for the tiles of the chunked loss; reported on CUDA, where there is a choice."""
    if hardware.device != "cuda":
        return "torch"
    if ledger.asked.recipe.model.kernels == "transformers":
        ledger.decide("loss_kernel", "torch", "", PATH)
        return "torch"
    chosen, reason = "torch", ""
    if not ledger.has("triton"):
        reason = "triton is not installed"
    elif (hardware.compute_capability or (0, 0)) < TRITON_FROM:
        reason = "triton needs compute capability 7.0"
    elif shape.logit_softcap:
        reason = "the model caps its logits (final_logit_softcapping)"
    elif ledger.asked.recipe.method == "distill":
        reason = "a tile of distillation holds the logits of two models, and is computed by torch"
    else:
        chosen, reason = "triton", "a tile of logits is read twice and written once"
    ledger.decide("loss_kernel", chosen, reason)
    return chosen


def _uses_liger(ledger: DecisionLog, hardware: Hardware, not_ligers: str, *, has_fused: bool) -> bool:
    """Whether Liger's kernels are used; where nobody says, on a GPU that has them.

    On another machine, which only may have them, fused kernels come first: these keep as little, are as fast
    (by arithmetic, within 2 %) and need no package.
    """
    wanted = ledger.asked.recipe.model.liger
    if wanted == "off":
        ledger.decide("liger", False, "", "model.liger")
        return False
    if wanted == "auto" and ledger.asked.recipe.model.kernels != "auto":
        ledger.decide("liger", False, "other kernels are asked for", "model.kernels")
        return False
    if wanted == "auto" and ledger.asked.recipe.model.compile == "on":
        ledger.decide("liger", False, COMPILED, "model.compile")
        return False
    if not_ligers:
        if wanted == "on":
            ledger.refuse(f"model.liger is on, but {not_ligers}", "model.liger", "set model.liger: auto")
        ledger.decide("liger", False, not_ligers, "model.liger")
        return False
    is_presumed = ledger.presumes("liger_kernel")
    if wanted == "auto" and is_presumed and has_fused and hardware.device == "cuda":
        ledger.decide(
            "liger",
            False,
            "memtrain's fused kernels keep as little memory, and need no package",
            "model.liger",
        )
        return False
    runs = hardware.device == "cuda" and ledger.has("liger_kernel")
    reason = "taken to be installed there" if is_presumed else "installed, and the device is CUDA"
    reason = reason if runs else f"liger-kernel {missing('liger_kernel')}"
    ledger.decide("liger", runs, reason if hardware.device == "cuda" else "CUDA only", "model.liger")
    return runs


def _not_ligers(config: Mapping[str, Any]) -> str:
    """Reason that Liger's kernels would not compute the model; empty where they would."""
    family = config.get("model_type", "this model")
    if family not in LIGER_FAMILIES:
        return f"Liger has no kernels for {family}"
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if activation in LIGER_ACTIVATIONS:
        return ""
    return f"Liger's kernels activate by one of {', '.join(LIGER_ACTIVATIONS)}, and the model by {activation}"


def _kernels(ledger: DecisionLog, hardware: Hardware, why_not: str, uses_liger: bool) -> str:
    """`fused` where the recipe asks for it, or on a GPU whose model has them."""
    wanted = ledger.asked.recipe.model.kernels
    if wanted == "fused" and why_not:
        ledger.refuse(
            f"model.kernels is fused, but {why_not}", "model.kernels", "set model.kernels: transformers"
        )
    if wanted == "fused" and uses_liger:
        ledger.refuse(
            "model.kernels is fused, but model.liger: on has its own kernels for the same parts",
            "model.kernels",
            "set model.liger: off, or model.kernels: auto",
        )
    if wanted != "auto":
        ledger.decide("kernels", wanted, "", "model.kernels")
        return wanted
    if ledger.asked.recipe.model.compile == "on":
        ledger.decide("kernels", "transformers", COMPILED, "model.compile")
        return "transformers"
    is_fused = hardware.device == "cuda" and not uses_liger and not why_not
    chosen = "fused" if is_fused else "transformers"
    reason = "fewer kernel launches, and fewer activations in memory" if is_fused else why_not
    if not reason:
        reason = "Liger's kernels are used" if uses_liger else "fused kernels need CUDA"
    ledger.decide("kernels", chosen, reason, "model.kernels")
    return chosen


def _why_not(shape: ModelShape, config: Mapping[str, Any]) -> str:
    """Reason that the model has no fused kernels; empty where it has."""
    if shape.counts is not None or not shape.family.has_fused:
        return f"{config.get('model_type', 'this model')} has no fused kernels"
    activation = config.get("hidden_act", "silu")
    return "" if activation in SILU else f"fused kernels activate by silu, and the model by {activation}"
