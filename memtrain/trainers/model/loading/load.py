"""The model of a run: weights by hub id or folder, or random weights from a configuration."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from memtrain.errors import LaunchError, MemtrainError, words_of
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.reading.token_files import tokens_of
from memtrain.recipes.sections.model import Model
from memtrain.trainers.model.attention.own_positions import take_own_positions
from memtrain.trainers.model.heads.backbone import backbone_of
from memtrain.trainers.model.loading.added_tokens import grow_embeddings
from memtrain.trainers.model.loading.locate import (
    Origin,
    built,
    fault_of_build,
    find_origin,
    make_config,
    read_config,
    read_config_file,
    unknown_type,
    with_scaled_positions,
)
from memtrain.trainers.model.loading.own_code import trust_code
from memtrain.trainers.model.loading.quantize import quantization_config
from memtrain.trainers.model.loading.sharded_init import is_keeping
from memtrain.trainers.model.loading.sharded_load import empty_model
from memtrain.trainers.model.loading.tiny import BUILTIN_TINY, tiny_config
from memtrain.trainers.model.loading.weight_files import check_shapes, check_weights
from memtrain.trainers.model.quantized.quantizer import begin_packed, packing_experts
from memtrain.trainers.runtime.oom_errors import is_out_of_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The torch dtype of each `Settings.dtype`."""


AUTO: dict[str, Any] = {"lm": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
"""Loaders of a model, by its head."""


def load_model(
    recipe: Model,
    settings: Settings,
    *,
    seed: int,
    vocab_size: int,
    head: str = "lm",
    is_new: bool = True,
    drawn_on: str | None = None,
) -> PreTrainedModel:
    """The causal LM that `recipe` names, in `settings.dtype`, on this process's device, in training mode.

    With head `score` it ends in one number for a sequence: that of a reward model, or a random one where
    it `is_new`.

    Without adapter, checkpointing or kernels: those are put on it afterwards. `vocab_size` is the size of
    the tokenizer. Random weights are drawn on the device of `settings`, or `drawn_on`: they depend on `seed`
    and that kind of device alone, so every rank gets the same ones; the caller's random state does not move.
    The KV cache is off and attention is `settings.attention`. Inside `made_in_parts` it has no data yet.

    Raises: NeedsWhole where it cannot be made in parts there; LaunchError when there is no such model, it is
    an adapter or no causal LM, its weights are incomplete or only in pickle files, it needs code from the
    hub, or its embedding is smaller than the tokenizer.
    """
    if is_random(recipe):
        config = with_scaled_positions(_config_of(recipe, vocab_size), recipe)
        model = _random_model(config, settings, seed, head, drawn_on)
    else:
        assert recipe.path is not None, "A recipe has model.path or model.config."
        trust_code(recipe)
        origin = find_origin(recipe.path, recipe.revision)
        config = with_scaled_positions(read_config(origin), recipe)
        model = _pretrained(origin, config, settings, head, is_new=is_new)
        if recipe.add_tokens:
            grow_embeddings(model, vocab_size, vocab_size - len(tokens_of(recipe.add_tokens)))
    _check_vocabulary(model, recipe, vocab_size)
    model.config.use_cache = False
    _set_attention(model, settings)
    take_own_positions(model)
    _record_no_routers(model)
    return model.train()


def is_random(recipe: Model) -> bool:
    """Whether a recipe names no weights: they are drawn."""
    return recipe.path is None or recipe.path == BUILTIN_TINY


def refuse_random_in_bits(recipe: Model) -> None:
    """Raise LaunchError for random weights that are to be quantized."""
    if is_random(recipe):
        _refuse_packed(recipe.quantize)


def _refuse_packed(quantize: str) -> None:
    if quantize != "none":
        raise LaunchError(
            f"model.quantize {quantize} is for existing weights, but this model begins with random ones",
            "model.quantize",
            "set it to none, or give model.path",
        )


def local_device(settings: Settings) -> torch.device:
    """The device of this process: the CPU, or the CUDA device that is current."""
    if settings.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _config_of(recipe: Model, vocab_size: int) -> PretrainedConfig:
    """The configuration that random weights are made for; a vocabulary left open is the tokenizer's."""
    if recipe.path == BUILTIN_TINY:
        given: Mapping[str, Any] = tiny_config(vocab_size)
    elif isinstance(recipe.config, str):
        given = read_config_file(recipe.config)
    else:
        assert recipe.config is not None, "A recipe has model.path or model.config."
        given = recipe.config
    model_type = given.get("model_type")
    if not isinstance(model_type, str):
        raise LaunchError(
            "model.config has no model_type", "model.config", "add one, such as model_type: qwen3"
        )
    # A default configuration names tokens of the family's own vocabulary, which a smaller one does not have.
    open_keys: dict[str, Any] = {
        "vocab_size": vocab_size,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    try:
        default = make_config({"model_type": model_type})
        known = {*default.to_dict(), *default.attribute_map}
        config = make_config(open_keys | dict[str, Any](given))
    except (
        Exception
    ) as error:  # an unknown type is a ValueError, a wrong value a dataclass error of the hub's
        what = unknown_type(model_type) or f"model.config: {words_of(error)}"
        raise LaunchError(what, "model.config", "use the values of a published model") from None
    unknown = sorted(set(given) - set(known) - READ_BY_MODELS)
    if unknown and not isinstance(recipe.config, str):
        near = difflib.get_close_matches(unknown[0], known, n=3)
        raise LaunchError(
            f"model.config: {model_type} has no {unknown[0]}",
            "model.config",
            f"did you mean {' or '.join(near)}?" if near else "remove it",
        )
    return config


READ_BY_MODELS = {"architectures", "torch_dtype", "transformers_version", "head_dim"}
"""Keys of a configuration that its class need not know: the models of Qwen3-MoE read `head_dim`."""


def _random_model(
    config: PretrainedConfig, settings: Settings, seed: int, head: str, drawn_on: str | None
) -> PreTrainedModel:
    check_config(config, "model.config", head)
    _scores_once(config, head)
    if drawn_on == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            "the random weights of this model were drawn on a GPU, and there is none here to draw them again",
            "model.config",
            "run the command on a machine with a GPU",
        )
    # Ranks that keep a part of each weight read it while it is made on the host.
    place = torch.device("cpu") if is_keeping() else torch.device(drawn_on or local_device(settings))
    of_gpu = [torch.cuda.current_device()] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=of_gpu), place:
        torch.manual_seed(seed)
        model = built(AUTO[head].from_config, config, "model.config", dtype=DTYPES[settings.dtype])
    _refuse_packed(settings.quantize)
    return model if is_keeping() else model.to(local_device(settings))


