"""The table of exit codes in docs/errors.md against the errors that the package can end with."""

import re
from pathlib import Path

from memtrain.__main__ import EXIT_INTERRUPTED
from memtrain.errors import EXIT_OUR_FAULT, Diverged, MemtrainError

DOCS = Path(__file__).parents[2] / "docs"
NO_ERRORS = {0, 1}
"""Done, and an answer that is no (`verify`, `doctor`)."""


def codes() -> set[int]:
    """Of every kind of error, and of what is none."""
    kinds, found = [MemtrainError], {EXIT_OUR_FAULT, EXIT_INTERRUPTED} | NO_ERRORS
    while kinds:
        below = kinds.pop().__subclasses__()
        found |= {kind.exit_code for kind in below if kind.__module__ == MemtrainError.__module__}
        kinds += below
    return found


def test_the_table_has_every_exit_code_and_no_other():
    text = (DOCS / "errors.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == codes()


def test_every_kind_of_error_has_a_code_of_its_own():
    kinds = [kind for kind in MemtrainError.__subclasses__() if kind.__module__ == MemtrainError.__module__]
    assert len({kind.exit_code for kind in kinds}) == len(kinds)
    assert Diverged in kinds


def test_the_short_lists_name_the_same_codes():
    for page, begins in (
        (DOCS.parent / "README.md", "Exit codes:"),
        (DOCS / "first-run.md", "The exit code says"),
    ):
        words = page.read_text().partition(begins)[2].partition("\n\n")[0]
        named = {int(code) for code in re.findall(r"\b(\d+)\b", words)}
        assert {2, 3, 4, 5, 6, 7, 8, 70, 75} <= named, page
