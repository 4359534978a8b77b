"""Hundreds of mutated data files: one clear error each, or every row and field out or reported."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "mutants_of_data.py"
FIRST = 100_000


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("mutants_of_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants_of_data", module)
    spec.loader.exec_module(module)
    yield module
    module.preparing.tokenizer_of = module.load


def silent_losses(mutants: ModuleType, count: int) -> Iterator[dict[str, str]]:
    """Losses that the harness sees among `count` mutants, made a few at a time and until one is taken."""
    for first in range(FIRST, FIRST + count, 5):
        yield from (one for one in mutants.run(first, 5) if one["kind"] == "silent loss")


@pytest.mark.parametrize(
    ("first", "count"), [(FIRST, 100), pytest.param(FIRST + 100, 400, marks=pytest.mark.slow)]
)
def test_no_mutant_is_a_traceback_a_hang_or_a_silent_loss(mutants: ModuleType, first: int, count: int):
    outcomes = mutants.run(first, count)
    assert [one for one in outcomes if one["kind"] not in mutants.SOUND] == []
    assert len(outcomes) == count
    for kind in ("made", "refused"):
        assert sum(one["kind"] == kind for one in outcomes) > count // 5


def test_the_harness_sees_a_row_that_is_lost(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A reader that loses the last row of every file, and one that loses a field without a word."""
    from memtrain.trainers.data.sources import sources

    read = sources.read_file
    monkeypatch.setattr(sources, "read_file", lambda *given: iter(list(read(*given))[:-1]))
    assert next(silent_losses(mutants, 30))
    monkeypatch.undo()
    from memtrain.trainers.data.store import prepare

    monkeypatch.setattr(prepare, "notes_of", lambda *given: iter(()))
    assert any("is in no text and not named" in one["text"] for one in silent_losses(mutants, 60))
