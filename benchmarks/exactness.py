"""Every exact strategy, and their pairs and triples, by method and attention back end: exact, or refused why?

    python benchmarks/exactness.py                      # all cells: an hour; writes the results and the pages
    python benchmarks/exactness.py --method dpo         # those of one method; the others' results stay
    python benchmarks/exactness.py --having packing     # cells with a strategy; the others' results stay
    python benchmarks/exactness.py --having X --pairs   # those alone and in pairs
    python benchmarks/exactness.py --rules              # models with windows, sinks, capped scores: minutes
    python benchmarks/exactness.py --compiled           # compiled layers: minutes
    python benchmarks/exactness.py --captured 1         # captured passes, strategies alone: half an hour; in
                                                        # pairs (2): hours. --method: the others' stay
    python benchmarks/exactness.py --page               # the pages again, from the results

A cell is a recipe that must use the strategies of the cell (`memory.use`) and none of the others
(`memory.never`); the back ends torch_cpu and masked take rows that lie end to end, so padding_free is theirs.
It is exact when losses, log-probs, gradients and updates of a step stay within the limits of `memtrain
verify`, no row sees another, and each strategy was seen at work; or its plan refuses it, with a reason. Cells
whose plans are the same are made once. Strategies that change what is learned (LEARN_OTHERWISE) are alone and
in pairs: the plain run beside them learns as they do. Models whose scores have a rule of their own (RULED)
are made with strategies that attention can tell apart. Results: benchmarks/results/exactness.json.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import captured_cells
import compiled_cells
import numpy as np
import torch
from result_files import write_result
from torch import Tensor
from torch.optim import AdamW

from memtrain.cli.plan.make_plan import make_plan, versions
from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.explain.strategies_page import PROVEN, pairs_table, strategies_page
from memtrain.memory.plan.plan import Plan
from memtrain.memory.strategies.registry import STRATEGIES
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.tools.verify.contamination import probe_contamination
from memtrain.trainers.tools.verify.evidence import Ran, Watch, traces
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts
from memtrain.trainers.tools.verify.plans import (
    baseline_plan,
    built_side,
    deterministic,
    on_one_process,
    same_pieces,
)
from memtrain.trainers.tools.verify.record import Recorded, Side, trained_weights
from memtrain.trainers.tools.verify.verify import Pair, compare_steps, plain_plan, planned_side

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "exactness.json"
RULED_RESULTS = ROOT / "benchmarks" / "results" / "exactness_rules.json"
CAPTURED_RESULTS = ROOT / "benchmarks" / "results" / "exactness_captured.json"
COMPILED_RESULTS = ROOT / "benchmarks" / "results" / "exactness_compiled.json"
PAGE = ROOT / "docs" / "exactness.md"
STRATEGIES_PAGE = ROOT / "docs" / "strategies.md"
METHODS_SHOWN = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo", "ppo", "distill")
BACKENDS = ("torch_cpu", "masked", "transformers")
"""The attention back ends that a CPU has."""
FLAT = {"torch_cpu": ("padding_free",), "masked": ("padding_free",)}
"""What a back end brings along: these two take rows that lie end to end."""
LARGEST = 3
"""Strategies of the largest combinations."""
STEPS = 1
"""`memtrain verify` makes more; here a cell has fresh optimizer states, but for compressed moments: they are
made in the first step, and read in a second."""
SLICE_TOKENS = 64
SLICE_TOKENS_OF_FEW_ROWS = 24
"""Of streamed layers: every micro-batch has several slices, and documents go on from one to the next. Small
micro-batches have smaller slices; a slice costs what its operators do, whatever its length."""
OF_SEVERAL_PROCESSES = ("context_parallel",)
"""Strategies that one process has not; their exactness is shown by tests of their own."""
EXACT = tuple(
    one.name for one in STRATEGIES.values() if one.is_exact and one.name not in OF_SEVERAL_PROCESSES
)
LEARN_OTHERWISE = ("pure_bfloat16", "stochastic_rounding", "compressed_moments")
"""Strategies that change what is learned: with each, every exact one gives what it gives plainly."""
NAMES = EXACT + LEARN_OTHERWISE
OF_BFLOAT16 = ("split_copies", "pure_bfloat16", "stochastic_rounding")
"""Strategies of trained bfloat16 weights: in their cells the model has them."""

MODEL = (
    "{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3,"
    " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: false}"
)
SLIDING = "sliding_window: 16, layer_types: [sliding_attention, full_attention, sliding_attention]"
HEADS = "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8"
RULED = {
    "windows and sinks": (
        f"{{model_type: gpt_oss, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3, {HEADS},"
        f" num_local_experts: 4, num_experts_per_tok: 2, {SLIDING}}}"
    ),
    "windows and capped scores": (
        f"{{model_type: gemma2, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3, {HEADS},"
        f" query_pre_attn_scalar: 8, attn_logit_softcapping: 0.5, {SLIDING}}}"
    ),
}
"""Models whose scores have a rule of their own."""
RULED_METHODS = ("sft", "dpo")
RULED_STRATEGIES = ("packing", "shared_prompts", "activation_checkpointing", "streamed_layers")
"""Strategies that change which tokens an attention call has, or how a layer is passed over."""
RECIPE = """
method: {method}
model: {{config: {model}, tokenizer: builtin:tiny}}
data: {{train: {{source: builtin:arithmetic, limit: 24}}, cache_dir: {folder}/cache}}
length: {{max_length: 160}}
train: {{batch_size: 6, max_steps: 2}}
memory: {{loss_chunk_size: 32KiB}}
cluster: {{device: cpu, threads: 1}}
"""
ONLINE = """
rewards: {functions: [{function: length}]}
generate: {num_generations: 3, max_tokens: 12}
"""
TAUGHT = "distill: {teacher: 'builtin:tiny'}\n"


@dataclass(frozen=True, slots=True)
class Cell:
    """One recipe of the matrix."""

    method: str
    backend: str
    strategies: tuple[str, ...]
    rule: str = ""
    """Of RULED; empty: the model has none."""
    is_compiled: bool = False
    """Its layers are compiled (see compiled_cells.py)."""
    is_captured: bool = False
    """Its passes are captured (see captured_cells.py)."""
    treatment: str = ""
    """Of captured_cells.TREATMENTS; empty: the strategies alone."""

    @property
    def name(self) -> str:
        """In words."""
        compiled = " compiled" if self.is_compiled else ""
        return f"{self.method} {self.rule} {self.backend}{compiled} {'+'.join(self.strategies)}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell."""

    cell: Cell
    kind: str
    """exact, refused, or broken."""
    says: str
    """The reason of a refusal, or what is broken."""
    worst: float | None = None
    """The largest difference over its limit."""


