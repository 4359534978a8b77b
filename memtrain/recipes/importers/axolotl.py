"""Axolotl: keys that are read together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.axolotl_data import TEMPLATES, datasets, listed
from memtrain.recipes.importers.engines import deepspeed, fsdp
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.tool import Tool, ToolReading
from memtrain.recipes.peers.table import table
from memtrain.recipes.trl.translation import Lost
from memtrain.recipes.trl.writing import inline

METHODS = {
    "dpo": "dpo",
    "ipo": "dpo",
    "simpo": "dpo",
    "orpo": "dpo",
    "kto": "kto",
    "grpo": "grpo",
    "gdpo": "grpo",
}
"""`rl:` and the method; another loss of pairs is a loss of `dpo`."""

_OWN_TRAINERS = {
    "diffusion": "training by diffusion",
    "nemo_gym": "rollouts of NeMo Gym",
    "hatchery": "training on a remote service",
}
"""Plugins that replace the trainer, and what they train."""

_OTHER_WEIGHTS = {
    "spectrum": "a part of the weights, by their signal-to-noise ratio",
    "mora": "MoRA's adapters",
    "grokfast": "filtered gradients",
    "densemixer": "all experts in the backward pass",
    "llm_compressor": "sparse weights",
    "expert_parallel": "experts divided over devices: `cluster.engine` divides a run",
}
"""Plugins that train otherwise."""

_HARMLESS = ("liger", "cutcrossentropy", "cut_cross_entropy", "lm_eval", "swanlab", "kernels")


def read(reading: ToolReading) -> None:
    """The method, precision, attention, loss, adapter, rows and devices.

    Raises: RecipeError for a method that has no counterpart.
    """
    _check(reading)
    _method(reading)
    _precision(reading)
    _attention(reading)
    _loss(reading)
    _plugins(reading)
    _adapter(reading)
    _preferences(reading)
    _online(reading)
    datasets(reading)
    _lengths(reading)
    _tokens(reading)
    _template(reading)
    _memory(reading)
    _schedule(reading)
    _evaluation(reading)
    _trackers(reading)
    _positions(reading)
    _devices(reading)


_NUMBERS = ("learning_rate", "rl_beta", "dpo_beta", "trl.beta", "orpo_alpha", "cpo_alpha", "num_epochs")
_TEXTS = ("rl", "adapter", "chat_template", "attn_implementation", "optimizer", "lora_model_dir")
_MAPPINGS = ("lr_scheduler_kwargs",)


def _check(reading: ToolReading) -> None:
    """Raise RecipeError for a value of another kind than its key's."""
    for keys, kind in ((_NUMBERS, "a number"), (_TEXTS, "a name"), (_MAPPINGS, "a mapping")):
        for key in keys:
            value = reading.get(key)
            if value is not None and not _is(kind, value):
                raise RecipeError(f"{key}: {inline(value)} is not {kind}", where=key, fix=f"give {kind}")


def _is(kind: str, value: object) -> bool:
    if kind == "a name":
        return isinstance(value, str | bool)
    if kind == "a mapping":
        return isinstance(value, Mapping)
    try:
        float(cast(str, value))
    except (TypeError, ValueError):
        return False
    return True


def _method(reading: ToolReading) -> None:
    asked = reading.get("rl")
    for key, why in (
        ("process_reward_model", "rewards for single steps of an answer"),
        ("trainer_cls", "your own trainer"),
        ("kd_trainer", "distillation from probabilities in the rows"),
    ):
        if reading.get(key) not in (None, False):
            raise RecipeError(
                f"{key}: {why}, which memtrain does not train",
                where=key,
                fix="memtrain distill trains from a teacher, memtrain reward on pairs of whole answers; or "
                "remove the key",
            )
    if reading.on("reward_model"):
        reading.method = "reward"
    elif asked in (None, False):
        reading.method = "sft"
    elif str(asked).lower() == "true":
        reading.method = "dpo"
    elif asked in METHODS:
        reading.method = METHODS[asked]
    else:
        raise RecipeError(
            f"rl: {asked} has no counterpart in memtrain",
            where="rl",
            fix=f"set it to a value that is read: {', '.join(METHODS)}; without it, sft",
        )


