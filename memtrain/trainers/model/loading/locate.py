"""Places of a model's files: a folder, the hub, or the hub's cache when the hub cannot be reached."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

from memtrain.errors import Fault, LaunchError, MemtrainError, words_of
from memtrain.memory.model_shape.adapter_file import read_adapter_config
from memtrain.memory.model_shape.config_file import (
    check_values,
    fault_at,
    read_config_json,
    read_json_object,
    refuse_pipes,
    without_code,
)
from memtrain.memory.model_shape.rope_scaling import scaled
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.sections.model import Model
from memtrain.trainers.runtime.oom_errors import is_out_of_memory

HUB_TIMEOUT_S = 10.0
NO_CODE_FIX = (
    "memtrain runs no code from the hub unasked (docs/security.md): use a model that transformers knows, "
    "update transformers, or download the model again"
)
PUBLISHED_FIX = "compare its values with the config.json of a published model of this type"


@dataclass(frozen=True, slots=True)
class Origin:
    """A folder or hub id, the revision asked for, and whether to read local files only."""

    path: str
    revision: str | None
    is_offline: bool

    def kwargs(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` to read this origin and nothing else."""
        return {"revision": self.revision or "main", "local_files_only": self.is_offline}


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Facts in an adapter's configuration, empty where they are missing."""

    base: str
    """Folder or hub id of the model that it was trained on."""
    task: str
    """PEFT's name: `CAUSAL_LM`, or `SEQ_CLS` for a reward model."""


def find_origin(path: str, revision: str | None) -> Origin:
    """Place of the model named in `model.path`. Asks the hub once; transformers would retry for a minute.

    Raises: LaunchError when there is no such folder, no such model on the hub, or it is gated.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        refuse_pipes(folder, "model.path")
        return Origin(str(folder), None, is_offline=True)
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or folder.exists():
        what = f"{path} is a file" if folder.exists() else f"there is no folder {path}"
        raise LaunchError(what, "model.path", "give a hub id (owner/name) or a folder with a config.json")
    return Origin(path, revision, is_offline=not _is_on_hub(path, revision))


def _is_on_hub(path: str, revision: str | None) -> bool:
    """True when the hub has it, False when the hub cannot be asked."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(path, revision=revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        fix = "accept its terms on the hub and log in with `hf auth login`"
        raise LaunchError(f"{path} is gated and this account has no access", "model.path", fix) from None
    except RevisionNotFoundError:
        fix = "give a branch, tag or commit of its page on the hub, or remove the key"
        raise LaunchError(f"{path} has no revision {revision}", "model.revision", fix) from None
    except (RepositoryNotFoundError, HFValidationError):
        fix = "check the spelling; for a private model log in with `hf auth login`"
        raise LaunchError(f"the hub has no model {path}", "model.path", fix) from None
    except Exception:  # each version of the hub's client has network errors of its own; the cache may have it
        return False
    return True


def read_config(origin: Origin) -> PretrainedConfig:
    """The configuration of the model at `origin`.

    Raises: LaunchError when it is not there, is an adapter, or needs code from the hub.
    """
    if (adapter := adapter_of(origin)) is not None:
        base = adapter.base or "an unnamed model"
        raise LaunchError(
            f"{origin.path} is an adapter of {base}, not a model",
            "model.path",
            f"set model.path to {base}, and model.adapter.path to {origin.path} to go on from it, or fold "
            "the adapter first (`memtrain merge`)",
        )
    given: dict[str, Any] = {}
    if Path(origin.path).is_dir():
        given = read_config_json(Path(origin.path), "model.path")
        if not isinstance(given.get("model_type"), str):
            raise LaunchError(
                f"the config.json of {origin.path} has no model_type", "model.path", NO_CODE_FIX
            )
    try:
        config = AutoConfig.from_pretrained(origin.path, trust_remote_code=False, **origin.kwargs())
    except OSError as error:
        if Path(origin.path).is_dir():
            raise LaunchError(
                f"{origin.path} has no readable config.json: {words_of(error)}", "model.path", NO_CODE_FIX
            ) from None
        fix = "connect this machine to the hub, or copy the model to this machine and give its folder"
        what = f"the hub cannot be reached, and its cache does not hold {origin.path}"
        raise LaunchError(what, "model.path", fix) from None
    except Exception as error:  # each configuration class has faults of its own
        raise _misread(error, given, f"{origin.path}/config.json") from None
    check_values(config.to_dict(), origin.path)
    if isinstance(getattr(config, "text_config", None), Mapping):
        rule = f"{config.model_type} models have no model inside: it must be left out"
        raise LaunchError(
            [fault_at("text_config", given.get("text_config"), rule, f"{origin.path}/config.json")]
        )
    return _without_code(config)


_FIELD = re.compile(r"Validation error for field '(\w+)'")
_EXPECTED = re.compile(r"Field '\w+' expected (\w+)")
_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number with a point",
    "str": "a word",
    "list": "a list",
    "dict": "a mapping",
    "NoneType": "null",
}