@dataclass(slots=True)
class Matrix:
    """Makes cells in a folder; what was made is known by its plan."""

    folder: Path
    made: dict[str, tuple[str, str, float | None]] = field(default_factory=dict)
    plain_runs: PlainRuns = field(default_factory=lambda: PlainRuns())

    def outcome(self, cell: Cell) -> Outcome:
        """The outcome of one cell. Any error that is no refusal of the plan is one of the caller's."""
        try:
            plan = self.plan(cell)
        except (RecipeError, DoesNotFit) as error:
            return Outcome(cell, "refused", error.faults[0].what)
        if cell.treatment:
            return Outcome(cell, *self._proven(cell, plan))
        missing = sorted(set(cell.strategies) - used(plan))
        if missing:
            return Outcome(cell, "broken", f"the plan leaves out {', '.join(missing)} without a word")
        besides = sorted((used(plan) & set(EXACT)) - {*cell.strategies, *brought_along(cell)})
        if besides:
            return Outcome(cell, "broken", f"the plan uses {', '.join(besides)} against memory.never")
        key = f"{cell.method} {cell.rule} {cell.treatment} {plan.settings.model_dump_json()}"
        if key not in self.made:
            self.made[key] = self._proven(cell, plan)
        return Outcome(cell, *self.made[key])

    def _proven(self, cell: Cell, plan: Plan) -> tuple[str, str, float | None]:
        if cell.is_captured:
            return captured_cells.proven(plan, with_stats=len(cell.strategies) < 2)
        return compiled_cells.proven(plan) if cell.is_compiled else proven(plan, self.plain_runs)

    def plan(self, cell: Cell) -> Plan:
        """The plan of a cell.

        Raises: RecipeError, DoesNotFit where the resolver refuses.
        """
        path = self.folder / f"{cell.method}.yaml"
        method, model = METHODS[cell.method], RULED.get(cell.rule, MODEL)
        text = RECIPE.format(method=cell.method, model=model, folder=self.folder)
        path.write_text(text + (ONLINE if method.is_online else TAUGHT if method.has_teacher else ""))
        words = words_of(cell)
        if cell.treatment:
            words = [f"model.attention={cell.backend}", *captured_cells.words_in(self.folder, cell.treatment)]
        return make_plan(load_recipe(str(path), words), run_dir=str(self.folder / "run")).plan


