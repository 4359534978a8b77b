"""A run's adapter folded into the weights it was trained on, as a full model, a module at a time."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import plan_of_run
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.model import Model
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.model.loading.adapters import load_adapter
from memtrain.trainers.model.loading.layers_of_files import without_data
from memtrain.trainers.model.loading.lazy_save import LazyWeights, lazy_weights
from memtrain.trainers.model.loading.load import DTYPES, load_model
from memtrain.trainers.model.loading.save import refuse_to_overwrite, save_final, stop_at
from memtrain.trainers.model.loading.sharded_init import Kept, NeedsWhole
from memtrain.trainers.online.rewards.reading import READING_FILE
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.tools.same_model import (
    Difference,
    difference,
    outputs,
    refuse_another,
    row_of,
    unchecked_folder,
)
from memtrain.trainers.tools.trained_model import MERGED, refuse_without_run, run_around


@dataclass(frozen=True, slots=True)
class Merged:
    """The written files, with notes for the user."""

    folder: Path
    dtype: str
    num_modules: int
    """Modules whose weight took an update in."""
    was_quantized: str
    """`4bit` or `8bit` when the adapter was trained on quantized weights; the full ones were merged."""
    compared: Difference
    """Distance from the adapter on its base."""
    why_whole: str = ""
    """Reason why the host held the whole model, where it did."""


def merge_run(run: Path, output: Path | None = None, dtype: str | None = None) -> Merged:
    """Write `output` (`run/merged` when not given): the base model of a run with its adapter folded in.

    Works on the CPU, which holds one module at a time, where `why_whole` does not say otherwise. Weights are
    taken as the run had them (its dtype, unquantized), the update is added in float32, and the sum is rounded
    once, to `dtype` (the run's own when not given). The run is not touched.

    Source: W + scale * B A, arXiv:2106.09685, section 4.1; rounding: TRL issue 6688 (merging in bfloat16
    drifts). Then both models read a row of tokens (`same_model`), and what is not the same model is removed.

    Raises: LaunchError when the run has no plan or no finished adapter, `output` holds something, or the
    merged model is another one than the adapter on its base.
    """
    run = run_around(run)
    refuse_without_run(run, "`merge` folds")
    folder = RunFolder(run)
    plan = plan_of_run(run)
    if not (folder.final / ADAPTER_FILE).is_file():
        is_full = (folder.final / "config.json").is_file()
        raise LaunchError(
            f"{folder.final} is already a full model" if is_full else f"{run} has no finished adapter",
            str(run),
            "use it directly" if is_full else "the run must finish first",
        )
    output = output or run / MERGED
    refuse_to_overwrite(output)
    to = known_dtype(dtype or plan.settings.dtype)
    tokenizer = load_tokenizer(str(folder.final))
    settings = plan.settings.model_copy(
        update={"device": "cpu", "quantize": "none", "attention": "transformers"}
    )

    def base() -> PreTrainedModel:
        """The model that the adapter was trained on."""
        made = load_model(
            plan.recipe.model,
            settings,
            seed=plan.recipe.train.seed,
            vocab_size=len(tokenizer),
            head=METHODS[plan.recipe.method].head,
            drawn_on=plan.settings.device,
        )
        if plan.data.turn_end is not None:
            stop_at(made, plan.data.turn_end.token_id)
        return made

    def read_back() -> PreTrainedModel:
        """The model that was written."""
        return load_model(
            Model(path=str(unchecked)),
            settings.model_copy(update={"dtype": to}),
            seed=0,
            vocab_size=len(tokenizer),
            head=METHODS[plan.recipe.method].head,
            is_new=False,
        )

    why_whole = ""
    with unchecked_folder(output) as unchecked:
        try:
            empty, kept = without_data(base)
            model, num_modules, weights = fold_by_module(empty, kept, str(folder.final), DTYPES[to])
            save_final(model, tokenizer, unchecked, weights)
        except NeedsWhole as error:
            why_whole = str(error)
            model, num_modules = fold(load_adapter(base(), str(folder.final)), DTYPES[to])
            save_final(model, tokenizer, unchecked)
        if (folder.final / READING_FILE).is_file():
            shutil.copy(folder.final / READING_FILE, unchecked)
        del model
        row = row_of(plan, len(tokenizer))
        expected, changed = outputs(base, row, adapter=folder.final)
        # Of the run's own precision the weights that the adapter changes are rounded, of another one all.
        compared = difference(
            plan, row, expected, read_back, changed if to == plan.settings.dtype else (), to
        )
        refuse_another(compared, "the merged model", "the adapter on its base", run)
    was_quantized = plan.settings.quantize if plan.settings.quantize != "none" else ""
    return Merged(output, to, num_modules, was_quantized, compared, why_whole)


def known_dtype(name: str) -> str:
    """`name`. Raises: LaunchError where it is no precision of weights."""
    if name not in DTYPES:
        raise LaunchError(
            f"unknown precision of weights: {name}", "--dtype", f"give one of {', '.join(DTYPES)}"
        )
    return name


@torch.no_grad()
def fold(adapted: PeftModel, dtype: torch.dtype) -> tuple[PreTrainedModel, int]:
    """The model inside `adapted` in `dtype`, with every update added in float32, and how many there were.

    One layer at a time is float32, so that the host holds little more than the model itself.
    """
    layers = _adapted_layers(adapted)
    _untie(adapted, layers)
    for layer in layers:
        _add_update(layer, dtype)
    return _unloaded(adapted, dtype), len(layers)


@torch.no_grad()
def fold_by_module(
    base: PreTrainedModel, kept: Mapping[str, Kept], adapter: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, int, LazyWeights]:
    """The same of a model without data and a folder or hub id: its weights are made as they are written.

    `kept`: of the model as `without_data` made it.

    Raises: NeedsWhole where a weight cannot be made without the others.
    """
    adapted = load_adapter(base, adapter)
    layers = _adapted_layers(adapted)
    # A sum with weights without data would be a sum with nothing, and no error.
    unread = [name for name, p in adapted.named_parameters() if p.is_meta and "lora_" in name]
    assert not unread, f"{', '.join(unread)} were not read."
    _untie(adapted, layers)
    by_storage = {one.storage._cdata: one for one in kept.values()}
    sources = {
        (id(module), last): by_storage[weight.untyped_storage()._cdata]
        for module in adapted.modules()
        for last, weight in module._parameters.items()
        if weight is not None and weight.is_meta
    }
    of_module: dict[int, list[LoraLayer]] = {}
    for layer in layers:
        of_module.setdefault(id(layer.get_base_layer()), []).append(layer)
    model = _unloaded(adapted, dtype)

    def make(names: Sequence[str]) -> dict[str, Tensor]:
        """Weights of one module."""
        module = model.get_submodule(names[0].rpartition(".")[0])
        last = {name.rpartition(".")[2]: name for name in names}
        held = {one: module.get_parameter(one) for one in last}
        for one in last:
            if held[one].is_meta:
                source = sources[id(module), one]
                numbers = source.numbers(range(held[one].numel())).view(held[one].shape)
                module._parameters[one] = nn.Parameter(numbers, requires_grad=False)
        for layer in of_module.get(id(module), []):
            _add_update(layer, dtype)
        made = {name: module.get_parameter(one).detach().to(dtype) for one, name in last.items()}
        module._parameters.update(held)
        return made

    weights = lazy_weights(model, make)
    written = {id(model.get_submodule(group[0].rpartition(".")[0])) for group in weights.groups}
    if not set(of_module) <= written:
        raise NeedsWhole("an adapter changes weights that are tied to others")
    return model, len(layers), weights


def _adapted_layers(adapted: PeftModel) -> list[LoraLayer]:
    return [module for module in adapted.modules() if isinstance(module, LoraLayer)]


def _add_update(layer: LoraLayer, dtype: torch.dtype) -> None:
    """Add the update to the layer's weights, in float32, and round the sum."""
    base = layer.get_base_layer()
    base.to(torch.float32)
    layer.merge(safe_merge=True)  # pyright: ignore[reportCallIssue] every kind of LoRA layer has it
    base.to(dtype)


def _untie(adapted: PeftModel, layers: Sequence[LoraLayer]) -> None:
    """Give a weight of its own to each adapted module that shares one: an adapter changes its own module
    alone, and folded into a shared weight it would change the others too."""
    num_owners = Counter(
        id(weight)
        for module in adapted.modules()
        for weight in module._parameters.values()
        if weight is not None
    )
    for module in {id(base): base for base in (layer.get_base_layer() for layer in layers)}.values():
        for name, weight in module._parameters.items():
            if weight is not None and num_owners[id(weight)] > 1:
                num_owners[id(weight)] -= 1
                own = weight.detach() if weight.is_meta else weight.detach().clone()
                module._parameters[name] = nn.Parameter(own, requires_grad=False)


def _unloaded(adapted: PeftModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model inside in `dtype`, without its adapter; untied where the head is no longer the embedding."""
    model = adapted.unload()
    assert isinstance(model, PreTrainedModel), "A run adapts a transformers model."
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return model.to(dtype)  # pyright: ignore[reportArgumentType]
