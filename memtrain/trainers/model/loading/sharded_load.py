"""A model whose weights are read, or drawn, when they lie in parts: each rank its own.

The model is made without data (sharded_init.py), cut (fsdp2.py), and filled. Weights come from files; what
transformers would rename, stack or split on loading is so here, a group of weights at a time. What neither
names, transformers loads itself, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.model.loading.converted_names import FileGroup, grouped
from memtrain.trainers.model.loading.locate import Origin, built
from memtrain.trainers.model.loading.sharded_init import (
    Kept,
    NeedsWhole,
    Stretch,
    keep,
    kept_in_parts,
    not_drawn,
)
from memtrain.trainers.model.loading.sharded_packed import keep_packed
from memtrain.trainers.model.loading.weight_files import INDEX, SINGLE, check_weights, index_of
from memtrain.trainers.runtime.weight_layout import local_of, rows_of

Made = TypeVar("Made")


def made_in_parts(settings: Settings, make: Callable[[], Made]) -> tuple[Made, str]:
    """(models from `make`, reason that they are whole): without data where each rank is to hold its part.

    Where the plan wants parts and they cannot be made apart, the models are whole, and the reason is told.
    """
    if not settings.loads_shards:
        return make(), ""
    try:
        with kept_in_parts(own_rows()):
            return make(), ""
    except NeedsWhole as error:
        return make(), str(error)


def own_rows() -> Stretch:
    """Range of a flattened weight's numbers that this rank holds: its rows."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def of_rows(shape: torch.Size) -> range:
        rows, width = rows_of(shape[0], rank, world), shape[1:].numel()
        return range(rows.start * width, rows.stop * width)

    return of_rows


def empty_model(
    origin: Origin,
    config: PretrainedConfig,
    settings: Settings,
    auto: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    may_miss: Sequence[str] = (),
) -> PreTrainedModel:
    """A model of class `auto` without data: its numbers are known to be in its files, or drawn.

    Drawn are weights that the files have not and `may_miss`. Buffers are real: they are computed from the
    configuration. What is quantized is packed on `device`. Raises: NeedsWhole where its files do not have
    its weights, or it keeps some in float32.
    """
    files = _files_of(origin)
    with torch.random.fork_rng(devices=[]), not_drawn(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = built(auto.from_config, config, origin.path, dtype=dtype)
    model.tie_weights()
    if dtype != torch.float32 and _float32_parts(model, dtype):
        raise NeedsWhole("some of its weights stay in float32")
    weights = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(weights)
    kept = set(model.state_dict()) - set(weights) - tied
    sources, spare = _sources(model, files, weights)
    spare = {name for name in spare - tied if not _is_of_other_head(name, model)}
    drawn = [name for name in weights if name not in sources]
    if kept or spare or not set(drawn) <= set(may_miss) or len(drawn) == len(weights):
        raise NeedsWhole("its files have other names than its weights")
    folder = next(iter(files.values())).parent
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    packed = set[str]()
    if settings.quantize != "none":
        packed = keep_packed(model, settings.quantize, sources, device)
    for name in (name for name in weights if name not in packed):
        keep(weights[name], sources.get(name))
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in drawn):
        model._init_weights(model.get_submodule(owner))
    return model


def _float32_parts(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Parts that transformers loads in float32 though the model is in half precision."""
    always: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    in_half: set[str] = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return always | in_half if dtype == torch.float16 else always


Read = Callable[[range], Tensor]


def _sources(
    model: PreTrainedModel, files: Mapping[str, Path], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Read], set[str]]:
    """(what reads a stretch of each weight, names that files give and the model has not).

    Raises: NeedsWhole where a weight has another shape in its files.
    """
    empty: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        with safe_open(file, "pt") as opened:
            for key in (key for key, place in files.items() if place == file):
                saved: Any = opened.get_slice(key)
                empty[key] = torch.empty(saved.get_shape(), device="meta")
    found: dict[str, Read] = {}
    spare: set[str] = set()
    for group in grouped(model, files):
        try:
            made = group.weights(model, empty.__getitem__)
        except Exception as error:  # each conversion has faults of its own, and transformers words for them
            raise NeedsWhole(f"its files cannot be converted: {error}") from None
        for name, tensor in made.items():
            if name not in weights:
                spare.add(name)
                continue
            if tensor.shape != weights[name].shape:
                raise NeedsWhole(f"{name} has another shape in its files")
            key = group.keys[0][0]
            if group.converter is None:
                found[name] = _from_file(files[key], key, tensor.shape)
            else:
                found[name] = _from_group(model, group, name, files, weights[name].dtype)
    return found, spare


def _from_group(
    model: PreTrainedModel, group: FileGroup, name: str, files: Mapping[str, Path], dtype: torch.dtype
) -> Read:
    """Reads a stretch of a flattened weight that is made of several in files: all of it, for a moment."""

    def one(key: str) -> Tensor:
        with safe_open(files[key], "pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
        return tensor.to(dtype)

    def read(stretch: range) -> Tensor:
        return group.weights(model, one)[name].reshape(-1)[stretch.start : stretch.stop]

    return read


def _is_of_other_head(name: str, model: PreTrainedModel) -> bool:
    """Whether a name is outside of the backbone, of a head that this class has not."""
    return not model.can_generate() and not name.startswith(f"{model.base_model_prefix}.")


def is_empty(model: nn.Module) -> bool:
    """Whether a model's weights are still to be read."""
    return any(parameter.is_meta for parameter in model.parameters())


def fill_rows(scorer: nn.Module, kept: Mapping[str, Kept], device: torch.device) -> None:
    """Give this rank's rows of every weight their numbers, after an empty scorer was cut into rows.

    `kept`: what is known of its weights, taken before; forgotten weight by weight.
    """
    buffers = dict(scorer.named_buffers())
    scorer.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        scorer.get_submodule(owner)._buffers[last] = buffer.to(device)
    mine = own_rows()
    with torch.no_grad():
        for name, weight in scorer.named_parameters():
            one = kept[name]
            numbers = one.numbers(mine(one.shape))
            own = local_of(weight).view(-1)
            # Bytes of packed weights lie as another type (quantized/packed.py).
            (own if numbers.is_floating_point() else own.view(numbers.dtype)).copy_(numbers)
            one.forget()


def _from_file(file: Path, name: str, shape: torch.Size) -> Callable[[range], Tensor]:
    """Reads a stretch of a flattened weight: the rows that it is in, and of these the numbers."""

    def read(stretch: range) -> Tensor:
        if not len(stretch):
            return torch.empty(0)
        width = shape[1:].numel()
        first, last = stretch.start // width, -(-stretch.stop // width)
        with safe_open(file, "pt") as opened:
            saved: Any = opened.get_slice(name)
            rows: Tensor = saved[first:last]
        return rows.reshape(-1)[stretch.start - first * width : stretch.stop - first * width]

    return read


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
    check_weights(folder)
    if not (folder / SINGLE).is_file():
        if not (folder / INDEX).is_file():
            return {}
        return {name: folder / file for name, file in index_of(folder).items()}
    with safe_open(folder / SINGLE, "pt") as opened:
        return dict.fromkeys(opened.keys(), folder / SINGLE)
