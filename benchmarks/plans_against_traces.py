"""Ninety plans against the trace of the run they plan: does one that "fits" fit by its trace too?

    python benchmarks/plans_against_traces.py [--most N]   writes benchmarks/results/plans_against_traces.json

Five models and nineteen recipes (methods, full and LoRA, packed and padded, precisions, optimizers,
offloading, a value model, shards over four GPUs), each planned for the smallest card that holds it, without
its data. Made without a GPU. Interrupted, and started again at the same commit, it goes on from the rows it
has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from result_files import write_result

from memtrain.cli.plan.answer import passes_batch
from memtrain.cli.plan.lookup import LookedAt, facts_without_data
from memtrain.cli.plan.tables import settings_words
from memtrain.errors import DoesNotFit
from memtrain.memory.estimate.pricing import heaviest, may_accumulate
from memtrain.memory.estimate.static import needed
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.planner.resolve import Resolved, resolve
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.tools.trace.client import can_trace, job_of
from memtrain.trainers.tools.trace.worker import answer

RESULTS = Path(__file__).parent / "results" / "plans_against_traces.json"
PART = RESULTS.with_suffix(".part.json")
"""The rows of a run that is under way."""
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "smollm3-3b", "mistral-7b", "llama-3.1-8b")
WRITES: dict[str, Any] = {
    "rewards": {"functions": ["builtin:length"]},
    "generate": {"num_generations": 8, "max_tokens": 512},
}
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"length": {"max_length": 4096, "packing": "bfd"}},
    {"model": {"adapter": {"r": 16}}},
    {"model": {"adapter": {"r": 64, "target_modules": ["q_proj", "v_proj"]}}, "length": {"max_length": 8192}},
    {"optim": {"kind": "adafactor"}},
    {"optim": {"master_weights": True}, "memory": {"loss": "full"}},
    {"memory": {"activation_checkpointing": "on", "activation_offloading": "on"}},
    {"length": {"max_length": 1024, "padding_free": False}},
    {"method": "dpo", "model": {"adapter": {"r": 16}}},
    {"method": "dpo", "dpo": {"reference": "copy"}},
    {"method": "kto", "model": {"adapter": {"r": 16}}},
    {"method": "reward"},
    {"method": "grpo", "model": {"adapter": {"r": 16}}, "grpo": {"beta": 0.04}} | WRITES,
    {"method": "rloo", "rloo": {"beta": 0.0}} | WRITES,
    {"method": "ppo", "ppo": {"value": "own"}} | WRITES,
    {"cluster": {"engine": "fsdp2"}},
    {"cluster": {"engine": "fsdp2"}, "model": {"adapter": {"r": 16}}},
    {"cluster": {"engine": "fsdp2"}, "method": "dpo", "dpo": {"reference": "copy"}},
    {"cluster": {"engine": "fsdp2"}, "method": "grpo", "grpo": {"beta": 0.0}} | WRITES,
)
SHARING = 4
"""GPUs of a recipe that shares its weights out."""
CARDS = ("4090", "a100-40", "h100", "h200")
TRACED = ("load", "first step", "steady step", "evaluation", "log-probs", "saving")
"""Phases that a trace has; completions are written by other code."""


def recipe_of(form: dict[str, Any]) -> Recipe:
    """The recipe of a form; steps of 16 rows."""
    said: dict[str, Any] = {"method": "sft", "length": {"max_length": 2048}, "train": {"batch_size": 16}}
    said |= {"data": {"train": ["rows.jsonl"]}} | form
    said["model"] = {"path": "a/model", "liger": "off"} | form.get("model", {})
    return Recipe.model_validate(json_lists(said))


def json_lists(value: Any) -> Any:
    """Lists as recipes hold them."""
    if isinstance(value, dict):
        return {name: json_lists(one) for name, one in value.items()}
    return tuple(value) if isinstance(value, list) else value


def planned(recipe: Recipe, config: dict[str, Any]) -> tuple[Hardware, Resolved] | None:
    """The plan for the smallest card that holds it."""
    asked = SourcedRecipe(recipe, lambda key: "default")
    for card in CARDS:
        hardware = Hardware.named(card, 1 if recipe.cluster.engine == "auto" else SHARING)
        try:
            return hardware, resolve(asked, facts_without_data(asked, LookedAt(config), hardware))
        except DoesNotFit:
            continue
    return None


def row(model: str, form: dict[str, Any]) -> dict[str, Any] | None:
    """One plan and its trace; None where no card holds it, or it cannot be traced."""
    config = known_config(model)
    assert config is not None
    recipe = recipe_of(form)
    found = planned(recipe, dict(config))
    if found is None or can_trace(recipe, found[1].settings) is not None:
        return None
    hardware, resolved = found
    settings, facts = resolved.settings, resolved.case.facts
    accumulates = may_accumulate(settings, facts)
    batch, passes = heaviest(settings, facts), passes_batch(resolved)
    traced = answer(job_of(recipe, settings, config, batch, accumulates=accumulates, passes=passes))
    reported = max(phase.num_bytes for phase in resolved.prediction.phases if phase.phase in TRACED)
    seen = traced.prediction.peak.num_bytes
    return {
        "model": model,
        "form": form,
        "card": hardware.name,
        "how": settings_words(settings),
        "arithmetic_bytes": reported,
        "traced_bytes": seen,
        "error": reported / seen - 1,
        "fits_by_trace": needed(seen, settings) <= hardware.memory_bytes,
        "host_bytes": traced.host_bytes,
        "seconds": round(traced.seconds, 1),
    }


def main() -> int:
    most = int(sys.argv[sys.argv.index("--most") + 1]) if "--most" in sys.argv else 10**6
    made = begun()
    rows: list[dict[str, Any]] = made["rows"]
    known = [(one["model"], one["form"]) for one in (*rows, *made["left_out"])]
    for form, model in product(FORMS, MODELS):
        if len(rows) >= most:
            break
        if (model, form) in known:
            continue
        found = row(model, form)
        if found is None:
            made["left_out"].append({"model": model, "form": form})
        else:
            rows.append(found)
            print(
                f"{model} {form}: {found['error']:+.2%} on {found['card']}, {found['seconds']} s", flush=True
            )
        PART.write_text(json.dumps(made) + "\n")
    write_result(RESULTS, made)
    PART.unlink()
    wrong = [one for one in rows if not one["fits_by_trace"]]
    worst = max((abs(one["error"]) for one in rows), default=0.0)
    mean = sum(abs(one["error"]) for one in rows) / max(1, len(rows))
    print(
        f"{len(rows)} plans, {len(wrong)} contradicted by the trace; error mean {mean:.2%}, worst {worst:.2%}"
    )
    return 1 if wrong else 0


def begun() -> dict[str, Any]:
    """Results without rows, or those that an interrupted run at this commit has left."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if PART.is_file() and (left := json.loads(PART.read_text()))["commit"] == commit:
        return left
    made = {"made": time.strftime("%Y-%m-%d"), "commit": commit, "device": "CPU, no GPU"}
    return made | {"rows": [], "left_out": []}


if __name__ == "__main__":
    sys.exit(main())
