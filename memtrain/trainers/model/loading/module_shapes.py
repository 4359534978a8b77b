"""The parts of a model counted in its modules, built without data: for families without a formula."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from memtrain.errors import LaunchError, words_of
from memtrain.memory.model_shape.config_names import OTHER_NAMES, canonical
from memtrain.memory.model_shape.layer_parts import Counts, ExpertStack, Linear
from memtrain.memory.model_shape.shape import NO_RUN, ModelShape, shape_of
from memtrain.recipes.sections.model import Model
from memtrain.trainers.model.experts.forward import is_experts, stacks_of
from memtrain.trainers.model.heads.backbone import backbone_of
from memtrain.trainers.model.loading.adapter_targets import check_continued, check_quantized, check_targets
from memtrain.trainers.model.loading.load import AUTO, check_config, refuse_random_in_bits
from memtrain.trainers.model.loading.locate import built, make_config, unknown_model, unknown_type
from memtrain.trainers.model.loading.weight_files import check_shapes, check_weights

SPARE_POSITIONS = 16
"""Rows that a table of positions may have beyond the longest row: OPT's has two. Taste."""


def count_model(config: Mapping[str, Any], head: str = "lm") -> tuple[Counts | None, dict[str, Any], str]:
    """(the counts, the numbers under the names used here, why there are none: then empty counts).

    `config` is a config.json as a mapping. The model is built on the meta device: no weight is made. What
    cannot be built is tried again at the next call, since a model's own code may be known by then.
    """
    try:
        return (*_counted(_key(config), head), "")
    # What a class of transformers raises over a configuration it does not like has no common kind.
    except Exception as error:
        if "model_type" in config and unknown_type(str(config["model_type"])) is not None:
            fault = unknown_model(config, "model.path")
            return None, {}, f"{NO_RUN}: {fault.faults[0].what}"
        if "vision_config" in config or "audio_config" in config:
            kind = config.get("model_type")
            return (
                None,
                {},
                f"{NO_RUN}: {kind} models read pictures or sound, and memtrain trains text models",
            )
        return None, {}, f"transformers cannot build it ({type(error).__name__}: {words_of(error)})"


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(dict(config), sort_keys=True, default=str)


@lru_cache(maxsize=16)
def _counted(config: str, head: str) -> tuple[Counts, dict[str, Any]]:
    model = _without_data(config, head)
    return counts_of(model), _numbers(model.config)


@lru_cache(maxsize=1)
def _without_data(config: str, head: str) -> PreTrainedModel:
    made = make_config(json.loads(config))
    if head == "score":
        made.num_labels = 1
    with torch.device("meta"):
        return AUTO[head].from_config(made)


def check_model(model: Model, config: Mapping[str, Any], head: str = "lm") -> None:
    """Refuse before launch a model that a run could not build or read: the model is built without weights,
    and the headers of its files are read.

    Raises: LaunchError.
    """
    if "model_type" in config:
        check_config(
            built(make_config, config, model.path or "model.config"), model.path or "model.config", head
        )
    _, _, why = count_model(config, head)
    if why:
        raise LaunchError(
            f"the model's config does not describe a model: {why}",
            model.path or "model.config",
            "compare its values with the config.json of a published model of this type",
        )
    refuse_random_in_bits(model)
    if model.adapter is not None:
        bare = _without_data(_key(config), head)
        check_targets(bare, model.adapter, quantize=model.quantize)
        check_quantized(bare, model.quantize)
        if model.adapter.path is not None:
            check_continued(bare, Path(model.adapter.path))
    folder = Path(model.path).expanduser() if model.path is not None else None
    if folder is not None and (folder / "config.json").is_file():
        check_weights(folder)
        if not model.add_tokens:  # `config` has rows for them, and the files have not
            wanted = _without_data(_key(config), head).state_dict()
            check_shapes(folder, {name: weight.shape for name, weight in wanted.items()})


def counted_shape(
    config: Mapping[str, Any], where: str = "", head: Literal["lm", "score"] = "lm"
) -> ModelShape:
    """The shape of a model of any family, its weights counted; a Llama's where it cannot be built.

    Raises: RecipeError when the numbers of a decoder are missing.
    """
    counts, numbers, why = count_model(config, head)
    if counts is None:
        found = shape_of(config, where, head)
        return replace(found, note="; ".join(note for note in (found.note, why) if note))
    inner = config.get("text_config")
    overrides = {"text_config": {**inner, **numbers}} if isinstance(inner, Mapping) else numbers
    return shape_of({**config, **overrides}, where, head, counts=counts)


def counts_of(model: PreTrainedModel) -> Counts:
    """The counts of a built model, with or without data."""
    backbone = backbone_of(model)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    layers = decoder_layers(backbone)
    largest = max(layers, key=_num_parameters)
    all_linears = Counter(
        one for name, module in model.named_modules() if module is not head and (one := _linear(name, module))
    )
    own = list(model.parameters())
    num_trunk = _num_parameters(backbone)
    return Counts(
        num_trunk=num_trunk,
        num_embedding=_num_parameters(embedding),
        num_head=_num_parameters(model) - num_trunk,
        layers=tuple(_num_parameters(layer) for layer in layers),
        largest_tensor=max(p.numel() for p in own),
        num_vectors=sum(p.numel() for p in own if p.dim() < 2),
        linears=tuple(one for name, module in largest.named_modules() if (one := _linear(name, module))),
        all_linears=tuple(all_linears.items()),
        stacks=tuple(Counter(_stacks(model)).items()),
        num_positions=_num_positions(model, embedding),
        is_eager=not model._supports_sdpa,  # pyright: ignore[reportPrivateUsage]
    )


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The decoder layers: the list of modules that holds the most parameters."""
    lists = [list(module) for module in backbone.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda one: sum(map(_num_parameters, one)), default=[backbone])


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _linear(name: str, module: nn.Module) -> Linear | None:
    leaf = name.rsplit(".", 1)[-1]
    if isinstance(module, nn.Linear):
        return Linear(leaf, module.in_features, module.out_features, module.bias is not None)
    if isinstance(module, Conv1D):
        num_inputs, num_outputs = module.weight.shape
        return Linear(leaf, num_inputs, num_outputs, True)
    return None


def _stacks(model: nn.Module) -> list[ExpertStack]:
    return [
        ExpertStack(name, *module._parameters[name].shape)  # pyright: ignore[reportOptionalMemberAccess]
        for module in model.modules()
        if is_experts(module)
        for name in stacks_of(module)
    ]


def _num_positions(model: PreTrainedModel, embedding: nn.Module) -> int | None:
    """The longest row that a table of positions allows; None where there is no such table."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    tables = [
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not embedding
    ]
    tables += [
        buffer.shape[0] for name, buffer in model.named_buffers() if buffer.dim() == 2 and "position" in name
    ]
    return longest if any(longest <= rows <= longest + SPARE_POSITIONS for rows in tables) else None


def _numbers(config: PretrainedConfig) -> dict[str, Any]:
    text = config.get_text_config()
    values, other = canonical(text.to_dict()), text.attribute_map
    names = (*OTHER_NAMES, "vocab_size", "tie_word_embeddings", "head_dim")
    found = {name: values.get(name, values.get(other.get(name, name))) for name in names}
    # Nemotron-H counts its layers by the list of their kinds.
    found["num_hidden_layers"] = text.num_hidden_layers
    return {name: value for name, value in found.items() if isinstance(value, int | float)}
