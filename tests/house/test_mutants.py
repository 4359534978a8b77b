"""The list of planted defects is one of today's code: each text stands once, each test file is there."""

from pathlib import Path

import mutants  # pyright: ignore[reportMissingImports]
import pytest


def test_every_planted_defect_has_its_place_and_its_tests():
    listed, recipes = mutants.read_list()
    assert len(mutants.places_of(listed, mutants.ROOT)) == len(listed) >= 100
    assert mutants.test_files(sorted({name for one in listed for name in one.tests}), mutants.ROOT)
    assert {one.verify for one in listed} - {None} <= set(recipes)


def test_a_text_that_is_gone_is_named_with_every_other(tmp_path, monkeypatch):
    """Two defects of three have no place, or two: both are said at once."""
    (tmp_path / "memtrain").mkdir()
    (tmp_path / "memtrain" / "one.py").write_text("a = 1\nb = 2\nc = 2\n")
    made = [mutants.Mutant(name, "", name, "x", (), None) for name in ("a = 1", "gone", "= 2")]
    with pytest.raises(SystemExit) as ended:
        mutants.places_of(made, tmp_path)
    assert "gone: its text stands nowhere" in str(ended.value)
    assert f"= 2: its text stands {Path('memtrain', 'one.py')} (2)" in str(ended.value)
    assert "a = 1" not in str(ended.value)
