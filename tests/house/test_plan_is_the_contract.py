"""What the plan settles, a worker reads in Settings: no recipe key stands for it a second time."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.length import Length, RowLimits, limits_of, truncations

ROOT = Path(__file__).parents[2]
SETTLED = (
    *("length", "row_limits", "cluster", "memory", "train.epochs", "train.max_steps"),
    *("model.dtype", "model.attention", "model.kernels", "model.liger", "model.adapter", "model.quantize"),
    *("optim.kind", "optim.master_weights", "optim.in_backward", "save.layout", "save.async_save"),
    *("train.batch_size", "train.batch_tokens", "train.micro_batch_size", "train.micro_tokens"),
    *("generate.backend", "generate.gather_weights", "generate.rows"),
)
"""Keys, and sections, that the plan decides or says again: their values are in Settings."""

NOT_OF_THE_STEPS = {
    "memory.measure_peaks": "whether peaks are measured; no setting says it",
    "memory.budget": "shown where memory ran out: what the recipe asked for",
}
MAKES_PLANS = (
    "memtrain.trainers.tools.verify.shrink",
    "memtrain.trainers.data.length_report",
    "memtrain.trainers.data.packing.by_method",
    "memtrain.trainers.data.packing.first_rows",
    "memtrain.trainers.data.packing.prompt_rows",
)
"""Modules that the launcher runs, before there is a plan."""


def read_keys(path: Path) -> list[tuple[int, str]]:
    """(line, key) of every `recipe.section.key` in a source file, also through `self` or a plan."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            match = re.search(r"(?:^|\.)recipe\.((?:\w+\.)*\w+)$", ast.unparse(node))
            if match:
                found.append((node.lineno, match[1].replace("generation", "generate")))
    return found


def is_settled(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in SETTLED) and key not in NOT_OF_THE_STEPS


def test_every_settled_key_is_a_key():
    keys = every_key(Recipe)
    named = {*SETTLED, *NOT_OF_THE_STEPS} - {"row_limits"}
    assert not [one for one in named if not any(key == one or key.startswith(f"{one}.") for key in keys)]


def test_no_worker_reads_in_the_recipe_what_the_plan_settles():
    wrong: list[str] = []
    for path in sorted((ROOT / "memtrain" / "trainers").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if name.startswith(MAKES_PLANS):
            continue
        keys = read_keys(path)
        longer = {key for _, key in keys}
        for line, key in keys:
            # `recipe.memory` is read on the way to `recipe.memory.measure_peaks`.
            is_on_the_way = any(other.startswith(f"{key}.") for other in longer)
            if is_settled(key) and not (is_on_the_way and "." not in key):
                wrong.append(f"{name}:{line}: recipe.{key}")
    assert not wrong


def test_settings_say_every_rule_of_lengths():
    assert {one.name for one in fields(RowLimits)} <= set(Settings.model_fields)
    assert {one.name for one in fields(RowLimits)} <= set(Length.model_fields)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_one_default_of_truncation(method: str):
    """As docs/recipe.md says: the start of rows that are trained on whole, the end of rows with a prompt."""
    said = {"method": method, "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    said |= {"rewards": {"functions": "length"}} if METHODS[method].is_online else {}
    said |= {method: {"teacher": "m"}} if METHODS[method].has_teacher else {}
    recipe = Recipe.model_validate(said)
    assert recipe.row_limits.truncation == ("keep_end" if METHODS[method].has_prompts else "keep_start")
    length = Length(truncation="drop")
    assert recipe.model_copy(update={"length": length}).row_limits.truncation == "drop"


def test_a_prompt_leaves_room_for_what_is_written():
    assert limits_of(Length(max_length=100), has_prompts=True, to_write=30).max_prompt == 70
    assert limits_of(Length(max_length=100, max_prompt=50), has_prompts=True, to_write=30).max_prompt == 50
    assert limits_of(Length(max_length=None, max_prompt=50), has_prompts=True, to_write=30).max_prompt == 50
    assert limits_of(Length(max_length=None), has_prompts=True, to_write=30).max_prompt is None
    assert limits_of(Length(max_length=100), has_prompts=True).max_prompt is None
    assert sorted(truncations(has_prompts=True)) == sorted(truncations(has_prompts=False))
