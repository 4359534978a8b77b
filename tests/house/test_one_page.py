"""A strategy is one page, and so are a method, a back end, a format and a tracker: few files name each.

How each is added: CONTRIBUTING.md. Files that read the words of other tools, or of earlier versions, are not
counted: they have the name because others have it.
"""

import re
from pathlib import Path
from typing import get_args

import pytest

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.memory.strategies.registry import ORDER, STRATEGIES
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.data import Format
from memtrain.trainers.run_folder.trackers import MAKERS

ROOT = Path(__file__).parents[2]
MOST = 6
"""Files that may name a strategy: the recipe key, its page, its formula, its code, its proof."""


IMPORTERS = ("memtrain/recipes/importers",)
OTHER_WORDS = (*IMPORTERS, "memtrain/recipes/trl", "memtrain/recipes/reading", "memtrain/cli/rescue")

OTHERS = {
    "method": (
        # Two files are its own; `sft` is a preference loss, too, and `reward` the key of a metric.
        METHODS,
        6,
    ),
    "attention back end": (
        [str(one) for one in AttentionBackend if one is not AttentionBackend.TRANSFORMERS],
        5,
    ),
    "data format": (
        # `text`, `prompt`, `messages` and `ids` are names of columns, too.
        [one for one in get_args(Format) if one not in ("auto", "text", "prompt", "messages", "ids")],
        5,
    ),
    "tracker": (MAKERS, 2),
}
"""Names of each kind, and the most files that may have one."""


def files_that_name(name: str, besides: tuple[str, ...] = IMPORTERS) -> list[str]:
    """Package files with the name as a word of its own in quotes; not those of the folders `besides`."""
    quoted = re.compile(rf"""["']{name}["']""")
    files = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "memtrain").rglob("*.py"))}
    own = {place: path for place, path in files.items() if not place.startswith(besides)}
    return [place for place, path in own.items() if quoted.search(path.read_text())]


@pytest.mark.parametrize("kind", OTHERS)
def test_few_files_name_one(kind: str):
    names, most = OTHERS[kind]
    found = {name: files_that_name(name, OTHER_WORDS) for name in names}
    assert not {name: files for name, files in found.items() if len(files) > most}


def test_few_files_name_a_strategy():
    found = {name: files_that_name(name) for name in STRATEGIES}
    assert {name: files for name, files in found.items() if len(files) > MOST} == {}


def test_every_strategy_that_a_recipe_may_name_has_its_page():
    assert list(STRATEGIES) == list(ORDER)
    for name in STRATEGIES:
        pages = list((ROOT / "memtrain/memory/strategies").rglob(f"{name}.py"))
        assert len(pages) == 1, name
