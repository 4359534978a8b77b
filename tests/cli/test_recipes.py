import json
from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.recipes.reading.shipped import configs_dir, shipped_names
from memtrain.recipes.reference.json_schema import reference_page
from memtrain.recipes.registry import METHODS


def test_every_shipped_recipe_is_listed_in_80_columns(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes"]) == 0
    reported = capsys.readouterr().out
    assert not [name for name in shipped_names() if f"\n{name} " not in reported]
    assert max(map(len, reported.splitlines())) <= 80


def test_a_recipe_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "show", "smoke/sft"]) == 0
    assert capsys.readouterr().out == (configs_dir() / "smoke" / "sft.yaml").read_text()


def test_a_recipe_that_is_not_there_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "show", "smoke/stf"]) == 2
    assert "did you mean smoke/sft" in capsys.readouterr().err


def test_every_method_is_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["methods"]) == 0
    reported = capsys.readouterr().out
    assert not [name for name in METHODS if f"\n{name} " not in reported]


def test_the_schema_is_json_and_the_reference_is_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "memtrain recipe"
    assert main(["schema", "--reference", "-o", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == reference_page()