def _pretrained(
    origin: Origin, config: PretrainedConfig, settings: Settings, head: str, *, is_new: bool
) -> PreTrainedModel:
    check_config(config, origin.path, head)
    _scores_once(config, head)
    may_miss = SCORE_HEADS if head == "score" and is_new else ()
    if is_keeping():
        return empty_model(
            origin,
            config,
            settings,
            AUTO[head],
            dtype=DTYPES[settings.dtype],
            device=local_device(settings),
            may_miss=may_miss,
        )
    kwargs: dict[str, Any] = {"quantization_config": quantization_config(settings)}
    if settings.device == "cuda":
        # Straight to where it lives, weight by weight: the host holds the whole model where that is there.
        where = torch.device("cpu") if settings.weights_offload else local_device(settings)
        kwargs["device_map"] = {"": where}
    if Path(origin.path).is_dir():
        check_weights(Path(origin.path))
    try:
        with packing_experts():
            loaded: Any = AUTO[head].from_pretrained(
                origin.path,
                config=config,
                dtype=DTYPES[settings.dtype],
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **origin.kwargs(),
                **kwargs,
            )
    except Exception as error:  # each model's class, safetensors and the hub have faults of their own
        if is_out_of_memory(error) or isinstance(error, MemtrainError):
            raise
        if (fault := fault_of_build(error, config, f"{origin.path}/config.json")) is not None:
            raise LaunchError([fault]) from None
        if Path(origin.path).is_dir() and "ignore_mismatched_sizes" in str(error):
            with torch.device("meta"):
                wanted = AUTO[head].from_config(config).state_dict()
            check_shapes(Path(origin.path), {name: weight.shape for name, weight in wanted.items()})
            # Weights of experts, which have other names in files than in the model.
            raise LaunchError(
                f"{origin.path} has weights of other shapes than its config.json says",
                f"{origin.path}/config.json",
                "take the config.json and the weights of one and the same model",
            ) from None
        raise LaunchError(
            f"the weights of {origin.path} cannot be loaded: {words_of(error)}",
            "model.path",
            "only complete safetensors files of models that transformers knows are read; convert others "
            "with save_pretrained",
        ) from None
    model, info = loaded
    _check_complete(origin, info, may_miss=may_miss)
    _check_no_more_layers(origin, model, info["unexpected_keys"])
    if settings.quantize != "none":
        begin_packed(model)
    return model


