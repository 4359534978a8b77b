"""The rule of a teacher: its form in a run, and its exclusions."""

from __future__ import annotations

from memtrain.errors import RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.model_shape.length_rules import length_rules, reached
from memtrain.memory.rules.attention import (
    PACKAGES,
    AttentionBackend,
    AttentionFacts,
    choose_attention,
    model_facts,
)
from memtrain.memory.rules.ledger import DecisionLog

MOST_PADDING = 1024
"""Tokens by which heads of one tokenizer may differ: Qwen2.5's have 151,936 and 152,064. Taste."""

WHY = {
    "model": "a frozen model beside the student, run in every step",
    "adapter_off": "the student without its adapter: no extra weights, one more forward pass",
    "file": "top-k tokens from a file: no teacher is loaded",
}
"""Each source of a teacher's distribution in words."""


def decide_teacher(
    ledger: DecisionLog, facts: PlannerInputs, attention: AttentionBackend, *, dtype: str
) -> dict[str, object]:
    """Settings of the teacher; nothing for methods without one. Notes what it cannot be with."""
    recipe = ledger.asked.recipe
    section = recipe.taught
    if section is None:
        return {}
    path = f"{recipe.method}.teacher"
    if section.kind != "file":
        _refuse_sharing(ledger, path)
    if section.kind == "adapter_off":
        _refuse_own_head(ledger, path)
    if section.kind == "model":
        _refuse_vocabulary(ledger, facts, path)
        _refuse_attention(ledger, facts, attention, path, dtype=dtype)
    reason = WHY[section.kind]
    if section.kind == "model" and facts.teacher is not None:
        own, other = facts.shape.vocab_size, facts.teacher.shape.vocab_size
        columns = f"; the loss is over the {min(own, other):,} columns that both heads have"
        reason = f"{section.teacher}: {reason}{columns if own != other else ''}"
    ledger.decide("teacher", section.kind, reason, f"{recipe.method}.top_k" if section.top_k else path)
    return {"teacher": section.kind, "teacher_top_k": section.top_k or 0}


def _refuse_sharing(ledger: DecisionLog, path: str) -> None:
    if ledger.asked.recipe.cluster.sharing > 1:
        ledger.refuse(
            "a teacher reads whole rows, and cluster.context_parallel divides each over processes",
            path,
            "set top_k and top_k_file (memtrain score-teacher), or cluster.context_parallel: 1",
        )


def _refuse_vocabulary(ledger: DecisionLog, facts: PlannerInputs, path: str) -> None:
    """Sizes alone are compared: the tokens themselves are, where both tokenizers are read."""
    if facts.teacher is None:
        return
    own, other = facts.shape.vocab_size, facts.teacher.shape.vocab_size
    if abs(own - other) > MOST_PADDING:
        ledger.refuse(
            f"the teacher {facts.teacher.path} has a vocabulary of {other:,} tokens, and the student one of "
            f"{own:,}: their tokenizers differ",
            path,
            "use a teacher and a student of one family, or train on the teacher's text (memtrain sft)",
        )


def _refuse_own_head(ledger: DecisionLog, path: str) -> None:
    """The student's head is read as the teacher's: it must be the same."""
    adapter = ledger.asked.recipe.model.adapter
    saved = () if adapter is None else adapter.modules_to_save
    trained = [name for name in saved if name.rsplit(".", 1)[-1] in ("lm_head", "embed_tokens")]
    if trained:
        ledger.refuse(
            f"the adapter trains {', '.join(trained)} whole, and adapter_off reads the student's head",
            path,
            "leave it out of model.adapter.modules_to_save, or name the model's own path as teacher",
        )


def _refuse_attention(
    ledger: DecisionLog, facts: PlannerInputs, attention: AttentionBackend, path: str, *, dtype: str
) -> None:
    """The teacher reads the rows as they lie for the student."""
    if facts.teacher is None or attention is AttentionBackend.TRANSFORMERS:
        return
    config = facts.teacher.config
    longest = facts.longest_piece
    growing = reached(length_rules(config), longest, "row")
    padded = "set length.padding_free: false"
    if growing is not None and reached(length_rules(facts.config), longest, "row") is None:
        ledger.refuse(f"the teacher's rows cannot be concatenated: {growing.summary}", path, padded)
    own = AttentionFacts(
        device=facts.hardware.device,
        dtype=dtype if facts.teacher.dtype == "auto" else facts.teacher.dtype,
        compute_capability=facts.hardware.compute_capability,
        longest_row_tokens=longest,
        packages=frozenset(PACKAGES),
        **model_facts(config),  # pyright: ignore[reportArgumentType]
    )
    try:
        choice = choose_attention(own, attention)
    except RecipeError as error:
        ledger.refuse(f"the teacher: {error.faults[0].what}", path, padded)
        return
    if not choice.can_pack:
        why = "; ".join(f"{backend}: {why}" for backend, why in choice.refused) or choice.reason
        ledger.refuse(f"the teacher's rows cannot be kept apart ({why})", path, padded)
