"""From a loaded recipe to a plan: data prepared, model looked at, every setting resolved."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import memtrain
from memtrain.cli.plan.keep_plan import at_its_turns, begun_in, resolve_again, turns_decision
from memtrain.cli.plan.model_config import model_config, reward_shapes, teacher_shape
from memtrain.cli.plan.model_shape import layer_measurer, shape_for
from memtrain.cli.plan.recipe_lines import at_their_lines
from memtrain.cli.plan.usual_tokenizer import keep_last
from memtrain.memory.estimate.pricing import PlannerInputs, host_need
from memtrain.memory.estimate.static import trained_parts
from memtrain.memory.hardware.calibration import version
from memtrain.memory.hardware.devices import Hardware, detect
from memtrain.memory.hardware.peak_history import read_history
from memtrain.memory.plan.heaviest_batch import MixedRows
from memtrain.memory.plan.length_profile import LengthProfile
from memtrain.memory.plan.plan import Owned, Plan, PreparedData
from memtrain.memory.plan.settings import Settings
from memtrain.memory.planner.resolve import Resolved, resolve
from memtrain.memory.planner.use_and_never import with_use_and_never
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.edit import with_key
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.recipe import HAS_ANSWERS, Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.packing.by_method import LaidEpochs, sequences_of
from memtrain.trainers.data.packing.step_order import BatchSize, count_steps
from memtrain.trainers.data.store.held_out_prompts import longest_written_prompt, num_written
from memtrain.trainers.data.store.prepare import prepare
from memtrain.trainers.data.tokenize.teacher_vocabulary import refuse_other_tokenizer


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the length profile that it was made for."""

    plan: Plan
    profile: LengthProfile


def make_plan(
    loaded: LoadedRecipe,
    *,
    run_dir: str | None = None,
    hardware: Hardware | None = None,
    progress: Callable[[int, int], None] | None = None,
    keeps: bool = False,
) -> Planned:
    """Prepare the data, look at the model, and resolve every setting.

    `keeps`: a run that its folder has checkpoints of goes on with the plan it had, while that fits.

    Raises: RecipeError, DataError, LaunchError, DoesNotFit.
    """
    from memtrain.trainers.model.loading.module_shapes import check_model

    asked = with_use_and_never(SourcedRecipe(loaded.recipe, loaded.where))
    folder = run_folder_of(loaded, run_dir)
    begun = begun_in(Path(folder), loaded.environment) if keeps else None
    if keeps:
        asked = replace(asked, recipe=at_its_turns(asked.recipe, Path(folder), begun))
    recipe = asked.recipe
    with at_their_lines(loaded):
        data = prepare(recipe, progress=progress)
        keep_last(recipe.model.tokenizer or recipe.model.path or "")
        config = model_config(recipe.model)
        check_model(recipe.model, config, METHODS[recipe.method].head)
        refuse_other_tokenizer(recipe)
    facts = facts_of(recipe, data, config, hardware or detect(recipe.cluster.device))
    facts = replace(facts, history=read_history())
    resolved = resolve(asked, facts) if begun is None else resolve_again(asked, facts, begun)
    decisions = resolved.decisions
    if recipe.data.assistant_only_loss is not loaded.recipe.data.assistant_only_loss and data.has_turns:
        decisions = (turns_decision(f"plan in {folder}"), *decisions)
    trained, total = _parameters(resolved.settings, facts)
    plan = Plan(
        recipe=resolved.case.recipe,
        recipe_path=str(loaded.path),
        run_dir=folder,
        settings=resolved.settings,
        decisions=decisions,
        data=data,
        prediction=resolved.prediction,
        plain=resolved.plain,
        versions=versions(),
        host=_on_host(resolved),
        environment=loaded.environment,
        started_in=str(Path.cwd()),
        num_trained=trained,
        num_parameters=total,
    )
    return Planned(plan, resolved.case.facts.rows_of(plan.settings))


def _parameters(settings: Settings, facts: PlannerInputs) -> tuple[int, int]:
    """(trained parameters, all of them) of the model."""
    total = facts.shape.num_parameters
    if settings.adapter is None:
        return total, total
    trained = sum(count for count, _ in trained_parts(settings, facts.shape))
    return trained, total + trained


def _on_host(resolved: Resolved) -> tuple[Owned, ...]:
    """Owners of the host's memory in its highest phase, the largest first."""
    owners = host_need(replace(resolved.chosen, settings=resolved.settings), resolved.case.facts)
    ordered = sorted(owners.items(), key=lambda item: -item[1])
    return tuple(Owned(owner=name, num_bytes=size) for name, size in ordered if size)


def run_folder_of(loaded: LoadedRecipe, asked: str | None) -> str:
    """The folder of a run: the given folder, the recipe's, or a folder of the recipe's name."""
    return asked or loaded.recipe.run_dir or str(Path("runs") / loaded.path.stem)


def facts_of(
    recipe: Recipe,
    data: PreparedData,
    config: Mapping[str, Any],
    hardware: Hardware,
    presumed: frozenset[str] = frozenset(),
) -> PlannerInputs:
    """The resolver's inputs from tokenized data, a model and devices."""
    shared = sequences_of(recipe, data, shares_prompts=True)
    has_apart = recipe.method in HAS_ANSWERS or recipe.online is not None
    unshared = sequences_of(recipe, data, shares_prompts=False) if has_apart else None
    shape = shape_for(config, recipe.model.path or "model.config", METHODS[recipe.method].head)
    return PlannerInputs(
        hardware=hardware,
        shape=shape,
        config=config,
        profile=shared.profile,
        count_steps=_counter(recipe, shared),
        method=recipe.method,
        learns_entropy=recipe.learns_entropy,
        mixes_answers=recipe.mixes_answers,
        mixed=_mixed(shared, unshared),
        unshared=None if unshared is None else (unshared.profile, _counter(recipe, unshared)),
        held_out=(shared.held_out, None if unshared is None else unshared.held_out),
        rewards=reward_shapes(recipe, config),
        taught=recipe.taught,
        teacher=teacher_shape(recipe),
        written_prompt=longest_written_prompt(recipe, data),
        num_written=num_written(recipe, data),
        presumed=presumed,
        measure_layers=layer_measurer(config, shape),
        at_length=lambda length: facts_of(
            with_key(recipe, "length.max_length", length), data, config, hardware, presumed
        ),
    )


def _mixed(shared: LaidEpochs, unshared: LaidEpochs | None) -> Callable[[Settings], MixedRows] | None:
    """The heaviest micro-batch of held-out prompts with the answers of others; None where none is read."""
    if unshared is None or shared.mixed is None or unshared.mixed is None:
        return None
    together, apart = shared.mixed, unshared.mixed
    return lambda settings: (together if settings.shared_prompts else apart).heaviest(settings)


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    packages = ("torch", "transformers", "accelerate", "peft")
    return {
        "memtrain": memtrain.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _counter(recipe: Recipe, sequences: LaidEpochs) -> Callable[[int | None, int | None, float], int]:
    def count(rows: int | None, tokens: int | None, epochs: float) -> int:
        updates = recipe.online.updates_per_rollout if recipe.online is not None else 1
        return updates * count_steps(
            sequences.tokens,
            BatchSize(rows, tokens),
            epochs=epochs,
            seed=recipe.train.seed,
            shuffle=recipe.train.shuffle,
            group_by_length=recipe.length.group_by_length,
            epoch_ptr=sequences.epoch_ptr,
        )

    return count
