"""A plan held against the plain run: the same steps twice, and the probes."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from memtrain.memory.model_shape.length_rules import length_rules, reached
from memtrain.memory.plan.plan import Plan
from memtrain.memory.strategies.registry import used_in
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.checkpoints.manifest import device_name
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from memtrain.trainers.protocols.feed import StepWork
from memtrain.trainers.tools.verify.alone import probe_alone
from memtrain.trainers.tools.verify.compare import STILL_LIMIT, Difference, StepDifferences, differences
from memtrain.trainers.tools.verify.contamination import probe_contamination
from memtrain.trainers.tools.verify.evidence import Ran as Watched
from memtrain.trainers.tools.verify.evidence import Watch, offloader_of, traces
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts
from memtrain.trainers.tools.verify.plans import (
    baseline_plan,
    built_side,
    deterministic,
    in_float32,
    on_one_process,
    same_pieces,
    take_state,
    whole_state,
)
from memtrain.trainers.tools.verify.record import Recorded, Side, trained_weights
from memtrain.trainers.tools.verify.result import Check, Ran, Verification
from memtrain.trainers.tools.verify.resume_check import probe_resume

Weights = dict[str, Tensor]
SEVERAL = ("log-probs", "gradients")
"""Checks whose names are plurals."""
LOW_BYTES = 512
"""Storages from this size on are offloaded here, so that small models have some. Taste."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both sides of a plan, built."""

    planned: Side
    plain: Side


@dataclass(frozen=True, slots=True)
class Compared:
    """Steps of both sides."""

    steps: list[StepDifferences]
    ran: Watched
    """In the first step, of the planned side."""
    plainly: Watched
    work: StepWork
    """Facts of the first step of the planned side."""


def verify(plan: Plan, *, steps: int = 2, notes: Sequence[str] = ()) -> Verification:
    """Make `steps` (2 or more) optimizer steps of `plan` and of its plain form, compare, and probe.

    Every step is compared from equal weights: the plain side takes the planned side's before each, and moves
    by the planned side's gradients, so that what an optimizer makes of a rounding error is not held against
    the next step.
    """
    assert steps >= 2, "A resumed run needs a second step."
    all_notes = [*notes]
    if plan.settings.num_processes > 1:
        all_notes.append(f"one process here, instead of {plan.settings.num_processes}")
    if plan.settings.compiled:
        all_notes.append("layers as they are written, instead of compiled: operators are watched one by one")
        plan = replace(plan, settings=plan.settings.model_copy(update={"compiled": False}))
    plan = on_one_process(plan, steps=steps)
    make_accelerator(plan.settings)
    rollouts = Rollouts()
    pair = build_pair(deterministic(plan), rollouts)
    found = compare_steps(pair, steps)
    checks = [_worst(name, [step.named() for step in found.steps]) for name in _names(found.steps)]
    checks += [
        _moves(found.steps),
        _contamination(pair, found.work),
        _alone(pair, found.work),
        _ran(pair, found),
    ]
    ran = _ran_of(found.ran, pair.planned), _ran_of(found.plainly, pair.plain)
    del pair
    gc.collect()
    checks.append(_resume(plan, rollouts))
    return Verification(
        is_exact=all(check.outcome != "fail" for check in checks),
        recipe=plan.recipe_path,
        method=plan.recipe.method,
        dtype=plan.settings.dtype,
        device=device_name(plan.settings.device),
        steps=steps,
        strategies=tuple(one.name for one in used_in(plan.settings)),
        checks=tuple(checks),
        gradients=_by_parameter(found.steps),
        planned=ran[0],
        plain=ran[1],
        notes=tuple(all_notes),
        versions=plan.versions,
    )


def build_pair(plan: Plan, rollouts: Rollouts) -> Pair:
    """Both sides of a plan that is repeatable and of one process, from equal weights, on the same pieces."""
    planned = planned_side(plan, rollouts)
    return Pair(planned, baseline_side(planned))


