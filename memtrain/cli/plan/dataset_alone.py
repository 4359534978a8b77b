"""A dataset in the place of a recipe (`memtrain show-data`, `plan`): the recipe that its columns suit."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from memtrain.cli.plan.model_table import is_model
from memtrain.cli.plan.recipe_lines import at_their_lines
from memtrain.cli.plan.recipe_of_dataset import is_dataset, model_word
from memtrain.cli.plan.usual_tokenizer import usual_tokenizer
from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import LoadedRecipe, recipe_of_words
from memtrain.recipes.reading.shipped import ENDINGS, shipped_names
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.length_report.inspect import every_format, method_of
from memtrain.trainers.data.store.look_into import kind_of, look_into


def is_dataset_alone(name: str) -> bool:
    """Whether a name in the place of a recipe's is that of a data file or folder."""
    return not is_recipe(name) and is_dataset(name)


def is_recipe(name: str) -> bool:
    """Whether a name is a recipe's: a YAML file's, or a shipped one's."""
    return name in shipped_names() or Path(name).suffix in ENDINGS


def recipe_to_show(dataset: str, overrides: Sequence[str]) -> tuple[LoadedRecipe, str]:
    """A recipe of the dataset, by the first method that its columns suit, and the sentence that says so.

    The tokenizer is that of `model.path` or `model.tokenizer` among the overrides, else the usual one.
    Raises: RecipeError, DataError; RecipeError for prompts alone, whose methods need rewards.
    """
    words, encoded = [_data_word(dataset)], ""
    if not any(word.startswith(("model.path=", "model.tokenizer=")) for word in overrides):
        usual = usual_tokenizer(dataset)
        words.append(f"model.path={json.dumps(usual.name)}")
        encoded = f" Encoded with {usual.words}. --model encodes with another."
    if any(word.startswith("method=") for word in overrides):
        return recipe_of_words([*words, *overrides]), f"Rows of {dataset}.{encoded}"
    method = _method(dataset, [*words, *overrides], "show-data")
    sentence = f"Rows of {dataset}, as {method} has them (method=... shows those of another method).{encoded}"
    return recipe_of_words([f"method={method}", *words, *overrides]), sentence


def recipe_to_plan(dataset: str, model: str, overrides: Sequence[str]) -> tuple[LoadedRecipe, str]:
    """The recipe that `memtrain METHOD DATASET --model MODEL` would run, and the sentence that names it.

    The method is the first that the columns suit, where the overrides name none.
    Raises: RecipeError, DataError; RecipeError for a model in the dataset's place, and for prompts alone.
    """
    if is_model(dataset) and Path(dataset).expanduser().is_dir():
        raise RecipeError(
            f"{dataset} is a model, and --model names another",
            "the command line",
            f"give a dataset beside --model, or the model alone: memtrain plan {dataset}",
        )
    words = [_data_word(dataset), model_word(model), *overrides]
    if not any(word.startswith("method=") for word in overrides):
        words.insert(0, f"method={_method(dataset, words, 'plan')}")
    loaded = recipe_of_words(words)
    own = [word for word in overrides if not word.startswith("method=")]
    command = shlex.join(["memtrain", METHODS[loaded.recipe.method].command, dataset, "--model", model, *own])
    way = "" if loaded.recipe.model.adapter is not None else ": full fine-tuning; model.adapter={} plans LoRA"
    return replace(loaded, path=Path(dataset)), f"The plan of `{command}`{way}."


def method_to_train(dataset: str, model: str, overrides: Sequence[str]) -> str | None:
    """The method of `memtrain train DATASET --model MODEL`: the first that the columns suit; None where an
    override names one, which has a command of its own.

    Raises: RecipeError, DataError; RecipeError for prompts alone.
    """
    if any(word.startswith("method=") for word in overrides):
        return None
    return _method(dataset, [_data_word(dataset), model_word(model), *overrides], "train")


def _data_word(dataset: str) -> str:
    return f"data.train={json.dumps(dataset, ensure_ascii=False)}"


def _method(dataset: str, words: Sequence[str], command: str) -> str:
    """The first method that the columns of a dataset suit.

    Raises: DataError where none does; RecipeError for prompts alone.
    """
    loaded = recipe_of_words(["method=sft", *words])
    data = loaded.recipe.data
    with at_their_lines(loaded):
        found = [look_into(one, data, every_format(), f"data.train[{n}]") for n, one in enumerate(data.train)]
    method = method_of(kind_of(found, every_format()))
    if METHODS[method].is_online:
        raise RecipeError(
            f"the rows of {dataset} are prompts without answers, so a recipe has to define their rewards",
            "the command line",
            f"write one (memtrain init {method} -o my.yaml), then memtrain {command} my.yaml "
            f"data.train={dataset}; `memtrain inspect-lengths {dataset}` needs none",
        )
    return method