def words_of(cell: Cell) -> list[str]:
    """The overrides that ask for a cell.

    A strategy's own precondition is given to it, so that cells show what strategies do to each other: an
    adapter to switch off, gradients that nothing scales.
    """
    used_here = dict.fromkeys((*cell.strategies, *brought_along(cell)))
    others = [name for name, one in STRATEGIES.items() if one.is_exact and name not in used_here]
    if "stochastic_rounding" in used_here:
        # Both are values of optim.copies: one in use is the other not.
        others = [name for name in others if name != "split_copies"]
    words = [f"memory.use=[{', '.join(used_here)}]", f"memory.never=[{', '.join(others)}]"]
    words.append(f"model.attention={cell.backend}")
    if set(OF_BFLOAT16) & set(cell.strategies):
        words.append("model.dtype=bfloat16")
    if "adapter_off_reference" in cell.strategies:
        words.append("model.adapter={r: 4, target_modules: [q_proj, v_proj, down_proj]}")
    if "streamed_layers" in cell.strategies:
        is_small = "smaller_micro_batch" in cell.strategies
        words.append(f"memory.slice_tokens={SLICE_TOKENS_OF_FEW_ROWS if is_small else SLICE_TOKENS}")
    if "optimizer_in_backward" in cell.strategies:
        words.append("optim.max_grad_norm=null")
    return [*words, *compiled_cells.WORDS] if cell.is_compiled else words


def brought_along(cell: Cell) -> tuple[str, ...]:
    """Strategies that a cell has beside its own: its back end's, and the pass over one layer at a time that
    weights on the host come in by."""
    passes = {"activation_checkpointing", "streamed_layers"}
    needs_pass = "weights_offload" in cell.strategies and not passes & set(cell.strategies)
    return (*FLAT.get(cell.backend, ()), *(("activation_checkpointing",) if needs_pass else ()))


def used(plan: Plan) -> set[str]:
    """Names of the strategies of a plan."""
    return {name for name, one in STRATEGIES.items() if one.is_used(plan.settings)}


@dataclass(slots=True)
class PlainRun(Side):
    """A plain side whose first step is made once: in other cells its weights move by their gradients."""

    recorded: Recorded | None = field(init=False, default=None)
    ran: Ran | None = field(init=False, default=None)

    def step(
        self,
        number: int,
        *,
        want_stats: bool,
        gradients: dict[str, Tensor] | None = None,
        watched: AbstractContextManager[object] | None = None,
    ) -> Recorded:
        """The step, or what is known of it with the weights that these gradients make."""
        assert number == 0, "Optimizer states are fresh in the first step alone."
        assert isinstance(watched, Watch), "The first step is watched."
        if self.recorded is None:
            made = Side.step(self, number, want_stats=want_stats, gradients=gradients, watched=watched)
            self.recorded, self.ran = made, watched.ran
            return made
        assert gradients is not None, "The weights move by the planned side's gradients."
        watched.ran = self.ran
        self.built.optimizer.state.clear()
        for name, parameter in self.built.trained.items():
            given = gradients.get(name)
            parameter.grad = None if given is None else given.to(parameter.grad_dtype, copy=True)
        self.stepper.update(self.work(number))
        return replace(self.recorded, weights=trained_weights(self.built))


@dataclass(slots=True)
class PlainRuns:
    """Plain sides by their plan and pieces; cells that differ in strategies alone have one."""

    known: dict[str, PlainRun] = field(default_factory=dict)
    rollouts: dict[str, Rollouts] = field(default_factory=dict)

    def pair(self, plan: Plan) -> Pair:
        """The sides of a plan; the plain one may be of a cell before. Answers are those of that cell."""
        # Nothing runs out of memory here: the steps of a recovery are never asked for.
        plainly = baseline_plan(plan).settings.model_dump_json(exclude={"recovery"})
        key = f"{plan.recipe.method} {plainly} {plan.recipe.optim.model_dump_json()}"
        planned = planned_side(plan, self.rollouts.setdefault(key, Rollouts()))
        key += _digest(planned.built.train)
        if key in self.known:
            return Pair(planned, self.known[key])
        plainly = plain_plan(planned)
        built = built_side(plainly, is_plain=True)
        same_pieces(planned.built, built)
        if type(built.optimizer) is not AdamW or plan.settings.max_steps != 1:
            return Pair(planned, Side(plainly, built, planned.rollouts, is_plain=True))
        self.known[key] = PlainRun(plainly, built, planned.rollouts, is_plain=True)
        return Pair(planned, self.known[key])