SCORE_HEADS = ("score.weight", "score.bias", "classifier.weight", "classifier.bias")
"""Weights that a language model has not, and a reward model begins at random."""


def _scores_once(config: PretrainedConfig, head: str) -> None:
    """Ask for one number a sequence."""
    if head == "score":
        config.num_labels = 1


def check_config(config: PretrainedConfig, named: str, head: str) -> None:
    """Refuse a configuration of a model that memtrain does not train.

    Raises: LaunchError unless it is one of a causal LM with plain weights, whose loss is that of its tokens.
    """
    _check_causal(config, named, head)
    if getattr(config, "quantization_config", None) is not None:
        raise LaunchError(
            f"the weights of {named} are quantized already (quantization_config in its config.json)",
            "model.path",
            "use the unquantized model; model.quantize: 4bit quantizes it while it is loaded",
        )


def _check_causal(config: PretrainedConfig, named: str, head: str) -> None:
    """Raise LaunchError unless the configuration is one of a causal LM, and its weights are too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    architectures: list[str] = getattr(config, "architectures", None) or []
    generates = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    if head == "score":
        generates += ("ForSequenceClassification",)
    is_other = bool(architectures) and not any(name.endswith(generates) for name in architectures)
    if config.is_encoder_decoder or is_other or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = ", ".join(architectures) or config.model_type
        is_two = ", with is_encoder_decoder: true" if config.is_encoder_decoder else ""
        raise LaunchError(
            f"{named} is not a causal language model (it is {what}{is_two})",
            "model",
            "use a decoder with a language-modelling head, such as Qwen/Qwen3-0.6B",
        )


def _record_no_routers(model: PreTrainedModel) -> None:
    """Let a backbone keep no logits of its routers, though its configuration asks for them.

    Their loss is computed by `experts/load_balance.py`, or not at all; kept, they would be bytes of every
    layer. The configuration itself stays, and is saved, as it is.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        backbone_of(model).register_forward_pre_hook(_without_router_logits, with_kwargs=True)


def _without_router_logits(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "output_router_logits": False}


def _check_complete(origin: Origin, info: Mapping[str, Any], *, may_miss: tuple[str, ...]) -> None:
    missing, mismatched = (
        sorted(set(info["missing_keys"]) - set(may_miss)),
        sorted(map(str, info["mismatched_keys"])),
    )
    for names, fault in ((missing, "has no weights for"), (mismatched, "has weights of another shape for")):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise LaunchError(
                f"{origin.path} {fault} {shown}",
                "model.path",
                "these weights would start random; use a complete causal LM",
            )


_NUMBER = re.compile(r"\.(\d+)\.")


def _check_no_more_layers(origin: Origin, model: PreTrainedModel, unread: Iterable[str]) -> None:
    """Raise LaunchError where the files have decoder layers beyond those of the configuration: a model with
    fewer would be trained, and nobody would say so."""
    config = model.config.get_text_config()
    # Layers that predict later tokens are published behind the others, and not trained.
    behind = int(getattr(config, "num_nextn_predict_layers", 0) or 0)
    count = int(getattr(config, "num_hidden_layers", 0) or 2**62)
    names = set(model.state_dict())
    for name in sorted(unread):
        number = _NUMBER.search(name)
        if number is None or _NUMBER.sub(".0.", name, count=1) not in names:
            continue
        if int(number[1]) >= count + behind:
            raise LaunchError(
                f"{origin.path} has weights of more layers than its config.json, by which there are {count}: "
                f"{name}",
                f"{origin.path}/config.json",
                "take the config.json of the model as published",
            )


def _check_vocabulary(model: PreTrainedModel, recipe: Model, vocab_size: int) -> None:
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding), "A causal LM looks its tokens up in an embedding."
    rows = embedding.num_embeddings
    if vocab_size > rows:
        raise LaunchError(
            f"the tokenizer has {vocab_size:,} tokens and the model's embedding {rows:,} rows",
            recipe.tokenizer or recipe.path or "model.config",
            "use the model's own tokenizer (remove model.tokenizer)"
            if recipe.path
            else f"set vocab_size in model.config to {vocab_size}, or leave it out",
        )


def _set_attention(model: PreTrainedModel, settings: Settings) -> None:
    from memtrain.memory.rules.attention import AttentionBackend
    from memtrain.trainers.model.attention import set_attention

    set_attention(model, AttentionBackend(settings.attention))
