"""The answer of `memtrain plan`: a recipe resolved for a machine, with all that can be reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from memtrain.cli.plan.lookup import (
    LookedAt,
    budget_words,
    card_words,
    facts_without_data,
    look_at_devices,
    look_at_model,
)
from memtrain.memory.estimate.host_memory import on_disk
from memtrain.memory.estimate.host_phases import PINNED, STEPS, highest
from memtrain.memory.estimate.pricing import (
    MARGIN_BYTES,
    MARGIN_SHARE,
    PlannerInputs,
    Priced,
    heaviest,
    may_accumulate,
    phases_on_host,
)
from memtrain.memory.estimate.static import needed, overhead
from memtrain.memory.explain.own_layers import activations_words
from memtrain.memory.explain.reasons import gains, left_out
from memtrain.memory.generation.rollout_time import RolloutTime, rollout_time
from memtrain.memory.generation.vllm import longest_read, own_engine
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.hardware.packages import assumed_words
from memtrain.memory.hardware.peak_history import read_history
from memtrain.memory.model_shape.shape import NO_RUN
from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.length_profile import LengthReport
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.planner.engine_ranking import RankedEngine, rank_engines
from memtrain.memory.planner.pinned_recipe import pins
from memtrain.memory.planner.resolve import Resolved, resolve, resolved_if_it_fits
from memtrain.memory.planner.search import frontier, price_all
from memtrain.memory.planner.use_and_never import with_use_and_never
from memtrain.memory.rules.assumed_lengths import PROMPT, assumed_length
from memtrain.memory.rules.attention import PACKAGE_OF
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.recipe import HAS_ANSWERS
from memtrain.trainers.tools.trace.client import RewardModelJob, Traced, reward_model_jobs, uses_liger

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Question:
    """Inputs of a plan: recipe, model, hardware."""

    loaded: LoadedRecipe
    asked: SourcedRecipe
    looked: LookedAt
    hardware: Hardware
    presumed: frozenset[str]
    notes: tuple[str, ...]
    """Remarks about the assumptions of the plan."""


@dataclass(frozen=True)
class Answer:
    """A plan, and the question."""

    question: Question
    facts: PlannerInputs
    resolved: Resolved
    notes: tuple[str, ...] = field(default=())

    @property
    def chosen(self) -> Priced:
        """The plan's memory and time."""
        return self.resolved.chosen

    @property
    def fits(self) -> bool | None:
        """Whether the run fits: a plan is made of what does; None where its numbers are known to be low."""
        return None if self.resolved.case.facts.shape.is_floor else True

    @property
    def report(self) -> LengthReport | None:
        """Report of truncation and packing; None where the data was not read."""
        facts = self.resolved.case.facts
        return None if facts.is_guessed else facts.rows_of(self.resolved.settings).report

    @property
    def need_bytes(self) -> int:
        """Of each device, without the margin."""
        return needed(self.resolved.prediction.corrected_bytes, self.resolved.settings)

    @property
    def need_parts(self) -> dict[str, int]:
        """Bytes of the need, part by part: live tensors, and what each device has beside them."""
        live, corrected = self.resolved.prediction.peak.num_bytes, self.resolved.prediction.corrected_bytes
        extra = overhead(self.resolved.settings)
        return {
            "live": live,
            "correction": corrected - live,
            "allocator": round(corrected * extra.slack),
            "context": extra.fixed,
            "margin": max(0, self.chosen.need_bytes - self.need_bytes),
        }

    @cached_property
    def frontier(self) -> list[Priced]:
        """The best plan of each size, fitting or not, among the ranked plans."""
        return frontier(self.resolved.tried)

    @cached_property
    def engines(self) -> tuple[RankedEngine, ...]:
        """Need of each engine."""
        resolved = self.resolved
        budget = resolved.prediction.budget_bytes or 0
        return rank_engines(resolved.chosen, everything(self), budget, resolved.case)

    @cached_property
    def rollout(self) -> RolloutTime | None:
        """Time of a step's completions; None of a method that writes none."""
        recipe = self.resolved.case.recipe
        if not recipe.writes_completions:
            return None
        found = rollout_time(self.resolved.settings, self.resolved.case.facts, recipe.generation)
        share = 1.0 if recipe.taught is None else recipe.taught.on_policy_fraction
        return RolloutTime(*(share * one for one in found))

    @property
    def step_s(self) -> float:
        """Of a whole step, with its share of a rollout."""
        return self.chosen.step_s + (self.rollout.seconds if self.rollout is not None else 0.0)

    @property
    def tokens_per_s(self) -> float:
        """Of all processes together."""
        return self.speed(self.chosen)

    def speed(self, one: Priced) -> float:
        """Tokens a second of all processes under a plan of this run: with its completions, which every plan
        is taken to write as fast as the chosen one."""
        rollout_s = 0.0 if self.rollout is None else self.rollout.seconds
        return one.settings.num_processes * one.step_s / one.token_s / (one.step_s + rollout_s)


