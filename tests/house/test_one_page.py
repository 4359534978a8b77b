"""A strategy is one page: few files of the package name it. docs: CONTRIBUTING.md."""

import re
from pathlib import Path

from memtrain.memory.strategies.registry import ORDER, STRATEGIES

ROOT = Path(__file__).parents[2]
MOST = 6
"""Files that may name a strategy: the recipe key, its page, its formula, its code, its proof."""


def files_that_name(strategy: str) -> list[str]:
    """Package files with the name as a word of its own in quotes; not the tables of other tools' keys."""
    quoted = re.compile(rf"""["']{strategy}["']""")
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "memtrain").rglob("*.py"))
        if "importers" not in path.parts and quoted.search(path.read_text())
    ]


def test_few_files_name_a_strategy():
    found = {name: files_that_name(name) for name in STRATEGIES}
    assert {name: files for name, files in found.items() if len(files) > MOST} == {}


def test_every_strategy_that_a_recipe_may_name_has_its_page():
    assert list(STRATEGIES) == list(ORDER)
    for name in STRATEGIES:
        pages = list((ROOT / "memtrain/memory/strategies").rglob(f"{name}.py"))
        assert len(pages) == 1, name
