"""From a loaded recipe to a plan: data prepared, model looked at, every setting resolved."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import memtrain
from memtrain.memory.hardware import Hardware, detect
from memtrain.memory.lengths import LengthProfile
from memtrain.memory.plan import Plan, PreparedData
from memtrain.memory.resolve import Facts, resolve
from memtrain.memory.rules import Asked
from memtrain.memory.shape import shape_of
from memtrain.recipes.load import LoadedRecipe
from memtrain.recipes.model import Model
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.order import BatchSize, count_steps
from memtrain.trainers.data.pieces import Sequences, Spans, lay_out
from memtrain.trainers.data.prepare import prepare
from memtrain.trainers.data.rows import choose_rows
from memtrain.trainers.data.store import TokenStore


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the length profile that it was made for."""

    plan: Plan
    profile: LengthProfile


def make_plan(
    loaded: LoadedRecipe,
    *,
    run_dir: str | None = None,
    hardware: Hardware | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Planned:
    """Prepare the data, look at the model, and resolve every setting.

    Raises: RecipeError, DataError, LaunchError, DoesNotFit.
    """
    recipe = loaded.recipe
    data = prepare(recipe, progress=progress)
    sequences = sequences_of(recipe, data)
    config = model_config(recipe.model)
    facts = Facts(
        hardware=hardware or detect(recipe.cluster.device),
        shape=shape_of(config, recipe.model.path or "model.config"),
        config=config,
        profile=sequences.profile,
        count_steps=_counter(loaded, sequences),
    )
    resolved = resolve(Asked(recipe, loaded.where), facts)
    plan = Plan(
        recipe=recipe,
        recipe_path=str(loaded.path),
        run_dir=run_dir or recipe.run_dir or str(Path("runs") / loaded.path.stem),
        settings=resolved.settings,
        decisions=resolved.decisions,
        data=data,
        prediction=resolved.prediction,
        plain=resolved.plain,
        versions=versions(),
    )
    return Planned(plan, sequences.profile)


def sequences_of(recipe: Recipe, data: PreparedData) -> Sequences:
    """The training rows as the workers will lay them out."""
    store = TokenStore.open(data.train.folder)
    rows = choose_rows(recipe.data, store, recipe.train.seed).train
    spans = Spans(store.span_ptr, store.span_starts, store.span_ends)
    return lay_out(store.lengths, spans, rows, recipe.length)


def model_config(model: Model) -> Mapping[str, object]:
    """The configuration of the model that is trained, as in its config.json.

    Raises: LaunchError when there is none.
    """
    from memtrain.trainers.data.tokenizer import tokenizer_of
    from memtrain.trainers.model.tiny import BUILTIN_TINY, tiny_config
    from memtrain.trainers.model.where import find_origin, read_config, read_config_file

    if model.path == BUILTIN_TINY:
        return tiny_config(len(tokenizer_of(model)))
    if isinstance(model.config, str):
        return read_config_file(model.config)
    if model.config is not None:
        from transformers import AutoConfig

        given = {"vocab_size": len(tokenizer_of(model)), **model.config}
        return AutoConfig.for_model(**given).to_dict() if "model_type" in given else given
    assert model.path is not None, "A recipe has model.path or model.config."
    file = Path(model.path).expanduser() / "config.json"
    if file.is_file():
        return json.loads(file.read_text())
    return read_config(find_origin(model.path, model.revision)).to_dict()


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    packages = ("torch", "transformers", "accelerate", "peft")
    return {
        "memtrain": memtrain.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _counter(loaded: LoadedRecipe, sequences: Sequences) -> Callable[[int | None, int | None, float], int]:
    recipe = loaded.recipe

    def count(rows: int | None, tokens: int | None, epochs: float) -> int:
        return count_steps(
            sequences.tokens,
            BatchSize(rows, tokens),
            epochs=epochs,
            seed=recipe.train.seed,
            shuffle=recipe.train.shuffle,
            group_by_length=recipe.length.group_by_length,
        )

    return count
