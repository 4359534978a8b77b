import json
from collections import Counter
from pathlib import Path

from memtrain.memory.explain.strategies_page import PROVEN, strategies_page
from memtrain.memory.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[3]


def test_the_page_of_strategies_is_up_to_date():
    assert (ROOT / "docs" / "strategies.md").read_text() == strategies_page(), "run make docs-reference"


def test_the_page_says_which_strategies_were_proven_together():
    """The counts are of the committed results: padding_free alone on two of three back ends of 9 methods."""
    _, _, proven = strategies_page().partition("\n## Proven together")
    assert "| 1 `padding_free` | 18 | 4 |" in proven
    results = json.loads((ROOT / "benchmarks" / "results" / "exactness.json").read_text())
    counted: Counter[str] = Counter()
    for part in results.values():
        for _, numbers, _, kind, _ in part["cells"]:
            if len(numbers) < 3:
                counted[" ".join(sorted(part["strategies"][at] for at in numbers))] += kind == "exact"
    assert counted == json.loads(PROVEN.read_text())["exact"]


def test_every_strategy_is_on_its_page_with_a_source():
    rows = [line.split(" | ") for line in strategies_page().splitlines() if line.startswith("| `")]
    reported = {row[0].strip("| `"): row for row in rows if len(row) == 6}
    assert set(reported) == set(STRATEGIES)
    assert all(row[-1].strip("| ") for row in reported.values())


def test_every_strategy_has_a_section_that_says_when_what_it_saves_costs_and_where_it_was_measured():
    sections = strategies_page().partition("## One by one")[2].split("### `")[1:]
    assert [section.partition("`")[0] for section in sections] == [
        *(one.name for one in STRATEGIES.values() if one.is_exact),
        *(one.name for one in STRATEGIES.values() if not one.is_exact),
    ]
    labels = ("When", "Saves", "Costs", "Refused", "Not with", "In the recipe", "Measured", "Source")
    for section in sections:
        assert [label for label in labels if f"- **{label}**: " not in section] == []
