"""Writes into each shipped recipe what it is predicted to need: the card it is meant for, and the least.

    python benchmarks/predict_shipped.py          writes the `needs:` lines
    python benchmarks/predict_shipped.py --check  says which lines are not up to date, and writes nothing

The data is not read: every sequence is taken to be as long as it may be. tests/recipes/test_shipped_needs.py
holds the lines to the planner.
"""

from __future__ import annotations

import sys
from pathlib import Path

from memtrain.cli.plan.lookup import LookedAt, facts_without_data
from memtrain.errors import DoesNotFit
from memtrain.memory.estimate.pricing import PlannerInputs, Priced
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.hardware.packages import ELSEWHERE
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.plan.units import gib
from memtrain.memory.planner.resolve import open_space, resolve
from memtrain.memory.planner.search import price_all
from memtrain.memory.planner.use_and_never import with_use_and_never
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.reading.shipped import configs_dir, shipped_names

CARDS = ("4090", "a100-40", "h100", "h200")
"""A size each: 24, 40, 80 and 141 GB. The first that holds the run without moving anything to the host."""

NEEDS = "# needs:  "


def predicted_names() -> list[str]:
    """The shipped recipes of models that are known: all but those of builtin:tiny."""
    return [
        name
        for name in shipped_names()
        if not str(load_recipe(name).recipe.model.path).startswith("builtin:")
    ]


def needs_line(name: str) -> str:
    """The line of a recipe's header: the card, what it needs there with margin, and the least of any plan."""
    # Without Liger, whether or not it is installed here: the same line on every machine.
    loaded = load_recipe(name, ["model.liger=off"])
    asked = with_use_and_never(SourcedRecipe(loaded.recipe, loaded.where))
    config = known_config(str(loaded.recipe.model.path))
    assert config is not None, f"{name}: its model is not in memory/model_shape/known_models.py"
    looked = LookedAt(config)
    for card in CARDS:
        facts = facts_without_data(asked, looked, Hardware.named(card), ELSEWHERE)
        try:
            chosen = resolve(asked, facts).chosen
        except DoesNotFit:
            continue
        plans = _plans(asked, facts)
        stays = any(_stays(one) and one.need_bytes <= facts.hardware.memory_bytes for one in plans)
        if stays or card == CARDS[-1]:
            least = min(one.need_bytes for one in plans)
            extra = "; CUDA, bitsandbytes" if loaded.recipe.model.quantize != "none" else ""
            words = f"one {facts.hardware.name}, {gib(chosen.need_bytes)} predicted"
            return f"{NEEDS}{words} (slower plans from {gib(least)}){extra}"
    raise SystemExit(f"{name} fits none of {', '.join(CARDS)}")


def _plans(asked: SourcedRecipe, facts: PlannerInputs) -> list[Priced]:
    _, case, choices = open_space(asked, facts)
    return price_all(choices.exact, case.facts)


def _stays(one: Priced) -> bool:
    return one.settings.offload == "none" and not one.settings.optimizer_offload


def main() -> int:
    """Write or check every recipe; 1 when `--check` found one that is out of date."""
    is_check = "--check" in sys.argv[1:]
    old: list[str] = []
    for name in predicted_names():
        path: Path = configs_dir() / f"{name}.yaml"
        lines, line = path.read_text().splitlines(), needs_line(name)
        at = next(at for at, one in enumerate(lines) if one.startswith(NEEDS))
        if lines[at] != line:
            old.append(name)
            lines[at] = line
            if not is_check:
                path.write_text("\n".join(lines) + "\n")
        print(f"{name}: {line.removeprefix(NEEDS)}")
    return 1 if is_check and old else 0


if __name__ == "__main__":
    sys.exit(main())
