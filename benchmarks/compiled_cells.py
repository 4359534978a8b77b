"""Cells of the exactness matrix with compiled layers (`model.compile: on`): see exactness.py --compiled.

Each is held against the plain run, which compiles nothing. torch's own compiler makes the kernels (inductor,
C++ on a CPU), as in a run. Fused kernels round numbers in between otherwise; the limits of
`memtrain verify` hold. Operators inside of a compiled layer cannot be watched, so a cell shows its numbers
and that graphs were compiled, not each strategy at work.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.tools.verify.compare import differences
from memtrain.trainers.tools.verify.contamination import probe_contamination
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts
from memtrain.trainers.tools.verify.plans import deterministic, on_one_process
from memtrain.trainers.tools.verify.record import trained_weights
from memtrain.trainers.tools.verify.verify import build_pair, wide_step, yardstick_of

METHODS = ("sft", "dpo", "grpo", "ppo")
"""Methods with one forward pass, a pair's, written answers, and a value model."""
BACKENDS = ("torch_cpu", "transformers")
FIRST = BACKENDS[0]
BESIDE = "activation_checkpointing"
"""A strategy that calls a compiled layer in another way: with it all others are made in pairs."""
STEPS = 2
"""Other lengths in the second: a graph of the first must serve it."""
WORDS = ("model.compile=on", "memory.measure_peaks=false")
"""Overrides of a cell. On a CPU peaks are counted operator by operator, which the plan refuses here."""


def combinations(exact: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(back end, strategies) of the cells of a method: nothing beside and one beside, and on the first back
    end each alone and in pairs."""
    yield from itertools.product(BACKENDS, [(), (BESIDE,)])
    others = [name for name in exact if name != BESIDE]
    yield from ((FIRST, (name,)) for name in others)
    yield from ((FIRST, (BESIDE, name)) for name in others)


def proven(plan: Plan) -> tuple[str, str, float]:
    """(exact or broken, what is broken, the largest difference over its limit) of steps of a plan."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pair = build_pair(deterministic(on_one_process(plan, steps=STEPS)), Rollouts())
    before, faults, worst = trained_weights(pair.planned.built), list[str](), 0.0
    yardstick = yardstick_of(pair) if plan.settings.dtype != "float32" else None
    for number in range(STEPS):
        wants, wide = number == 0, None
        pair.plain.take_weights(before)
        mine = pair.planned.step(number, want_stats=wants)
        theirs = pair.plain.step(number, want_stats=wants, gradients=mine.gradients)
        if yardstick is not None:
            wide = wide_step(yardstick, number, before, mine, wants)
        for name, one in differences(mine, theirs, before, wide).named().items():
            worst = max(worst, one.value / one.limit)
            faults += [] if one.is_within else [f"{name} {one.value:.1e} at {one.where}"]
        before = mine.weights
        if number == 0:
            rows = np.concatenate(pair.planned.work(0).micro_batches)
            seen = probe_contamination(pair.planned, pair.plain, rows)
            faults += [seen.fault] if seen is not None and seen.fault else []
    faults += [] if torch._dynamo.utils.counters["stats"]["unique_graphs"] else ["nothing was compiled"]
    return ("broken" if faults else "exact"), "; ".join(faults), worst


def section(results: dict) -> list[str]:
    """The section of docs/exactness.md."""
    found = results["cells"]
    versions, made = results["versions"], results["distinct_plans"]
    return [
        "## Compiled layers",
        "",
        f"`model.compile: on` with nothing beside, with `{BESIDE}`, and on {FIRST} with each",
        "exact strategy, alone and beside that one, against the plain run that compiles nothing; by",
        "`python benchmarks/exactness.py --compiled`. Kernels are made by inductor, as in a run; numbers in",
        f"between are rounded otherwise, within the same limits. {STEPS} steps of unlike rows. Operators",
        "inside of a compiled layer cannot be watched: a cell shows its numbers, that no row sees another,",
        "and that graphs were compiled. Under FSDP2 a test shows the same.",
        "",
        f"{made} plans in {results['seconds']:,} s on {results['device']}, torch {versions['torch']}, "
        f"{results['date']}, commit {results['commit']}.",
        "",
        *cells_table(found, {"method": METHODS, "backend": BACKENDS}, ("method", "back end")),
    ]


def cells_table(found: list[dict], ways: Mapping[str, Sequence[str]], heads: Sequence[str]) -> list[str]:
    """Cells counted by two of their names, `ways`: the names and their values; the reasons of refusals."""
    lines = [
        f"| {' | '.join(heads)} | exact | refused | broken | largest difference, of its limit |",
        "|---|---|---|---|---|---|",
    ]
    for names in itertools.product(*ways.values()):
        here = [one for one in found if tuple(one[way] for way in ways) == names]
        kinds = Counter(one["kind"] for one in here)
        worst = max((one["worst"] for one in here if one["worst"] is not None), default=0.0)
        counts = f"{kinds['exact']} | {kinds['refused']} | {kinds['broken']}"
        lines.append(f"| {' | '.join(names)} | {counts} | {worst:.0%} |")
    reasons = Counter(one["says"] for one in found if one["kind"] == "refused")
    lines += ["", "| cells | reason in the plan |", "|---|---|"]
    return [*lines, *(f"| {count} | {reason} |" for reason, count in reasons.most_common()), ""]
