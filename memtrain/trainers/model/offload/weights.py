"""Weights of a model's layers that live on the host, by `memory.weights_offload`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import moves_trained
from memtrain.trainers.model.attention.run_device import run_device
from memtrain.trainers.model.offload.copy_engines import CopyEngine, CudaEngine, engine_for
from memtrain.trainers.model.streamed.apply import layers_of
from memtrain.trainers.model.streamed.end_weights import EndWeights
from memtrain.trainers.model.streamed.layer_weights import LayerWeights

HOME = "_layer_weights"
"""Attribute of a model's first layer with the weights of all: a model that is treated again has them there,
and they go with it."""


def weights_on_host(
    model: nn.Module, settings: Settings, engine: CopyEngine | None = None
) -> LayerWeights | None:
    """The layers' weights in host memory, and all else of `model` on the device; None where they stay.

    Of a model with an adapter its frozen weights of layers, and the adapter's where the settings say so; the
    embedding and the head stay on the device. Of a model that is trained whole, these two live on the host as
    well.

    `engine` is chosen by `settings.device` when not given.

    Raises: LaunchError when the model has no layers that are passed one at a time.
    """
    if not settings.weights_offload:
        return None
    engine = engine or engine_for(settings)
    layers = layers_of(model)
    if not layers:
        raise LaunchError(
            f"the layers of {type(model).__name__} are not known, and their weights cannot wait on the host",
            "memory.weights_offload",
            "set it to off",
        )
    known = weights_of(model)
    if known is not None:
        return known
    device = device_of(engine)
    made = LayerWeights(layers, engine, device, _of_layers(layers, takes_all=moves_trained(settings)))
    if settings.adapter is None:
        EndWeights(_ends(model), made)
    _move_rest(model, made, device)
    vars(layers[0])[HOME] = made
    return made


def weights_of(model: nn.Module) -> LayerWeights | None:
    """The weights of a model's layers that live on the host; None where they are on the device."""
    layers = layers_of(model)
    return vars(layers[0]).get(HOME) if layers else None


def compute_device(model: nn.Module) -> torch.device:
    """Device on which a model computes: not that of its weights, where these live on the host."""
    home = weights_of(model)
    return run_device(model) if home is None else home.device


def chosen(model: nn.Module, settings: Settings) -> list[nn.Parameter]:
    """The weights of a model that `settings` let live on the host."""
    if not settings.weights_offload:
        return []
    ends = [module._parameters.get("weight") for module in _ends(model)] if settings.adapter is None else []
    in_layers = _of_layers(layers_of(model), takes_all=moves_trained(settings))
    return [*in_layers, *(one for one in ends if one is not None)]


def _of_layers(layers: list[nn.Module], *, takes_all: bool) -> list[nn.Parameter]:
    return [one for layer in layers for one in layer.parameters() if takes_all or not one.requires_grad]


def _ends(model: nn.Module) -> list[nn.Module]:
    """The embedding, and the head where it is as large."""
    base: Any = model
    found = (base.get_input_embeddings(), base.get_output_embeddings())
    return [module for module in found if isinstance(module, nn.Module)]


def device_of(engine: CopyEngine) -> torch.device:
    """The device to which an engine copies: a GPU, or the CPU that plays one."""
    if isinstance(engine, CudaEngine):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _move_rest(model: nn.Module, weights: LayerWeights, device: torch.device) -> None:
    """Put on the device all weights that do not live on the host."""
    away = weights.all_of_them()
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        if id(tensor) not in away and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
