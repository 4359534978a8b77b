"""`memtrain show-data DATASET`: the recipe that shows rows without one, its method read off their columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from memtrain.cli.plan.usual_tokenizer import usual_tokenizer
from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import LoadedRecipe, recipe_of_words
from memtrain.recipes.reading.shipped import ENDINGS, shipped_names
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.length_report.inspect import every_format, method_of
from memtrain.trainers.data.sources.readers import READERS, ending
from memtrain.trainers.data.store.prepare import work_of
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of


def is_dataset(name: str) -> bool:
    """Whether a name in the place of a recipe's is that of a data file, or of a folder."""
    path = Path(name).expanduser()
    if name in shipped_names() or path.suffix in ENDINGS:
        return False
    return path.is_dir() or (path.is_file() and ending(path) in READERS)


def recipe_to_show(dataset: str, overrides: Sequence[str]) -> tuple[LoadedRecipe, str]:
    """A recipe of the dataset, by the first method that its columns suit, and the sentence that says so.

    The tokenizer is that of `model.path` or `model.tokenizer` among the overrides, else the usual one.
    Raises: RecipeError, DataError; RecipeError for prompts alone, whose methods need rewards.
    """
    words, counted = [f"data.train={json.dumps(dataset, ensure_ascii=False)}"], ""
    if not any(word.startswith(("model.path=", "model.tokenizer=")) for word in overrides):
        usual = usual_tokenizer(dataset)
        words.append(f"model.path={json.dumps(usual.name)}")
        counted = usual.summary.replace("Counted with", "Encoded with")
        counted = counted.split(" --model or --tokenizer")[0].split("; --model or --tokenizer")[0]
        counted = f" {counted.rstrip('.')}. --model encodes with another."
    if any(word.startswith("method=") for word in overrides):
        return recipe_of_words([*words, *overrides]), f"Rows of {dataset}.{counted}"
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
    sentence = f"Rows of {dataset}, as {method} has them (method=... shows those of another method).{counted}"
    return recipe_of_words([f"method={method}", *words, *overrides]), sentence
