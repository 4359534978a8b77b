"""A run that goes on keeps the plan of its newest checkpoint while that still fits, and says if it cannot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue, ValidationError

from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs, need_of, predict
from memtrain.memory.generation.vllm import training_budget
from memtrain.memory.plan.plan import PLAN_FILE, Decision
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import gib
from memtrain.memory.planner.pinned_recipe import kept_pins
from memtrain.memory.planner.resolve import Resolved, resolve
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.edit import with_key
from memtrain.recipes.reading.environment import EnvironmentText, revealed
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.run_folder.folder import RunFolder

RESTS_ON = (
    "cluster.context_parallel",
    "cluster.context_parallel_mode",
    "cluster.device",
    "cluster.engine",
    "cluster.cpu_offload",
    "cluster.processes",
    "cluster.slurm.gpus_per_node",
    "cluster.slurm.nodes",
    "cluster.threads",
    "generate.backend",
    "generate.cuda_graphs",
    "generate.gather_weights",
    "generate.rows",
    "generate.vllm",
    "length",
    "memory.activation_checkpointing",
    "memory.activation_offloading",
    "memory.allow",
    "memory.checkpoint_every",
    "memory.loss",
    "memory.loss_chunk_size",
    "memory.never",
    "memory.offload_keep",
    "memory.optimizer_offload",
    "memory.slice_tokens",
    "memory.streamed_layers",
    "memory.use",
    "memory.weights_offload",
    "model",
    "optim.in_backward",
    "train.batch_size",
    "train.batch_tokens",
    "train.cuda_graphs",
    "train.micro_batch_size",
    "train.micro_tokens",
)
"""Recipe keys, or sections, that a plan follows from. A budget is none of them: a plan is held against it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """State of a started run that is to go on."""

    step: int
    """Of its newest checkpoint."""
    recipe: Mapping[str, JsonValue]
    settings: Mapping[str, JsonValue]


def begun_in(folder: Path, environment: Sequence[EnvironmentText] = ()) -> Begun | None:
    """The run that a folder holds checkpoints of; None where it holds none that can be read.

    `environment`: texts of the recipe that goes on; a saved one with the same digest is the same text.
    """
    from memtrain.trainers.checkpoints.run_state import newest_facts

    facts = newest_facts(RunFolder(folder))
    if facts is None:
        return None
    return Begun(facts.step, revealed(facts.recipe, environment, with_digest=True), facts.settings)


ALL_TURNS = "data.assistant_only_loss"
"""The key whose default was false: plans of that time say so, and their runs go on with it."""


def at_its_turns(recipe: Recipe, folder: Path, begun: Begun | None) -> Recipe:
    """The recipe of a run that goes on; where it leaves open which turns are trained on, and the run trains
    on all of them, so does its rest. `begun`: None where no checkpoint was written."""
    if recipe.data.assistant_only_loss is not None:
        return recipe
    saved = begun.recipe if begun is not None else _planned(folder)
    data = saved.get("data")
    is_all = isinstance(data, dict) and data.get("assistant_only_loss") is False
    return with_key(recipe, ALL_TURNS, False) if is_all else recipe


def _planned(folder: Path) -> Mapping[str, JsonValue]:
    """The recipe in the plan of a run folder, as it stands there; empty where it cannot be read."""
    try:
        plan = json.loads((folder / PLAN_FILE).read_bytes())
        recipe = plan["recipe"]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def turns_decision(source: str) -> Decision:
    """The decision of a run that goes on with all turns."""
    why = (
        f"as the run began ({ALL_TURNS}: false); new runs train on the assistant's turns of conversations by "
        "default, and so does this recipe with --no-resume"
    )
    return Decision(setting="trained turns", value="all", reason=why, source=source)


def resolve_again(asked: SourcedRecipe, facts: PlannerInputs, begun: Begun) -> Resolved:
    """The plan of a run that goes on: its own one, or another where that cannot be kept; told in a decision.

    Its own: every choice that the recipe leaves open is what it was, whatever is free now, measured since or
    counted on this machine, so that the numbers stay the same to the last bit.

    Raises: RecipeError and DoesNotFit, as `resolve` does for a run that begins.
    """
    settings = _read(begun.settings)
    if settings is None:
        why = "the checkpoint's settings are of another version of memtrain, unknown to this one"
        return _with_decision(resolve(asked, facts), "new", why, begun)
    asked, facts = _at_its_length(asked, facts, settings)
    moved = _moved(asked, begun)
    if moved:
        return _with_decision(resolve(asked, facts), "new", f"changed in the recipe: {moved}", begun)
    try:
        made = resolve(kept_pins(asked, settings), _with_room(facts, settings))
    except (DoesNotFit, RecipeError) as fault:
        new = resolve(asked, facts)
        why = f"{_why_not(fault, asked, facts, settings)}; the new plan needs {_need(new)}"
        return _with_decision(new, "new", why, begun)
    made = replace(
        made, case=replace(made.case, asked=asked), settings=_same_sampler(made.settings, settings)
    )
    budget = gib(made.prediction.budget_bytes or 0)
    why = f"the plan of the checkpoint; it needs {_need(made)} of {budget}{_beside(facts, settings)}"
    return _with_decision(made, "kept", why, begun)


