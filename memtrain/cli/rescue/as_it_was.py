"""The plan of a run as another tool computes it: its settings priced, whether they fit or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memtrain.cli.plan.lookup import LookedAt, facts_without_data, look_at_model
from memtrain.cli.rescue.evaluation import evaluated
from memtrain.cli.rescue.model import looked_at
from memtrain.cli.rescue.value_head import with_value_head
from memtrain.cli.rescue.vllm_share import Beside, beside_vllm
from memtrain.errors import RecipeError
from memtrain.memory.estimate.peaks import step_moments, total
from memtrain.memory.estimate.pricing import PlannerInputs, Priced, heaviest, may_accumulate, price
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.hardware.packages import ELSEWHERE
from memtrain.memory.plan.engine_kinds import ZERO
from memtrain.memory.plan.heaviest_batch import TRANSFORMERS
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.plan import Owned, PhasePeak
from memtrain.memory.planner.resolve import open_space
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.edit import with_key
from memtrain.recipes.importers.importing import Foreign, Imported, import_config
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Model

PROMPT = 512
"""Default tokens of a prompt of the online methods: the default cut of TRL and verl."""


@dataclass(frozen=True, slots=True)
class AsItWas:
    """A run of another tool, and its needs."""

    imported: Imported
    recipe: Recipe
    """The imported recipe, with a length."""
    priced: Priced
    facts: PlannerInputs
    notes: tuple[str, ...]
    beside: Beside
    """vLLM on the same cards."""

    @property
    def need_bytes(self) -> int:
        """Most that the run needs of a card, vLLM's share included."""
        return self.beside.together_bytes


_NEAREST = {"zero1": ("zero1", "ddp"), "zero2": ("zero2", "ddp"), "ddp": ("ddp",)}
"""Engines that a run is planned as, the first that memtrain has: one that cuts weights never stands for one
that keeps them whole."""


def as_it_was(
    foreign: Foreign,
    hardware: Hardware,
    budget: int,
    max_length: int | None,
    pins: Mapping[str, object] | None = None,
) -> AsItWas:
    """The run of a configuration on some devices. `pins`: what else was otherwise.

    Raises: RecipeError with what the configuration lacks; LaunchError for a model that is nowhere.
    """
    imported = import_config(foreign, has_stand_ins=True)
    recipe, notes = with_a_length(imported.whole(), max_length)
    facts = replace(facts_of(recipe, hardware), foreign=TRANSFORMERS)
    taken = looked_at(recipe.model.path, recipe.model.revision)[1] if recipe.model.path else ""
    notes = tuple(one for one in (taken, *notes, _precision_doubt(foreign, recipe)) if one)
    keys = {**imported.pins, **(pins or {}), "memory.budget": budget}
    if foreign.grows_segments:
        keys["memory.expandable_segments"] = True
    engine = str(keys["cluster.engine"])
    for nearest in _NEAREST.get(engine, (engine, "fsdp2", "ddp")):
        there = {"cluster.engine": nearest}
        if nearest == "ddp":
            # Whole weights on every device: no shard could wait on the host.
            there["cluster.cpu_offload"] = "none"
        try:
            priced, facts = priced_with(recipe, keys | there, facts)
        except RecipeError:
            if nearest == "ddp":
                raise
            continue
        if nearest != engine:
            notes = (*notes, f"Planned as {nearest}: memtrain has no {engine} for such a run.")
        if recipe.online is None:
            priced = with_value_head(evaluated(priced, foreign, facts), foreign, facts)
        is_own = foreign.config.get("unsloth") is True
        beside = beside_vllm(recipe, priced, hardware, shares_weights=is_own)
        if beside.words():
            notes = (*notes, beside.words())
        return AsItWas(imported, recipe, priced, facts, notes, beside)
    raise AssertionError("One engine is always tried.")


def _precision_doubt(foreign: Foreign, recipe: Recipe) -> str:
    """The remark that frozen weights may have been in float32, where nothing says their precision."""
    is_theirs = foreign.tool.name == "trl" or foreign.is_plain_script
    is_said = any(re.search(r"dtype|model_init_kwargs", key) for key in foreign.config)
    if not is_theirs or is_said or recipe.model.adapter is None or recipe.model.quantize != "none":
        return ""
    return (
        "No dtype is written: TRL's default, and transformers' before version 5, holds the frozen weights in "
        "float32, twice what is planned (dtype: bfloat16 says it)."
    )


def priced_with(
    recipe: Recipe, keys: Mapping[str, object], facts: PlannerInputs
) -> tuple[Priced, PlannerInputs]:
    """(the settings that some keys leave, priced; the facts that they are priced by)."""
    for key, value in keys.items():
        if _is_of_method(recipe, key):
            recipe = _set(recipe, key, value)
    recipe, hardware, elsewhere = _settled_here(recipe, facts)
    facts = replace(facts, hardware=hardware)
    _, case, choices = open_space(SourcedRecipe(recipe, lambda key: "default"), facts)
    settled = [settings.model_copy(update=elsewhere) for settings in choices.groups[0]]
    priced = [price(settings, case.facts) for settings in settled]
    return min(priced, key=lambda one: one.step_s), case.facts