def planned_side(plan: Plan, rollouts: Rollouts) -> Side:
    """The side of a plan itself."""
    planned = built_side(plan, is_plain=False)
    offloader = offloader_of(planned)
    if offloader is not None:
        offloader.min_bytes = LOW_BYTES
        if plan.settings.device == "cpu":
            # As late as allowed: a copy that nobody waited for is a wrong number every time.
            offloader.travel_by(LazyEngine())
    return Side(plan, planned, rollouts, is_plain=False)


def baseline_side(planned: Side) -> Side:
    """The plain side of a planned one: equal weights, the same pieces."""
    plainly = plain_plan(planned)
    plain = built_side(plainly, is_plain=True)
    same_pieces(planned.built, plain)
    return Side(plainly, plain, planned.rollouts, is_plain=True)


def plain_plan(planned: Side) -> Plan:
    """The plan of the plain side of a planned one."""
    plainly = baseline_plan(planned.plan)
    config = base_model(planned.built.model).config.to_dict()
    if reached(length_rules(config), None, "row") is None:
        return plainly
    # Padded rows must tell how long they are; the probe of rows alone does not rely on it.
    settings = plainly.settings.model_copy(update={"positions_by_row": True})
    return plainly.model_copy(update={"settings": settings})


def compare_steps(pair: Pair, steps: int) -> Compared:
    """The differences of each step, and the record of the first."""
    planned, plain = pair.planned, pair.plain
    before = trained_weights(planned.built)
    plain.take_weights(before)
    yardstick = yardstick_of(pair) if planned.plan.settings.dtype != "float32" else None
    found: list[StepDifferences] = []
    watches = Watch(planned, 0), Watch(plain, 0)
    for number in range(steps):
        # As in a run, whose first step is logged: the statistics take another way through the loss.
        want_stats = number == 0
        around = watches if number == 0 else (None, None)
        mine = planned.step(number, want_stats=want_stats, watched=around[0])
        theirs = plain.step(number, want_stats=want_stats, gradients=mine.gradients, watched=around[1])
        wide = wide_step(yardstick, number, before, mine, want_stats) if yardstick is not None else None
        found.append(differences(mine, theirs, before, wide))
        before = mine.weights
        plain.take_weights(before)
    ran, plainly = (watch.ran for watch in watches)
    assert ran is not None, "The first step was made."
    assert plainly is not None, "The first step was made."
    return Compared(found, ran, plainly, watches[0].work)


def yardstick_of(pair: Pair) -> Side:
    """The plain side in float32, with the weights of the plain side."""
    plan = in_float32(pair.plain.plan)
    built = built_side(plan, is_plain=True)
    take_state(built, whole_state(pair.plain.built))
    same_pieces(pair.planned.built, built)
    return Side(plan, built, pair.planned.rollouts, is_plain=True)


def wide_step(side: Side, number: int, before: Weights, mine: Recorded, want_stats: bool) -> Recorded:
    """The same step of that side, from the weights before it."""
    side.take_weights(before)
    return side.step(number, want_stats=want_stats, gradients=mine.gradients)


def _names(found: Sequence[StepDifferences]) -> list[str]:
    return list(dict.fromkeys(name for step in found for name in step.named()))


def _by_parameter(steps: Sequence[StepDifferences]) -> dict[str, float]:
    """The largest difference of each parameter's gradient over the steps."""
    names = {name: None for step in steps for name in step.by_parameter}
    return {name: max(step.by_parameter.get(name, 0.0) for step in steps) for name in sorted(names)}


