"""The argument of `memtrain score`: a reward model, an adapter of one, or the folder of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import PLAN_FILE, plan_of_run
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.reading.interpolate import literal
from memtrain.recipes.sections.model import Model
from memtrain.trainers.model.loading.locate import adapter_of, find_origin
from memtrain.trainers.run_folder.folder import RunFolder

BASES = ("model.path=", "model.config=")


@dataclass(frozen=True, slots=True)
class Scored:
    """A model that scores, as a recipe's words, and the adapter that goes on it."""

    words: tuple[str, ...]
    adapter: str | None = None
    """Folder or hub id."""


def find_scored(model: str, overrides: Sequence[str]) -> Scored:
    """The model at `model`; an adapter's base is its run's model, else its own named base, else `overrides`.

    Raises: LaunchError when a run has not ended, an adapter belongs to a language model, or names no base.
    """
    path = Path(model).expanduser()
    if (path / PLAN_FILE).is_file():
        path = RunFolder(path).final
        if not path.is_dir():
            raise LaunchError(
                f"the run in {model} has no trained model yet",
                str(path),
                "wait until it finishes, or score its base model",
            )
        model = str(path)
    given = any(word.startswith(BASES) for word in overrides)
    adapter = adapter_of(find_origin(model, None))
    if adapter is None:
        return Scored((word("model.path", model),))
    if adapter.task != "SEQ_CLS":
        raise LaunchError(
            f"{model} is an adapter of a language model: it has no weights for score.weight",
            str(Path(model) / ADAPTER_FILE),
            "use the adapter of a reward model (`memtrain reward` trains one)",
        )
    tokenizer = (word("model.tokenizer", model),) if (path / "tokenizer_config.json").is_file() else ()
    plan = path.parent / PLAN_FILE
    if given:
        base = ()
    elif plan.is_file():
        recipe = plan_of_run(plan.parent).recipe
        base = (*_words(recipe.model), f"train.seed={recipe.train.seed}")
    elif adapter.base:
        base = (word("model.path", adapter.base),)
    else:
        raise LaunchError(
            f"{model} does not name the model that it was trained on",
            str(Path(model) / ADAPTER_FILE),
            "add it to the command: model.path=FOLDER_OR_HUB_ID",
        )
    return Scored((*base, *tokenizer), model)


def _words(model: Model) -> tuple[str, ...]:
    """The base model of a run; random weights are drawn again by its seed."""
    if model.path is None:
        config = model.config if isinstance(model.config, str) else dict(model.config or {})
        return (word("model.config", config),)
    revision = () if model.revision is None else (word("model.revision", model.revision),)
    return (word("model.path", model.path), *revision)


def word(key: str, value: object) -> str:
    """A word of the command line that sets a key to a value as it is: no text of it is a reference."""
    return f"{key}={json.dumps(literal(value), ensure_ascii=False)}"