def _digest(feed: Any) -> str:
    """Digest of the pieces of rows that a feed lays out."""
    sequences = getattr(feed, "sequences", None)
    if sequences is None:
        return ""
    arrays = {
        name: value
        for name in sequences.__dataclass_fields__
        if isinstance(value := getattr(sequences, name), np.ndarray)
    }
    assert arrays, "Sequences are arrays."
    return hashlib.sha256(b"".join(name.encode() + one.tobytes() for name, one in arrays.items())).hexdigest()


def proven(plan: Plan, plain_runs: PlainRuns) -> tuple[str, str, float | None]:
    """(exact or broken, what is broken, the largest difference over its limit)."""
    steps = STEPS + plan.settings.compressed_moments
    pair = plain_runs.pair(deterministic(on_one_process(plan, steps=steps)))
    found = compare_steps(pair, steps)
    named = [(name, one) for step in found.steps for name, one in step.named().items()]
    worst = max(one.value / one.limit for _, one in named)
    faults = [f"{name} {one.value:.1e} at {one.where}" for name, one in named if not one.is_within]
    seen = probe_contamination(pair.planned, pair.plain, np.concatenate(found.work.micro_batches))
    faults += [seen.fault] if seen is not None and seen.fault else []
    faults += [
        f"{name} did not act"
        for name, trace in traces(pair.planned, found.ran, found.plainly, found.work).items()
        if trace.had_work and not trace.acted
    ]
    return ("broken" if faults else "exact"), "; ".join(faults), worst


def cells(largest: int = LARGEST) -> Iterator[Cell]:
    """All cells: single strategies first."""
    for size in range(1, largest + 1):
        for strategies in itertools.combinations(NAMES, size):
            if size > 2 and set(strategies) & set(LEARN_OTHERWISE):
                continue
            for method in METHODS_SHOWN:
                for backend in BACKENDS:
                    yield Cell(method, backend, strategies)


def ruled_cells() -> Iterator[Cell]:
    """Cells of models with rules of their own: strategies that attention can tell apart, alone and in
    pairs."""
    for rule, method in itertools.product(RULED, RULED_METHODS):
        for size in (1, 2):
            for strategies in itertools.combinations(RULED_STRATEGIES, size):
                for backend in BACKENDS:
                    yield Cell(method, backend, strategies, rule)


def compiled() -> Iterator[Cell]:
    """Cells of compiled layers."""
    for method in compiled_cells.METHODS:
        for backend, strategies in compiled_cells.combinations(EXACT):
            yield Cell(method, backend, strategies, is_compiled=True)


def captured(largest: int = 2) -> Iterator[Cell]:
    """Cells of captured passes: every treatment, then the matrix."""
    for method in captured_cells.METHODS:
        for treatment in captured_cells.TREATMENTS:
            yield Cell(method, "torch_cpu", (treatment,), is_captured=True, treatment=treatment)
    yield from (replace(cell, is_captured=True) for cell in cells(largest))


