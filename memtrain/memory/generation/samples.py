"""Samples and metrics of a run in a plan: completions at a time, and the memory of writing them."""

from __future__ import annotations

from memtrain.memory.estimate.peaks import phase_peak
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.estimate.static import needed
from memtrain.memory.generation.decode_bytes import fetched_words, generation_bytes, resting_peak
from memtrain.memory.generation.gather_weights import gather_bytes
from memtrain.memory.generation.native import not_native
from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.plan import Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import gib
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.sections.generate import Generate

MOST_ROWS = 32
"""Completions that are written at a time at most. Taste: more are hardly faster, and few are asked for."""
PHASE = "samples"


def with_samples(
    ledger: DecisionLog, settings: Settings, prediction: Prediction, facts: PlannerInputs, budget: int | None
) -> tuple[Settings, Prediction]:
    """Settings and prediction with the completions of `eval.samples` and `eval.metrics`; as they are where
    none are asked for.

    As many at a time as need no more than training does, one at least. Raises: RecipeError where not even one
    fits the budget.
    """
    asked = ledger.asked.recipe.eval
    if not asked.writes:
        return settings, prediction
    key = "eval.samples" if asked.samples is not None else "eval.metrics"
    # The trained module writes: natively where rows can share a pass, else by transformers' own generate.
    longest = facts.written_prompt + asked.longest_written
    sampler = "transformers" if not_native(settings.attention, facts.config, longest) else "native"
    writing = settings.model_copy(update={"sampler": sampler})
    resting = resting_peak(prediction)
    generate = Generate(num_generations=1, max_tokens=asked.longest_written)
    owners = {one.owner: one.num_bytes for one in resting.owners}

    def moment(rows: int) -> dict[str, int]:
        streamed = gather_bytes(settings, facts, rows=rows, tokens=generate.max_tokens).streamed
        gathered = {"gathered weights": streamed} if shards_weights(settings) else {}
        return (
            owners
            | gathered
            | generation_bytes(writing, facts.shape, generate, max(1, facts.written_prompt), rows)
        )

    rows = min(MOST_ROWS, facts.num_written)
    while rows > 1 and sum(moment(rows).values()) > prediction.peak.num_bytes:
        rows //= 2
    made = prediction.model_copy(update={"phases": (*prediction.phases, phase_peak(PHASE, moment(rows)))})
    need = needed(made.peak.num_bytes, settings)
    if budget is not None and need > budget and made.peak.num_bytes > prediction.peak.num_bytes:
        ledger.refuse(
            f"a single completion of {generate.max_tokens:,} tokens after a prompt of "
            f"{facts.written_prompt:,} needs {gib(need)}, and the budget is {gib(budget)}",
            key,
            f"lower {key}.max_tokens, or remove {key}",
        )
        ledger.raise_refusals()
    words = "completions of eval.samples and eval.metrics at a time" + fetched_words(settings, facts.shape)
    ledger.decide("sample_rows", rows, words, key)
    # Attention that keeps rows apart writes natively, unless the plan says otherwise.
    other = {"sampler": sampler} if settings.attention != sampler == "transformers" else {}
    return settings.model_copy(update={"sample_rows": rows} | other), made
