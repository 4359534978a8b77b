"""The model of a run that is not on this machine: its shape by its folder's name, or of another model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from memtrain.cli.plan.lookup import LookedAt, look_at_model
from memtrain.cli.plan.model_shape import shape_for
from memtrain.errors import LaunchError, RecipeError
from memtrain.memory.model_shape.known_models import known_model, not_trained
from memtrain.memory.rules.adapter_targets import missing_targets
from memtrain.recipes.importers.importing import Foreign
from memtrain.recipes.importers.tool import Tool
from memtrain.recipes.sections.model import Model as RecipeModel

_OTHERS = {"verl": "actor_rollout_ref.model.path", "unsloth": "from_pretrained.model_name"}
"""Keys of the model, where a configuration has none."""


@lru_cache(maxsize=8)
def looked_at(path: str, revision: str | None) -> tuple[LookedAt, str]:
    """(a model's configuration, a note where it is another model's): looked up once for all changes that are
    tried.

    Raises: LaunchError when it is nowhere, and its name is of no known model.
    """
    try:
        found = look_at_model(RecipeModel(path=path, revision=revision))
        return found, f"{found.note[:-1]} (--model names another)." if found.is_by_name else ""
    except LaunchError as error:
        what = error.faults[0].what
    known, other = known_model(path), not_trained(path)
    if known is None:
        fix = "add --model owner/name, a model of the same shape; or give the model's folder"
        if other is not None:
            what += "" if other in what else f"; {other}"
            fix = "add --model with the language model inside to plan that part (Qwen/Qwen2.5-7B of its VL)"
        raise LaunchError(what, "the model of the configuration", fix)
    note = (
        f"{what[0].upper()}{what[1:]}: the shape of {known.name} is planned, by its name (--model names "
        "another)."
    )
    return LookedAt(known.config, is_on_hub_only=True), note


def with_model(foreign: Foreign, model: str | None) -> Foreign:
    """The configuration with another model, where one is asked for.

    Raises: RecipeError where neither says a model.
    """
    named = _model_keys(foreign.tool, foreign.config)
    if model is None and not named:
        unset = [text for key, text in foreign.unset.items() if key in _model_keys(foreign.tool, [key])]
        said = f"the model is {unset[0]}, which nothing sets" if unset else "the configuration names no model"
        raise RecipeError(said, foreign.name, "add --model owner/name")
    if model is None:
        return foreign
    keys: dict[str, object] = {key: model for key in named or [_default_key(foreign)]}
    unset = {key: text for key, text in foreign.unset.items() if key not in keys}
    return replace(foreign, config={**foreign.config, **keys}, unset=unset)


def with_modules_that_are_there(foreign: Foreign, model: RecipeModel) -> tuple[Foreign, list[str]]:
    """(the configuration without names of an adapter's targets that the model has not, a note on them).

    PEFT passes over them where it finds another; a recipe may not name them.
    """
    if model.adapter is None or model.path is None:
        return foreign, []
    names = model.adapter.target_modules
    missing = missing_targets(names, shape_for(looked_at(model.path, model.revision)[0].config))
    if not missing or len(missing) == len(names):
        return foreign, []
    config = {key: _without(value, missing) for key, value in foreign.config.items()}
    note = (
        f"The model has no linear map {', '.join(missing)}, and the adapter is planned without: stacked "
        "experts are named in model.adapter.target_parameters."
    )
    return replace(foreign, config=config), [note]


def _without(value: Any, names: Sequence[str]) -> Any:
    """A list of a configuration, or words with commas, without some names."""
    if isinstance(value, list) and set(names) <= {str(one) for one in cast(list[Any], value)}:
        return [one for one in cast(list[Any], value) if str(one) not in names]
    words = [word.strip() for word in value.split(",")] if isinstance(value, str) else []
    return ",".join(word for word in words if word not in names) if set(names) <= set(words) else value


def _model_keys(tool: Tool, config: Iterable[str]) -> list[str]:
    """Keys of a configuration that name the model."""
    return [key for key in config if (row := tool.row(key)) is not None and row.trl == _TRL]


def _default_key(foreign: Foreign) -> str:
    tool = foreign.tool
    return _OTHERS.get(tool.name) or next(iter(_model_keys(tool, tool.table.rows)), _TRL)


_TRL = "model_name_or_path"
