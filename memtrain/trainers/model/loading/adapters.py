"""Small trained adapters on frozen weights: LoRA, rsLoRA and DoRA, through PEFT.

Adapter weights are kept in float32 whatever the model's dtype: they are about a hundredth of the model, and
in bfloat16 small updates would be rounded away. They compute in the dtype of what enters them, so that no
float32 copy of a layer's input is made or kept (PEFT's own way makes one for every adapted layer).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    PeftType,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError, MemtrainError, first_line_of
from memtrain.recipes.sections.model import ALL_LINEAR, Adapter
from memtrain.trainers.model.experts.adapters import beside_experts, shapes_of_packed
from memtrain.trainers.model.loading.adapter_targets import check_adapter_files, check_targets, does_not_fit
from memtrain.trainers.model.loading.dora_parts import magnitudes_in_parts
from memtrain.trainers.model.loading.dora_product import multiply_without_identity
from memtrain.trainers.model.loading.lora_layers import in_few_kernels
from memtrain.trainers.model.loading.sharded_init import NeedsWhole, is_keeping
from memtrain.trainers.model.loading.weight_files import ADAPTER_WEIGHTS
from memtrain.trainers.model.quantized.dora import show_numbers_to_dora
from memtrain.trainers.model.quantized.packed import layout_of
from memtrain.trainers.model.streamed.wide_products import linear
from memtrain.trainers.runtime.oom_errors import is_out_of_memory

TASKS = {"lm": "CAUSAL_LM", "score": "SEQ_CLS"}
"""PEFT's name of the task, by the model's head; the head of a `score` is trained beside the adapter."""

SCORE = "score"
"""Module of a model that scores, whose adapter saves it: one of a model that writes has none."""


def add_adapter(
    model: PreTrainedModel, adapter: Adapter, *, quantize: str = "none", head: str = "lm"
) -> PeftModel:
    """`model` with its weights frozen and a trainable adapter on the modules that `adapter` names.

    A is random (Kaiming) from torch's random state, B is zero: the model's outputs have not moved yet.

    Source: LoRA arXiv:2106.09685, eq. 3 (scale alpha / r); rsLoRA arXiv:2312.03732, theorem 3.2
    (alpha / sqrt(r)); DoRA arXiv:2402.09353, eq. 5.

    Raises: LaunchError when a name matches nothing, or what is named cannot be adapted.
    """
    check_targets(model, adapter, quantize=quantize)
    show_numbers_to_dora()
    multiply_without_identity()
    targets = adapter.target_modules
    config = LoraConfig(
        task_type=TASKS[head],
        r=adapter.r,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType] a float scales as well as an int
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if ALL_LINEAR in targets else list(targets),
        target_parameters=list(adapter.target_parameters) or None,
        modules_to_save=list(adapter.modules_to_save) or None,
        use_rslora=adapter.rslora,
        use_dora=adapter.kind == "dora",
    )
    with warnings.catch_warnings(), shapes_of_packed(), magnitudes_in_parts():
        # PEFT up to 0.21 reads the name that transformers 5.23 renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.* is deprecated")
        # Tied weights that are adapted or saved apart: merging unties them.
        warnings.filterwarnings("ignore", ".*ensure_weight_tying.*")
        # PEFT 0.21 looks for the doubled rank of stacked gate and up among modules; on the stack it is there.
        warnings.filterwarnings("ignore", ".*_pattern keys did not match any targeted module.*")
        adapted = get_peft_model(model, config, autocast_adapter_dtype=True)
    assert isinstance(adapted, PeftModel), "PEFT wraps the model."
    own = adapted.active_peft_config
    if own.base_model_name_or_path and Path(own.base_model_name_or_path).is_dir():
        # Of any working directory: the adapter is used from others.
        own.base_model_name_or_path = str(Path(own.base_model_name_or_path).absolute())
    if is_keeping():
        _round_to(adapted, model.dtype)
    compute_in_input_dtype(adapted)
    return adapted.train()


def continue_adapter(model: PeftModel, folder: Path) -> None:
    """Give the new adapter of `model` the trained numbers of the one in `folder`, to the bit where both are
    float32; a head for scores that it has not stays new.

    Raises: LaunchError where its file is damaged, or has more or fewer numbers than this model's adapter.
    """
    check_adapter_files(folder, "model.adapter.path")
    given = load_file(folder / ADAPTER_WEIGHTS)
    try:
        set_peft_model_state_dict(model, dict(given))
    except RuntimeError as error:  # of sizes that differ
        raise does_not_fit(folder, first_line_of(error)) from None
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    absent = sorted(name for name in own.keys() - given.keys() if SCORE not in name.split("."))
    more = sorted(given.keys() - own.keys())
    if absent or more:
        what = f"it has no {absent[0]}" if absent else f"the model has no place for its {more[0]}"
        count = len(absent) + len(more)
        raise does_not_fit(folder, f"{what} ({count} such tensors)" if count > 1 else what)


def check_new_tokens_learn(model: PeftModel) -> None:
    """Raise LaunchError where the embedding, or the head, stays frozen: added tokens would learn nothing."""
    base: Any = model.get_base_model()
    tables = {"embedding": base.get_input_embeddings(), "head": base.get_output_embeddings()}
    for name, table in tables.items():
        if table is not None and not any(one.requires_grad for one in table.parameters()):
            raise LaunchError(
                f"model.add_tokens are trained in the {name}, which is frozen",
                "model.adapter.modules_to_save",
                "name both: [embed_tokens, lm_head] (other families: wte, embed_in, embed_out)",
            )


def _round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Round new adapters as PEFT does beside weights that have data: they are float32 numbers of `dtype`."""
    for module in (module for module in model.modules() if isinstance(module, LoraLayer)):
        if layout_of(module.get_base_layer(), getattr(module, "parameter_name", "weight")) is not None:
            continue  # beside packed weights PEFT rounds nothing
        for low_rank in (*module.lora_A.values(), *module.lora_B.values()):
            for weight in low_rank.parameters():
                weight.data = weight.data.to(dtype).to(weight.dtype)