def _preferences(reading: ToolReading) -> None:
    """The losses of pairs: ORPO and SimPO are sums, with the likelihood of the chosen answer.

    Source: core/builders/rl.py; TRL 1.9.0's ORPOTrainer (nll + beta x odds ratio) and CPOTrainer (simpo +
    cpo_alpha x nll, whose alpha is 1 where nothing is written), which Axolotl pins.
    """
    asked = reading.get("rl")
    beta = next(
        (reading.get(key) for key in ("trl.beta", "rl_beta", "dpo_beta") if reading.get(key) is not None),
        None,
    )
    if beta is not None:
        reading.set_trl("beta", float(beta), "rl_beta")
    if asked == "orpo":
        weight = beta if beta is not None else reading.get("orpo_alpha", 0.1)
        reading.trl.pop("beta", None)
        _found(reading, "orpo_alpha")
        reading.set_recipe("dpo.loss", ["sft", "orpo"])
        reading.set_recipe("dpo.loss_weights", [1.0, float(weight)], "the likelihood, and the odds ratio")
        reading.notes.append(
            "rl: orpo: the likelihood is of the prompt's tokens too there, and of the chosen answer's here"
        )
    elif asked == "simpo":
        weight = float(reading.get("cpo_alpha", 1.0))
        _found(reading, "cpo_alpha")
        losses = ["simpo", "sft"] if weight else ["simpo"]
        reading.set_recipe("dpo.loss", losses)
        if weight:
            said = "cpo_alpha" if reading.get("cpo_alpha") is not None else "cpo_alpha, 1 by default"
            reading.set_recipe("dpo.loss_weights", [1.0, weight], said)
    elif asked == "ipo":
        reading.set_trl("loss_type", ["ipo"], "rl")


def _found(reading: ToolReading, key: str) -> None:
    """A key that its row calls lost is carried over."""
    reading.lost = [one for one in reading.lost if one.key != key]


def _online(reading: ToolReading) -> None:
    """GRPO by TRL 1.9.0, which Axolotl pins: its defaults differ from those of TRL 1.16.

    Source: core/trainers/grpo/__init__.py, GRPOStrategy.set_training_args_kwargs.
    """
    if reading.method != "grpo":
        return
    if reading.get("rl") == "gdpo":
        reading.trl.setdefault("multi_objective_aggregation", "normalize_then_sum")
    for key, value in (("use_bias_correction_kl", False), ("max_completion_length", 256)):
        if reading.trl.get(key) is None:
            reading.trl[key] = value
            reading.assumed.add(key)
    if reading.get("trl.max_completion_length") is None:
        reading.notes.append(
            "trl.max_completion_length is not set: completions have no limit there, and 256 tokens here "
            "(generate.max_tokens)"
        )
    if reading.trl.pop("max_length", None) is not None:
        reading.notes.append("sequence_len: GRPO reads it nowhere, and cuts no prompt")
    if reading.get("trl.vllm_mode") != "colocate":
        # Only beside the training are the engine's share and devices the run's.
        for key in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length"):
            reading.trl.pop(key, None)
        if reading.on("trl.use_vllm") and reading.get("trl.vllm_mode") is None and reading.get("vllm.host"):
            reading.notes.append(
                "vllm: such a section is of a server (axolotl vllm-serve); without trl.vllm_mode: server the "
                "sampler runs beside the training, as here"
            )
    models = [str(name) for name in listed(reading.trl.get("reward_funcs")) if "/" in str(name)]
    if models:
        reading.trl["reward_funcs"] = [
            name for name in listed(reading.trl["reward_funcs"]) if "/" not in str(name)
        ]
        weights = listed(reading.trl.pop("reward_weights", None))
        names = [*models, *cast(list[str], reading.trl["reward_funcs"])]
        order = [str(name) for name in listed(reading.get("trl.reward_funcs"))]
        made: list[dict[str, object]] = []
        for name in names:
            one: dict[str, object] = (
                {"model": {"path": name}} if "/" in name else {"function": ":".join(name.rsplit(".", 1))}
            )
            if weights:
                one["weight"] = weights[order.index(name)]
            made.append(one)
        reading.trl.pop("reward_funcs")
        reading.set_recipe("rewards.functions", made)


def _precision(reading: ToolReading) -> None:
    """Weights are loaded in the precision that is computed in.

    Source: utils/config/__init__.py, resolve_dtype; loaders/model.py (`torch_dtype`).
    """
    bf16 = reading.get("bf16", "auto" if "bf16" not in reading.config else None)
    fp16 = reading.on("fp16")
    reading.precision_is_open = bf16 == "auto" and not fp16
    half = "bfloat16" if (bf16 not in (False, None) and not fp16) or reading.on("bfloat16") else ""
    half = half or ("bfloat16" if bf16 is True else "")
    half = half or ("float16" if fp16 or reading.on("float16") or reading.on("load_in_8bit") else "")
    reading.set_trl("dtype", half or "float32")
    if not half:
        reading.set_trl("bf16", False)


