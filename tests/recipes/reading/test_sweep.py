"""Sweeps: every combination once, and words that cannot be taken."""

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.reading.sweep import folder_name, split_values, sweep


def test_a_sweep_is_every_combination_the_last_key_fastest():
    assert sweep(["train.seed=0,1", "optim.lr=1e-4,2e-4"]) == (
        ("train.seed=0", "optim.lr=1e-4"),
        ("train.seed=0", "optim.lr=2e-4"),
        ("train.seed=1", "optim.lr=1e-4"),
        ("train.seed=1", "optim.lr=2e-4"),
    )


def test_no_words_are_one_run():
    assert sweep([]) == ((),)


def test_commas_in_brackets_and_quotes_belong_to_the_value():
    assert split_values("[0.9,0.95],{a: 1, b: 2},'x,y'") == ["[0.9,0.95]", "{a: 1, b: 2}", "'x,y'"]


def test_every_word_that_cannot_be_taken_is_reported():
    with pytest.raises(RecipeError) as caught:
        sweep(["train.seed", "optim.lr=1,", "cluster.threads=1,2", "train.seed=1,1"])
    reported = [fault.what for fault in caught.value.faults]
    assert reported == [
        "'train.seed' gives no values to try",
        "'optim.lr=1,' gives no values to try",
        "cluster.threads cannot differ within an array",
        "'train.seed=1,1' gives a value twice",
    ]


def test_a_folder_is_named_after_what_differs():
    assert folder_name(("train.seed=2", "model.path=org/name x")) == "seed=2_path=org-name-x"
