"""`memtrain bench`: the variants of a plan measured in turns, each in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memtrain.cli.measure.variants import Variant, ablations, predicted_of, variant, waterfall
from memtrain.cli.plan.make_plan import Planned, facts_of, make_plan
from memtrain.cli.plan.model_config import model_config
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.hardware.devices import detect
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.runtime.safe_path import safe_path

VERSION = 1
"""Of the JSON: raised when a key changes its meaning or goes."""
LIMIT_S = 3600
"""Seconds after which a variant is given up."""

Progress = Callable[[str], None]


@dataclass(slots=True)
class Measured:
    """All measurements of a variant."""

    variant: Variant
    peaks: list[int] = field(default_factory=list[int])
    reserved: list[int] = field(default_factory=list[int])
    rss: list[int] = field(default_factory=list[int])
    speeds: list[float] = field(default_factory=list[float])
    """Tokens a second."""
    losses: tuple[float, ...] = ()
    heaviest: tuple[int, int, int, int] | None = None
    """Rows, tokens, loss tokens and longest row of its heaviest micro-batch."""
    fault: str = ""
    """Reason of a missing measurement: out of memory, or another end of its process."""

    def take(self, measured: dict[str, Any]) -> None:
        """Add a measurement, as `memtrain.trainers.tools.bench` prints it."""
        self.peaks.append(int(measured["peak_bytes"]))
        self.reserved.append(int(measured["reserved_bytes"]))
        self.rss.append(int(measured["rss_bytes"]))
        self.speeds.append(measured["tokens"] / max(1e-9, measured["seconds"]))
        self.losses = tuple(measured["losses"])
        rows, tokens, loss_tokens, longest = measured["heaviest"]
        self.heaviest = rows, tokens, loss_tokens, longest


@dataclass(frozen=True, slots=True)
class Row:
    """A variant in the result; bytes, seconds, tokens a second. None where it was not measured."""

    name: str
    strategies: tuple[str, ...]
    peak_bytes: int | None
    reserved_bytes: int | None
    rss_bytes: int | None
    tokens_per_s: float | None
    tokens_per_s_all: tuple[float, ...]
    """Speed of each repetition, in their order."""
    loss_difference_first: float | None
    """From the first row, in the first step: rounding."""
    loss_difference: float | None
    """The largest of all steps: rounding that training has carried on."""
    predicted_bytes: int
    predicted_step_s: float
    fault: str


@dataclass(frozen=True, slots=True)
class Bench:
    """All rows of a benchmark."""

    recipe: str
    method: str
    device: str
    steps: int
    repeats: int
    versions: dict[str, str]
    rows: tuple[Row, ...]
    ablations: tuple[Row, ...]
    against: tuple[Row, ...]
    version: int = VERSION

    def as_json(self) -> dict[str, Any]:
        """JSON values of all fields."""
        return asdict(self)


def bench_recipe(
    recipe: str,
    overrides: list[str],
    place: Path,
    *,
    ablate: bool,
    against: str | None,
    steps: int,
    repeats: int,
    progress: Progress = lambda text: None,
) -> Bench:
    """Plan a recipe, and measure its variants in turns; `place`: a folder for their plans.

    Raises: RecipeError, DataError, LaunchError, DoesNotFit for plans that cannot be made.
    """
    from memtrain.trainers.tools.verify.plans import baseline_plan

    plan, facts = _planned(recipe, overrides, place, steps)
    bare = baseline_plan(plan)
    groups = [
        waterfall(plan, bare, facts),
        ablations(plan, bare, facts) if ablate else [],
        [variant(against, *_planned(against, overrides, place, steps))] if against is not None else [],
    ]
    measured = [[Measured(one) for one in group] for group in groups]
    in_turns([one for group in measured for one in group], place, steps, repeats, progress)
    plainly = measured[0][0].losses
    from memtrain.trainers.checkpoints.manifest import device_name

    rows, left_out, others = (tuple(row(one, plainly) for one in group) for group in measured)
    return Bench(
        recipe=recipe,
        method=plan.recipe.method,
        device=device_name(plan.settings.device),
        steps=steps,
        repeats=repeats,
        versions=plan.versions,
        rows=rows,
        ablations=left_out,
        against=others,
    )


def bench_plan(recipe: str, overrides: list[str], place: Path, *, steps: int, repeats: int) -> Row:
    """A single plan, measured several times; its losses are compared with nothing.

    Raises: RecipeError, DataError, LaunchError, DoesNotFit for a plan that cannot be made.
    """
    plan, facts = _planned(recipe, overrides, place, steps)
    one = Measured(variant("planned", plan, facts))
    in_turns([one], place, steps, repeats, lambda text: None)
    return row(one, ())


def in_turns(measured: Sequence[Measured], place: Path, steps: int, repeats: int, progress: Progress) -> None:
    """Measure every variant once, then every one again: a change of the machine's load meets all."""
    for repeat in range(repeats):
        for number, one in enumerate(measured):
            if one.fault:
                continue
            progress(f"{repeat + 1} of {repeats}: {one.variant.name}")
            folder = place / f"variant-{number}"
            folder.mkdir(exist_ok=True)
            found = measure_apart(one.variant.plan.write(folder), steps)
            if isinstance(found, str):
                one.fault = found
            else:
                one.take(found)


def measure_apart(plan: Path, steps: int) -> dict[str, Any] | str:
    """The steps of a plan in a process of its own; or why there is no figure, in a line."""
    command = [sys.executable, "-m", "memtrain.trainers.tools.bench", str(plan), str(steps)]
    try:
        done = subprocess.run(
            command,
            env=os.environ | safe_path(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S} s"
    if done.returncode == 7:
        return "out of memory"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[0] if lines[0].startswith("error:") else lines[-1]
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(one: Measured, plainly: Sequence[float]) -> Row:
    """A variant with the medians of its measurements, its losses held against the first row's."""
    apart = [abs(mine - theirs) for mine, theirs in zip(one.losses, plainly, strict=False)]
    is_measured = bool(one.peaks)
    return Row(
        name=one.variant.name,
        strategies=one.variant.strategies,
        peak_bytes=max(one.peaks) if is_measured else None,
        reserved_bytes=max(one.reserved) if is_measured else None,
        rss_bytes=round(statistics.median(one.rss)) if is_measured else None,
        tokens_per_s=statistics.median(one.speeds) if is_measured else None,
        tokens_per_s_all=tuple(one.speeds),
        loss_difference_first=apart[0] if apart else None,
        loss_difference=max(apart) if apart else None,
        predicted_bytes=predicted_of(one.variant, one.heaviest)
        if one.heaviest
        else one.variant.predicted_bytes,
        predicted_step_s=one.variant.predicted_step_s,
        fault=one.fault,
    )


def _planned(recipe: str, overrides: list[str], place: Path, steps: int) -> tuple[Plan, PlannerInputs]:
    """A recipe's plan for one process, and the inputs of its predictions."""
    from memtrain.trainers.tools.verify.plans import on_one_process

    made = make_plan(load_recipe(recipe, overrides), run_dir=str(place / "run"))
    return on_one_process(made.plan, steps=steps + 2), _facts(made)


def _facts(made: Planned) -> PlannerInputs:
    plan = made.plan
    hardware = detect(plan.recipe.cluster.device)
    return facts_of(plan.recipe, plan.data, model_config(plan.recipe.model), hardware)