_ATTENTION = {
    "xformers": "sdpa",
    "sdpa": "sdpa",
    "eager": "eager",
    "flex_attention": "flex_attention",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
    "flash_attention_4": "flash_attention_3",
    "flash_attention_torch": "flash_attention_2",
}
"""Attention by Axolotl's names, and by TRL's."""

_SWITCHES = {
    "flash_attention": "flash_attention_2",
    "flex_attention": "flex_attention",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "xformers_attention": "sdpa",
}
"""The same by the switches of earlier versions."""


def _attention(reading: ToolReading) -> None:
    name = str(reading.get("attn_implementation", ""))
    if re.search(r"flash-attn[23]$", name):
        name = "flash_attention_3" if name.endswith("3") else "flash_attention_2"
    if name:
        if name in _ATTENTION:
            reading.set_trl("attn_implementation", _ATTENTION[name], "attn_implementation")
        else:
            reading.lose("attn_implementation", "`model.attention` names the back ends that there are")
        return
    for key, kind in _SWITCHES.items():
        if reading.on(key):
            reading.set_trl("attn_implementation", kind, key)
            return
    for key in ("sage_attention", "s2_attention"):
        if reading.on(key):
            reading.lose(key, "`model.attention` names the back ends that there are")


def _loss(reading: ToolReading) -> None:
    """The loss: fused where a plugin replaces the model's own, which trainers of answers do not call."""
    plugins = " ".join(str(name).lower() for name in listed(reading.get("plugins")))
    has_liger = "liger" in plugins
    cuts = "cutcrossentropy" in plugins and reading.get("cut_cross_entropy", True) is True
    fused = has_liger and reading.on("liger_fused_linear_cross_entropy")
    if cuts or fused:
        if reading.method == "sft":
            # They replace the loss of a model that is given labels; trainers of `rl:` ask it for logits.
            reading.computed["memory.loss"] = "chunked"
        else:
            reading.notes.append(
                f"{'Cut Cross Entropy' if cuts else 'Liger'}: {reading.method} has no fused loss there: its "
                "trainer reads logits; here no loss needs whole logits"
            )
    elif reading.on("chunked_cross_entropy"):
        reading.notes.append(
            "chunked_cross_entropy makes the loss in pieces of whole logits; memory.loss needs none"
        )
    if reading.on("liger_use_token_scaling"):
        _found(reading, "liger_use_token_scaling")
        reading.set_recipe("sft.loss", "dft", "each token by its probability")
    kernels = ("liger_rms_norm", "liger_rope", "liger_swiglu", "liger_glu_activation")
    if has_liger and any(reading.on(key) for key in kernels):
        reading.set_recipe("model.liger", "auto")


def _plugins(reading: ToolReading) -> None:
    """Plugins that train something else.

    Raises: RecipeError for one that replaces the trainer.
    """
    for name in map(str, listed(reading.get("plugins"))):
        word = name.lower()
        own = next((why for sign, why in _OWN_TRAINERS.items() if sign in word), None)
        if own is not None:
            raise RecipeError(
                f"plugins: {name} is {own}, which memtrain does not do",
                where="plugins",
                fix="remove the plugin to train the same rows by the method of the file",
            )
        other = next((why for sign, why in _OTHER_WEIGHTS.items() if sign in word), None)
        if other is not None:
            reading.lost.append(Lost("plugins", name, other))
        elif ".kd" not in word and not any(known in word for known in _HARMLESS):
            reading.lost.append(Lost("plugins", name, "a plugin of Axolotl's or your own"))