def load_adapter(model: PreTrainedModel, adapter: str) -> PeftModel:
    """`model` with the trained adapter of a folder or hub id, frozen; modules saved beside it are its own.

    Where the model has no data, the adapter has its own all the same.

    Raises: LaunchError when the adapter does not fit the model, or is neither LoRA nor DoRA.
    """
    if Path(adapter).is_dir():
        check_adapter_files(Path(adapter))
    show_numbers_to_dora()
    multiply_without_identity()
    with warnings.catch_warnings():
        # PEFT up to 0.21 reads the name that transformers 5.23 renamed.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.* is deprecated")
        # Tied weights that were saved apart: each is loaded as its own, and merging unties them.
        warnings.filterwarnings("ignore", ".*ensure_weight_tying.*")
        is_empty = model.device.type == "meta"
        place = "cpu" if is_empty else str(model.device)
        try:
            with _staying_where_read() if is_empty else nullcontext():
                adapted = PeftModel.from_pretrained(
                    model, adapter, torch_device=place, low_cpu_mem_usage=is_empty
                )
        except Exception as error:  # PEFT reads foreign values in ways of its own: KeyError, TypeError, ...
            if is_out_of_memory(error) or isinstance(error, MemtrainError | NeedsWhole):
                raise
            raise LaunchError(
                f"the adapter {adapter} does not fit the model: {first_line_of(error)}",
                adapter,
                "give the model that it was trained on: model.path=FOLDER_OR_HUB_ID",
            ) from None
    kind = str(adapted.active_peft_config.peft_type)
    if adapted.active_peft_config.peft_type != PeftType.LORA:
        raise LaunchError(
            f"the adapter {adapter} is a {kind.removeprefix('PeftType.')} adapter; only LoRA and DoRA are "
            "supported",
            adapter,
            "merge it into its model with PEFT, and use the merged model",
        )
    compute_in_input_dtype(adapted)
    return adapted.eval()


@contextmanager
def _staying_where_read() -> Iterator[None]:
    """Adapters that are read inside have their data, also beside weights that have none.

    PEFT 0.21 moves what it has read to the device of the weights, `meta` too.
    """
    movers: list[Any] = [BaseTunerLayer, ParamWrapper]
    moves = [one._move_adapter_to_device_of_base_layer for one in movers]
    for one in movers:
        one._move_adapter_to_device_of_base_layer = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for one, move in zip(movers, moves, strict=True):
            one._move_adapter_to_device_of_base_layer = move


def compute_in_input_dtype(model: nn.Module) -> None:
    """From now on the float32 adapters inside `model` compute in the dtype of their inputs."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
            for low_rank in (*module.lora_A.values(), *module.lora_B.values()):
                if isinstance(low_rank, nn.Linear):
                    low_rank.forward = MethodType(_linear_in_input_dtype, low_rank)
    if isinstance(model, PeftModel):
        in_few_kernels(model)
        beside_experts(model)


def _linear_in_input_dtype(self: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, self.weight, self.bias)
