"""A plan in tables: bytes by phase and owner, beside the plain run, and the need of the card."""

from __future__ import annotations

from memtrain.memory.estimate.pricing import need_of
from memtrain.memory.estimate.static import needed, overhead
from memtrain.memory.generation.vllm import shares_device
from memtrain.memory.plan.plan import Owned, PhasePeak, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import GIB, MIB, gib, signed
from memtrain.recipes.recipe import Recipe

SHORT = {
    "load": "load",
    "first step": "1st step",
    "steady step": "step",
    "evaluation": "eval",
    "saving": "save",
}
"""Phases as the heads of narrow columns."""


def owner_table(prediction: Prediction, plain: Prediction) -> tuple[list[str], list[list[str]]]:
    """(headers, rows): an owner a row, a phase a column, in GiB or MiB; the plain run's highest phase last.

    Owners are in the order of their largest share, without those too small to be shown; the last row is the
    sum of each column.
    """
    columns = [*prediction.phases, plain.peak]
    held = [{owned.owner: owned.num_bytes for owned in phase.owners} for phase in columns]
    # Of owners that are as large, the first one that is met stays first.
    met = dict.fromkeys(name for owners in held for name in owners)
    names = sorted(met, key=lambda n: -max(o.get(n, 0) for o in held))
    is_large = max(phase.num_bytes for phase in columns) >= GIB
    unit, digits = (GIB, 2) if is_large else (MIB, 1)
    # What would be a row of zeros is not told apart.
    names = [name for name in names if max(o.get(name, 0) for o in held) >= 0.5 * unit / 10**digits]
    headers = [
        "GiB" if is_large else "MiB",
        *(SHORT.get(phase.phase, phase.phase) for phase in prediction.phases),
        "plain",
    ]

    def cell(num_bytes: int) -> str:
        return f"{num_bytes / unit:.{digits}f}" if num_bytes else "0"

    rows = [[name, *(cell(owners.get(name, 0)) for owners in held)] for name in names]
    return headers, [*rows, ["total", *(cell(phase.num_bytes) for phase in columns)]]


VLLM = "vLLM's process"


def as_run(prediction: Prediction, recipe: Recipe) -> Prediction:
    """The prediction without the evaluation of a run that holds out no rows, to be shown."""
    if recipe.data.holds_out or prediction.peak.phase == "evaluation":
        return prediction
    phases = tuple(phase for phase in prediction.phases if phase.phase != "evaluation")
    return prediction.model_copy(update={"phases": phases})


def with_vllm(prediction: Prediction, settings: Settings, recipe: Recipe) -> Prediction:
    """The prediction with memory that a vLLM process fills on the same device while it writes, to be shown.

    The run's own need, by which it is planned, is without it: the process is made as large as there is room.
    """
    if not settings.sampler_bytes or not shares_device(recipe):
        return prediction
    engine = Owned(owner=VLLM, num_bytes=settings.sampler_bytes)
    phases = tuple(
        phase.model_copy(
            update={
                "owners": (*phase.owners, engine),
                "num_bytes": phase.num_bytes + engine.num_bytes,
            }
        )
        if phase.phase == "generation"
        else phase
        for phase in prediction.phases
    )
    return prediction.model_copy(update={"phases": phases})


def verdict(settings: Settings, prediction: Prediction, planned: int) -> str:
    """The need with a traced peak, against the budget. `planned`: the need of the plan itself."""
    peak, extra = prediction.peak, overhead(settings)
    need = need_of(prediction, settings)
    parts = [f"{gib(peak.num_bytes)} of live tensors in the {peak.phase}"]
    parts.append(f"{extra.slack:.0%} for the allocator")
    if settings.device == "cuda":
        parts.append(f"{gib(extra.fixed)} for the CUDA context and its workspaces")
    else:
        parts.append(f"{gib(extra.fixed)} for the interpreter and its libraries")
    parts.append(f"{gib(need - needed(prediction.corrected_bytes, settings))} of margin")
    need_text = f"With the traced peak the plan's {gib(planned)} are {gib(need)}: {', '.join(parts)}."
    if prediction.budget_bytes is None:
        return need_text
    left = prediction.budget_bytes - need
    fits = f"{gib(left)} stay free" if left >= 0 else f"{gib(-left)} are missing"
    return f"{need_text} Of the budget of {gib(prediction.budget_bytes)}, {fits}."


def difference(arithmetic: Prediction, trace: Prediction) -> str:
    """Distance of the arithmetic from the trace at the peak, in words."""
    predicted, found = arithmetic.peak, trace.peak
    share = predicted.num_bytes / found.num_bytes - 1
    return f"traced {gib(found.num_bytes)} in the {found.phase}; the arithmetic is off by {signed(share)}"


def largest_owners(phase: PhasePeak, count: int = 3) -> str:
    """The owners that hold most in a phase, in words."""
    return ", ".join(f"{owned.owner} {gib(owned.num_bytes)}" for owned in phase.owners[:count])