def ask(
    loaded: LoadedRecipe,
    gpu: str | None,
    num_gpus: int | None,
    budget: int | None,
    host_bytes: int | None = None,
) -> Question:
    """The recipe, its model and the devices, looked at without torch.

    Raises: RecipeError and LaunchError with what cannot be planned.
    """
    asked = with_use_and_never(SourcedRecipe(loaded.recipe, loaded.where))
    recipe = asked.recipe
    asked_for = recipe.cluster.processes
    if gpu is not None and num_gpus is None and isinstance(asked_for, int) and recipe.cluster.slurm is None:
        num_gpus = asked_for
    hardware, presumed = look_at_devices(gpu, num_gpus, budget, recipe.cluster.device)
    if host_bytes is not None:
        hardware = replace(hardware, host_bytes=host_bytes)
    looked = look_at_model(recipe.model)
    notes = [looked.note] if looked.note else []
    where = asked.where("cluster.device")
    if card := card_words(hardware, gpu, budget, recipe.cluster.device, where):
        notes.append(card)
    if capped := budget_words(recipe.memory.budget, hardware, asked.where("memory.budget")):
        notes.append(capped)
    shape_note = facts_note(looked, recipe.model.path)
    if NO_RUN in shape_note:
        notes.insert(0, shape_note)
    elif shape_note:
        notes.append(shape_note)
    return Question(loaded, asked, looked, hardware, presumed, tuple(notes))


def facts_note(looked: LookedAt, path: str | None) -> str:
    """Remark about an uncertain shape."""
    from memtrain.cli.plan.model_shape import shape_for

    note = shape_for(looked.config, path or "model.config").note
    return f"{note[0].upper()}{note[1:]}." if note else ""


def facts_of_question(
    question: Question, *, reads_data: bool, progress: Progress | None
) -> tuple[PlannerInputs, str]:
    """(facts, a note). The data is tokenized, or found in the cache, unless it is not to be read or the
    model is not here.

    Raises: DataError when the data cannot be used as declared.
    """
    recipe = question.asked.recipe
    if not reads_data or question.looked.is_on_hub_only:
        why = "its tokenizer cannot be loaded" if reads_data else "--without-data"
        facts = facts_without_data(question.asked, question.looked, question.hardware, question.presumed)
        kind = "answer" if recipe.method in HAS_ANSWERS else "sequence"
        length = f"{assumed_length(recipe):,} tokens"
        if recipe.length.max_length is None and recipe.length.max_prompt is None:
            length += f", {PROMPT} of them of its prompt (length.max_prompt sets another number)"
        return facts, f"The data was not read ({why}): every {kind} is assumed to have {length}."
    from memtrain.cli.plan.make_plan import facts_of
    from memtrain.cli.plan.recipe_lines import at_their_lines
    from memtrain.trainers.data.store.prepare import prepare

    with at_their_lines(question.loaded):
        data = prepare(recipe, progress=progress)
    facts = facts_of(recipe, data, question.looked.config, question.hardware, question.presumed)
    return facts, " ".join(data.words())


