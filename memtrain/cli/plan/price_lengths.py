"""Predictions for each max_length: peak memory and time of a step, for a recipe and a budget."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.cli.plan.model_config import model_config, teacher_shape
from memtrain.cli.plan.model_shape import layer_measurer, shape_for
from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.estimate.pricing import CountSteps, PlannerInputs, typical_micro_batch
from memtrain.memory.hardware.devices import Hardware, detect
from memtrain.memory.plan.units import count_of, gib
from memtrain.memory.planner.resolve import Resolved, resolved_if_it_fits
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.recipe import HAS_ANSWERS
from memtrain.recipes.sections.length import Length, with_prompts_apart
from memtrain.trainers.data.length_report.candidates import Price
from memtrain.trainers.data.length_report.layouts import ROW_LAYOUTS, LaidOut, RowLayout
from memtrain.trainers.data.length_report.result import Cost
from memtrain.trainers.data.packing.step_order import BatchSize, count_steps


@dataclass(frozen=True, slots=True)
class Pricing:
    """The planner for one recipe, and the devices it plans for."""

    price: Price
    device: str
    """In words."""


def pricing(loaded: LoadedRecipe, budget_bytes: int | None) -> Pricing:
    """The planner for a recipe. With a budget and no GPU here: for the known card of that size.

    Raises: LaunchError when the model cannot be looked at; RecipeError for one that is not known.
    """
    recipe = loaded.recipe
    config = model_config(recipe.model)
    shape = shape_for(config, recipe.model.path or "model.config")
    hardware, teacher = detect(recipe.cluster.device), teacher_shape(recipe)
    if hardware.device == "cpu" and budget_bytes is not None and recipe.cluster.device == "auto":
        hardware = Hardware.for_budget(budget_bytes)
    if budget_bytes is not None:
        memory = recipe.memory.model_copy(update={"budget": budget_bytes})
        recipe = recipe.model_copy(update={"memory": memory})

    def price(length: Length, rows: RowLayout) -> Cost | None:
        if not isinstance(rows, ROW_LAYOUTS[recipe.method]):  # Rows of another method.
            return None
        asked = SourcedRecipe(recipe.model_copy(update={"length": length}), loaded.where)
        shared = rows.at(length)
        if shared.profile is None or not len(shared.tokens):
            return None
        unshared = None
        if recipe.method in HAS_ANSWERS:
            one = rows.at(with_prompts_apart(length))
            assert one.profile is not None, "Answers have a profile."
            unshared = (one.profile, _counter(loaded, one))
        facts = PlannerInputs(
            hardware=hardware,
            shape=shape,
            config=config,
            profile=shared.profile,
            count_steps=_counter(loaded, shared),
            method=recipe.method,
            mixes_answers=recipe.mixes_answers,
            unshared=unshared,
            taught=recipe.taught,
            teacher=teacher,
            measure_layers=layer_measurer(config, shape),
        )
        try:
            resolved = resolved_if_it_fits(asked, facts)
        except (DoesNotFit, RecipeError) as error:
            return Cost(fits=False, peak_bytes=None, need_bytes=None, step_s=None, words=error.faults[0].what)
        return cost_of(resolved, facts)

    within = ""
    if budget_bytes is not None and budget_bytes < hardware.memory_bytes:
        within = f", within {gib(budget_bytes)}"
    return Pricing(price, f"{hardware.words()}{within}, with packing {recipe.length.packing}")


def cost_of(resolved: Resolved, facts: PlannerInputs) -> Cost:
    """The answer of the planner, with the time of a typical step."""
    settings = resolved.settings
    batch, _ = typical_micro_batch(settings, facts)
    parts = [f"micro-batch of {count_of(batch.rows, 'row')}"]
    if settings.checkpoint_every:
        parts.append("activation checkpointing")
    if settings.slice_tokens:
        parts.append("streamed layers")
    if settings.offload != "none":
        parts.append("activation offloading")
    peak, is_floor = resolved.prediction.peak, resolved.case.facts.shape.is_floor
    return Cost(
        fits=None if is_floor else True,
        peak_bytes=peak.num_bytes,
        need_bytes=resolved.chosen.need_bytes,
        step_s=resolved.chosen.step_s,
        words=f"{'more than ' * is_floor}{gib(peak.num_bytes)} in the {peak.phase}, {', '.join(parts)}",
    )


def _counter(loaded: LoadedRecipe, laid: LaidOut) -> CountSteps:
    recipe = loaded.recipe

    def count(rows: int | None, tokens: int | None, epochs: float) -> int:
        size = BatchSize(rows, tokens)
        return count_steps(
            laid.tokens, size, epochs=epochs, seed=recipe.train.seed, shuffle=recipe.train.shuffle
        )

    return count
