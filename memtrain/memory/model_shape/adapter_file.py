"""An adapter's adapter_config.json, read with its values checked before PEFT reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.config_file import read_json_object
from memtrain.recipes.reading.adapter_config import faults_of


def read_adapter_config(file: Path, key: str) -> dict[str, Any]:
    """The mapping in an adapter_config.json, its values checked.

    Raises: LaunchError at the `key` of the recipe that names it, with each value that no adapter has.
    """
    given = read_json_object(file, key)
    if faults := faults_of(given, file):
        raise LaunchError(faults)
    return given
