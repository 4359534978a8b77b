"""A model's config.json: foreign text, whose values are checked and whose wish for code is not granted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from memtrain.errors import Fault, LaunchError
from memtrain.memory.model_shape.config_names import INSIDE, OTHER_NAMES
from memtrain.recipes.reading.regular_file import check_regular, open_regular

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

DTYPE = re.compile(r"(torch\.)?(auto|half|double|(b?float|u?int)\d+\w*)")
"""Names of precisions in torch."""

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
    "shared_expert_intermediate_size": (0, 2**24),
    "num_experts": (0, 2**16),
    "num_local_experts": (0, 2**16),
    "n_routed_experts": (0, 2**16),
    "num_experts_per_tok": (0, 2**16),
    "decoder_sparse_step": (1, 2**12),
    "num_labels": (1, 2**20),
    "sliding_window": (0, 2**62),
    "max_position_embeddings": (1, 2**62),
    "chunk_size_feed_forward": (0, 2**62),
    "bos_token_id": (-1, 2**28),
    "pad_token_id": (-1, 2**28),
    "eos_token_id": (-1, 2**28),
}
"""Whole numbers of a configuration, with the least and the most that is taken. Taste: a hundred times what
any published model has. Of token ids -1 is none."""

NUMBERS: Mapping[str, Limits] = {
    "rms_norm_eps": (0, 1),
    "layer_norm_eps": (0, 1),
    "layer_norm_epsilon": (0, 1),
    "norm_eps": (0, 1),
    "rope_theta": (1e-6, 1e30),
    "partial_rotary_factor": (0, 1),
    "query_pre_attn_scalar": (1e-6, 1e9),
    "attention_dropout": (0, 1),
    "hidden_dropout": (0, 1),
    "embd_pdrop": (0, 1),
    "activation_dropout": (0, 1),
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
    "hidden_act": (str, None, "the name of a function, such as silu"),
    "hidden_activation": (str, None, "the name of a function, such as gelu_pytorch_tanh"),
    "activation_function": (str, None, "the name of a function, such as gelu_new"),
    "text_config": (dict, None, "a mapping"),
    "quantization_config": (dict, None, "a mapping"),
    "auto_map": (dict, None, "a mapping"),
    "id2label": (dict, None, "a mapping of numbers to labels"),
    "label2id": (dict, None, "a mapping of labels to numbers"),
    **dict.fromkeys(
        (
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "use_cache",
            "use_sliding_window",
            "norm_topk_prob",
            "output_router_logits",
            "output_attentions",
            "output_hidden_states",
            "return_dict",
            "is_decoder",
            "is_encoder_decoder",
            "add_cross_attention",
        ),
        (bool, None, "true or false"),
    ),
}
"""Other values, with their kinds, and the kind of the items of a list."""


def read_config_json(file: Path, key: str) -> dict[str, Any]:
    """The mapping in a config.json, or in that of a folder, its values checked.

    Raises: LaunchError at the `key` of the recipe that names it when there is none, or it is no model's.
    """
    refuse_run_folder(file, key)
    if file.is_dir():
        refuse_pipes(file, key)
    file = file / "config.json" if file.is_dir() else file
    given = read_json_object(file, key, "give a folder with a config.json")
    check_values(given, str(file))
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


def refuse_pipes(folder: Path, key: str) -> None:
    """Refuse a model's folder in which anything is a pipe, a socket or a device: who opened it would wait.

    Raises: LaunchError at the `key` of the recipe that names it.
    """
    try:
        for path in sorted(folder.iterdir()):
            if not path.is_dir():
                check_regular(path)
    except OSError as error:
        raise LaunchError(
            f"{error.filename} cannot be read: {error.strerror}", key, "give a folder of a model's files"
        ) from None


def read_json_object(file: Path, key: str, missing: str = "") -> dict[str, Any]:
    """The JSON object in a file of a model. `missing`: the way out where there is no such file.

    Raises: LaunchError at the `key` of the recipe that names it.
    """
    again = "copy or download it again"
    try:
        with open_regular(file) as opened:
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


def check_values(config: Mapping[str, Any], where: str) -> None:
    """Refuse values that no model has, and values that contradict one another, before anything is built or
    counted by them.

    `where`: the file, or the key of the recipe. Raises: LaunchError with each such key and value.
    """
    faults = [fault for part in _parts(config) for fault in _faults_of(part, where)]
    if faults:
        raise LaunchError(list(dict.fromkeys(faults)))


def _faults_of(part: Mapping[str, Any], where: str) -> list[Fault]:
    found = [
        fault_at(key, bad, rule, where)
        for name, key, value in _named(part)
        for bad, rule in _wrong(name, value)
    ]
    # Values of a wrong kind are not compared.
    return found or [fault_at(*one, where=where) for holds in CONTRADICTIONS for one in holds(part)]


def _wrong(name: str, value: object) -> Iterator[tuple[object, str]]:
    """(the value, or one of a list, and what it must be) where it is of a wrong kind or past its limits."""
    if name in SIZES or name in NUMBERS:
        is_whole = name in SIZES
        least, most = SIZES[name] if is_whole else NUMBERS[name]
        for number in cast(list[object], value) if isinstance(value, list) else [value]:
            is_number = isinstance(number, int if is_whole else int | float) and not isinstance(number, bool)
            if not is_number or not least <= cast(float, number) <= most:
                yield (
                    number,
                    f"it must be {'a whole number' if is_whole else 'a number'} from {least:,g} to {most:,g}",
                )
    elif name in ("dtype", "torch_dtype"):
        if not isinstance(value, str) or not DTYPE.fullmatch(value):
            yield value, "it must be a precision, such as bfloat16"
    elif name in KINDS:
        kind, item, expected = KINDS[name]
        items = cast(list[object], value) if item is not None and isinstance(value, list) else []
        if not isinstance(value, kind) or not all(isinstance(one, item or object) for one in items):
            yield value, f"it must be {expected}"


def _named(part: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(the name used here, the key in the file, its value) of what a configuration gives; null gives
    nothing."""
    for key, value in part.items():
        if value is not None:
            yield CANONICAL.get(key, key), key, value
    for section, key in INSIDE.items():
        inner = part.get(section)
        if isinstance(inner, Mapping) and cast(Mapping[str, Any], inner).get(key) is not None:
            yield CANONICAL.get(key, key), f"{section}.{key}", cast(Mapping[str, Any], inner)[key]