def _adapter(reading: ToolReading) -> None:
    kind = reading.get("adapter")
    if not kind:
        return
    if kind not in ("lora", "qlora", "dora"):
        reading.lose("adapter", "the adapters are LoRA and DoRA")
        return
    reading.set_trl("use_peft", True, "adapter")
    if trained := reading.get("lora_model_dir"):
        reading.go_on_from("lora_model_dir", str(trained))
    if kind == "qlora" and "load_in_4bit" not in reading.config and not reading.on("load_in_8bit"):
        reading.set_trl("load_in_4bit", True, "adapter")
    for name in ("lora_r", "lora_alpha"):
        if reading.get(name) is None:
            reading.set_recipe(f"model.adapter.{name.removeprefix('lora_')}", 8, "PEFT's default")
            reading.notes.append(f"{name} is not set, and Axolotl has no default of it: PEFT's 8 is taken")
    modules = reading.get("lora_target_modules")
    if reading.on("lora_target_linear"):
        reading.set_trl("lora_target_modules", "all-linear", "lora_target_linear")
    elif modules:
        reading.set_trl("lora_target_modules", _names(reading, modules), "lora_target_modules")
    elif reading.get("lora_target_parameters"):
        reading.set_trl("lora_target_modules", [], "lora_target_modules")
    packed = reading.get("bnb_config_kwargs")
    if isinstance(packed, Mapping) and any(
        one not in _PACKED for one in cast(Mapping[str, Any], packed).items()
    ):
        reading.lose("bnb_config_kwargs", "4-bit weights are NF4 with rounded scales (`model.quantize`)")
    quantizes = reading.trl.get("load_in_4bit") is True or reading.trl.get("load_in_8bit") is True
    if quantizes and reading.get("quantize_moe_experts") is False:
        reading.lose("quantize_moe_experts", "`model.quantize` packs stacked experts too")


_PACKED = (("bnb_4bit_use_double_quant", True), ("bnb_4bit_quant_type", "nf4"))
"""Arguments of bitsandbytes that say what is so anyway."""


def _names(reading: ToolReading, modules: object) -> object:
    """Names of modules; of an expression that ends with alternatives, these."""
    if not isinstance(modules, str) or not re.search(r"[\\()|*\[]", modules):
        return modules
    found = re.search(r"\(((?:\w+\|)+\w+)\)(\w*)\$?$", modules)
    if found is None:
        reading.lose("lora_target_modules", "an expression: name the modules by their last part")
        return "all-linear"
    reading.notes.append(
        "lora_target_modules is an expression: the names at its end are taken, wherever such modules are"
    )
    return [f"{name}{found[2]}" for name in found[1].split("|")]


def _lengths(reading: ToolReading) -> None:
    """Packing, the order of rows, and rows that are too long: left out, unless something else is asked.

    Source: utils/data/utils.py, handle_long_seq_in_dataset; utils/data/rl.py; a reward model's rows are cut
    (prompt_strategies/bradley_terry/chat_template.py).
    """
    packs = "length.packing" in reading.direct
    if reading.on("sample_packing") and reading.method == "sft":
        if not packs:
            reading.set_trl("packing", True, "sample_packing")
    elif reading.on("sample_packing"):
        reading.notes.append(f"sample_packing: {reading.method} lays its rows end to end by itself")
    if reading.get("excess_length_strategy") == "raise":
        reading.notes.append("excess_length_strategy: a longer row ends the run there, and is left out here")
    asked = reading.get("excess_length_strategy")
    # What is cut into rows leaves nothing too long, and prompts are not cut.
    if reading.method != "grpo" and not packs:
        cuts = reading.method == "reward" or asked == "truncate"
        reading.set_trl(
            "truncation_mode", "keep_start" if cuts else "drop", "excess_length_strategy" if asked else ""
        )
        if not asked:
            reading.assumed.add("truncation_mode")
    elif packs:
        reading.set_trl("truncation_mode", "keep_start", "sequence_len")
    streams = reading.get("pretraining_dataset") or reading.on("streaming")
    if reading.on("curriculum_sampling") or (streams and reading.get("shuffle_merged_datasets") is False):
        _found(reading, "curriculum_sampling")
        reading.set_recipe("train.shuffle", False)
    if reading.get("group_by_length") is False:
        reading.trl.pop("group_by_length", None)


def _tokens(reading: ToolReading) -> None:
    """Tokens that are added; padding is neither attended to nor in the loss, and its token says nothing."""
    special = reading.get("special_tokens")
    named = dict(cast(Mapping[str, Any], special)) if isinstance(special, Mapping) else {}
    tokens = reading.get("tokens")
    if isinstance(tokens, Mapping):  # As earlier versions had them: special ones.
        named |= cast(Mapping[str, Any], tokens)
        tokens = None
    added = [*listed(tokens), *listed(named.get("additional_special_tokens"))]
    if added:
        reading.add_tokens([str(token) for token in added])
    others = {key: named[key] for key in ("bos_token", "eos_token") if named.get(key)}
    if others:
        why = "set them in the tokenizer that `model.tokenizer` names, where they are not its own"
        reading.lost.append(Lost("special_tokens", others, why))
    if reading.get("added_tokens_overrides"):
        reading.lose("added_tokens_overrides", "write them into the tokenizer that `model.tokenizer` names")
    if reading.get("eot_tokens"):
        reading.notes.append(
            "eot_tokens: the tokens with which the chat template ends the assistant's turn are trained on "
            "without being named (`memtrain show-data` shows them)"
        )


