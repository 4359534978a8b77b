import pytest

from memtrain.recipes.reading.field_types import describe, every_key, follow
from memtrain.recipes.recipe import Recipe


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("train.batch_size", "a whole number above 0, or null"),
        ("train.micro_batch_size", "a whole number above 0, or auto"),
        ("train.shuffle", "true or false"),
        ("data.eval_fraction", "a number from 0 to below 1"),
        ("data.on_bad_row", "error or skip"),
        ("memory.budget", "a size such as 24GiB, or auto"),
        ("model.adapter.target_modules", "text, or a list of them"),
        ("model.config", "text, a mapping, or null"),
        ("optim.betas", "a list of 2 numbers"),
    ],
)
def test_a_type_is_reported_in_plain_words(key: str, words: str):
    assert describe(follow(Recipe, tuple(key.split(".")))[1]) == words


def test_the_names_of_union_branches_are_no_part_of_a_path():
    assert follow(Recipe, ("memory", "budget", "literal['auto']"))[0] == ("memory", "budget")
    assert follow(Recipe, ("model", "config", "dict[str,json]", "a", "b"))[0] == ("model", "config")
    assert follow(Recipe, ("data", "train", 0, "weight", "float"))[0] == ("data", "train", 0, "weight")


def test_no_type_of_the_recipe_is_left_without_words():
    for key in every_key(Recipe):
        reported = describe(follow(Recipe, tuple(key.split(".")))[1])
        assert reported
        assert "typing" not in reported
        assert "<" not in reported