def answer(
    question: Question, facts: PlannerInputs, note: str = "", *, seeks_ways_out: bool = True
) -> Answer:
    """The plan.

    Raises: RecipeError and DoesNotFit; without ways out NoPlan, at once, where none was looked for.
    """
    notes = (*question.notes, note) if note else question.notes
    facts = replace(facts, history=read_history())
    resolved = (resolve if seeks_ways_out else resolved_if_it_fits)(question.asked, facts)
    words = activations_words(resolved.case.facts.shape), assumed_words(_used(resolved) & question.presumed)
    return Answer(question, facts, resolved, (*notes, *(one for one in words if one)))


def _used(resolved: Resolved) -> frozenset[str]:
    """Optional packages that a plan computes with, by module."""
    settings = resolved.settings
    used = {
        PACKAGE_OF.get(settings.attention, ""): True,
        "liger_kernel": uses_liger(settings),
        "bitsandbytes": settings.quantize != "none" or OPTIMIZERS[settings.optimizer].is_bitsandbytes,
        "deepspeed": uses_zero(settings),
        "vllm": own_engine(resolved.case.recipe) is not None,
    }
    return frozenset(name for name, is_used in used.items() if is_used)


def everything(made: Answer) -> list[Priced]:
    """Every plan that is left open, those beyond the chosen group too."""
    from memtrain.memory.planner.resolve import open_space

    _, case, choices = open_space(made.question.asked, made.facts)
    tried = dict.fromkeys(one.settings for one in made.resolved.tried)
    rest = [one for group in choices.groups for one in group if one not in tried]
    return [*made.resolved.tried, *price_all(rest, case.facts)]


MOST_TRACED_LAYERS = 12
"""Layers up to which a trace goes through all of them: some 0.5 s of processor time for each, and as much for
each slice of a row that is traced. The peaks of two shallow models stand for more, in under 15 s."""


def trace_answer(made: Answer, *, is_whole: bool | None = None) -> tuple[Traced | None, str]:
    """(result of a trace of the run's own step, reason of its absence).

    `is_whole`: every layer is traced, and the allocator replayed; None: where that takes seconds.
    """
    from memtrain.errors import LaunchError
    from memtrain.trainers.tools.trace.client import can_trace, job_of, traced

    resolved = made.resolved
    recipe, settings = resolved.case.recipe, resolved.settings
    why_not = can_trace(recipe, settings)
    if why_not is not None:
        return None, why_not
    batch = heaviest(settings, resolved.case.facts)
    passes = passes_batch(resolved)
    if is_whole is None:
        passed = resolved.case.facts.shape.num_layers * _num_slices(settings, batch)
        is_whole = settings.device == "cuda" and passed <= MOST_TRACED_LAYERS
    job = job_of(
        recipe,
        settings,
        made.question.looked.config,
        batch,
        accumulates=may_accumulate(settings, resolved.case.facts),
        is_whole=is_whole,
        passes=passes,
        judges=judges_of(resolved),
        teacher=None if resolved.case.facts.teacher is None else resolved.case.facts.teacher.config,
    )
    try:
        return traced(job), ""
    except LaunchError as error:
        return None, error.faults[0].what


