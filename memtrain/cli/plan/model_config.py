"""The configurations of a recipe's models: the one that is trained, its reward models, its teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memtrain.cli.plan.model_shape import shape_for
from memtrain.errors import LaunchError, words_of
from memtrain.memory.estimate.auxiliary_models import RewardShape
from memtrain.memory.estimate.teachers import TeacherShape
from memtrain.memory.model_shape.config_file import check_values, read_config_json
from memtrain.memory.model_shape.rope_scaling import scaled
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Model


def reward_shapes(
    recipe: Recipe,
    config: Mapping[str, Any],
    look: Callable[[Model], Mapping[str, object]] | None = None,
) -> tuple[RewardShape, ...]:
    """The reward models of a recipe beside a policy of `config`; `look` finds a model's configuration.

    Raises: LaunchError when there is none of that name.
    """
    models = recipe.rewards.models if recipe.rewards is not None else ()
    found = [(look or model_config)(Model(path=one.path, revision=one.revision)) for one in models]
    return tuple(
        RewardShape(
            shape=shape_for(own, one.path),
            dtype=one.dtype,
            config=own,
            is_alike=own.get("model_type") == config.get("model_type"),
            max_length=one.max_length,
        )
        for one, own in zip(models, found, strict=True)
    )


def teacher_shape(
    recipe: Recipe, look: Callable[[Model], Mapping[str, object]] | None = None
) -> TeacherShape | None:
    """The teacher that is in memory beside the student; `look` finds a model's configuration.

    Raises: LaunchError when there is none of that name.
    """
    if recipe.taught is None or not recipe.taught.loads_teacher:
        return None
    from memtrain.trainers.data.tokenize.teacher_vocabulary import teacher_model

    section = recipe.taught
    own = (look or model_config)(teacher_model(recipe))
    path = str(section.teacher)
    return TeacherShape(shape=shape_for(own, path), dtype=section.teacher_dtype, path=path, config=own)


def model_config(model: Model) -> Mapping[str, object]:
    """The configuration of the model that is trained: its config.json with the recipe's scaling of positions.

    Raises: LaunchError when there is none; RecipeError for a scaling that the model cannot have.
    """
    config = scaled(own_config(model), model.rope_scaling)
    return _with_added_tokens(config, model) if model.add_tokens else config


def _with_added_tokens(config: Mapping[str, object], model: Model) -> Mapping[str, object]:
    """The configuration with as many tokens as the tokenizer has, where it has fewer."""
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    count, text = len(tokenizer_of(model)), config.get("text_config")
    if isinstance(text, dict) and "vocab_size" in text:
        return {**config, "text_config": {**text, "vocab_size": max(count, int(str(text["vocab_size"])))}}
    return {**config, "vocab_size": max(count, int(str(config["vocab_size"])))}


def own_config(model: Model) -> Mapping[str, object]:
    """The configuration of the model as in its config.json.

    Raises: LaunchError when there is none.
    """
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
    from memtrain.trainers.model.loading.locate import (
        find_origin,
        make_config,
        read_config,
        read_config_file,
        unknown_type,
    )
    from memtrain.trainers.model.loading.tiny import BUILTIN_TINY, tiny_config

    if model.path == BUILTIN_TINY:
        return tiny_config(len(tokenizer_of(model)))
    if isinstance(model.config, str):
        return read_config_file(model.config)
    if model.config is not None:
        given = {"vocab_size": len(tokenizer_of(model)), **model.config}
        if "model_type" in given and (fault := unknown_type(str(given["model_type"]))):
            raise LaunchError(fault, "model.config", "write a model_type that transformers knows")
        check_values(given, "model.config")
        if "model_type" not in given:
            return given
        try:
            return make_config(given).to_dict()
        except Exception as error:  # each configuration class has faults of its own
            raise LaunchError(
                f"model.config: {words_of(error)}", "model.config", "use the values of a published model"
            ) from None
    assert model.path is not None, "A recipe has model.path or model.config."
    if model.trust_remote_code:
        from memtrain.trainers.model.loading.own_code import trust_code

        trust_code(model)
    folder = Path(model.path).expanduser()
    if folder.is_dir() and (folder / "config.json").exists():
        given = read_config_json(folder, "model.path")
        _refuse_unknown(given, folder)
        return given
    return read_config(find_origin(model.path, model.revision)).to_dict()


def _refuse_unknown(config: Mapping[str, object], folder: Path) -> None:
    """Raise LaunchError for a model of a type that transformers does not know."""
    from memtrain.trainers.model.loading.locate import unknown_model, unknown_type

    if "model_type" in config and unknown_type(str(config["model_type"])) is not None:
        raise unknown_model(config, f"{folder}/config.json")
