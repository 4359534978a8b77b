"""The shape of a model for planning: by formula where its family is known, else counted in its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

from memtrain.errors import LaunchError
from memtrain.memory.estimate.pricing import MeasureLayers
from memtrain.memory.model_shape.layer_record import NOT_MEASURED, ModelRecord, Treatment
from memtrain.memory.model_shape.shape import ModelShape, has_formula, is_measured, shape_of
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.tools.trace.client import LayersJob, layer_record, layers_job


def shape_for(config: Mapping[str, Any], where: str = "", head: Literal["lm", "score"] = "lm") -> ModelShape:
    """The shape that a config.json (as a mapping) describes. torch is loaded for unknown families only.

    Raises: RecipeError when the numbers of a decoder are missing.
    """
    if has_formula(config):
        return shape_of(config, where, head)
    from memtrain.trainers.model.loading.module_shapes import counted_shape

    return counted_shape(config, where, head)


def layer_measurer(config: Mapping[str, Any], shape: ModelShape) -> MeasureLayers:
    """Function that measures the layers of a model where no arithmetic is known of them."""
    return partial(_with_record, dict(config), shape)


def _with_record(
    config: dict[str, Any], shape: ModelShape, settings: Settings, treatments: frozenset[Treatment]
) -> ModelShape:
    if not is_measured(shape, settings.adapter) or shape.starts_no_run:
        return shape
    if shape.model_type in NOT_MEASURED:
        return replace(shape, unmeasured=NOT_MEASURED[shape.model_type])
    found = _measured(layers_job(config, settings, treatments).model_dump_json())
    return replace(shape, **{"unmeasured" if isinstance(found, str) else "record": found})


@lru_cache(maxsize=16)
def _measured(job: str) -> ModelRecord | str:
    """The record of a job, or why there is none: a search for lengths asks many times."""
    try:
        return layer_record(LayersJob.model_validate_json(job))
    except LaunchError as error:
        return error.faults[0].what
