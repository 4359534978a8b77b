"""The variants of a benchmark: from the plain run to the plan, a strategy at a time, or each left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memtrain.memory.estimate.pricing import PlannerInputs, head_output_of, predict, price
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.plan import Plan, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import StrategyGroup
from memtrain.memory.strategies.exclusions import excluded
from memtrain.memory.strategies.registry import STRATEGIES, used_in


@dataclass(frozen=True, slots=True)
class Stage:
    """Settings that change together: the plain run's in place of some strategies'."""

    name: str
    members: StrategyGroup | tuple[str, ...]
    """The strategies: a group, or their names."""
    unnamed: tuple[str, ...] = ()
    """Settings that belong to no strategy."""
    with_it: tuple[str, ...] = ()
    """Stages that cannot be without this one."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the settings, without the ones of stages that depend on this stage."""
        others = {field for stage in STAGES if stage.name in self.with_it for field in stage.fields}
        own = (
            field
            for one in STRATEGIES.values()
            if one.axis == self.members or one.name in self.members
            for field in one.plain
        )
        return tuple(dict.fromkeys(field for field in (*self.unnamed, *own) if field not in others))


STAGES = (
    Stage("padding-free rows", "rows", ("attention", "pad_to_multiple_of"), ("shared prompts",)),
    Stage("shared prompts", "prompts"),
    Stage("the reference", "reference"),
    Stage("Liger's kernels", (), ("liger",)),
    Stage("fused kernels", (), ("kernels",)),
    Stage("compiled layers", (), ("compiled",)),
    Stage("the loss", "loss"),
    Stage("the loss's kernel", (), ("loss_kernel",)),
    Stage("checkpointing", "checkpointing", with_it=("offloading", "weights on the host")),
    Stage("offloading", "offloading"),
    Stage("float32 copies", "copies"),
    Stage("optimizer states on the host", "states"),
    Stage("steps in the backward pass", "backward"),
    Stage("weights on the host", ("weights_offload",)),
)
"""Order in which the waterfall goes down: the cheapest first."""


TIMED = ("log-probs", "first step", "steady step")
"""Phases that a benchmark goes through."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan to measure, with its prediction."""

    name: str
    plan: Plan
    strategies: tuple[str, ...]
    predicted_bytes: int
    predicted_step_s: float
    off_plan: PlannerInputs | None = None
    """Of padded rows in micro-batches by tokens, or of packed rows: no plan makes those, it lays them end to
    end. The peak is then predicted for the micro-batch that was measured."""


def waterfall(plan: Plan, bare: Plan, facts: PlannerInputs) -> list[Variant]:
    """From the plain run `bare` to `plan`, one stage at a time; stages that change nothing are left out."""
    made = [variant("plain", bare, facts)]
    settings = bare.settings
    for stage in STAGES:
        changed = _taken(settings, plan.settings, stage.fields)
        if changed != settings:
            settings = changed
            made.append(variant(f"+ {_words(made[-1], settings, stage)}", _with(plan, settings), facts))
    if settings != plan.settings:
        made.append(variant("+ the rest of the plan", plan, facts))
    return made


def ablations(plan: Plan, bare: Plan, facts: PlannerInputs) -> list[Variant]:
    """`plan` without each of its stages, where the rest can be without it."""
    made: list[Variant] = []
    for stage in STAGES:
        also = [other for other in STAGES if other.name in stage.with_it]
        fields = (*stage.fields, *(name for other in also for name in other.fields))
        settings = _taken(plan.settings, bare.settings, fields)
        needs_flat = plan.settings.packing != "none" and not settings.padding_free
        if settings != plan.settings and (needs_flat or excluded(settings) is None):
            gone = [one.name for one in used_in(plan.settings) if not one.is_used(settings)]
            made.append(variant(f"without {', '.join(gone) or stage.name}", _with(plan, settings), facts))
    return made


def variant(name: str, plan: Plan, facts: PlannerInputs) -> Variant:
    """A plan with its predictions."""
    settings = plan.settings
    is_off_plan = not settings.padding_free and (
        settings.packing != "none" or settings.micro_tokens is not None
    )
    priced = price(settings, facts)
    return Variant(
        name,
        plan,
        tuple(one.name for one in used_in(settings)),
        peak_of_steps(priced.prediction),
        priced.step_s,
        facts if is_off_plan else None,
    )


def predicted_of(one: Variant, heaviest: tuple[int, int, int, int]) -> int:
    """Bytes predicted of a variant, given (rows, tokens, loss tokens, longest row) of the measured batch."""
    if one.off_plan is None:
        return one.predicted_bytes
    batch = HeaviestBatch(
        *heaviest, head_output_of(one.off_plan.method, learns_entropy=one.off_plan.learns_entropy)
    )
    return peak_of_steps(predict(one.plan.settings, one.off_plan, batch))


def peak_of_steps(prediction: Prediction) -> int:
    """Bytes of the heaviest step and the passes before it; a benchmark evaluates and writes nothing."""
    return max(one.num_bytes for one in prediction.phases if one.phase in TIMED)


def _words(before: Variant, settings: Settings, stage: Stage) -> str:
    """The strategies that a stage switches on, or its own name."""
    is_new: Callable[[str], bool] = lambda name: name not in before.strategies  # noqa: E731
    return ", ".join(one.name for one in used_in(settings) if is_new(one.name)) or stage.name


def _taken(settings: Settings, other: Settings, fields: tuple[str, ...]) -> Settings:
    """Settings with some fields of others."""
    return settings.model_copy(update={name: getattr(other, name) for name in fields})


def _with(plan: Plan, settings: Settings) -> Plan:
    return plan.model_copy(update={"settings": settings})
