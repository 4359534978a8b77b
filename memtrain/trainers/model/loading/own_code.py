"""The code of a model, run only where the recipe asks for it and pins it: by a commit, or by a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from memtrain.errors import LaunchError, words_of
from memtrain.memory.model_shape.config_file import read_json_object
from memtrain.recipes.sections.model import Model

KEY = "model.trust_remote_code"
DIGEST = "sha256:"
PARTS: Mapping[str, Any] = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
"""Classes of a model that memtrain takes from its code, by the names of `auto_map`."""


def code_digest(folder: Path) -> str:
    """Digest of all Python files of a folder, with their names: `sha256:...`."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()}\n{content}\n".encode())
    return f"{DIGEST}{digest.hexdigest()}"


def trust_code(model: Model) -> None:
    """Make the classes of a model's own code known to transformers, where the recipe trusts and pins it.

    Its configuration and its causal LM are taken, from its own repository alone; its tokenizer's code is not.

    Raises: LaunchError where the code is not the one that is pinned, or is none, or does not import.
    """
    if not model.trust_remote_code or model.path is None:
        return
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        _check_folder(folder, model.revision or "")
    config = _config(folder, model)
    kind, named = str(config.get("model_type")), _own_classes(config, model.path)
    if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind].__module__.startswith("transformers."):
        raise LaunchError(
            f"transformers knows {kind} models itself: no code of {model.path} is needed", KEY, "remove it"
        )
    found = {part: _imported(named[part], folder, model) for part in PARTS}
    AutoConfig.register(kind, found["AutoConfig"], exist_ok=True)
    AutoModelForCausalLM.register(found["AutoConfig"], found["AutoModelForCausalLM"], exist_ok=True)
    # What is saved has its code beside it.
    found["AutoConfig"].register_for_auto_class()
    found["AutoModelForCausalLM"].register_for_auto_class("AutoModelForCausalLM")


def _check_folder(folder: Path, pinned: str) -> None:
    seen = code_digest(folder)
    if pinned != seen:
        is_pinned = pinned.startswith(DIGEST)
        what = f"is not the pinned one ({pinned[:19]}...)" if is_pinned else "is not pinned"
        raise LaunchError(
            f"the code in {folder} {what}", "model.revision", f"read it, then set model.revision: {seen}"
        )


def _config(folder: Path, model: Model) -> Mapping[str, Any]:
    if folder.is_dir():
        return read_json_object(folder / "config.json", "model.path")
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(str(model.path), "config.json", revision=model.revision)
        return cast(Mapping[str, Any], json.loads(Path(file).read_text(encoding="utf-8")))
    except Exception as error:  # each version of the hub's client has network errors of its own
        raise LaunchError(
            f"the config.json of {model.path} at {model.revision} cannot be read: {words_of(error)}",
            "model.path",
            "check the commit and the network",
        ) from None


def _own_classes(config: Mapping[str, Any], path: str) -> dict[str, str]:
    """The classes of `auto_map`. Raises: LaunchError where one is missing, or lies in another repository."""
    given: Any = config.get("auto_map")
    named = {part: given.get(part) for part in PARTS} if isinstance(given, dict) else dict.fromkeys(PARTS)
    for part, one in named.items():
        if not isinstance(one, str) or one.count(".") != 1:
            raise LaunchError(
                f"{path} has no code for a {part} (auto_map of its config.json)", KEY, "remove it"
            )
        if "--" in one:
            raise LaunchError(
                f"{path} takes its {part} from another repository ({one}), whose code is not pinned",
                KEY,
                "copy the code into a folder with the model, and pin that",
            )
    return cast(dict[str, str], named)


def _imported(reference: str, folder: Path, model: Model) -> Any:
    commit = None if folder.is_dir() else model.revision
    place = str(folder) if folder.is_dir() else str(model.path)
    try:
        return get_class_from_dynamic_module(reference, place, revision=commit, code_revision=commit)
    except Exception as error:  # code of strangers has faults of every kind
        raise LaunchError(
            f"{reference} of {model.path} cannot be imported: {words_of(error)}",
            KEY,
            "install what it needs, or use a model that transformers knows",
        ) from None
