"""A model and its micro-batches without data: shapes, dtypes and autograd, no bytes.

The GPU is played by fake `cpu` tensors and the host by fake `meta` ones: a CPU build of torch runs backward
passes on no other kind (fake `cuda` tensors need a CUDA build).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from memtrain.memory.activations import HeaviestBatch
from memtrain.memory.attention import AttentionBackend
from memtrain.memory.settings import Settings
from memtrain.trainers.data.collate import MicroBatch, Piece, lay_end_to_end, pad_right
from memtrain.trainers.model.adapters import add_adapter
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.checkpointing import checkpoint_layers
from memtrain.trainers.model.load import DTYPES

PLAYED_BY = {AttentionBackend.FLASH: AttentionBackend.CUDA, AttentionBackend.FLEX: AttentionBackend.CUDA}
"""Back ends whose kernels need packages or a compiler: torch's own flash kernels keep the same tensors."""


def bare_model(
    config: Mapping[str, Any], settings: Settings, num_layers: int | None = None, device: str = "meta"
) -> PreTrainedModel | PeftModel:
    """The model of a run from its configuration, with its attention, adapter and checkpointing.

    `num_layers`: build only the first layers. On `meta` nothing has data; elsewhere weights are random.
    """
    made = AutoConfig.for_model(**config)
    if num_layers is not None:
        shorten(made, num_layers)
    made.use_cache = False
    with torch.device(device):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(made, dtype=DTYPES[settings.dtype])
        if settings.attention != "stock":
            backend = AttentionBackend(settings.attention)
            set_attention(base, PLAYED_BY.get(backend, backend))
        model = base if settings.adapter is None else add_adapter(base, settings.adapter)
    model.train()
    if settings.checkpoint_every:
        checkpoint_layers(model, settings.checkpoint_every)
    return model


def shorten(config: Any, num_layers: int) -> None:
    """Leave the first `num_layers` layers in a configuration, with their kinds."""
    config.num_hidden_layers = num_layers
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list):
            setattr(config, name, kinds[:num_layers])


def fakeify(model: nn.Module, device: str = "cpu") -> None:
    """Replace every parameter and buffer by a fake one on `device`, in place, keeping ties.

    Call it inside a FakeTensorMode. Module.to fails there: PEFT's modules swap tensors.
    """
    made: dict[int, Tensor] = {}
    # The originals are kept until the end: an id must not be used again.
    originals: list[Tensor] = []

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            originals.append(tensor)
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
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


def dummy_micro(settings: Settings, batch: HeaviestBatch) -> MicroBatch:
    """Real tokens (all zero) laid out like `batch`; the last `scored_tokens` of them are learnt."""
    lengths = _lengths(batch)
    budget = batch.scored_tokens
    pieces: list[Piece] = []
    for length in lengths:
        learnt = max(0, min(length, budget))
        budget -= learnt
        is_learnt = torch.arange(length).numpy() >= length - learnt
        pieces.append(Piece(torch.zeros(length, dtype=torch.int32).numpy(), is_learnt))
    lay = lay_end_to_end if settings.padding_free else pad_right
    return lay(pieces, pad_id=0, multiple=settings.pad_to_multiple_of)


def _lengths(batch: HeaviestBatch) -> list[int]:
    """Lengths of `rows` sequences, `longest` among them, that sum to `tokens`."""
    if batch.rows == 1:
        return [batch.tokens]
    rest, rows = batch.tokens - batch.longest, batch.rows - 1
    base, extra = divmod(max(rest, rows), rows)
    return [batch.longest, *(base + (row < extra) for row in range(rows))]


def without_data(value: Any, mode: FakeTensorMode) -> Any:
    """A dataclass of tensors (a micro-batch) with fake tensors in their place."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: without_data(getattr(value, f.name), mode) for f in fields(value)})
    return value