def _settled_here(recipe: Recipe, facts: PlannerInputs) -> tuple[Recipe, Hardware, dict[str, object]]:
    """(the recipe without settings that other tools have together and memtrain has not, the card that it is
    settled for, those settings)."""
    elsewhere: dict[str, object] = {}
    hardware = facts.hardware
    kind = recipe.optim.kind
    if OPTIMIZERS[kind].is_bitsandbytes and recipe.cluster.engine in (*ZERO, "fsdp2"):
        elsewhere["optimizer"] = kind
        recipe = with_key(recipe, "optim.kind", "adamw")
    if recipe.model.dtype == "float16" and recipe.cluster.engine in (*ZERO, "fsdp2"):
        # Half precision is half precision, and their losses are scaled over shards.
        elsewhere["dtype"] = "float16"
        recipe = with_key(recipe, "model.dtype", "bfloat16")
        hardware = replace(hardware, has_bfloat16=True, compute_capability=(8, 0))
    if recipe.model.attention == "masked" and recipe.length.padding_free is False:
        # Eager attention on padded rows.
        elsewhere["attention"] = "masked"
        recipe = with_key(recipe, "model.attention", "transformers")
    if recipe.model.attention == "flex":
        # Unsloth's, on padded rows: it keeps no scores where the model's own attention does.
        recipe = with_key(recipe, "model.attention", "transformers")
        if facts.shape.makes_scores:
            elsewhere["attention"] = "torch_varlen"
    is_old = hardware.compute_capability is not None and hardware.compute_capability < (8, 0)
    if recipe.model.attention == "torch_varlen" and is_old:
        # xformers' kernels, which keep as much.
        recipe = with_key(recipe, "model.attention", "torch_efficient")
    return recipe, hardware, elsewhere


def facts_of(recipe: Recipe, hardware: Hardware, presumed: frozenset[str] = ELSEWHERE) -> PlannerInputs:
    """The planner's inputs: rows as long as they may be. `presumed`: packages that the machine has."""
    looked = _look(recipe.model)
    asked = SourcedRecipe(recipe, lambda key: "default")
    return facts_without_data(asked, looked, hardware, presumed)


def _look(model: Model) -> LookedAt:
    if model.path is None:
        return look_at_model(model)
    return looked_at(model.path, model.revision)[0]


def with_a_length(recipe: Recipe, max_length: int | None) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with a longest row, and the notes on its source.

    Raises: RecipeError where the length of the rows is unknown.
    """
    if max_length is not None:
        return with_key(recipe, "length.max_length", max_length), ()
    if recipe.length.max_length is not None:
        return recipe, ()
    if recipe.online is None:
        raise RecipeError("the length of the rows is unknown", "length.max_length", "add --max-length 2048")
    prompt = recipe.length.max_prompt or PROMPT
    length = prompt + recipe.generation.max_tokens
    notes = () if recipe.length.max_prompt else (f"Prompts are assumed to have at most {PROMPT} tokens.",)
    return with_key(recipe, "length.max_length", length), notes


def _is_of_method(recipe: Recipe, key: str) -> bool:
    section = key.partition(".")[0]
    return section not in ("dpo", "kto", "grpo", "rloo") or section == recipe.method


def _set(recipe: Recipe, key: str, value: Any) -> Recipe:
    section, _, name = key.partition(".")
    if section == "generate" and name.startswith("vllm."):
        return recipe
    return with_key(recipe, key, value)


LOGITS, BACKWARD = ("logits",), ("logits", "recomputation", "gathered weights")


def died_in(was: AsItWas, moment: str | None) -> PhasePeak:
    """Owners at the moment of a traceback: of a step the heaviest such moment, else the phase's peak."""
    prediction, settings, facts = was.priced.prediction, was.priced.settings, was.facts
    phases = {phase.phase: phase for phase in prediction.phases}
    if moment in ("load", "saving", "evaluation"):
        return phases[moment]
    owned = {
        "loss": LOGITS,
        "reference's pass": ("reference's pass",),
        "backward pass": BACKWARD,
        "optimizer step": ("gradients",),
    }.get(moment or "", ())
    if not owned:
        return prediction.peak
    load = Workload(settings, facts.shape, heaviest(settings, facts))
    moments = step_moments(load, has_state=True, accumulates=may_accumulate(settings, facts))
    if moment == "optimizer step":
        moments = moments[-1:]
    there = [one for one in moments if any(one.get(name) for name in owned)]
    if not there:
        return prediction.peak
    found = max(there, key=total)
    owners = sorted(((name, size) for name, size in found.items() if size), key=lambda item: -item[1])
    return PhasePeak(
        phase=moment or "step",
        num_bytes=total(found),
        owners=tuple(Owned(owner=name, num_bytes=size) for name, size in owners),
    )


def changed(foreign: Foreign, keys: Mapping[str, object]) -> Foreign:
    """The configuration with some keys changed."""
    return replace(foreign, config={**foreign.config, **keys})
