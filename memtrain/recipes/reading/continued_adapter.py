"""`model.adapter.path`, a trained adapter that a run goes on from: its shape is read from its own file."""

from __future__ import annotations

import json
from collections.abc import Mapping as ReadOnly
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from memtrain.recipes.reading.adapter_config import ADAPTER_FILE, faults_of
from memtrain.recipes.reading.regular_file import open_regular
from memtrain.recipes.reading.yaml_tree import Entry, Faults, Items, Leaf, Mapping, Node, Place, Scalar, plain

MAX_BYTES = 2**20
"""Largest file that is read. Taste: the longest, with patterns of every layer, are under 100 KiB."""

NEUTRAL = frozenset(
    {
        *("alora_invocation_tokens", "auto_mapping", "base_model_name_or_path", "corda_config"),
        *("eva_config", "inference_mode", "layers_pattern", "loftq_config", "lora_ga_config"),
        *("megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size"),
        *("revision", "runtime_config", "task_type", "use_rslora", "use_dora", "fan_in_fan_out"),
        *("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "modules_to_save"),
        *("init_lora_weights", "bias"),
    }
)
"""Keys that are read here, or that change nothing once an adapter has weights. Source: PEFT 0.21,
tuners/lora/config.py."""

PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Starts of an adapter that leave the model's weights alone. Source: the same file, `init_lora_weights`."""


def with_adapter_of_path(tree: Mapping, faults: Faults) -> Mapping:
    """The tree with the shape of the adapter that `model.adapter.path` names, and its base model.

    What is not at one with the adapter's own file is a fault at its line.
    """
    model = tree.node("model")
    adapter = model.node("adapter") if isinstance(model, Mapping) else None
    named = adapter.entries.get("path") if isinstance(adapter, Mapping) else None
    if named is None or not isinstance(named.node, Leaf) or not isinstance(named.node.value, str):
        return tree
    assert isinstance(model, Mapping)
    assert isinstance(adapter, Mapping)
    place = named.node.place
    folder = _folder(named.node.value, place, faults)
    given = None if folder is None else _read(folder / ADAPTER_FILE, place, faults)
    if folder is None or given is None:
        return tree
    shape = _shape(given)
    if kept := adapter.entries.get("dropout"):
        shape["dropout"] = plain(kept.node)
    for key, value in shape.items():
        _check_same(key, value, adapter, folder, faults)
    entries = {key: Entry(place, _node(value, place)) for key, value in shape.items()}
    entries["path"] = replace(named, node=replace(named.node, value=str(folder)))
    model = _with_base(model, adapter, given, named, faults)
    filled = replace(adapter, entries={**adapter.entries, **entries})
    model = replace(
        model, entries={**model.entries, "adapter": Entry(model.entries["adapter"].place, filled)}
    )
    return replace(tree, entries={**tree.entries, "model": Entry(tree.entries["model"].place, model)})


def _folder(path: str, place: Place, faults: Faults) -> Path | None:
    """The folder of an adapter, or the one in a run's; absolute, since a run may start elsewhere."""
    given = Path(path).expanduser().absolute()
    for folder in (given, given / "final"):
        if (folder / ADAPTER_FILE).is_file():
            return folder
    if (given / "config.json").is_file() or (given / "final" / "config.json").is_file():
        faults.add(
            f"model.adapter.path: {path} is a whole model, not an adapter",
            place,
            "name it in model.path, and leave model.adapter.path out: a new adapter is trained on it",
        )
        return None
    faults.add(
        f"model.adapter.path: there is no {ADAPTER_FILE} in {path}",
        place,
        "give the folder of a trained adapter, or of its run; one of the hub is brought by `hf download "
        "NAME --local-dir FOLDER`",
    )
    return None


def _read(file: Path, place: Place, faults: Faults) -> dict[str, Any] | None:
    """The adapter's own configuration; None with its faults where no run can go on from it."""
    again = "train or download the adapter again"
    try:
        with open_regular(file) as opened:
            raw = opened.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES // 2**20} MiB")
        read = json.loads(raw.decode("utf-8-sig"))
    except OSError as error:
        faults.add(f"model.adapter.path: {file} cannot be read: {error.strerror}", place, again)
        return None
    except (ValueError, RecursionError) as error:
        faults.add(f"model.adapter.path: {file} is not JSON: {error}"[:300], place, again)
        return None
    if not isinstance(read, dict):
        faults.add(f"model.adapter.path: {file} holds no keys", place, again)
        return None
    given = cast(dict[str, Any], read)
    wrong = faults_of(given, file)
    for fault in wrong:
        faults.add(f"model.adapter.path: {fault.what} ({file})", place, fault.fix)
    reason = "" if wrong else _why_not(given)
    if reason:
        faults.add(
            f"model.adapter.path: no run goes on from the adapter in {file.parent}: {reason}",
            place,
            "merge it into its model with PEFT (merge_and_unload), name the result in model.path, and train "
            "a new one",
        )
    return None if wrong or reason else given


def _why_not(given: ReadOnly[str, Any]) -> str:
    """What an adapter has that the adapters of memtrain have not; empty where there is nothing."""
    if given.get("peft_type") != "LORA":
        return f"it is of the kind {given.get('peft_type')}, and only LoRA and DoRA are trained here"
    if not isinstance(given.get("r"), int) or not given.get("lora_alpha") or given["lora_alpha"] < 0:
        return "its r and lora_alpha are not positive numbers"
    if isinstance(targets := given.get("target_modules"), str) and targets != "all-linear":
        return f"its modules are named by a pattern (target_modules: {targets[:60]})"
    if (start := given.get("init_lora_weights", True)) not in PLAIN_STARTS:
        return f"it began by changing the model's own weights (init_lora_weights: {start})"
    if given.get("bias") not in (None, "none"):
        return f"it trains biases (bias: {given['bias']})"
    extra = sorted(key for key, value in given.items() if value and key not in NEUTRAL)
    return f"it has {', '.join(extra)}" if extra else ""


def _shape(given: ReadOnly[str, Any]) -> dict[str, Any]:
    """The keys of `model.adapter` that an adapter's own file says."""
    targets: Any = given.get("target_modules") or []
    saved = set(given.get("modules_to_save") or [])
    if given.get("task_type") == "SEQ_CLS":
        # PEFT writes the heads of such models itself, whatever was asked for.
        saved -= {"classifier", "score"}
    return {
        "kind": "dora" if given.get("use_dora") else "lora",
        "r": given["r"],
        "alpha": float(given["lora_alpha"]),
        "dropout": float(given.get("lora_dropout") or 0.0),
        "target_modules": [targets] if isinstance(targets, str) else sorted(targets),
        "target_parameters": sorted(given.get("target_parameters") or []),
        "modules_to_save": sorted(saved),
        "rslora": bool(given.get("use_rslora")),
    }


def _check_same(key: str, value: object, adapter: Mapping, folder: Path, faults: Faults) -> None:
    """Note a written key that is not what the adapter's own file says."""
    entry = adapter.entries.get(key)
    if entry is None:
        return
    written = plain(entry.node)
    if isinstance(value, list):
        names = cast(list[str], written) if isinstance(written, list) else [written]
        is_same = sorted(str(name) for name in names) == value
    else:
        is_same = written == value
    if not is_same:
        faults.add(
            f"model.adapter.{key} is {written}, and the adapter in {folder} has {value}",
            entry.node.place,
            f"remove model.adapter.{key}: a continued adapter keeps its shape",
        )


def _with_base(
    model: Mapping, adapter: Mapping, given: ReadOnly[str, Any], named: Entry, faults: Faults
) -> Mapping:
    """The model's section with the adapter's base, where it names none; a fault where it names another."""
    base = str(given.get("base_model_name_or_path") or "")
    if "path" not in model.entries and "config" not in model.entries and base:
        return replace(model, entries={**model.entries, "path": replace(named, node=Leaf(base, named.place))})
    path = model.node("path")
    held = adapter.node("base")
    told = held.value if isinstance(held, Leaf) else None
    if not base or not isinstance(path, Leaf) or _last(str(path.value)) == _last(base) or told == base:
        return model
    faults.add(
        f"model.path is {path.value}, and the adapter was trained on {base}",
        path.place,
        f"set model.path to that model; where both have the same weights, say so: model.adapter.base: {base}",
    )
    return model


def _last(path: str) -> str:
    """The last part of a folder or hub id, by which copies of a model are told from others; of a run's model
    with the run's name."""
    parts = path.rstrip("/").lower().split("/")
    return "/".join(parts[-2:] if parts[-1] in ("final", "merged", "export", "model") else parts[-1:])


def _node(value: Any, place: Place) -> Node:
    if isinstance(value, list):
        return Items(tuple(Leaf(cast(Scalar, one), place) for one in cast(list[Any], value)), place)
    return Leaf(cast(Scalar, value), place)
