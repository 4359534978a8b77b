"""Axolotl: what its keys say together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.axolotl_keys import KEYS
from memtrain.recipes.importers.engines import deepspeed, fsdp
from memtrain.recipes.importers.tool import Said, Tool
from memtrain.recipes.trl.keys import KEYS as TRL_KEYS

METHODS = {"dpo": "dpo", "ipo": "dpo", "simpo": "dpo", "orpo": "dpo", "kto": "kto", "grpo": "grpo"}
"""`rl:` and the method; another loss of pairs is a loss of `dpo`."""

_PREFERENCE_LOSS = {"ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}
_PROMPT_COMPLETION = ("alpaca", "completion")
"""Types of rows that are recognised by their columns."""


def read(said: Said) -> None:
    """The method, precision, attention, loss, adapter, rows and devices.

    Raises: RecipeError for a method that has no counterpart.
    """
    _method(said)
    _precision(said)
    _attention(said)
    _loss(said)
    _adapter(said)
    _rows(said)
    _memory(said)
    _schedule(said)
    _trackers(said)
    if said.get("deepspeed"):
        deepspeed(said, "deepspeed", said.config["deepspeed"])
    fsdp(said, "fsdp", said.get("fsdp"), said.get("fsdp_config"))
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        if isinstance(said.get(key), int) and said.config[key] > 1:
            said.put("cluster.context_parallel", said.config[key])


def _method(said: Said) -> None:
    asked = said.get("rl")
    if said.on("reward_model"):
        said.method = "reward"
    elif asked in (None, False):
        said.method = "sft"
    elif str(asked).lower() == "true":
        said.method = "dpo"
    elif asked in METHODS:
        said.method = METHODS[asked]
        if asked in _PREFERENCE_LOSS:
            said.say("loss_type", [_PREFERENCE_LOSS[asked]], "rl")
    else:
        raise RecipeError(
            f"rl: {asked} has no counterpart in memtrain",
            where="rl",
            fix=f"set it to one that is read: sft, {', '.join(METHODS)}",
        )


def _precision(said: Said) -> None:
    """Weights are loaded in half precision under an adapter, and in float32 under autocast without one."""
    half = "bfloat16" if said.get("bf16") not in (False, None) or said.on("bfloat16") else ""
    half = half or ("float16" if said.on("fp16") or said.on("float16") else "")
    half = half or ("bfloat16" if "bf16" not in said.config else "")
    if said.on("bfloat16") or said.on("float16") or said.get("adapter") or (said.get("deepspeed") and half):
        said.say("dtype", half or "float32")
    elif not half:
        said.say("bf16", False)


def _attention(said: Said) -> None:
    if said.get("attn_implementation"):
        name = str(said.config["attn_implementation"])
        said.say("attn_implementation", name, "attn_implementation")
        if name not in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"):
            said.trl.pop("attn_implementation")
            said.lose("attn_implementation", "`model.attention` names the back ends that there are")
        return
    kinds = {
        "flash_attention": "flash_attention_2",
        "flex_attention": "flex_attention",
        "sdp_attention": "sdpa",
        "eager_attention": "eager",
        "xformers_attention": "sdpa",
    }
    for key, kind in kinds.items():
        if said.on(key):
            said.say("attn_implementation", kind, key)
            return
    for key in ("sage_attention", "s2_attention"):
        if said.on(key):
            said.lose(key, "`model.attention` names the back ends that there are")


def _loss(said: Said) -> None:
    if any(said.on(key) for key in ("liger_fused_linear_cross_entropy", "cut_cross_entropy")):
        said.computed["memory.loss"] = "chunked"
    elif said.on("chunked_cross_entropy"):
        said.notes.append(
            "chunked_cross_entropy makes the loss in pieces of whole logits; memory.loss needs none"
        )
    if any(said.on(key) for key in ("liger_rms_norm", "liger_rope", "liger_swiglu", "liger_glu_activation")):
        said.put("model.liger", "auto")
    for name in cast(list[object], said.get("plugins", []) or []):
        if not any(known in str(name).lower() for known in ("liger", "cutcrossentropy")):
            said.lose("plugins", f"{name} is a plugin of Axolotl's")


def _adapter(said: Said) -> None:
    kind = said.get("adapter")
    if not kind:
        return
    if kind not in ("lora", "qlora", "dora"):
        said.lose("adapter", "the adapters are LoRA and DoRA")
        return
    said.say("use_peft", True, "adapter")
    if kind == "qlora" and "load_in_4bit" not in said.config and not said.on("load_in_8bit"):
        said.say("load_in_4bit", True, "adapter")
    modules = said.get("lora_target_modules")
    if said.on("lora_target_linear"):
        said.say("lora_target_modules", "all-linear", "lora_target_linear")
    elif modules:
        said.say("lora_target_modules", modules, "lora_target_modules")


def _rows(said: Said) -> None:
    sources = [_source(said, one) for one in _listed(said.get("datasets") or said.get("pretraining_dataset"))]
    if sources:
        said.put("data.train", sources)
    held = [_source(said, one) for one in _listed(said.get("test_datasets"))]
    share = said.get("val_set_size")
    if held:
        said.put("data.eval", held)
    elif isinstance(share, float | int) and share:
        if share < 1:
            said.put("data.eval_fraction", share)
        else:
            said.lose("val_set_size", "a number of rows: `data.eval_fraction` is a fraction")
    if said.on("sample_packing") and said.method == "sft":
        said.say("packing", True, "sample_packing")
    elif said.on("sample_packing"):
        said.notes.append(f"sample_packing: {said.method} lays its rows end to end by itself")
    if said.get("shuffle_merged_datasets") is False:
        said.put("train.shuffle", False)
    for key in ("special_tokens", "tokens", "added_tokens_overrides", "eot_tokens"):
        if said.get(key) and key != "special_tokens":
            said.lose(key, "tokens of your own: add them to the tokenizer that `model.tokenizer` names")
    template = said.get("chat_template_jinja")
    if template:
        said.put("model.chat_template", template)
    elif said.get("chat_template") not in (None, "tokenizer_default", "jinja"):
        said.lose(
            "chat_template", "the tokenizer's own template is taken; `model.chat_template` names a Jinja file"
        )


def _listed(value: object) -> list[object]:
    if value in (None, "", []):
        return []
    return cast(list[object], value) if isinstance(value, list) else [value]


def _source(said: Said, one: object) -> dict[str, object]:
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
        said.notes.append(
            f"datasets: `type: {kind}` of {source['source']}: data.format decides by the columns"
        )
    return source


def _memory(said: Said) -> None:
    checkpoints, offloads = said.get("gradient_checkpointing"), said.get("activation_offloading")
    said.say("gradient_checkpointing", checkpoints not in (None, False), "gradient_checkpointing")
    if checkpoints in ("offload", "offload_disk", "unsloth") or offloads not in (None, False):
        said.say(
            "activation_offloading", True, "activation_offloading" if offloads else "gradient_checkpointing"
        )
        said.trl["gradient_checkpointing"] = True
    if said.on("tiled_mlp"):
        said.notes.append("tiled_mlp: memory.streamed_layers goes over whole layers in slices")
    if said.on("group_by_length") is False:
        said.trl.pop("group_by_length", None)


def _schedule(said: Said) -> None:
    rate = said.get("learning_rate")
    if rate is not None:
        said.say("learning_rate", float(rate), "learning_rate")
    if said.get("cosine_min_lr_ratio") is not None:
        said.put("optim.min_lr_ratio", said.config["cosine_min_lr_ratio"])
    for key, ours in (("evals_per_epoch", "eval"), ("saves_per_epoch", "save")):
        number = said.get(key)
        if number == 1:
            said.say(f"{ours}_strategy", "epoch", key)
        elif number:
            said.lose(key, f"`{ours}.every_steps` counts steps; not given: at the end of every epoch")
            said.say(f"{ours}_strategy", "epoch", key)
    for key in ("save_steps", "eval_steps"):
        if said.get(key):
            said.say("save_strategy" if key == "save_steps" else "eval_strategy", "steps", key)
    for key in [name for name in said.trl if name in TRL_KEYS and said.trl[name] is None]:
        del said.trl[key]


def _trackers(said: Said) -> None:
    asked = [name for name in ("wandb", "mlflow", "tensorboard", "trackio") if said.on(f"use_{name}")]
    if said.get("wandb_project") and "wandb" not in asked:
        asked.append("wandb")
    if asked:
        said.say("report_to", asked, f"use_{asked[0]}")
    if said.get("wandb_project"):
        said.say("project", said.config["wandb_project"], "wandb_project")


AXOLOTL = Tool(
    name="axolotl",
    title="Axolotl",
    version="0.19",
    keys=KEYS,
    read=read,
    defaults={
        "num_train_epochs": 1,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 1,
        "max_length": 512,
        "save_strategy": "epoch",
        "lora_dropout": 0.0,
        "gradient_checkpointing": False,
    },
)
"""Axolotl, as its schema of 2026-07-24 has it."""
