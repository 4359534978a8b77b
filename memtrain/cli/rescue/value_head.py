"""Logits that LLaMA-Factory's reward model computes: a causal model, whose value head reads none of them."""

from __future__ import annotations

from dataclasses import replace

from memtrain.memory.estimate.peaks import phase_peak, step_moments, total
from memtrain.memory.estimate.pricing import PlannerInputs, Priced, heaviest, may_accumulate, need_of
from memtrain.memory.estimate.workload import DTYPE_BYTES, Workload
from memtrain.memory.plan.plan import PhasePeak
from memtrain.recipes.importers.importing import Foreign

STEPS = {"first step": False, "steady step": True}
"""Phases of a step, and whether its optimizer has states before it."""


def with_value_head(priced: Priced, foreign: Foreign, facts: PlannerInputs) -> Priced:
    """The run with the logits of all tokens at the end of its forward pass, in the model's precision and in
    float32; they are gone before the backward pass.

    Source: trl's `AutoModelForCausalLMWithValueHead.forward` (`lm_logits.float()`), which the stage `rm` of
    LLaMA-Factory runs.
    """
    if foreign.tool.name != "llamafactory" or foreign.config.get("stage") != "rm":
        return priced
    settings = priced.settings
    batch = heaviest(settings, facts)
    tokens = batch.tokens if settings.padding_free else batch.rows * batch.longest
    copy = 0 if settings.dtype == "float32" else 4
    logits = tokens * facts.shape.vocab_size * (DTYPE_BYTES[settings.dtype] + copy)
    load = Workload(settings, facts.shape, batch)

    def whole(phase: PhasePeak) -> PhasePeak:
        if phase.phase == "evaluation":
            owners = {one.owner: one.num_bytes for one in phase.owners}
            return phase_peak(phase.phase, owners | {"logits": owners.get("logits", 0) + logits})
        if phase.phase not in STEPS:
            return phase
        has_state, waits = STEPS[phase.phase], may_accumulate(settings, facts)
        moments = step_moments(load, has_state=has_state, accumulates=waits)
        at_loss = max((one for one in moments if "logits" in one), key=total)
        found = phase_peak(phase.phase, at_loss | {"logits": logits})
        return max(found, phase, key=lambda one: one.num_bytes)

    prediction = priced.prediction.model_copy(
        update={"phases": tuple(whole(phase) for phase in priced.prediction.phases)}
    )
    return replace(priced, prediction=prediction, need_bytes=need_of(prediction, settings))
