"""Results of benchmarks are compact (one writer, one row a line), and the manual has their page."""

import json
from pathlib import Path

from page import page, read_results
from result_files import ROW, text_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_committed_results_are_as_the_writer_writes_them():
    found = [file for file in sorted(RESULTS.glob("*.json")) if not file.name.endswith(".part.json")]
    assert found
    other = [path.name for path in found if text_of(json.loads(path.read_text())) != path.read_text()]
    assert other == [], "python benchmarks/result_files.py benchmarks/results/*.json"


def test_a_row_is_one_line_however_long_and_nothing_is_lost():
    rows = [{"method": "sft", "losses": [float(number) for number in range(200)]}, {"method": "dpo"}]
    cells = {f"sft {number}": {"same_bits": True, "peak": 10**9 + number} for number in range(9)}
    made = {"command": "python x.py", "rows": rows, "cells": cells, "long": {"one": {"text": "x" * ROW}}}
    lines = text_of(made).splitlines()
    assert json.loads("".join(lines)) == made
    assert sum(line.startswith('  {"method"') for line in lines) == 2
    assert sum(line.startswith('  "sft ') for line in lines) == 9


def test_the_manual_has_the_page_of_the_committed_results():
    """A page of no results was committed once, and one of the results before the committed ones."""
    written = (RESULTS.parents[1] / "docs" / "benchmarks.md").read_text()
    # Where a result names no commit, the page asks git for that of its file.
    pages = [
        [line for line in text.splitlines() if "Measured on " not in line]
        for text in (written, page(read_results(RESULTS)))
    ]
    assert pages[0] == pages[1], "python benchmarks/page.py"
