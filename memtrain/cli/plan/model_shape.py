"""The shape of a model for planning: by formula where its family is known, else counted in its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.families import PASSED
from memtrain.memory.model_shape.seen_layers import NOT_SEEN, SeenLayers
from memtrain.memory.model_shape.shape import ModelShape, has_formula, shape_of
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.tools.trace.client import LayersJob, layers_job, seen_layers


def shape_for(config: Mapping[str, Any], where: str = "", head: Literal["lm", "score"] = "lm") -> ModelShape:
    """The shape that a config.json (as a mapping) describes. torch is loaded for unknown families only.

    Raises: RecipeError when the numbers of a decoder are missing.
    """
    if has_formula(config):
        return shape_of(config, where, head)
    from memtrain.trainers.model.loading.module_shapes import counted_shape

    return counted_shape(config, where, head)


def layers_seer(config: Mapping[str, Any], shape: ModelShape) -> Callable[[Settings], ModelShape] | None:
    """Function that finds the activations of layers that no formula knows; None where formulas know them, or
    this machine cannot build the model."""
    is_passed = shape.own_layers or shape.model_type in PASSED
    if not is_passed or shape.counts is None:
        return None
    return partial(_with_seen_layers, dict(config), shape)


def _with_seen_layers(config: dict[str, Any], shape: ModelShape, settings: Settings) -> ModelShape:
    if shape.model_type in NOT_SEEN:
        return replace(shape, unseen=NOT_SEEN[shape.model_type])
    found = _passed(layers_job(config, settings).model_dump_json())
    return replace(shape, unseen=found) if isinstance(found, str) else passed_shape(shape, found)


def passed_shape(shape: ModelShape, seen: SeenLayers) -> ModelShape:
    """A counted shape with the activations of its layers, and its family's norms."""
    return replace(shape, seen=seen, family=PASSED.get(shape.model_type, shape.family))


@lru_cache(maxsize=16)
def _passed(job: str) -> SeenLayers | str:
    """The layers of a job, or why they cannot be passed: a search for lengths asks many times."""
    try:
        return seen_layers(LayersJob.model_validate_json(job))
    except LaunchError as error:
        return error.faults[0].what
