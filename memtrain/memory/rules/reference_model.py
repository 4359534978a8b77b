"""Rules of methods with answers: prompts computed once, and the source of reference log-probs."""

from __future__ import annotations

from collections.abc import Callable

from memtrain.memory.model_shape.length_rules import LengthRule
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionChoice
from memtrain.memory.rules.batching import Micro
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.recipe import HAS_ANSWERS
from memtrain.recipes.sections.methods.online_base import FromOwnCompletions
from memtrain.recipes.sections.methods.preference import Dpo

WHY: dict[str, str] = {
    "none": "the loss needs no reference",
    "copy": "a frozen copy of the weights",
    "adapter_off": "the same weights without their adapter: no extra memory, one more forward pass",
    "adapter_start": "the same weights with the adapter as the run began: a copy of the adapter alone, one "
    "more forward pass",
    "precomputed": "one pass before training, kept in the cache: no reference is loaded",
    "synced": "a copy of the weights that follows the policy",
}
"""Each source of the reference's log-probs in words."""


def decide_shared_prompts(
    ledger: DecisionLog, attention: AttentionChoice, *, padding_free: bool, growing: LengthRule | None = None
) -> bool:
    """Whether a prompt is computed once for all its answers: exact wherever rows can be kept apart.

    `growing`: what the length of a row changes in all its tokens, where rows of the run come to it.
    """
    recipe = ledger.asked.recipe
    if recipe.method not in HAS_ANSWERS and recipe.online is None:
        return False
    wanted, path = recipe.length.shared_prompts, "length.shared_prompts"
    if wanted is False:
        ledger.decide("shared_prompts", False, "", path)
        return False
    if growing is not None:
        why = f"activations of a prompt depend on each answer: {growing.summary}"
        if wanted:
            ledger.refuse(
                f"a prompt cannot be shared by its answers ({why})",
                path,
                f"remove it, or keep rows within {growing.tokens:,} tokens (length.max_length)",
            )
        ledger.decide("shared_prompts", False, f"a prompt for each answer ({why})")
        return False
    if padding_free:
        words = "a prompt is computed once for all its answers; same numbers"
        ledger.decide("shared_prompts", True, words, path)
        return True
    why = "rows are padded, and each row holds one answer"
    if not attention.can_pack:
        refused = "; ".join(f"{backend}: {why}" for backend, why in attention.refused)
        why = refused or f"{attention.backend} attention does not keep rows apart"
    if wanted:
        ledger.refuse(
            f"a prompt cannot be shared by its answers ({why})",
            path,
            "remove it, or set length.padding_free: true and a model.attention that keeps rows apart",
        )
    ledger.decide("shared_prompts", False, f"one row for each answer ({why})")
    return False


def decide_reference(ledger: DecisionLog, *, passes: float) -> str:
    """Source of the reference's log-probs; `passes` of the run over the data."""
    recipe = ledger.asked.recipe
    section = recipe.near_reference
    if section is None or (isinstance(section, Dpo | FromOwnCompletions) and not section.needs_reference):
        return "none"
    wanted, adapter, path = section.reference, recipe.model.adapter, f"{recipe.method}.reference"
    if wanted == "auto" and recipe.online is not None:
        return "copy" if adapter is None else adapter.at_rest
    if wanted == "auto":
        return adapter.at_rest if adapter is not None and passes <= 1 else "precomputed"
    if wanted == "adapter_start" and (adapter is None or adapter.at_rest != "adapter_start"):
        ledger.refuse(
            "there is no adapter to begin with: model.adapter.path is not set",
            path,
            "set reference: auto, or name the adapter that is continued in model.adapter.path",
        )
    if wanted == "adapter_off" and adapter is None:
        ledger.refuse(
            "there is no adapter to switch off: every weight is trained",
            path,
            "set reference: precomputed (or copy), or train an adapter (model.adapter)",
        )
    if wanted == "synced" and adapter is not None:
        ledger.refuse(
            "a reference that follows the policy needs its own weights, but only the adapter is trained",
            path,
            "set reference: adapter_off, or train all weights (remove model.adapter)",
        )
    return wanted


def explain_reference(
    ledger: DecisionLog, settings: Settings, gain: Callable[[dict[str, object]], str]
) -> None:
    """Note the reference with its reason and its price against a frozen copy."""
    section = ledger.asked.recipe.near_reference
    if section is None:
        return
    if settings.reference == "none" and ledger.asked.recipe.online is not None:
        ledger.decide(
            "reference", "none", "beta is 0: no reference is needed", f"{ledger.asked.recipe.method}.beta"
        )
        return
    price = "" if settings.reference in ("none", "copy", "synced") else gain({"reference": "copy"})
    why = WHY[settings.reference]
    path = f"{ledger.asked.recipe.method}.reference"
    ledger.decide(
        "reference",
        settings.reference,
        f"{why}; {price.removesuffix('without')}with a copy" if price else why,
        path,
    )


def whole_batch(ledger: DecisionLog, batch: tuple[int | None, int | None], num_processes: int) -> list[Micro]:
    """The only micro-batch of losses that sort the pairs of a step; none for all others, who choose."""
    recipe = ledger.asked.recipe
    if not recipe.ranks_the_batch:
        return []
    rows, _ = batch
    words = "loss aot sorts the pairs of a whole step, which must be one micro-batch on one process"
    if rows is None:
        ledger.refuse(
            f"{words}; a step in tokens may be split into several",
            "train.batch_tokens",
            "set train.batch_size instead",
        )
        return [Micro(1, None)]
    if num_processes > 1:
        ledger.refuse(words, "cluster.processes", "set cluster.processes: 1, or use another dpo.loss")
    if recipe.train.micro_batch_size not in ("auto", rows) or recipe.train.micro_tokens != "auto":
        key = "micro_batch_size" if recipe.train.micro_batch_size != "auto" else "micro_tokens"
        ledger.refuse(words, f"train.{key}", f"remove train.{key}")
    return [Micro(rows, None)]