def _misread(error: Exception, given: Mapping[str, Any], file: str) -> LaunchError:
    """The error about a configuration that its class refuses: at the key that it is about, where one is."""
    if unknown_type(str(given.get("model_type"))) is not None:
        return unknown_model(given, file)
    words = words_of(error)
    field = _FIELD.search(words)
    key = field[1] if field is not None else _refused_for(given)
    kinds = [str(_WORDS.get(one, one)) for one in dict.fromkeys(_EXPECTED.findall(words))]
    rule = f"it must be {' or '.join(kinds)}" if kinds else f"transformers refuses it ({words})"
    if not key:
        return LaunchError(f"transformers cannot read {file}: {words}", file, PUBLISHED_FIX)
    return LaunchError([fault_at(key, given.get(key), rule, file)])


def _refused_for(given: Mapping[str, Any]) -> str:
    """The key without which the configuration is read; empty where no single one is at fault."""
    for key in given:
        try:
            make_config({one: value for one, value in given.items() if one != key})
        except Exception:  # noqa: S112  it is not the only fault
            continue
        return key
    return ""


def fault_of_build(error: Exception, config: PretrainedConfig | Mapping[str, Any], file: str) -> Fault | None:
    """The fault of a configuration from which a model could not be built, where a word in it is unknown."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        key = next((key for key, value in values.items() if value == error.args[0]), "")
        if key:
            return fault_at(key, error.args[0], "transformers knows no function of that name", file)
    return None


def with_scaled_positions(config: PretrainedConfig, recipe: Model) -> PretrainedConfig:
    """`config`, changed in place to the recipe's `rope_scaling`.

    Raises: RecipeError for a model without one kind of rotary positions; LaunchError for a scaling that
    transformers does not take.
    """
    if recipe.rope_scaling is None:
        return config
    found = scaled(config.to_dict(), recipe.rope_scaling)
    holder: Any = config
    holder.rope_parameters = found["rope_parameters"]
    holder.max_position_embeddings = found["max_position_embeddings"]
    try:
        holder.validate_rope()
    except Exception as error:  # transformers checks each kind of scaling by its own rules
        raise LaunchError(
            f"model.rope_scaling: {words_of(error)}",
            "model.rope_scaling",
            "compare its keys with docs/recipe.md",
        ) from None
    return config


def make_config(given: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration that a mapping describes, without the code that it asks for.

    Raises: what the configuration's class raises over values that it does not take.
    """
    return _without_code(AutoConfig.for_model(**without_code(given)))


def _without_code(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with no implementation chosen, in itself and in its parts, and the usual outputs."""
    config._attn_implementation = None
    config._experts_implementation = None
    # What a model returns is asked for here: tuples would be misread, and every layer's states never fit.
    config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
    return config


def built(
    build: Callable[..., Any], config: PretrainedConfig | Mapping[str, Any], named: str, **kwargs: Any
) -> Any:
    """Result of `build` for a configuration.

    Raises: LaunchError when the model's class cannot be built by its values.
    """
    try:
        return build(config, **kwargs)
    except Exception as error:  # an unknown activation is a KeyError, a wrong width a ValueError, ...
        if is_out_of_memory(error) or isinstance(error, MemtrainError):
            raise
        given = config if isinstance(config, Mapping) else config.to_dict()
        kind = given.get("model_type")
        if unknown_type(str(kind)) is not None:
            raise unknown_model(given, f"{named}/config.json") from None
        if (fault := fault_of_build(error, given, f"{named}/config.json")) is not None:
            raise LaunchError([fault]) from None
        raise LaunchError(
            f"transformers cannot build the {kind} model of {named}: {words_of(error)}",
            named,
            PUBLISHED_FIX,
        ) from None


def read_config_file(path: str) -> dict[str, Any]:
    """The mapping in a `config.json`. Raises: LaunchError when there is none or it is no model's."""
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    given = read_json_object(file, "model.config", "give a mapping or a config.json")
    check_values(given, str(file))
    return given


def adapter_of(origin: Origin) -> AdapterFacts | None:
    """Facts about the adapter at `origin`; None when it is no adapter."""
    from transformers.utils.hub import cached_file

    found = cached_file(
        origin.path, ADAPTER_FILE, **origin.kwargs(), _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    if found is None:
        return None
    config = read_adapter_config(Path(found), "model.path")
    return AdapterFacts(str(config.get("base_model_name_or_path") or ""), str(config.get("task_type") or ""))


def unknown_model(config: Mapping[str, Any], where: str) -> LaunchError:
    """The error about a model of a type that transformers does not know."""
    fix = "use a model that transformers knows, update transformers, or download the model again"
    with_code = ""
    if config.get("auto_map"):
        with_code = ", and the model comes with its own code"
        fix = f"memtrain runs no code of a model unasked (docs/security.md says how to ask for it): {fix}"
    what = f"transformers {transformers.__version__} does not know {config.get('model_type')} models"
    return LaunchError(what + with_code, where, fix)


def unknown_type(model_type: str) -> str | None:
    """The fault of a name unknown to transformers, with near names; None for a known name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return None
    near = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), n=3)
    return f"model.config: transformers has no model_type {model_type}" + (
        f"; near it are {', '.join(near)}" if near else ""
    )