def spread(count: int) -> list[Cell]:
    """`count` cells spread over the matrix, the same ones always."""
    every = list(cells())
    stride = max(1, len(every) // count)
    # A stride that shares no factor with their number visits all methods and back ends.
    while math.gcd(stride, len(every)) > 1:
        stride += 1
    return every[::stride]


def main() -> None:
    """Make the cells, or the page alone."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    parser.add_argument("--method", choices=METHODS_SHOWN, help="one method; the others' results stay")
    parser.add_argument("--having", choices=NAMES, help="cells with this one; the others' results stay")
    parser.add_argument("--pairs", action="store_true", help="no triples; with --having, or a new --method")
    parser.add_argument("--rules", action="store_true", help="models with windows, sinks or caps alone")
    parser.add_argument("--compiled", action="store_true", help="compiled layers alone")
    parser.add_argument(
        "--captured", type=int, choices=(1, 2, 3), help="captured passes of so many strategies"
    )
    asked = parser.parse_args()
    parts = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    has_triples = asked.method is None or any(len(cell[1]) > 2 for cell in parts[asked.method]["cells"])
    if asked.pairs and not asked.having and has_triples:
        parser.error("--pairs: triples of all strategies would be lost; give --having")
    torch.set_num_threads(1)
    if asked.rules:
        write_result(RULED_RESULTS, ruled())
    elif asked.compiled:
        write_result(COMPILED_RESULTS, of_compiled())
    elif asked.captured:
        known = read_captured()
        for method in [asked.method] if asked.method else METHODS_SHOWN:
            known[method] = of_captured(method, asked.captured)
            write_result(CAPTURED_RESULTS, known)
    elif not asked.page:
        for method in [asked.method] if asked.method else METHODS_SHOWN:
            largest = 2 if asked.pairs else LARGEST
            parts[method] = made_of(method, asked.having, parts.get(method), largest)
            write_result(RESULTS, parts)
    parts = json.loads(RESULTS.read_text())
    of_rules = json.loads(RULED_RESULTS.read_text())
    compiled_results = json.loads(COMPILED_RESULTS.read_text())
    captured_results = read_captured()
    PAGE.write_text(page(parts, of_rules["cells"], compiled_results, captured_results))
    write_result(PROVEN, proven_pairs(parts))
    STRATEGIES_PAGE.write_text(strategies_page())
    is_broken = any(one[3] == "broken" for part in parts.values() for one in part["cells"])
    others = (*of_rules["cells"], *compiled_results["cells"])
    others += tuple(one for part in captured_results.values() for one in part["cells"])
    sys.exit(is_broken or any(one["kind"] == "broken" for one in others))


def made_of(
    method: str, having: str | None, before: dict | None, largest: int = LARGEST
) -> dict[str, object]:
    """The cells of a method, with where they were made; those without `having` as they were `before`."""
    started = time.time()
    kept = (
        [one for one in read({method: before}) if having and having not in one["strategies"]]
        if before
        else []
    )
    with TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        found: list[Outcome] = []
        for cell in cells(largest):
            if cell.method != method or (having and having not in cell.strategies):
                continue
            found.append(matrix.outcome(cell))
            if found[-1].kind == "broken":
                print("broken:", found[-1].cell.name, found[-1].says, flush=True)
    print(f"{method}: {len(found):,} cells, {len(matrix.made):,} plans, {time.time() - started:.0f} s")
    made = [
        {"backend": one.cell.backend, "strategies": one.cell.strategies}
        | {"worst": one.worst, "kind": one.kind, "says": one.says}
        for one in found
    ]
    num_made, seconds = len(matrix.made), round(time.time() - started)
    if not kept or before is None:
        return as_json(method, made, num_made, seconds)
    if len(kept + made) > len(before["cells"]):
        num_made, seconds = before["distinct_plans"] + num_made, before["seconds"] + seconds
    else:
        # The same cells again: as many plans stand behind them as before.
        num_made, seconds = before["distinct_plans"], before["seconds"]
    result = as_json(method, kept + made, num_made, seconds)
    return result | {"commit": commits_of(str(result["commit"]), str(having), before["commit"])}


def commits_of(now: str, having: str, before: str) -> str:
    """The commits of cells of which those with `having` were made now, and all others `before`."""
    others = f"; cells without {having}: "
    return f"{now}{others}{before.partition(others)[2] or before}"


def ruled() -> dict[str, object]:
    """The cells of models with rules of their own, with where they were made."""
    started = time.time()
    with TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        found: list[Outcome] = []
        for rule in RULED:
            # Plain runs are known by their recipe, which does not name the model.
            matrix.plain_runs = PlainRuns()
            found += [matrix.outcome(cell) for cell in ruled_cells() if cell.rule == rule]
    return of_a_kind("rules", found, len(matrix.made), started)


def of_compiled() -> dict[str, object]:
    """The cells of compiled layers, with where they were made."""
    started = time.time()
    with TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        found = [matrix.outcome(cell) for cell in compiled()]
    return of_a_kind("compiled", found, len(matrix.made), started)


def read_captured() -> dict[str, Any]:
    """Results of captured passes, by method."""
    return json.loads(CAPTURED_RESULTS.read_text()) if CAPTURED_RESULTS.is_file() else {}


def of_captured(method: str, largest: int) -> dict[str, object]:
    """The cells of a method's captured passes that no plan refuses, with where they were made."""
    started = time.time()
    with TemporaryDirectory() as folder:
        matrix = Matrix(Path(folder))
        made = (matrix.outcome(cell) for cell in captured(largest) if cell.method == method)
        found = [one for one in made if one.kind != "refused"]
    return of_a_kind("captured", found, len(matrix.made), started, f" {largest} --method {method}")


def of_a_kind(
    kind: str, found: list[Outcome], num_made: int, started: float, size: str = ""
) -> dict[str, object]:
    """The result of an option that makes cells of one kind."""
    for one in found:
        if one.kind == "broken":
            print("broken:", one.cell.name, one.says, flush=True)
    print(f"{len(found):,} cells, {num_made:,} plans, {time.time() - started:.0f} s")
    cells = [
        ({"rule": one.cell.rule} if one.cell.rule else {})
        | {"method": one.cell.method, "backend": one.cell.backend}
        | {"strategies": one.cell.strategies, "kind": one.kind, "says": one.says}
        | {"worst": None if one.worst is None else round(one.worst, 4)}
        for one in found
    ]
    where = as_json(kind, [], num_made, round(time.time() - started))
    reported = {
        key: where[key] for key in ("device", "commit", "date", "versions", "distinct_plans", "seconds")
    }
    return {"command": f"python benchmarks/exactness.py --{kind}{size}", **reported, "cells": cells}


def as_json(method: str, found: list[dict], num_made: int, seconds: int) -> dict[str, object]:
    """The results of a method. A cell: back end, strategies by number, difference over limit, kind, reason by
    number."""
    reasons = list(dict.fromkeys(one["says"] for one in found))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": f"python benchmarks/exactness.py --method {method}",
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "steps": STEPS,
        "distinct_plans": num_made,
        "seconds": seconds,
        "strategies": NAMES,
        "reasons": reasons,
        "cells": [
            [
                one["backend"],
                [NAMES.index(name) for name in one["strategies"]],
                None if one["worst"] is None else round(one["worst"], 4),
                one["kind"],
                reasons.index(one["says"]),
            ]
            for one in found
        ],
    }


