"""A model whose weights are read when they lie in shards: each rank reads its own rows of the files.

The model is made without weights, cut (shards.py), and filled. It is for checkpoints whose names are the
model's own; where transformers would rename or merge weights on loading, it loads them itself, whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from memtrain.trainers.model.where import Origin
from memtrain.trainers.run.shard_files import rows_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_FILES: WeakKeyDictionary[nn.Module, dict[str, Path]] = WeakKeyDictionary()
"""The file of each weight of a model that is still empty."""


def empty_model(origin: Origin, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel | None:
    """The causal LM without weights, or None where its files have other names than its weights.

    Buffers are real: they are computed from the configuration.
    """
    files = _files_of(origin)
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    wanted = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted
    kept = set(model.state_dict()) - wanted - tied
    if kept or not wanted <= set(files) <= wanted | tied:
        return None
    folder = next(iter(files.values())).parent
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    _FILES[model] = {name: files[name] for name in wanted}
    return model


def is_empty(model: nn.Module) -> bool:
    """Whether a model's weights are still to be read."""
    return any(parameter.is_meta for parameter in model.parameters())


def fill_shards(scorer: nn.Module, base: PreTrainedModel, device: torch.device) -> None:
    """Read this rank's rows of every weight of an empty model that was cut into shards."""
    buffers = {name: buffer for name, buffer in scorer.named_buffers()}
    scorer.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        scorer.get_submodule(owner)._buffers[last] = buffer.to(device)
    named = dict(base.named_parameters())
    files = _FILES.pop(base)
    with torch.no_grad():
        for file in sorted(set(files.values())):
            _fill_from(file, {name: named[name] for name, place in files.items() if place == file})


def _fill_from(file: Path, weights: Mapping[str, nn.Parameter]) -> None:
    with safe_open(file, "pt") as opened:
        for name, weight in weights.items():
            assert isinstance(weight, DTensor), "An empty model is filled when it is cut."
            rows = rows_of(weight.shape[0], dist.get_rank(), dist.get_world_size())
            saved: Any = opened.get_slice(name)
            assert tuple(saved.get_shape()) == tuple(weight.shape), f"{name} has another shape in {file}."
            own: Tensor = weight.to_local()
            if len(rows):
                own.copy_(saved[rows.start : rows.stop])


def _files_of(origin: Origin) -> dict[str, Path]:
    """The file of each name that is saved."""
    folder = Path(origin.path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        wanted = ["*.safetensors", "*.json"]
        folder = Path(
            snapshot_download(
                origin.path,
                revision=origin.revision,
                allow_patterns=wanted,
                local_files_only=origin.is_offline,
            )
        )
    if (folder / INDEX).is_file():
        index: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in index.items()}
    if not (folder / SINGLE).is_file():
        return {}
    with safe_open(folder / SINGLE, "pt") as opened:
        return dict.fromkeys(opened.keys(), folder / SINGLE)