def _template(reading: ToolReading) -> None:
    """The chat template: a file, or one of the shipped ones that writes the same."""
    text, asked = reading.get("chat_template_jinja"), reading.get("chat_template")
    if text is not None and "{" in str(text):
        first = str(text).strip().splitlines()[0][:40]
        reading.lost.append(
            Lost(
                "chat_template_jinja",
                f"{first}...",
                "write it into a file, and name it in `model.chat_template`",
            )
        )
    elif text is not None:
        reading.set_recipe("model.chat_template", text)
    elif asked in TEMPLATES:
        reading.set_recipe("model.chat_template", TEMPLATES[asked])
    elif str(asked).startswith("tokenizer_default_fallback_"):
        reading.notes.append(
            f"chat_template: {asked}: the tokenizer's own; where it has none, the run says so"
        )
    elif asked not in (None, "tokenizer_default", "jinja"):
        reading.lose(
            "chat_template",
            "the tokenizer's own template is taken; `model.chat_template` names a Jinja file",
        )


def _memory(reading: ToolReading) -> None:
    checkpoints, offloads = reading.get("gradient_checkpointing"), reading.get("activation_offloading")
    shards = _plain(reading.get("fsdp_config"))
    if (
        isinstance(shards, Mapping)
        and cast(Mapping[str, Any], shards).get("activation_checkpointing") is True
    ):
        checkpoints = checkpoints or True  # FSDP recomputes what the trainer does not.
    reading.set_trl("gradient_checkpointing", checkpoints not in (None, False), "gradient_checkpointing")
    if checkpoints in ("offload", "offload_disk", "unsloth") or offloads not in (None, False):
        reading.set_trl(
            "activation_offloading", True, "activation_offloading" if offloads else "gradient_checkpointing"
        )
        reading.trl["gradient_checkpointing"] = True
    if reading.on("tiled_mlp"):
        reading.notes.append("tiled_mlp: memory.streamed_layers goes over whole layers in slices")


_EIGHT_BITS = ("adamw_torch_8bit", "ao_adamw_8bit")
"""torchao's AdamW with moments in 8 bits."""


def _schedule(reading: ToolReading) -> None:
    """Learning rate, its schedule and warm-up.

    Source: core/builders/base.py, _configure_warmup_and_logging.
    """
    rate = reading.get("learning_rate")
    if rate is not None:
        reading.set_trl("learning_rate", float(rate), "learning_rate")
    if reading.get("cosine_min_lr_ratio") is not None:
        reading.set_recipe("optim.min_lr_ratio", reading.config["cosine_min_lr_ratio"])
    if reading.get("warmup_steps") is None and reading.get("warmup_ratio") is None:
        most = reading.get("max_steps")
        if isinstance(most, int) and most > 0:
            steps = min(int(0.03 * most), 100)
            reading.trl["warmup_steps"] = 2 if steps == 1 else steps
        else:
            reading.trl["warmup_ratio"] = 0.03
            reading.notes.append(
                "warm-up: 3 % of the steps, at most 100 of them there (optim.warmup_steps gives their number)"
            )
        reading.assumed |= {"warmup_steps", "warmup_ratio"}
    if reading.get("optimizer") in _EIGHT_BITS:
        reading.set_trl("optim", "adamw_8bit", "optimizer")
        reading.notes.append("optimizer: torchao's 8-bit moments are bitsandbytes' here")
    if reading.get("batch_size") and reading.get("gradient_accumulation_steps") is None:
        _accumulates(reading)
    for key in [name for name, value in reading.trl.items() if value is None]:
        del reading.trl[key]


