"""The model of a run that is not on this machine: its shape by its folder's name, or of another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from memtrain.cli.plan.lookup import LookedAt, look_at_model
from memtrain.errors import LaunchError
from memtrain.memory.model_shape.known_models import known_config, known_name
from memtrain.recipes.importers.importing import Foreign
from memtrain.recipes.importers.tool import TrlKey
from memtrain.recipes.sections.model import Model

_OTHERS = {"verl": "actor_rollout_ref.model.path", "unsloth": "from_pretrained.model_name"}
"""Keys of the model, where a configuration has none."""


@lru_cache(maxsize=8)
def looked_at(path: str, revision: str | None) -> tuple[LookedAt, str]:
    """(a model's configuration, a note where it is another model's): looked up once for all changes that are
    tried.

    Raises: LaunchError when it is nowhere, and its name is of no known model.
    """
    try:
        return look_at_model(Model(path=path, revision=revision)), ""
    except LaunchError as error:
        what = error.faults[0].what
    name = known_name(path)
    config = None if name is None else known_config(name)
    if name is None or config is None:
        raise LaunchError(
            what,
            "the model of the configuration",
            "add --model owner/name, a model of the same shape; or give the model's folder",
        )
    note = (
        f"{what[0].upper()}{what[1:]}: the shape of {name} is planned, by its name (--model names another)."
    )
    return LookedAt(config, is_on_hub_only=True), note


def with_model(foreign: Foreign, model: str | None) -> Foreign:
    """The configuration with another model, where one is asked for."""
    if model is None:
        return foreign
    keys: dict[str, object] = {
        key: model for key in _model_keys(foreign.tool.keys, foreign.config) or [_default_key(foreign)]
    }
    return replace(foreign, config={**foreign.config, **keys})


def _model_keys(rules: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Keys of a configuration that name the model."""
    return [
        key
        for key in config
        if key == _TRL or (isinstance(rule := rules.get(key), TrlKey) and rule.key == _TRL)
    ]


def _default_key(foreign: Foreign) -> str:
    rules = foreign.tool.keys
    return _OTHERS.get(foreign.tool.name) or next(iter(_model_keys(rules, rules)), _TRL)


_TRL = "model_name_or_path"
