"""`memtrain plan MODEL`: needs of LoRA, QLoRA and full fine-tuning of a model, here and on common cards."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memtrain.cli.plan.answer import Answer, Question, answer, ask, facts_of_question
from memtrain.cli.plan.lookup import look_at_devices
from memtrain.cli.plan.tables import settings_words
from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.explain.nothing_fits import NoPlan
from memtrain.memory.hardware.devices import detect
from memtrain.memory.plan.units import gib
from memtrain.memory.planner.use_and_never import with_use_and_never
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.reading.load import LoadedRecipe, recipe_of_words
from memtrain.recipes.reading.shipped import ENDINGS, shipped_names

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CARDS = ("t4", "4090", "l40s", "h100")
"""Cards of a table: 16, 24, 48 and 80 GB. Taste."""
WAYS: dict[str, tuple[str, ...]] = {
    "LoRA": ("model.adapter={}",),
    "QLoRA": ("model.adapter={}", "model.quantize=4bit"),
    "full": (),
}
"""Ways to train a model, and the keys of each."""
LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Cell:
    """A way to train, on a card."""

    way: str
    device: str
    answer: Answer | None
    """None where nothing fits."""
    why_not: str = ""


def is_model(name: str) -> bool:
    """Whether a name is a model's and no recipe's: a folder with a config.json, or a hub id."""
    path = Path(name).expanduser()
    if path.is_dir():
        return (path / "config.json").is_file()
    is_recipe = path.suffix in ENDINGS or name.partition("/")[0] in {
        one.partition("/")[0] for one in shipped_names()
    }
    return not is_recipe and not path.exists() and HUB_ID.fullmatch(name) is not None


def table_of(model: str, overrides: Sequence[str], cards: Sequence[str] = CARDS) -> list[Cell]:
    """A plan for each way and each card, this machine's first where it has a CUDA device.

    Raises: LaunchError when there is no such model; RecipeError for a wrong key.
    """
    here: list[str | None] = [None] if detect("auto").device == "cuda" else []
    first = ask(_recipe(model, "QLoRA", overrides), cards[0], None, None)
    cells: list[Cell] = []
    for way in WAYS:
        loaded = _recipe(model, way, overrides)
        own = replace(
            first, loaded=loaded, asked=with_use_and_never(SourcedRecipe(loaded.recipe, loaded.where))
        )
        for card in (*here, *cards):
            hardware, presumed = look_at_devices(card, None, None, "auto")
            cells.append(_cell(way, replace(own, hardware=hardware, presumed=presumed)))
    return cells


def _recipe(model: str, way: str, overrides: Sequence[str]) -> LoadedRecipe:
    words = ["method=sft", f"model.path={json.dumps(model)}", "data.train=builtin:arithmetic"]
    return recipe_of_words([*words, f"length.max_length={LENGTH}", *WAYS[way], *overrides])


def _cell(way: str, question: Question) -> Cell:
    """The fastest plan of a way on a card, for rows of full length."""
    facts, _ = facts_of_question(question, reads_data=False, progress=None)
    name = question.hardware.name
    try:
        return Cell(way, name, answer(question, facts, seeks_ways_out=False))
    except NoPlan as error:
        return Cell(way, name, None, f"needs {gib(error.closest.need_bytes)} at least")
    except DoesNotFit:
        return Cell(way, name, None, "does not fit")
    except RecipeError as error:
        return Cell(way, name, None, error.faults[0].what)


def rows_of(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """The cells as rows of a table: way, device, need, speed, and the strategies that make it fit."""
    rows: list[tuple[str, ...]] = []
    for cell in cells:
        if cell.answer is None:
            rows.append((cell.way, cell.device, "no", "", cell.why_not))
            continue
        chosen = cell.answer.chosen
        is_floor = cell.answer.fits is None
        rows.append(
            (
                cell.way,
                cell.device,
                f"{'more than ' * is_floor}{gib(chosen.need_bytes)}",
                f"{cell.answer.tokens_per_s:,.0f}",
                settings_words(chosen.settings),
            )
        )
    return rows


def as_json(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """The cells as JSON values; memory in bytes."""
    return [
        {
            "way": cell.way,
            "device": cell.device,
            "fits": cell.answer is not None and cell.answer.fits,
            "need_bytes": cell.answer.chosen.need_bytes if cell.answer else None,
            "tokens_per_s": cell.answer.tokens_per_s if cell.answer else None,
            "why_not": cell.why_not or None,
        }
        for cell in cells
    ]
