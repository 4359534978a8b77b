from typing import get_args

from memtrain.recipes.reading.field_types import field_types
from memtrain.recipes.recipe import MethodName, Recipe
from memtrain.recipes.registry import METHODS


def test_the_registry_and_the_recipe_know_the_same_methods():
    assert set(METHODS) == set(get_args(MethodName))


def test_every_method_has_a_section_of_its_name():
    assert not [name for name in METHODS if name not in field_types(Recipe)]


def test_every_method_names_a_trainer_and_one_sentence():
    for method in METHODS.values():
        assert method.trainer.startswith("memtrain.trainers.")
        assert method.summary.endswith(".")