def _worst(name: str, steps: Sequence[Mapping[str, Difference]]) -> Check:
    """The check of one kind of difference: the step that is furthest over, or nearest to, its limit."""
    known = [step[name] for step in steps if name in step]
    worst = next((one for one in known if not one.is_within), None) or max(
        known, key=lambda one: one.value / max(one.limit, 1e-30)
    )
    at = f" at {worst.where}" if worst.where else ""
    differ = "differ" if name in SEVERAL else "differs"
    return Check(
        name=name,
        outcome="pass" if worst.is_within else "fail",
        found=worst.value,
        limit=worst.limit,
        where=worst.where,
        says=f"{name} {differ} by {worst.value:.1e}{at}; {worst.limit:.1e} is allowed",
    )


def _moves(steps: Sequence[StepDifferences]) -> Check:
    """Whether the optimizer moved what it had to move: the plain side has the same one."""
    worst = max((step.moves for step in steps), key=lambda one: one.num_still / max(1, one.num_due))
    num_due = sum(step.moves.num_due for step in steps)
    return _check(
        "moves",
        worst.is_fine,
        worst.num_still / max(1, worst.num_due),
        STILL_LIMIT,
        worst.where,
        f"the optimizer moved all {num_due:,} weights whose update is above a rounding step"
        if worst.is_fine
        else f"the optimizer left {worst.num_still:,} of {worst.num_due:,} weights where they were, though "
        f"their update is above a rounding step, most of {worst.where}",
    )


def _contamination(pair: Pair, work: StepWork) -> Check:
    seen = probe_contamination(pair.planned, pair.plain, np.concatenate(work.micro_batches))
    if seen is None:
        return _not_run("contamination", "a step has only one row")
    fine = f"{seen.num_rows} of {seen.rows_together} rows were changed, one by one: no other row changed"
    return _check("contamination", not seen.fault, seen.others_moved, seen.limit, "", seen.fault or fine)


def _alone(pair: Pair, work: StepWork) -> Check:
    micro_batch = max(work.micro_batches, key=len)
    seen = probe_alone(pair.planned, pair.plain, micro_batch)
    lengths = ", ".join(map(str, seen.lengths))
    fine = f"rows of {lengths} tokens equal plain transformers' result for each alone"
    return _check("alone", not seen.fault, seen.different, seen.limit, "", seen.fault or fine)


def _ran(pair: Pair, compared: Compared) -> Check:
    """Whether each strategy of the plan that had something to do was seen to do it."""
    found = traces(pair.planned, compared.ran, compared.plainly, compared.work)
    missing = {name: one.expected for name, one in found.items() if one.had_work and not one.acted}
    acted = [name for name, one in found.items() if one.acted]
    idle = [name for name, one in found.items() if not one.had_work and not one.acted]
    parts = [f"{name} did not act: no {expected}" for name, expected in missing.items()]
    parts += [f"seen at work: {', '.join(acted)}"] if acted else []
    parts += [f"no effect in such a small step: {', '.join(idle)}"] if idle else []
    return _check(
        "ran", not missing, float(len(missing)), 0.0, ", ".join(missing), "; ".join(parts) or "no strategy"
    )


def _resume(plan: Plan, rollouts: Rollouts) -> Check:
    resumed = probe_resume(plan, rollouts)
    fine = f"step 2 of a run resumed at step 1 is the same to the bit ({resumed.num_compared:,} numbers)"
    text = f"step 2 of a run resumed at step 1 differs: {resumed.where}"
    return _check(
        "resume",
        resumed.is_same,
        float(resumed.num_differing),
        0.0,
        resumed.where,
        fine if resumed.is_same else text,
    )


def _check(name: str, is_fine: bool, found: float, limit: float, where: str, says: str) -> Check:
    outcome: Literal["pass", "fail"] = "pass" if is_fine else "fail"
    return Check(name=name, outcome=outcome, found=found, limit=limit, where=where, says=says)


def _not_run(name: str, why: str) -> Check:
    return Check(name=name, outcome="not run", found=None, limit=None, where="", says=why)


def _ran_of(watched: Watched, side: Side) -> Ran:
    known = {name: value for name, value in asdict(watched).items() if name in Ran.model_fields}
    return Ran(**known, optimizer=type(side.built.optimizer).__name__)
