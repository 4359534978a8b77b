"""A model written weight by weight: the host holds one module at a time, and never the model.

The files are those of `save_pretrained`, byte for byte: headers are known from weights without data, and each
weight is put into its place as it is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from memtrain.trainers.model.loading.sharded_init import NeedsWhole
from memtrain.trainers.model.loading.weight_files import INDEX
from memtrain.trainers.runtime.parallel_write import write_tensors_at
from memtrain.trainers.runtime.safetensors_writer import begin_file

Make = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""The weights of some names, with their numbers."""


@dataclass(frozen=True, slots=True)
class LazyWeights:
    """Weights of a model without data, which are made when they are written."""

    shapes: Mapping[str, Tensor]
    """Each by its name in the model, without data, as it will be written."""
    groups: Sequence[Sequence[str]]
    """Names that are made together."""
    make: Make

    @property
    def num_bytes(self) -> int:
        """Bytes of all."""
        return sum(tensor.nbytes for tensor in self.shapes.values())


def lazy_weights(model: PreTrainedModel, make: Make) -> LazyWeights:
    """The weights of a model without data, those of a module together; tied ones once.

    Raises: NeedsWhole where its files would name them otherwise than one module at a time can tell.
    """
    weights = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(weights)
    state = model.state_dict()
    if set(state) - set(weights) - tied or (tied and set(weights) & set(_left_out(model))):
        raise NeedsWhole("its state is not its weights alone")
    shapes = {name: torch.empty_like(state[name], device="meta") for name in state if name in weights}
    by_module: dict[str, list[str]] = {}
    for name in shapes:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    groups = list(by_module.values())
    apart = [name for group in groups for name in revert_weight_conversion(model, _of(shapes, group))]
    if sorted(apart) != sorted(revert_weight_conversion(model, dict(shapes))):
        raise NeedsWhole("weights of several modules are one in its files")
    return LazyWeights(shapes, groups, make)


def write_weights(model: PreTrainedModel, weights: LazyWeights, folder: Path, max_shard_bytes: int) -> None:
    """Write the files of weights, and their index where there are several."""
    saved = revert_weight_conversion(model, dict(weights.shapes))
    # As of weights with data: what is taken apart out of one storage stays in one file.
    split = split_state_dict_into_shards_factory(
        saved,
        get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
        get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    places: dict[str, tuple[Path, int]] = {}
    for name, held in split.filename_to_tensors.items():
        with (folder / name).open("wb") as file:
            begun = begin_file(file, {one: saved[one] for one in sorted(held)})
        places |= {one: (folder / name, offset) for one, offset in begun.items()}
    for group in weights.groups:
        made = revert_weight_conversion(model, dict(weights.make(group)))
        for name, tensor in made.items():
            path, offset = places.pop(name)
            expected = saved[name]
            assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), f"{name} is as planned."
            with path.open("r+b") as file:
                write_tensors_at(file.fileno(), [(tensor, offset)])
    assert not places, f"Nobody made {', '.join(places)}."
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")


def _of(shapes: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: shapes[name] for name in names}


def _left_out(model: PreTrainedModel) -> Mapping[str, str]:
    """Names that transformers leaves out of files where they are tied, each with the name that stays."""
    found: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return found