CANONICAL: Mapping[str, str] = {other: name for name, others in OTHER_NAMES.items() for other in others}
"""The name used here, by another one."""


def _whole(part: Mapping[str, Any], name: str) -> tuple[str, int] | None:
    """(the key in the file, its whole number) of a name used here; None where it is left out or a list."""
    return next(
        ((key, value) for one, key, value in _named(part) if one == name and isinstance(value, int)), None
    )


Contradiction = tuple[str, object, str]
"""The key, its value, and the other value that it does not go with."""


def _heads_in_groups(part: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Each head of keys and values serves as many query heads as any other."""
    groups, heads = _whole(part, "num_key_value_heads"), _whole(part, "num_attention_heads")
    if groups and heads and heads[1] % groups[1] and not part.get("multi_query"):
        yield *groups, f"it must divide {heads[0]}, which is {heads[1]}"


def _width_of_heads(part: Mapping[str, Any]) -> Iterator[Contradiction]:
    """Without a width of its own a head has its share of the model's."""
    heads, width = _whole(part, "num_attention_heads"), _whole(part, "hidden_size")
    has_own = part.get("head_dim") is not None or part.get("model_type") not in DIVIDE_WIDTH
    if heads and width and not has_own and width[1] % heads[1]:
        yield *heads, f"it must divide {width[0]}, which is {width[1]}"


DIVIDE_WIDTH = frozenset(
    {"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "opt"}
    | {"olmo", "olmo2", "olmoe", "stablelm", "starcoder2", "gpt_bigcode", "bloom", "falcon", "granite"}
)
"""Types of models whose heads share the model's width. Source: their modeling_*.py in transformers 5.23."""


def _a_word_for_each_layer(part: Mapping[str, Any]) -> Iterator[Contradiction]:
    layers = _whole(part, "num_hidden_layers")
    for key in ("layer_types", "mlp_layer_types"):
        words: object = part.get(key)
        if layers and isinstance(words, list) and len(cast(list[object], words)) != layers[1]:
            yield (
                key,
                cast(object, words),
                f"it must have a word for each layer, and {layers[0]} is {layers[1]}",
            )


def _windows_have_a_width(part: Mapping[str, Any]) -> Iterator[Contradiction]:
    words: object = part.get("layer_types")
    if isinstance(words, list) and "sliding_attention" in words and part.get("sliding_window", 1) is None:
        yield "sliding_window", None, "layer_types has sliding_attention, which needs a width"


def _dropout_is_a_number(part: Mapping[str, Any]) -> Iterator[Contradiction]:
    if part.get("attention_dropout", 0) is None:
        yield "attention_dropout", None, "it must be a number from 0 to 1"


def _no_more_experts_than_there_are(part: Mapping[str, Any]) -> Iterator[Contradiction]:
    chosen = _whole(part, "num_experts_per_tok")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = _whole(part, name)
        if chosen and experts and 0 < experts[1] < chosen[1]:
            yield *chosen, f"it must be {experts[0]} at most, which is {experts[1]}"


def _padding_has_a_row(part: Mapping[str, Any]) -> Iterator[Contradiction]:
    pad, rows = _whole(part, "pad_token_id"), _whole(part, "vocab_size")
    if pad and rows and pad[1] >= rows[1]:
        yield *pad, f"it must be less than {rows[0]}, which is {rows[1]}"


CONTRADICTIONS = (
    _heads_in_groups,
    _width_of_heads,
    _a_word_for_each_layer,
    _windows_have_a_width,
    _dropout_is_a_number,
    _no_more_experts_than_there_are,
    _padding_has_a_row,
)
"""Checks of values against each other."""


def fault_at(key: str, value: object, rule: str, where: str) -> Fault:
    """The fault of a value in a configuration: its key, its file, and what it must be."""
    what = f"the model's config has {key}: {json.dumps(value, default=str)[:60]}"
    return Fault(what, where, f"{rule}; take the config.json of the model as published")


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration, and that of its text model where it has several."""
    yield config
    if isinstance(config.get("text_config"), Mapping):
        yield config["text_config"]


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
