"""Every wrong recipe in wrong/ has one clear text beside it; MEMTRAIN_REWRITE_EXPECTED=1 writes them anew."""

import os
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import load_recipe

WRONG = Path(__file__).parents[1] / "wrong"
OURS_ONLY = ("Input should", "pydantic", "Traceback", "union", "literal[", "Extra inputs", "Field required")


@pytest.fixture(autouse=True)
def beside_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WRONG)
    monkeypatch.delenv("MEMTRAIN_TEST_NOT_SET", raising=False)


def reported(name: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(f"{name}.yaml")
    return caught.value.text() + "\n"


@pytest.mark.parametrize("name", sorted(path.stem for path in WRONG.glob("*.yaml")))
def test_a_wrong_recipe_is_reported_in_the_words_kept_beside_it(name: str):
    expected = WRONG / f"{name}.txt"
    text = reported(name)
    if os.environ.get("MEMTRAIN_REWRITE_EXPECTED"):
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")
    assert not [word for word in OURS_ONLY if word in text]


@pytest.mark.parametrize("name", sorted(path.stem for path in WRONG.glob("*.yaml")))
def test_every_fault_of_a_wrong_recipe_has_a_line_and_a_way_out(name: str):
    with pytest.raises(RecipeError) as caught:
        load_recipe(f"{name}.yaml")
    for fault in caught.value.faults:
        assert fault.where.count(":") >= 2
        assert fault.where.split(":")[1].isdecimal()
        assert fault.fix


def test_there_are_at_least_thirty_wrong_recipes():
    assert len(list(WRONG.glob("*.yaml"))) >= 30
