"""Axolotl: keys that are read together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.engines import deepspeed, fsdp
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.tool import Tool, ToolReading
from memtrain.recipes.peers.table import table

METHODS = {"dpo": "dpo", "ipo": "dpo", "simpo": "dpo", "orpo": "dpo", "kto": "kto", "grpo": "grpo"}
"""`rl:` and the method; another loss of pairs is a loss of `dpo`."""

_PREFERENCE_LOSS = {"ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
_PROMPT_COMPLETION = ("alpaca", "completion")
"""Types of rows that are recognised by their columns."""


def read(reading: ToolReading) -> None:
    """The method, precision, attention, loss, adapter, rows and devices.

    Raises: RecipeError for a method that has no counterpart.
    """
    _method(reading)
    _precision(reading)
    _attention(reading)
    _loss(reading)
    _adapter(reading)
    _rows(reading)
    _memory(reading)
    _schedule(reading)
    _trackers(reading)
    _positions(reading)
    if reading.get("deepspeed"):
        deepspeed(reading, "deepspeed", reading.config["deepspeed"])
    fsdp(reading, "fsdp", reading.get("fsdp"), reading.get("fsdp_config"))
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if isinstance(reading.get(key), int) and reading.config[key] > 1:
            reading.set_recipe("cluster.context_parallel", reading.config[key])


def _method(reading: ToolReading) -> None:
    asked = reading.get("rl")
    if reading.on("reward_model"):
        reading.method = "reward"
    elif asked in (None, False):
        reading.method = "sft"
    elif str(asked).lower() == "true":
        reading.method = "dpo"
    elif asked in METHODS:
        reading.method = METHODS[asked]
        if asked in _PREFERENCE_LOSS:
            reading.set_trl("loss_type", [_PREFERENCE_LOSS[asked]], "rl")
    else:
        raise RecipeError(
            f"rl: {asked} has no counterpart in memtrain",
            where="rl",
            fix=f"set it to a value that is read: sft, {', '.join(METHODS)}",
        )


def _precision(reading: ToolReading) -> None:
    """Weights are loaded in half precision under an adapter, and in float32 under autocast without one."""
    reading.precision_is_open = reading.get("bf16") == "auto"
    half = "bfloat16" if reading.get("bf16") not in (False, None) or reading.on("bfloat16") else ""
    half = half or ("float16" if reading.on("fp16") or reading.on("float16") else "")
    half = half or ("bfloat16" if "bf16" not in reading.config else "")
    if (
        reading.on("bfloat16")
        or reading.on("float16")
        or reading.get("adapter")
        or (reading.get("deepspeed") and half)
    ):
        reading.set_trl("dtype", half or "float32")
    elif not half:
        reading.set_trl("bf16", False)


def _attention(reading: ToolReading) -> None:
    if reading.get("attn_implementation"):
        name = str(reading.config["attn_implementation"])
        reading.set_trl("attn_implementation", name, "attn_implementation")
        if name not in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"):
            reading.trl.pop("attn_implementation")
            reading.lose("attn_implementation", "`model.attention` names the back ends that there are")
        return
    kinds = {
        "flash_attention": "flash_attention_2",
        "flex_attention": "flex_attention",
        "sdp_attention": "sdpa",
        "eager_attention": "eager",
        "xformers_attention": "sdpa",
    }
    for key, kind in kinds.items():
        if reading.on(key):
            reading.set_trl("attn_implementation", kind, key)
            return
    for key in ("sage_attention", "s2_attention"):
        if reading.on(key):
            reading.lose(key, "`model.attention` names the back ends that there are")


def _loss(reading: ToolReading) -> None:
    if any(reading.on(key) for key in ("liger_fused_linear_cross_entropy", "cut_cross_entropy")):
        if reading.method == "sft":
            # They replace the loss of a model that is given labels; trainers of `rl:` ask it for logits.
            reading.computed["memory.loss"] = "chunked"
    elif reading.on("chunked_cross_entropy"):
        reading.notes.append(
            "chunked_cross_entropy makes the loss in pieces of whole logits; memory.loss needs none"
        )
    if any(
        reading.on(key) for key in ("liger_rms_norm", "liger_rope", "liger_swiglu", "liger_glu_activation")
    ):
        reading.set_recipe("model.liger", "auto")
    for name in cast(list[object], reading.get("plugins", []) or []):
        if not any(known in str(name).lower() for known in ("liger", "cutcrossentropy")):
            reading.lose("plugins", f"{name} is a plugin of Axolotl's")


def _adapter(reading: ToolReading) -> None:
    kind = reading.get("adapter")
    if not kind:
        return
    if kind not in ("lora", "qlora", "dora"):
        reading.lose("adapter", "the adapters are LoRA and DoRA")
        return
    reading.set_trl("use_peft", True, "adapter")
    if kind == "qlora" and "load_in_4bit" not in reading.config and not reading.on("load_in_8bit"):
        reading.set_trl("load_in_4bit", True, "adapter")
    modules = reading.get("lora_target_modules")
    if reading.on("lora_target_linear"):
        reading.set_trl("lora_target_modules", "all-linear", "lora_target_linear")
    elif modules:
        reading.set_trl("lora_target_modules", modules, "lora_target_modules")
    elif reading.get("lora_target_parameters"):
        reading.set_trl("lora_target_modules", [], "lora_target_modules")
    quantizes = reading.trl.get("load_in_4bit") is True or reading.trl.get("load_in_8bit") is True
    if quantizes and reading.get("quantize_moe_experts") is False:
        reading.lose("quantize_moe_experts", "`model.quantize` packs stacked experts too")


def _rows(reading: ToolReading) -> None:
    sources = [
        _source(reading, one)
        for one in _listed(reading.get("datasets") or reading.get("pretraining_dataset"))
    ]
    if sources:
        reading.set_recipe("data.train", sources)
    _trained_roles(reading)
    held = [_source(reading, one) for one in _listed(reading.get("test_datasets"))]
    share = reading.get("val_set_size")
    if held:
        reading.set_recipe("data.eval", held)
    elif isinstance(share, float | int) and share:
        if share < 1:
            reading.set_recipe("data.eval_fraction", share)
        else:
            reading.lose("val_set_size", "a number of rows: `data.eval_fraction` is a fraction")
    if reading.on("sample_packing") and reading.method == "sft":
        reading.set_trl("packing", True, "sample_packing")
    elif reading.on("sample_packing"):
        reading.notes.append(f"sample_packing: {reading.method} lays its rows end to end by itself")
    if reading.get("shuffle_merged_datasets") is False:
        reading.set_recipe("train.shuffle", False)
    _tokens(reading)
    for key in ("added_tokens_overrides", "eot_tokens"):
        if reading.get(key):
            reading.lose(key, "your own tokens: add them to the tokenizer that `model.tokenizer` names")
    template = reading.get("chat_template_jinja")
    if template:
        reading.set_recipe("model.chat_template", template)
    elif reading.get("chat_template") not in (None, "tokenizer_default", "jinja"):
        reading.lose(
            "chat_template", "the tokenizer's own template is taken; `model.chat_template` names a Jinja file"
        )


def _trained_roles(reading: ToolReading) -> None:
    """Conversations are trained on assistants' turns, unless inputs or other roles are asked for.

    Source: axolotl, prompt_strategies/chat_template.py, StrategyLoader (`roles_to_train`, `train_on_inputs`).
    """
    listed = [
        cast(Mapping[str, Any], one) for one in _listed(reading.get("datasets")) if isinstance(one, Mapping)
    ]
    roles = [one.get("roles_to_train", ["assistant"]) for one in listed if "chat" in str(one.get("type", ""))]
    if not roles or reading.method != "sft":
        return
    if reading.get("train_on_inputs"):
        reading.set_trl("assistant_only_loss", False, "train_on_inputs")
    elif all(set(_listed(one)) <= {"assistant", "gpt", "model"} for one in roles):
        reading.set_trl("assistant_only_loss", True, "datasets")
    else:
        reading.set_trl("assistant_only_loss", False, "datasets")
        reading.lose(
            "datasets",
            "roles_to_train: turns of the assistant alone, or all turns (as here), are trained on "
            "(`data.assistant_only_loss`)",
        )


def _tokens(reading: ToolReading) -> None:
    """Tokens that are added; padding is neither attended to nor in the loss, and its token says nothing."""
    special = reading.get("special_tokens")
    named: Mapping[str, Any] = cast(Mapping[str, Any], special) if isinstance(special, Mapping) else {}
    added = [*_listed(reading.get("tokens")), *_listed(named.get("additional_special_tokens"))]
    if added:
        reading.add_tokens([str(token) for token in added])
    others = [key for key in ("bos_token", "eos_token") if named.get(key)]
    if others:
        reading.lose(
            "special_tokens", f"{', '.join(others)}: set them in the tokenizer that `model.tokenizer` names"
        )


def _listed(value: object) -> list[object]:
    if value in (None, "", []):
        return []
    return cast(list[object], value) if isinstance(value, list) else [value]


def _source(reading: ToolReading, one: object) -> dict[str, object]:
    if not isinstance(one, Mapping):
        return {"source": str(one)}
    given = cast(Mapping[str, Any], one)
    files = given.get("data_files")
    source: dict[str, object] = {"source": files if isinstance(files, str) else str(given.get("path", ""))}
    if given.get("name"):
        source["name"] = given["name"]
    if given.get("split") and given["split"] != "train":
        source["split"] = given["split"]
    kind = str(given.get("type", ""))
    if kind and not kind.startswith(_PROMPT_COMPLETION) and "chat" not in kind:
        reading.notes.append(
            f"datasets: `type: {kind}` of {source['source']}: data.format decides by the columns"
        )
    return source


def _memory(reading: ToolReading) -> None:
    checkpoints, offloads = reading.get("gradient_checkpointing"), reading.get("activation_offloading")
    reading.set_trl("gradient_checkpointing", checkpoints not in (None, False), "gradient_checkpointing")
    if checkpoints in ("offload", "offload_disk", "unsloth") or offloads not in (None, False):
        reading.set_trl(
            "activation_offloading", True, "activation_offloading" if offloads else "gradient_checkpointing"
        )
        reading.trl["gradient_checkpointing"] = True
    if reading.on("tiled_mlp"):
        reading.notes.append("tiled_mlp: memory.streamed_layers goes over whole layers in slices")
    if reading.on("group_by_length") is False:
        reading.trl.pop("group_by_length", None)


def _schedule(reading: ToolReading) -> None:
    rate = reading.get("learning_rate")
    if rate is not None:
        reading.set_trl("learning_rate", float(rate), "learning_rate")
    if reading.get("cosine_min_lr_ratio") is not None:
        reading.set_recipe("optim.min_lr_ratio", reading.config["cosine_min_lr_ratio"])
    for key, ours in (("evals_per_epoch", "eval"), ("saves_per_epoch", "save")):
        number = reading.get(key)
        if number == 1:
            reading.set_trl(f"{ours}_strategy", "epoch", key)
        elif number:
            reading.lose(key, f"`{ours}.every_steps` counts steps; not given: at the end of every epoch")
            reading.set_trl(f"{ours}_strategy", "epoch", key)
    for key in ("save_steps", "eval_steps"):
        if reading.get(key):
            reading.set_trl("save_strategy" if key == "save_steps" else "eval_strategy", "steps", key)
    for key in [name for name, value in reading.trl.items() if value is None]:
        del reading.trl[key]


def _positions(reading: ToolReading) -> None:
    """Scaled positions, by their own key or as a change of the model's configuration."""
    scale_positions(reading, "rope_scaling", reading.get("rope_scaling"))
    changed = reading.get("overrides_of_model_config")
    if not isinstance(changed, Mapping):
        return
    changes = dict(cast(Mapping[str, Any], changed))
    scale_positions(reading, "overrides_of_model_config", changes.pop("rope_scaling", None))
    if changes:
        why = "changes of the model's configuration: write them into its config.json"
        reading.lose("overrides_of_model_config", why)


def _trackers(reading: ToolReading) -> None:
    asked = [name for name in ("wandb", "mlflow", "tensorboard", "trackio") if reading.on(f"use_{name}")]
    if reading.get("wandb_project") and "wandb" not in asked:
        asked.append("wandb")
    if asked:
        reading.set_trl("report_to", asked, f"use_{asked[0]}")
    if reading.get("wandb_project"):
        reading.set_trl("project", reading.config["wandb_project"], "wandb_project")


AXOLOTL = Tool(table("axolotl"), read)
