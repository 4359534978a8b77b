"""`memtrain show-data DATASET`: the recipe that shows rows without one, its method read off their columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from memtrain.cli.plan.recipe_of_dataset import is_dataset
from memtrain.cli.plan.usual_tokenizer import usual_tokenizer
from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import LoadedRecipe, recipe_of_words
from memtrain.recipes.reading.shipped import ENDINGS, shipped_names
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.length_report.inspect import every_format, method_of
from memtrain.trainers.data.store.prepare import work_of
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of


def is_shown_alone(name: str) -> bool:
    """Whether a name in the place of a recipe's is that of a dataset."""
    return name not in shipped_names() and Path(name).suffix not in ENDINGS and is_dataset(name)


def recipe_to_show(dataset: str, overrides: Sequence[str]) -> tuple[LoadedRecipe, str]:
    """A recipe of the dataset, by the first method that its columns suit, and the sentence that says so.

    The tokenizer is that of `model.path` or `model.tokenizer` among the overrides, else the usual one.
    Raises: RecipeError, DataError; RecipeError for prompts alone, whose methods need rewards.
    """
    words, encoded = [f"data.train={json.dumps(dataset, ensure_ascii=False)}"], ""
    if not any(word.startswith(("model.path=", "model.tokenizer=")) for word in overrides):
        usual = usual_tokenizer(dataset)
        words.append(f"model.path={json.dumps(usual.name)}")
        encoded = f" Encoded with {usual.words}. --model encodes with another."
    if any(word.startswith("method=") for word in overrides):
        return recipe_of_words([*words, *overrides]), f"Rows of {dataset}.{encoded}"
    asked = recipe_of_words(["method=sft", *words, *overrides]).recipe
    work = work_of(asked.data, asked.data.train, every_format(), tokenizer_of(asked.model))
    method = method_of(work.job.kind)
    if METHODS[method].is_online:
        raise RecipeError(
            f"the rows of {dataset} are prompts alone, and a recipe has to say their rewards",
            "the command line",
            f"write one (memtrain init {method} -o my.yaml), then memtrain show-data my.yaml "
            f"data.train={dataset}; `memtrain inspect-lengths {dataset}` needs none",
        )
    sentence = f"Rows of {dataset}, as {method} has them (method=... shows those of another method).{encoded}"
    return recipe_of_words([f"method={method}", *words, *overrides]), sentence