def read(parts: dict) -> list[dict]:
    """The cells of all methods, in words."""
    return [
        {
            "method": method,
            "backend": backend,
            "strategies": [part["strategies"][number] for number in numbers],
            "worst": worst,
            "kind": kind,
            "says": part["reasons"][reason],
        }
        for method, part in parts.items()
        for backend, numbers, worst, kind, reason in part["cells"]
    ]


def page(parts: dict, of_rules: list[dict], compiled_results: dict, captured_results: dict) -> str:
    """docs/exactness.md."""
    found = read(parts)
    counts, captured = Counter(one["kind"] for one in found), captured_cells.shares(captured_results)
    worst = max((one for one in found if one["worst"] is not None), key=lambda one: one["worst"])
    lines = [
        "# Exactness: every strategy with every other",
        "",
        "Written by `python benchmarks/exactness.py`; do not edit. A cell asks for its strategies and for",
        "none of the others, on a tiny Qwen3-shaped model in float32, or in bfloat16 where a strategy of the",
        f"cell is of bfloat16 weights (`{'`, `'.join(OF_BFLOAT16)}`). It is **exact** when the losses,",
        "log-probs, gradients and update of an optimizer step are those of the plain run within the",
        "limits of `memtrain verify` (plain: padded rows, whole logits, every activation kept, eager",
        "attention), no row sees another, each strategy was seen at work; or **refused** by the plan, with",
        "the reason below. No cell may end in any other way. The back ends torch_cpu and masked take rows",
        "that lie end to end, so `padding_free` is in each of their cells. Of strategies that change what is",
        f"learned (`{'`, `'.join(LEARN_OTHERWISE)}`) the plain run has the same: with them, the others are",
        "exact. Split copies are held against whole ones.",
        "",
        f"{len(found):,} cells ({len(EXACT)} exact strategies alone, in pairs and in triples; "
        f"{len(LEARN_OTHERWISE)} that change what is learned alone and in pairs; {len(parts)} methods; "
        f"attention back ends {', '.join(BACKENDS)}): **{counts['exact']:,} exact, {counts['refused']:,} "
        f"refused, {counts['broken']:,} broken**. {sum(part['distinct_plans'] for part in parts.values()):,} "
        "different plans stand behind the exact ones; each was made once, and the plain run of those that "
        "share one was, too. The largest difference is "
        f"{worst['worst']:.0%} of its limit ({worst['method']}, {worst['backend']}, "
        f"{' + '.join(worst['strategies'])}).",
        "",
        "Back ends that need a GPU (flash, flash3, torch_varlen, flex), and what has nothing to do on a CPU",
        f"(`optimizer_offload`) or in one process (`{'`, `'.join(OF_SEVERAL_PROCESSES)}`), are not measured",
        "here. Cells of compiled layers are below, and those of captured passes.",
        "",
        "| method | cells | captured | plans made | seconds | device | date | commit | torch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {method} | {len(part['cells']):,} | {captured.get(method, 'not made')} | "
        f"{part['distinct_plans']:,} | {part['seconds']:,} | "
        f"{part['device']} | {part['date']} | {part['commit']} | {part['versions']['torch']} |"
        for method, part in parts.items()
    ]
    lines += [
        "",
        "## Strategies alone and in pairs",
        "",
        "The number of back ends, of torch_cpu, masked and transformers, on which the cell is exact; `-`",
        "where the plan refuses all three, `?` where it was not made. On the diagonal a strategy alone.",
        "",
    ]
    for method in parts:
        lines += [f"### {method}", "", *_table(found, [method]), ""]
    in_threes = {name for one in found if len(one["strategies"]) > 2 for name in one["strategies"]}
    if alone := [name for name in EXACT if name not in in_threes]:
        lines += [f"No triples with `{'`, `'.join(alone)}` were made.", ""]
    lines += _rules_section(of_rules)
    lines += compiled_cells.section(compiled_results)
    lines += captured_cells.section(captured_results)
    lines += ["## Triples", "", *_triples(found), "", "## Why cells are refused", "", *_reasons(found), ""]
    return "\n".join(lines)


