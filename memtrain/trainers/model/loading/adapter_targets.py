"""Names in a recipe's adapter against the modules and stacks of a model, with or without data."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.adapter_file import read_adapter_config
from memtrain.memory.model_shape.layer_parts import takes_experts
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.sections.model import ALL_LINEAR, Adapter
from memtrain.trainers.model.experts.forward import is_experts, stacks_of
from memtrain.trainers.model.loading.weight_files import ADAPTER_WEIGHTS, header_of

PREFIX = "base_model.model."
"""Before the names of modules in an adapter's file, which calls stacks `base_layer`. Source: PEFT 0.21."""


def check_adapter_files(folder: Path, key: str = "") -> None:
    """Refuse a folder whose adapter cannot be read whole, or is pickled. Raises: LaunchError."""
    key = key or str(folder)
    read_adapter_config(folder / ADAPTER_FILE, key)
    file = folder / ADAPTER_WEIGHTS
    if not file.exists():
        raise LaunchError(
            f"{folder} has no {ADAPTER_WEIGHTS}; pickle files, which can run code, are not read",
            key,
            "train or download the adapter again, as safetensors",
        )
    header_of(file, key)


def does_not_fit(folder: Path, why: str) -> LaunchError:
    """The error about an adapter that a run was to go on from, and that is another model's."""
    return LaunchError(
        f"the adapter in {folder} does not fit the model: {why}",
        "model.adapter.path",
        "name the model that it was trained on in model.path, or train a new adapter (remove the path)",
    )


def check_continued(model: nn.Module, folder: Path) -> None:
    """Refuse before launch the adapter in `folder` where `model` has no place for one of its tensors, or a
    place of another size; its file's header alone is read.

    Raises: LaunchError.
    """
    check_adapter_files(folder, "model.adapter.path")
    modules = dict(model.named_modules())
    for name, tensor in header_of(folder / ADAPTER_WEIGHTS, "model.adapter.path").items():
        place, _, part = name.removeprefix(PREFIX).replace(".base_layer", "").partition(".lora_")
        module = modules.get(place if part else place.rpartition(".")[0])
        if module is None:
            raise does_not_fit(folder, f"the model has no place for its {name}")
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or part not in ("A.weight", "B.weight") or weight is None:
            continue
        axis, own = (1, module.in_features) if part == "A.weight" else (0, module.out_features)
        if list(tensor["shape"])[axis] != own:
            size = " x ".join(map(str, tensor["shape"]))
            raise does_not_fit(folder, f"{place} is {own:,} wide, and its {name} is of {size}")


def check_targets(model: PreTrainedModel, adapter: Adapter, *, quantize: str = "none") -> None:
    """Refuse names that the model has not, and adapters that cannot be put on what is named.

    Raises: LaunchError.
    """
    if ALL_LINEAR in adapter.target_modules:
        if len(adapter.target_modules) > 1:
            raise LaunchError(
                f"{ALL_LINEAR} means every linear layer but the head, and nothing can be added to it",
                "model.adapter.target_modules",
                f"give {ALL_LINEAR} alone, or the names of all modules",
            )
    else:
        adaptable = [
            n for n, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding | Conv1D)
        ]
        more = "; stacked experts are named in model.adapter.target_parameters" if stacks_in(model) else ""
        for target in adapter.target_modules:
            _check_named(target, adaptable, "model.adapter.target_modules", more=more)
    _check_stacks(model, adapter)
    names = [name for name, _ in model.named_modules() if name]
    for saved in adapter.modules_to_save:
        _check_named(saved, names, "model.adapter.modules_to_save")
    if quantize != "none" and _names_head(model, (*adapter.target_modules, *adapter.modules_to_save)):
        raise LaunchError(
            "the LM head cannot be adapted on quantized weights: the loss reads the full-precision head",
            "model.adapter.target_modules",
            "remove the head from the list, or set model.quantize to none",
        )


def stacks_in(model: nn.Module) -> list[str]:
    """Names of all stacks of experts."""
    return [
        f"{name}.{stack}"
        for name, module in model.named_modules()
        if is_experts(module)
        for stack in stacks_of(module)
    ]


def check_quantized(model: nn.Module, quantize: str) -> None:
    """Refuse a model whose experts would stay as they are beside quantized linear maps, and nobody would say
    so.

    Raises: LaunchError that names them.
    """
    known = {id(module) for module in model.modules() if is_experts(module)}
    for name, module in model.named_modules() if quantize != "none" else ():
        for own, weight in module._parameters.items():
            if id(module) not in known and weight is not None and _is_like_experts(weight):
                raise LaunchError(
                    f"the weights {name}.{own} of {type(module).__name__} cannot be quantized, and would "
                    f"stay whole: {weight.numel():,} numbers in every layer",
                    "model.quantize",
                    "set it to none, or use a mixture such as Qwen3-MoE, gpt-oss, Mixtral, DeepSeek or GLM",
                )


LEAST_WIDTH = 16
"""Rows and columns of what is a stack of matrices, and no convolution. Taste."""


def _is_like_experts(weight: nn.Parameter) -> bool:
    return weight.dim() == 3 and min(weight.shape[1:]) >= LEAST_WIDTH and weight.shape[0] > 1


def _check_stacks(model: PreTrainedModel, adapter: Adapter) -> None:
    stacks, key = stacks_in(model), "model.adapter.target_parameters"
    for target in adapter.target_parameters:
        if not stacks:
            raise LaunchError(
                f"the model has no experts, and nothing to adapt by the name {target}", key, "remove it"
            )
        _check_named(target, stacks, key, "stack of experts")
    is_all = takes_experts(adapter, model.config.model_type)
    if not stacks or not (adapter.target_parameters or is_all):
        return
    for asked, key, value, word in (
        (adapter.dropout > 0, "model.adapter.dropout", "dropout: 0", "dropout"),
        (adapter.kind == "dora", "model.adapter.kind", "kind: lora", "DoRA"),
    ):
        if asked:
            raise LaunchError(
                f"the adapter has experts among its targets, for which PEFT has no {word}",
                key,
                f"set {value}, or leave the experts out: model.adapter.target_modules: [q_proj, "
                "k_proj, v_proj, o_proj]",
            )


def _check_named(wanted: str, names: Sequence[str], key: str, kind: str = "module", more: str = "") -> None:
    """Raise LaunchError unless a name is `wanted` or ends in `.wanted`, as PEFT matches."""
    if any(name == wanted or name.endswith(f".{wanted}") for name in names):
        return
    # Of a stack the module belongs to the name.
    num_parts, plural = (1, "modules") if kind == "module" else (2, "stacks")
    leaves = list(dict.fromkeys(".".join(name.rsplit(".", num_parts)[-num_parts:]) for name in names))
    near = difflib.get_close_matches(wanted, leaves, n=3, cutoff=0.5) or leaves[:8]
    raise LaunchError(
        f"the model has no {kind} {wanted}",
        key,
        f"name {plural} that it has, such as {', '.join(near)}{more}",
    )


def _names_head(model: PreTrainedModel, wanted: tuple[str, ...]) -> bool:
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    return any(name == one or name.endswith(f".{one}") for one in wanted)
