"""`memtrain sft DATASET --model M`: the recipe that these words mean, written to a file before it runs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import yaml

from memtrain.cli.output.terminal import print_text
from memtrain.errors import RecipeError
from memtrain.memory.model_shape.adapter_file import read_adapter_config
from memtrain.memory.model_shape.config_file import model_of_run
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.reading.load import recipe_of_words
from memtrain.recipes.reading.shipped import ENDINGS
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.sources.readers import READERS, ending

HEADER = "# Written by `memtrain {command} DATASET --model MODEL`. Every key: docs/recipe.md."


def write_recipe(method: str | None, dataset: str, model: str, overrides: Sequence[str]) -> Path:
    """The file of the recipe that trains `model` on `dataset`, in the current folder.

    A file that says the same is taken as it is; one that an earlier command wrote, and that no run used (its
    command was refused), is kept beside it. Beside any other the file has a number: `rows-sft-2.yaml`.
    Raises: RecipeError when a word is wrong, or the method is not given.
    """
    if method is None:
        raise RecipeError(
            "a dataset alone does not say the method",
            "the command line",
            "use the command of a method: memtrain sft DATASET --model MODEL",
        )
    command = METHODS[method].command
    words = [
        f"method={method}",
        model_word(model),
        f"data.train={json.dumps(dataset, ensure_ascii=False)}",
        *overrides,
    ]
    loaded = recipe_of_words(words)
    body = yaml.safe_dump(dict(loaded.resolved), sort_keys=False, allow_unicode=True, width=100)
    header = HEADER.format(command=command)
    path, is_there = _free_file(f"{name_of(dataset)}-{method}", header, f"{header}\n{body}")
    if is_there:
        return path
    if path.exists():
        names = (f"{path}.bak", *(f"{path}.bak-{number}" for number in range(2, 1000)))
        path.replace(kept := next(name for name in names if not Path(name).exists()))
        print_text(f"{path} was written before, and no run used it: it is kept as {kept}.")
    path.write_text(f"{header}\n{body}", encoding="utf-8")
    return path


def model_word(model: str) -> str:
    """`--model` as the key of a recipe; the folder of a run is the model in it.

    Raises: RecipeError for an adapter, which is no model.
    """
    folder = Path(model_of_run(model)).expanduser()
    if (folder / ADAPTER_FILE).is_file() and not (folder / "config.json").exists():
        base = (
            read_adapter_config(folder / ADAPTER_FILE, "--model").get("base_model_name_or_path")
            or "ITS_MODEL"
        )
        raise RecipeError(
            f"{model} is an adapter of {base}, not a model",
            "--model",
            f"go on training it: --model {shlex.quote(str(base))} model.adapter.path={shlex.quote(model)}; "
            f"or make one model of both: memtrain merge {shlex.quote(model)}",
        )
    return f"model.path={json.dumps(model_of_run(model), ensure_ascii=False)}"


def _free_file(stem: str, header: str, text: str) -> tuple[Path, bool]:
    """The first of `stem.yaml`, `stem-2.yaml`, ... that holds the text, is free, or was used by no run; and
    whether it holds the text."""
    for number in count(1):
        path = Path(f"{stem}.yaml" if number == 1 else f"{stem}-{number}.yaml")
        if not path.exists():
            return path, False
        before = path.read_text(encoding="utf-8", errors="replace")
        if before == text:
            return path, True
        if before.startswith(header) and not Path("runs", path.stem, "metrics.jsonl").exists():
            return path, False
    raise AssertionError("count(1) has no end")


def is_dataset(name: str) -> bool:
    """Whether a name is that of a data file, or of a folder."""
    path = Path(name).expanduser()
    return path.is_dir() or (path.is_file() and path.suffix not in ENDINGS and ending(path) in READERS)


def refuse_dataset(name: str, method: str | None) -> None:
    """Raise RecipeError when a name is a data file, or a folder: a model is missing beside it."""
    if is_dataset(name):
        raise RecipeError(
            f"{name} is a dataset, but no model is given",
            "the command line",
            f"memtrain {METHODS[method].command if method else 'METHOD'} {name} --model MODEL, or a recipe",
        )


def name_of(dataset: str) -> str:
    """The name of a dataset's file or folder, or of its hub id, in the letters of a file name."""
    stem = Path(dataset.rstrip("/")).name.split(".")[0]
    return re.sub(r"[^\w-]+", "-", stem).strip("-") or "data"