def _num_slices(settings: Settings, batch: HeaviestBatch) -> int:
    """Slices of a row that a trace goes through, at most four; 1 for a row in one piece."""
    return min(4, -(-batch.tokens // settings.slice_tokens)) if settings.slice_tokens else 1


def traced_need(made: Answer, reserved_bytes: int) -> int:
    """Bytes of the device for memory that the allocator reserves: with the device's own, and the margin."""
    beside = overhead(made.resolved.settings).fixed
    return round((reserved_bytes + beside) * (1 + MARGIN_SHARE)) + MARGIN_BYTES


def figures_words(hardware: Hardware) -> str:
    """Origin of the device's rates and overheads."""
    measured = hardware.measured
    return "typical" if measured is None else f"measured here on {measured.made}"


def passes_batch(resolved: Resolved) -> HeaviestBatch | None:
    """The heaviest micro-batch of answers that are read before they are trained on; None where none are."""
    if not any(phase.phase == "log-probs" for phase in resolved.prediction.phases):
        return None
    settings, factor = resolved.settings, resolved.settings.pass_factor
    tokens = None if settings.micro_tokens is None else factor * settings.micro_tokens
    larger = settings.model_copy(
        update={"micro_batch_size": factor * settings.micro_batch_size, "micro_tokens": tokens}
    )
    return heaviest(larger, resolved.case.facts)


def judges_of(resolved: Resolved) -> tuple[RewardModelJob, ...]:
    """The reward models beside the policy, with the most that each reads at once."""
    facts, recipe = resolved.case.facts, resolved.case.recipe
    if not facts.rewards:
        return ()
    return reward_model_jobs(
        facts.rewards, longest_read(facts, recipe.generation) + recipe.generation.max_tokens
    )


def host_json(made: Answer) -> dict[str, Any]:
    """The host's memory: what there is, the owners of each phase, which of them is pinned, and the disk."""
    settings, facts = made.resolved.settings, made.resolved.case.facts
    phases = phases_on_host(replace(made.chosen, settings=settings), facts)
    # What a driver pages is not locked.
    is_paged = OPTIMIZERS[settings.optimizer].is_paged
    pinned = [name for name in PINNED if not (is_paged and name == "optimizer states")]
    return {
        "memory_bytes": facts.hardware.host_bytes * facts.hardware.num_nodes,
        "need_bytes": sum(highest(phases)[1].values()),
        "highest_phase": highest(phases)[0],
        "phases": {name: dict(owners) for name, owners in phases.items()},
        "pinned": [name for name in pinned if settings.device == "cuda" and phases[STEPS].get(name)],
        "disk_bytes": on_disk(settings, facts.shape, heaviest(settings, facts)),
    }


def as_json(made: Answer, traced: Traced | None, why_not: str) -> dict[str, Any]:
    """All of it as JSON values; memory in bytes, time in seconds."""
    resolved, hardware = made.resolved, made.question.hardware
    reserved = None if traced is None else traced.reserved_bytes
    return {
        "recipe": str(made.question.loaded.path),
        "device": {
            "name": hardware.name,
            "memory_bytes": hardware.memory_bytes,
            "count": hardware.num_devices,
            "figures": figures_words(hardware),
        },
        "fits": made.fits,
        "without_margin_bytes": made.need_bytes,
        "need_bytes": made.chosen.need_bytes,
        "need_parts": made.need_parts,
        "budget_bytes": resolved.prediction.budget_bytes,
        "host": host_json(made),
        "step_s": made.step_s,
        "host_share": made.chosen.host_share,
        "rollout_s": None if made.rollout is None else made.rollout.seconds,
        "tokens_per_s": made.tokens_per_s,
        "settings": resolved.settings.model_dump(mode="json"),
        "decisions": [one.model_dump(mode="json") for one in resolved.decisions],
        "prediction": resolved.prediction.model_dump(mode="json"),
        "plain": resolved.plain.model_dump(mode="json"),
        "gains": [
            {
                "strategy": one.strategy,
                "peak_bytes_without": one.peak_bytes,
                "need_bytes_without": one.need_bytes,
                "time_without": one.time_share,
            }
            for one in gains(made.chosen, resolved.case.facts)
        ],
        "left_out": {one.strategy: one.reason for one in left_out(made.chosen, resolved.case)},
        "engines": [
            {
                "engine": one.name,
                "need_bytes": None if one.best is None else one.best.need_bytes,
                "step_s": None if one.best is None else one.best.step_s,
                "why": one.words,
            }
            for one in made.engines
        ],
        "frontier": [
            {
                "need_bytes": one.need_bytes,
                "tokens_per_s": made.speed(one),
                "pins": pins(resolved.case.asked, one.settings),
            }
            for one in made.frontier
        ],
        "pins": pins(resolved.case.asked, resolved.settings),
        "notes": list(made.notes),
        "data_was_read": not resolved.case.facts.is_guessed,
        "traced": None if traced is None else traced.model_dump(mode="json"),
        "traced_need_bytes": None if reserved is None else traced_need(made, reserved),
        "not_traced": why_not or None,
    }