def _rules_section(found: list[dict]) -> list[str]:
    """Models whose scores have a rule of their own."""
    return [
        "## Windows, sinks, capped scores",
        "",
        "Models with sliding windows in two of three layers, and sinks (gpt-oss-shaped) or capped scores",
        f"(Gemma-2-shaped), with `{'`, `'.join(RULED_STRATEGIES)}` alone and in pairs; by",
        "`python benchmarks/exactness.py --rules`. Rows go past their windows.",
        "",
        *compiled_cells.cells_table(
            found, {"rule": RULED, "method": RULED_METHODS}, ("model with", "method")
        ),
    ]


def proven_pairs(parts: dict) -> dict[str, object]:
    """The counts behind the last section of docs/strategies.md: strategies alone and in pairs."""
    counts = _counts(read(parts), list(parts))
    return {
        "methods": list(parts),
        "backends": list(BACKENDS),
        "strategies": list(NAMES),
        "exact": {" ".join(sorted(names)): count for names, count in counts.items()},
    }


def _counts(found: list[dict], methods: list[str]) -> dict[frozenset[str], int]:
    """On how many back ends one or two strategies are exact, of those that were made together."""
    counts: dict[frozenset[str], int] = {}
    for one in found:
        names = frozenset(one["strategies"])
        if one["method"] in methods and len(names) < 3:
            counts[names] = counts.get(names, 0) + (one["kind"] == "exact")
    return counts


def _table(found: list[dict], methods: list[str]) -> list[str]:
    return pairs_table(NAMES, _counts(found, methods))


def _triples(found: list[dict]) -> list[str]:
    lines = ["| method | back end | exact | refused | broken |", "|---|---|---|---|---|"]
    for method, backend in itertools.product(METHODS_SHOWN, BACKENDS):
        kinds = Counter(
            one["kind"]
            for one in found
            if (one["method"], one["backend"], len(one["strategies"])) == (method, backend, 3)
        )
        lines.append(f"| {method} | {backend} | {kinds['exact']} | {kinds['refused']} | {kinds['broken']} |")
    return lines


def _reasons(found: list[dict]) -> list[str]:
    reasons = Counter(one["says"] for one in found if one["kind"] == "refused")
    first: dict[str, str] = {}
    for one in found:
        if one["kind"] == "refused":
            first.setdefault(one["says"], f"{one['method']}: {' + '.join(one['strategies'])}")
    lines = ["| cells | reason in the plan | for example |", "|---|---|---|"]
    return lines + [f"| {count:,} | {reason} | {first[reason]} |" for reason, count in reasons.most_common()]


if __name__ == "__main__":
    main()
