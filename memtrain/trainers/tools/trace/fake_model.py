"""A model and its micro-batches without data: shapes, dtypes and autograd, no bytes.

The GPU is played by fake `cpu` tensors and the host by fake `meta` ones: a CPU build of torch runs backward
passes on no other kind (fake `cuda` tensors need a CUDA build).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.heads.reward_head import in_float
from memtrain.trainers.model.kernels.apply import apply_kernels
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.liger import apply_liger
from memtrain.trainers.model.loading.load import AUTO, DTYPES
from memtrain.trainers.model.loading.locate import make_config
from memtrain.trainers.tools.trace.bitsandbytes import as_beside_4bit, pack_without_data
from memtrain.trainers.tools.trace.fake_host import HOST

PLAYED_BY = {
    AttentionBackend.FLASH3: AttentionBackend.TORCH_VARLEN,
    AttentionBackend.FLASH: AttentionBackend.TORCH_VARLEN,
    AttentionBackend.FLEX: AttentionBackend.TORCH_VARLEN,
    AttentionBackend.TORCH_EFFICIENT: AttentionBackend.TORCH_VARLEN,
}
"""Back ends whose kernels need packages or a compiler: torch's own flash kernels keep the same tensors."""

KINDS = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Lists of a configuration with the kind of each layer."""


def bare_model(
    config: Mapping[str, Any],
    settings: Settings,
    num_layers: int | None = None,
    device: str = "meta",
    *,
    head: str = "lm",
    is_reference: bool = False,
) -> PreTrainedModel | PeftModel:
    """The model of a run from its configuration, with its kernels, attention and adapter.

    `num_layers`: build only the first layers. On `meta` nothing has data; elsewhere weights are random.
    `is_reference`: without an adapter.
    """
    made = make_config(config)
    if num_layers is not None:
        shorten(made, num_layers)
    made.use_cache = False
    if head == "score":
        made.num_labels = 1
    with torch.device(device):
        base: PreTrainedModel = AUTO[head].from_config(made, dtype=DTYPES[settings.dtype])
        backend = AttentionBackend(settings.attention)
        set_attention(base, PLAYED_BY.get(backend, backend))
        pack_without_data(base, settings)
        apply_liger(base, settings)
        apply_kernels(base, settings)
        adapter = None if is_reference else settings.adapter
        model = base if adapter is None else add_adapter(base, adapter, quantize=settings.quantize, head=head)
        as_beside_4bit(model)
        if head == "score":
            in_float(model)
    return model.train()


def shorten(config: Any, num_layers: int) -> None:
    """Leave the first `num_layers` layers in a configuration, with their kinds."""
    config.num_hidden_layers = num_layers
    for name in KINDS:
        kinds = getattr(config, name, None)
        # Jamba and Bamba compute the list from the number of layers.
        is_computed = isinstance(getattr(type(config), config.attribute_map.get(name, name), None), property)
        if isinstance(kinds, list) and not is_computed:
            setattr(config, name, kinds[:num_layers])


def fakeify(model: nn.Module, device: str = "cpu", on_host: Collection[Tensor] = ()) -> None:
    """Replace every parameter and buffer by a fake one on `device`, or `on_host`, in place, keeping ties.

    Call it inside a FakeTensorMode. Module.to fails there: PEFT's modules swap tensors.
    """
    made: dict[int, Tensor] = {}
    # The originals are kept until the end: an id must not be used again.
    originals: list[Tensor] = []
    away = set(map(id, on_host))

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            originals.append(tensor)
            place = HOST if id(tensor) in away else device
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
            )
        return made[id(tensor)]

    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in list(held.items()):
                if tensor is not None:
                    held[name] = fake(tensor)  # pyright: ignore[reportArgumentType]
