from pathlib import Path

from memtrain.memory.explain.strategies_page import strategies_page
from memtrain.memory.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[3]


def test_the_page_of_strategies_is_up_to_date():
    written, _, proven = (ROOT / "docs" / "strategies.md").read_text().partition("\n## Proven together")
    assert written == strategies_page(), "run make docs-reference"
    assert "| 1 `padding_free` |" in proven


def test_every_strategy_is_on_its_page_with_a_source():
    rows = [line.split(" | ") for line in strategies_page().splitlines() if line.startswith("| `")]
    told = {row[0].strip("| `"): row for row in rows if len(row) == 6}
    assert set(told) == set(STRATEGIES)
    assert all(row[-1].strip("| ") for row in told.values())


def test_every_strategy_has_a_section_that_says_when_what_it_saves_costs_and_where_it_was_measured():
    sections = strategies_page().partition("## One by one")[2].split("### `")[1:]
    assert [section.partition("`")[0] for section in sections] == [
        *(one.name for one in STRATEGIES.values() if one.is_exact),
        *(one.name for one in STRATEGIES.values() if not one.is_exact),
    ]
    labels = ("When", "Saves", "Costs", "Refused", "Not with", "In the recipe", "Measured", "Source")
    for section in sections:
        assert [label for label in labels if f"- **{label}**: " not in section] == []
