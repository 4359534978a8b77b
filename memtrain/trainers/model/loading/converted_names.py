"""Weights of files whose names or shapes are not the model's own: renamed, stacked or split on loading.

transformers converts a whole folder as it loads; here it is one weight, or one stack of experts, at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Weights in files that become weights of the model together."""

    first: str
    """Name that transformers gives to the group: of its first, or only, weight in the model."""
    keys: tuple[tuple[str, str], ...]
    """Name of each in its file, and the pattern that it matched; in the order of files."""
    converter: WeightConverter | None
    """None: one weight under another name, or its own."""

    def weights(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's weights by name, of what `read` gives for the names in files."""
        if self.converter is None:
            return {self.first: read(self.keys[0][0])}
        converter = deepcopy(self.converter)
        for key, pattern in self.keys:
            converter.add_tensor(self.first, key, pattern, read(key))  # pyright: ignore[reportArgumentType]
        made: Mapping[str, Any] = converter.convert(self.first, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def grouped(model: PreTrainedModel, names: Iterable[str]) -> list[FileGroup]:
    """The groups of the names in files, by the conversions that transformers has for this model.

    The conversions that were used are remembered on the model, which is saved under the names of its files.

    Source: transformers 5.16 to 5.23, `convert_and_load_state_dict_in_model`.
    """
    mapping: list[Any] = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, list[tuple[str, str]]] = {}
    used: dict[str, WeightConverter] = {}
    for key in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=known)
        if pattern is not None:
            used.setdefault(name, by_pattern[pattern])
        found.setdefault(name, []).append((key, pattern or key))
    vars(model)["_weight_conversions"] = [entry for entry in mapping if entry.was_used()]
    return [FileGroup(name, tuple(keys), used.get(name)) for name, keys in found.items()]
