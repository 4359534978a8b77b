"""A model's config.json: foreign text, whose numbers are checked and whose wish for code is not granted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.config_names import canonical

MAX_BYTES = 16 * 2**20
"""Largest config.json that is read. Taste: the longest of the hub are under 1 MiB."""

KEYS_OF_CODE = frozenset(
    {
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "use_kernels",
        "kernel_config",
    }
)
"""Keys by which transformers takes an implementation, which it may fetch from the hub and run."""

Limits = tuple[float, float]

SIZES: Mapping[str, Limits] = {
    "hidden_size": (1, 2**20),
    "num_hidden_layers": (1, 2**12),
    "vocab_size": (1, 2**28),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (1, 2**16),
    "intermediate_size": (0, 2**24),
    "moe_intermediate_size": (0, 2**24),
    "num_experts": (0, 2**16),
    "num_local_experts": (0, 2**16),
    "n_routed_experts": (0, 2**16),
    "num_experts_per_tok": (0, 2**16),
    "num_labels": (1, 2**20),
    "sliding_window": (0, 2**62),
    "max_position_embeddings": (0, 2**62),
}
"""Whole numbers of a configuration, with the least and the most that is taken. Taste: a hundred times what
any published model has."""

NUMBERS: Mapping[str, Limits] = {
    "rms_norm_eps": (0, 1),
    "layer_norm_eps": (0, 1),
    "layer_norm_epsilon": (0, 1),
    "rope_theta": (1e-6, 1e30),
    "attention_dropout": (0, 1),
    "hidden_dropout": (0, 1),
    "initializer_range": (0, 1e6),
}
"""Other numbers, with their limits: past them no loss is finite."""


KINDS: Mapping[str, tuple[type, type | None, str]] = {
    "layer_types": (list, str, "a list, a word for each layer"),
    "mlp_layer_types": (list, str, "a list, a word for each layer"),
    "mlp_only_layers": (list, int, "a list of numbers of layers"),
    "no_rope_layers": (list, int, "a list, a number for each layer"),
    "rope_parameters": (dict, None, "a mapping with rope_type"),
    "rope_scaling": (dict, None, "a mapping with rope_type"),
    "model_type": (str, None, "a word"),
    "architectures": (list, str, "a list of names of classes"),
}
"""Other values, with their kinds, and the kind of the items of a list."""


def read_config_json(file: Path, key: str) -> dict[str, Any]:
    """The mapping in a config.json, or in that of a folder, its numbers checked.

    Raises: LaunchError at the `key` of the recipe that names it when there is none, or it is no model's.
    """
    refuse_run_folder(file, key)
    file = file / "config.json" if file.is_dir() else file
    given = read_json_object(file, key, "give a folder with a config.json")
    check_numbers(given, str(file))
    return given


def model_of_run(path: str) -> str:
    """The model in the folder of a run, as a path; any other path as it is."""
    folder = Path(path).expanduser()
    return str(Path(path) / "final") if not (folder / "config.json").exists() and is_run(folder) else path


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run with a trained model."""
    return (folder / "plan.json").is_file() and (folder / "final").is_dir()


def refuse_run_folder(folder: Path, key: str) -> None:
    """Raise LaunchError at the `key` that names a run in place of the model in it."""
    if not (folder / "config.json").exists() and is_run(folder):
        raise LaunchError(
            f"{folder} is the folder of a run, not a model", key, f"give its model: {folder}/final"
        )


def read_json_object(file: Path, key: str, missing: str = "") -> dict[str, Any]:
    """The JSON object in a file of a model. `missing`: the way out where there is no such file.

    Raises: LaunchError at the `key` of the recipe that names it.
    """
    again = "copy or download it again"
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise LaunchError(f"there is no file {file}", key, missing or again) from None
    except OSError as error:
        raise LaunchError(f"{file} cannot be read: {error.strerror}", key, "check its permissions") from None
    if len(raw) > MAX_BYTES:
        raise LaunchError(f"{file} is larger than {MAX_BYTES // 2**20} MiB", key, "give the model's own file")
    try:
        given = json.loads(raw.decode("utf-8-sig"), parse_constant=_constant, object_hook=untagged)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        what = f"{file} is empty" if not raw.strip() else f"{file} is not JSON: {reason}"
        raise LaunchError(what, key, again) from None
    if not isinstance(given, dict):
        raise LaunchError(f"{file} is not a JSON object", key, again)
    return cast(dict[str, Any], given)


def _constant(word: str) -> float | NoReturn:
    # State-space models bound their time steps by Infinity; nothing is computed from a NaN.
    if word == "NaN":
        raise ValueError("NaN is not a number")
    return float(word)


def untagged(found: dict[str, Any]) -> Any:
    """A JSON object, or the number that transformers writes as an object: {"__float__": "Infinity"}.

    Source: transformers 5.23, configuration_utils.py, `_encode_special_floats`.
    """
    return _constant(str(found[FLOAT_TAG])) if found.keys() == {FLOAT_TAG} else found


FLOAT_TAG = "__float__"


def check_numbers(config: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that no model has, before anything is built or counted by them.

    Raises: LaunchError with the key and the number.
    """
    for part in _parts(config):
        known = canonical(part)
        for name, limits in SIZES.items():
            for number in _each(known.get(name)):
                _check(name, number, limits, where, is_whole=True)
        for name, limits in NUMBERS.items():
            for number in _each(known.get(name)):
                _check(name, number, limits, where, is_whole=False)
        for name, (kind, item, expected) in KINDS.items():
            value: object = known.get(name)
            items = cast(list[object], value) if item is not None and isinstance(value, list) else []
            is_kind = value is None or isinstance(value, kind)
            if not is_kind or not all(isinstance(one, item or object) for one in items):
                raise _refused(name, cast(object, value), where, f"it must be {expected}")


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration, and that of its text model where it has several."""
    yield config
    if isinstance(config.get("text_config"), Mapping):
        yield config["text_config"]


def _each(value: object) -> list[object]:
    """A number, or the numbers of a list for each layer."""
    if value is None:
        return []
    return cast(list[object], value) if isinstance(value, list) else [value]


def _check(name: str, number: object, limits: Limits, where: str, *, is_whole: bool) -> None:
    least, most = limits
    is_number = isinstance(number, int if is_whole else int | float) and not isinstance(number, bool)
    if is_number and math.isfinite(cast(float, number)) and least <= cast(float, number) <= most:
        return
    kind = "a whole number" if is_whole else "a number"
    raise _refused(name, number, where, f"it must be {kind} from {least:,g} to {most:,g}")


def _refused(name: str, value: object, where: str, rule: str) -> LaunchError:
    shown = json.dumps(value, default=str)
    what = f"the model's config has {name}: {shown[:60]}"
    return LaunchError(what, where, f"{rule}; take the config.json of the model as published")


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, and every part of it, without the keys that choose code (`KEYS_OF_CODE`)."""
    return {
        key: without_code(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in KEYS_OF_CODE
    }


def asked_code(config: Mapping[str, Any]) -> list[str]:
    """Code that a configuration asks for, each as `key: value`."""
    found: list[str] = []
    for key, value in config.items():
        if key in KEYS_OF_CODE:
            found += [] if value is None else [f"{key}: {value}"]
        elif isinstance(value, Mapping):
            found += asked_code(cast(Mapping[str, Any], value))
    return found