def _read(saved: Mapping[str, JsonValue]) -> Settings | None:
    """The settings of a checkpoint; None for a checkpoint of a version with other settings."""
    known = {name: value for name, value in saved.items() if name in Settings.model_fields}
    try:
        return Settings.model_validate_json(json.dumps(known))
    except ValidationError:
        return None


def _at_its_length(
    asked: SourcedRecipe, facts: PlannerInputs, settings: Settings
) -> tuple[SourcedRecipe, PlannerInputs]:
    """The recipe with rows as short as the run made them (`memory.allow: [shorter_sequences]`)."""
    memory, length = asked.recipe.memory, asked.recipe.length
    is_shorter = settings.max_length is not None and settings.max_length != length.max_length
    if "shorter_sequences" not in memory.allow or not is_shorter or facts.at_length is None:
        return asked, facts
    allow = tuple(name for name in memory.allow if name != "shorter_sequences")
    recipe = asked.recipe.model_copy(
        update={
            "memory": memory.model_copy(update={"allow": allow}),
            "length": length.model_copy(update={"max_length": settings.max_length}),
        }
    )
    shorter = replace(facts.at_length(settings.max_length or 0), history=facts.history)
    return SourcedRecipe(recipe, asked.where), shorter


def _moved(asked: SourcedRecipe, begun: Begun) -> str:
    """The keys under a plan that the recipe says otherwise now, in words; empty where there are none."""
    from memtrain.trainers.checkpoints.resume import differences, is_below, sentence, with_defaults

    moved = differences(with_defaults(begun.recipe), asked.recipe.model_dump(mode="json"))
    return ", ".join(sentence(one) for one in moved if is_below(one.key, RESTS_ON))


def _with_room(facts: PlannerInputs, settings: Settings) -> PlannerInputs:
    """A CPU with fewer cores than the run has processes still runs them, only slower."""
    hardware = facts.hardware
    if hardware.device != "cpu":
        return facts
    cores = max(hardware.num_cores, -(-settings.num_processes // hardware.num_nodes))
    return replace(facts, hardware=replace(hardware, num_cores=cores))


def _same_sampler(made: Settings, settings: Settings) -> Settings:
    """vLLM with the memory that it had, where there is as much now."""
    if made.sampler != "vllm" or made.sampler_bytes < settings.sampler_bytes:
        return made
    kept = {name: getattr(settings, name) for name in ("sampler_bytes", "sampler_keys_bytes")}
    return made.model_copy(update=kept)


def _beside(facts: PlannerInputs, settings: Settings) -> str:
    """Devices or cores of this machine beyond, or short of, the plan's."""
    hardware = facts.hardware
    cores, devices = hardware.num_nodes * hardware.num_cores, hardware.num_nodes * hardware.num_devices
    if hardware.device == "cuda" and devices > settings.num_processes:
        return f"; {devices} devices are here: a higher cluster.processes uses more of them"
    wanted = settings.threads * settings.num_processes
    if hardware.device == "cpu" and wanted > cores:
        return f"; {wanted} threads on {cores} core{'s' if cores > 1 else ''}: slower, the same numbers"
    return ""


def _why_not(
    fault: DoesNotFit | RecipeError, asked: SourcedRecipe, facts: PlannerInputs, settings: Settings
) -> str:
    """The reason why the earlier plan cannot be kept, with its need where memory is the reason."""
    if isinstance(fault, DoesNotFit):
        need = need_of(predict(settings, facts), settings)
        budget = training_budget(asked.recipe, facts, settings)
        if need > budget:
            return f"the earlier plan needs {gib(need)} (margin included), and the budget is {gib(budget)}"
    return f"the earlier plan cannot be kept: {fault.faults[0].what}"


def _need(made: Resolved) -> str:
    return f"{gib(made.chosen.need_bytes)} (margin included)"


def _with_decision(made: Resolved, value: str, why: str, begun: Begun) -> Resolved:
    source = f"checkpoint of step {begun.step}"
    decision = Decision(setting="plan", value=value, reason=why, source=source)
    return replace(made, decisions=(decision, *made.decisions))
