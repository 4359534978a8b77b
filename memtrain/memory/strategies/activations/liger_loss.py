"""Liger's loss: LM head and cross-entropy in one fused kernel, with the gradients made in the forward pass.

When: asked for, or allowed. Saves: whole logits, as the chunked loss does. Costs: the head's gradient is
summed in half precision, so it is rounded more coarsely than ours. Not exact for that reason, and never
chosen unasked. Refused: without Liger, on a CPU, and for methods whose loss is no cross-entropy.

Source: Hsu et al. 2024, arXiv:2410.10989, section 3.2 (FusedLinearCrossEntropy).
"""

from __future__ import annotations

from memtrain.memory.hardware.packages import missing
from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import ON_A_GPU, Conflict, Strategy, StrategyContext, Updates
from memtrain.recipes.recipe import HAS_ANSWERS


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """Liger's kernel."""
    return ({"loss": "liger"},)


def refusal(case: StrategyContext) -> str | None:
    """Reason against Liger's loss, a CUDA kernel for cross-entropy; None where it can be used."""
    if case.recipe.method in HAS_ANSWERS or case.recipe.taught is not None:
        return f"Liger's kernel computes cross-entropy, and the loss of {case.recipe.method} is another"
    if case.facts.hardware.device != "cuda":
        return "Liger runs on CUDA only"
    if not case.facts.has("liger_kernel"):
        return f"Liger {missing('liger_kernel')} (pip install 'memtrain[liger]')"
    return None


STRATEGY = Strategy(
    name="liger_loss",
    axis="loss",
    summary="LM head and cross-entropy in Liger's fused kernel",
    saves="the logits",
    costs="the head's gradient is summed in half precision",
    measured=ON_A_GPU,
    is_exact=False,
    is_used=lambda settings: settings.loss == "liger",
    wish=lambda recipe: "on" if recipe.memory.loss == "liger" else "allow",
    use_keys=lambda recipe: {"memory.loss": "liger"},
    never_keys=lambda recipe: {"memory.loss": "auto"},
    changes=changes,
    without={"loss": "full"},
    refusal=refusal,
    conflicts=(Conflict("shared_prompts", "Liger's kernel is cross-entropy of single rows"),),
)
