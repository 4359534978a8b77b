"""The files of a trained model that go to the hub: those that memtrain wrote, and no others; no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from memtrain.errors import LaunchError, words_of
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.trainers.tools.trained_model import CONFIG, GENERATION, TrainedModel

CARD = "README.md"
VALUE_FOLDER = "value"
"""A value model with a body of its own, beside its policy (`heads/value_head.py`)."""
TEMPLATES_FOLDER = "additional_chat_templates"

WRITTEN = (
    *(CARD, CONFIG, ADAPTER_FILE, GENERATION, "reward_reading.json", "value_head.safetensors"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("adapter_model.safetensors", "chat_template.jinja", f"{TEMPLATES_FOLDER}/*.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Names of the files of a model in the format of Hugging Face, as `save_pretrained` writes them."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What goes to the hub, and what lies beside it and does not."""

    folder: Path
    files: tuple[tuple[str, int], ...]
    """(name in the repository, bytes)"""
    left_out: tuple[tuple[str, str], ...]
    """(name, reason)"""
    local: tuple[str, ...]
    """Sentences on places of this machine in what goes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)


def upload_of(model: TrainedModel) -> Upload:
    """The files of a trained model to upload.

    Raises: LaunchError where its folder is a link, or cannot be read.
    """
    folder = model.folder
    if folder.is_symlink():
        raise LaunchError(
            f"{folder} is a link to {folder.resolve()}, and links are not followed",
            str(folder),
            "name the folder itself, if it is the model that you mean",
        )
    code = _own_code(model.config)
    files: list[tuple[str, int]] = []
    left_out: list[tuple[str, str]] = []
    try:
        for name, path in _entries(folder):
            below = name.removeprefix(f"{VALUE_FOLDER}/")
            if path.is_symlink():
                left_out.append((name, "a link"))
            elif path.is_dir():
                left_out.append((name, "a folder that memtrain did not write"))
            elif not path.is_file():
                left_out.append((name, "no file"))
            elif any(fnmatchcase(below, pattern) for pattern in WRITTEN) or below in code:
                files.append((name, path.stat().st_size))
            else:
                left_out.append((name, "memtrain did not write it"))
    except OSError as error:
        raise LaunchError(f"{folder} cannot be read: {error}", str(folder), "check its permissions") from None
    return Upload(folder, tuple(files), tuple(left_out), tuple(_local(model, files)))


def _entries(folder: Path) -> list[tuple[str, Path]]:
    """What lies in a folder, and in those two that a model has; no other folder is gone into."""
    found: list[tuple[str, Path]] = []
    for path in sorted(folder.iterdir()):
        is_known = path.name in (VALUE_FOLDER, TEMPLATES_FOLDER)
        if is_known and path.is_dir() and not path.is_symlink():
            found += [(f"{path.name}/{name}", below) for name, below in _entries(path)]
        else:
            found.append((path.name, path))
    return found


def _own_code(config: dict[str, Any]) -> set[str]:
    """Python files that the configuration names as the model's own."""
    named = config.get("auto_map")
    words = [one for one in named.values() if isinstance(one, str)] if isinstance(named, dict) else []
    return {f"{word.partition('.')[0]}.py" for word in words if re.fullmatch(r"\w+\.\w+", word)}


def _local(model: TrainedModel, files: Sequence[tuple[str, int]]) -> list[str]:
    """Places of this machine in the configurations that go."""
    told: list[str] = []
    for name in (ADAPTER_FILE, CONFIG, "tokenizer_config.json"):
        if name not in [one for one, _ in files]:
            continue
        try:
            given = json.loads((model.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        for key in ("base_model_name_or_path", "_name_or_path", "name_or_path"):
            value = given.get(key) if isinstance(given, dict) else None
            if isinstance(value, str) and (value.startswith(("/", "~", ".")) or Path(value).exists()):
                told.append(f"{name} names a place of this machine, {value} ({key})")
    return told


def upload(made: Upload, name: str, *, is_private: bool) -> str:
    """The address of the repository after the upload, in one commit.

    Raises: LaunchError with the hub's own words.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api: Any = HfApi()
    try:
        address = api.create_repo(name, private=is_private, exist_ok=True)
        operations = [CommitOperationAdd(file, str(made.folder / file)) for file, _ in made.files]
        api.create_commit(name, operations, commit_message="Upload a model trained with memtrain")
    except Exception as error:  # each version of the hub's client has errors of its own
        raise LaunchError(
            f"{name} was not uploaded: {words_of(error)}",
            "the Hugging Face hub",
            "log in with `hf auth login`, check the name and the network, or use --dry-run",
        ) from None
    return str(address)