def _accumulates(reading: ToolReading) -> None:
    """The rows of a step where only they are written, which earlier versions read."""
    rows, micro = reading.config["batch_size"], reading.get("micro_batch_size", 1)
    if isinstance(rows, int) and isinstance(micro, int) and micro > 0 and rows % micro == 0:
        _found(reading, "batch_size")
        reading.set_trl("gradient_accumulation_steps", rows // micro, "batch_size")


def _evaluation(reading: ToolReading) -> None:
    """Evaluations, the first before the first step, and saves, by steps, epochs, or shares of the run.

    Source: core/builders/base.py, _configure_save_and_eval_strategy; utils/config/__init__.py.
    """
    holds_out = reading.get("test_datasets") or reading.get("val_set_size")
    for key, ours in (("evals_per_epoch", "eval"), ("saves_per_epoch", "save")):
        number = reading.get(key)
        if not number or (ours == "eval" and not holds_out):
            continue
        reading.set_trl(f"{ours}_strategy", "epoch", key)
        if number != 1:
            reading.set_recipe(f"{ours}.per_epoch", number)
    for key, ours in (("eval_steps", "eval"), ("save_steps", "save")):
        every = reading.get(key)
        if isinstance(every, float) and every < 1:
            reading.trl.pop(key, None)
            reading.set_trl(f"{ours}_strategy", "epoch", key)
            parts = 1 / (every * float(reading.get("num_epochs", 1)))
            if round(parts) >= 1 and abs(parts - round(parts)) < 0.01:
                reading.set_recipe(f"{ours}.per_epoch", round(parts), f"{every:g} of all steps")
            else:
                reading.lose(key, f"a share of all steps; write their number to `{ours}.every_steps`")
        elif every:
            reading.set_trl(f"{ours}_strategy", "steps", key)
    if not reading.get("loss_watchdog_threshold"):
        reading.direct.pop("train.loss_watchdog.patience", None)  # It has no effect in Axolotl either.
    asked = reading.get("eval_steps") or reading.get("evals_per_epoch")
    asked = asked or reading.get("eval_strategy", reading.get("evaluation_strategy", "no")) != "no"
    if holds_out and asked:
        reading.set_trl("eval_on_start", True, "eval_steps")


def _positions(reading: ToolReading) -> None:
    """Scaled positions, by their own key or as a change of the model's configuration."""
    scale_positions(reading, "rope_scaling", reading.get("rope_scaling"))
    for key in ("overrides_of_model_config", "model_config"):
        changed = reading.get(key)
        if not isinstance(changed, Mapping):
            continue
        changes = dict(cast(Mapping[str, Any], changed))
        scale_positions(reading, key, changes.pop("rope_scaling", None))
        if changes:
            reading.lose(key, "changes of the model's configuration: write them into its config.json")


def _trackers(reading: ToolReading) -> None:
    asked = [name for name in ("wandb", "mlflow", "tensorboard", "trackio") if reading.on(f"use_{name}")]
    if reading.get("wandb_project") and "wandb" not in asked:
        asked.append("wandb")
    if asked:
        reading.set_trl("report_to", asked, f"use_{asked[0]}")
    if reading.get("wandb_project"):
        reading.set_trl("project", reading.config["wandb_project"], "wandb_project")


def _devices(reading: ToolReading) -> None:
    """Engine, and devices that share a row or its weights."""

    def number(*keys: str) -> int:
        return max([1, *(one for key in keys if isinstance(one := reading.get(key), int))])

    reading.sharing = number("context_parallel_size", "sequence_parallel_degree")
    copies = number("dp_shard_size") * number("dp_replicate_size")
    if reading.on("use_ray"):
        copies = max(copies, number("ray_num_workers") // reading.sharing)
    if reading.sharing * copies > reading.processes:
        reading.processes = reading.sharing * copies
        reading.set_recipe("cluster.processes", reading.processes)
    if reading.sharing > 1:
        reading.set_recipe("cluster.context_parallel", reading.sharing)
    if number("tensor_parallel_size") > 1:
        reading.notes.append(
            f"tensor_parallel_size: {number('tensor_parallel_size')} cards share rows there; here they are "
            "those of one card, and the other cards are left out"
        )
    if number("dp_shard_size") > 1 and not reading.get("fsdp_config") and not reading.get("deepspeed"):
        reading.set_recipe("cluster.engine", "fsdp2", "dp_shard_size")
    if reading.get("deepspeed"):
        deepspeed(reading, "deepspeed", reading.config["deepspeed"])
    fsdp(reading, "fsdp", reading.get("fsdp"), _plain(reading.get("fsdp_config")))


def _plain(options: object) -> object:
    """Options of FSDP without the prefix of earlier versions."""
    if not isinstance(options, Mapping):
        return options
    given = cast(Mapping[str, Any], options)
    plain = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    if plain.get("reshard_after_forward") is False:
        plain["sharding_strategy"] = "SHARD_GRAD_OP"
    return plain


AXOLOTL = Tool(table("axolotl"), read)
