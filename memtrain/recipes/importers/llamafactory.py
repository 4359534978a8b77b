"""LLaMA-Factory: its keys, with transformers' own beside them, and what they say together."""

from __future__ import annotations

from memtrain.errors import RecipeError
from memtrain.recipes.importers.engines import deepspeed, fsdp
from memtrain.recipes.importers.tool import As, Said, Tool, ToolRule
from memtrain.recipes.trl.rules import Decided, Gone, To, Together

_CACHE = Decided("tokenized rows are kept in memtrain's own cache (data.cache_dir)")
_TOKENS = Gone("tokens of your own: add them to the tokenizer that `model.tokenizer` names")
_IMAGES = Gone("rows are text", (None, False, 262144, 1024, 589824, 2.0, 128, 16000))
_OTHER = Gone("methods that memtrain does not have")
_UNUSED = Decided("inference and export have commands of their own")
_SWANLAB = Gone("the trackers are tensorboard, wandb, mlflow and trackio")
_BESIDE = Decided("belongs to a method, or an engine, that is listed where it is asked for")
_TOGETHER = Together()

KEYS: dict[str, ToolRule] = {
    "stage": _TOGETHER,
    "finetuning_type": _TOGETHER,
    "model_revision": As("model_revision", {"main": None}),
    "adapter_name_or_path": Gone("an adapter that is trained on: merge it into its base model first"),
    "template": Gone("the tokenizer's own chat template is taken; `model.chat_template` names a Jinja file"),
    "flash_attn": _TOGETHER,
    "quantization_bit": _TOGETHER,
    "quantization_method": Gone("weights are quantized by bitsandbytes", (None, "bnb", "bitsandbytes")),
    "quantization_type": As("bnb_4bit_quant_type"),
    "double_quantization": Decided("the scales of 4-bit weights are always quantized too"),
    "quantization_device_map": Decided("the plan says where weights are"),
    "rope_scaling": Gone("scaled positions: write rope_scaling into the model's config.json"),
    "shift_attn": _OTHER,
    "mixture_of_depths": _OTHER,
    "use_unsloth": Gone("the plan chooses kernels and strategies"),
    "use_unsloth_gc": _TOGETHER,
    "enable_liger_kernel": As("use_liger_kernel"),
    "moe_aux_loss_coef": As("router_aux_loss_coef"),
    "disable_gradient_checkpointing": _TOGETHER,
    "pure_bf16": _TOGETHER,
    "upcast_layernorm": Decided("norms are computed in float32"),
    "upcast_lmhead_output": Decided("log-probs are accumulated in float32 in any case"),
    "train_from_scratch": Gone("`model.config` in place of `model.path` starts from random weights"),
    "lora_rank": As("lora_r"),
    "lora_alpha": As("lora_alpha"),
    "lora_dropout": As("lora_dropout"),
    "lora_target": _TOGETHER,
    "additional_target": _TOGETHER,
    "use_rslora": As("use_rslora"),
    "use_dora": As("use_dora"),
    "loraplus_lr_ratio": Gone("one rate for an adapter"),
    "pissa_init": Gone("LoRA begins at zero"),
    "use_llama_pro": _OTHER,
    "use_adam_mini": _OTHER,
    "use_muon": _TOGETHER,
    "use_galore": _OTHER,
    "use_apollo": _OTHER,
    "use_badam": _OTHER,
    "use_mca": Gone("Megatron's engine"),
    "use_megatron_bridge": Gone("Megatron's engine"),
    "use_hyper_parallel": Gone("`cluster.engine` and `cluster.context_parallel` divide a run"),
    "use_kt": Gone("weights that KTransformers keeps on the host"),
    "use_dft_loss": _TOGETHER,
    "use_asft_loss": _OTHER,
    "use_eaft_loss": _OTHER,
    "fp8": Gone("8-bit floating-point training"),
    "dataset": _TOGETHER,
    "dataset_dir": _TOGETHER,
    "eval_dataset": _TOGETHER,
    "val_size": _TOGETHER,
    "cutoff_len": As("max_length"),
    "train_on_prompt": As("completion_only_loss", {True: False, False: None}),
    "mask_history": To("data.last_turn_only_loss"),
    "streaming": As("streaming"),
    "max_samples": _TOGETHER,
    "preprocessing_num_workers": As("dataset_num_proc"),
    "packing": _TOGETHER,
    "neat_packing": _TOGETHER,
    "mix_strategy": _TOGETHER,
    "interleave_probs": _TOGETHER,
    "ignore_pad_token_for_loss": Decided("padding is never in the loss"),
    "default_system": To("data.system_prompt"),
    "enable_thinking": _TOGETHER,
    "disable_shuffling": To("train.shuffle", values={True: False, False: None}),
    "pref_beta": As("beta"),
    "pref_loss": _TOGETHER,
    "pref_ftx": _TOGETHER,
    "pref_bco_weight": Gone("a weighted sum with BCO's loss; `dpo.loss` takes several with loss_weights"),
    "dpo_label_smoothing": As("label_smoothing"),
    "kto_chosen_weight": As("desirable_weight"),
    "kto_rejected_weight": As("undesirable_weight"),
    "simpo_gamma": _TOGETHER,
    "ld_alpha": As("ld_alpha"),
    "ref_model": Gone("the reference is the model before training"),
    "reward_model": _BESIDE,
    "early_stopping_steps": Gone("a run ends by its steps"),
    "num_train_epochs": As("num_train_epochs"),
    "deepspeed": _TOGETHER,
    "fsdp": _TOGETHER,
    "fsdp_config": _TOGETHER,
    "freeze_trainable_*": Gone("some layers trained, others frozen"),
    "freeze_extra_modules": Gone("some layers trained, others frozen"),
    "compute_accuracy": Decided("pairs report their accuracy"),
    "plot_loss": Decided("report.md has the curves"),
    "include_effective_tokens_per_second": Decided("metrics.jsonl has every step"),
    "use_swanlab": _SWANLAB,
    "swanlab_*": _BESIDE,
    **dict.fromkeys(
        (
            "overwrite_cache",
            "preprocessing_batch_size",
            "tokenized_path",
            "data_shared_file_system",
            "cache_dir",
        ),
        _CACHE,
    ),
    **dict.fromkeys(("buffer_size", "media_dir", "eval_num_beams", "eval_on_each_dataset"), _UNUSED),
    **dict.fromkeys(
        ("tool_format", "preserve_thinking"), Gone("the chat template writes tools and thoughts")
    ),
    **dict.fromkeys(
        ("use_fast_tokenizer", "low_cpu_mem_usage", "print_param_status", "use_reentrant_gc"),
        Decided("the plan chooses how"),
    ),
    **dict.fromkeys(
        (
            "resize_vocab",
            "split_special_tokens",
            "add_tokens",
            "add_special_tokens",
            "new_special_tokens_config",
        ),
        _TOKENS,
    ),
    "init_special_tokens": _BESIDE,
    **dict.fromkeys(
        ("infer_*", "vllm_*", "sglang_*", "export_*", "offload_folder", "use_kv_cache", "*_hub_token"),
        _UNUSED,
    ),
    **dict.fromkeys(
        (
            "image_*",
            "video_*",
            "audio_*",
            "use_audio_in_video",
            "crop_to_patches",
            "freeze_vision_tower",
            "freeze_multi_modal_projector",
            "freeze_language_model",
        ),
        Decided("rows are text"),
    ),
    **dict.fromkeys(
        (
            "galore_*",
            "apollo_*",
            "badam_*",
            "kt_*",
            "oft_*",
            "module_dropout",
            "ppo_*",
            "asft_*",
            "eaft_*",
            "pissa_*",
            "hyper_parallel_*",
            "megatron_bridge_args",
            "loraplus_lr_embedding",
            "create_new_adapter",
            "adapter_folder",
            "oft_target",
            "reward_model_*",
            "ref_model_*",
            "fp8_*",
            "use_v1_kernels",
            "ray_*",
            "master_*",
            "profiler_*",
            "profile_modules",
            "enable_torch_profiler",
        ),
        _BESIDE,
    ),
    **dict.fromkeys(
        ("compute_dtype", "device_map", "model_max_length", "block_diag_attn"), Decided("no key of a file")
    ),
    "overwrite_output_dir": Decided("a run continues from its run folder; `--no-resume` starts over"),
    "predict_with_generate": Gone("texts that are written in evaluation"),
    "lora_modules_to_save": As("lora_modules_to_save"),
}
"""Every key of its own by its name; those of transformers' trainer are TRL's."""

METHODS = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}
"""`stage:` and the method."""


def read(said: Said) -> None:
    """The method, adapter, precision, attention, rows and devices.

    Raises: RecipeError for a stage that has no counterpart.
    """
    stage = said.get("stage", "sft")
    if stage not in METHODS:
        raise RecipeError(
            f"stage: {stage} is not read", "stage", f"stages that are read: {', '.join(METHODS)}"
        )
    said.method = METHODS[stage]
    _adapter(said)
    _precision(said)
    _rows(said)
    _losses(said)
    off = said.on("disable_gradient_checkpointing")
    said.say("gradient_checkpointing", not off, "disable_gradient_checkpointing")
    if said.on("use_unsloth_gc"):
        said.say("activation_offloading", True, "use_unsloth_gc")
    if said.on("use_muon"):
        said.put("optim.kind", "muon")
        said.trl.pop("optim", None)
    if said.get("deepspeed"):
        deepspeed(said, "deepspeed", said.config["deepspeed"])
        said.trl.pop("deepspeed", None)
    fsdp(said, "fsdp", said.get("fsdp"), said.get("fsdp_config"))
    for key in ("fsdp", "fsdp_config"):
        said.trl.pop(key, None)


def _adapter(said: Said) -> None:
    kind = said.get("finetuning_type", "lora")
    bits = said.get("quantization_bit")
    if bits in (4, 8):
        said.say(f"load_in_{bits}bit", True, "quantization_bit")
    elif bits:
        said.lose("quantization_bit", "weights are quantized to 4 or 8 bits")
    if kind == "lora":
        said.say("use_peft", True, "finetuning_type")
        target = str(said.get("lora_target", "all"))
        modules = [name.strip() for name in target.split(",") if name.strip()]
        said.say("lora_target_modules", "all-linear" if modules == ["all"] else modules, "lora_target")
        said.trl.setdefault("lora_r", 8)
        said.trl.setdefault("lora_alpha", 2 * int(said.trl["lora_r"]))
        if said.get("additional_target"):
            names = [name.strip() for name in str(said.config["additional_target"]).split(",")]
            said.say("lora_modules_to_save", names, "additional_target")
    elif kind != "full":
        said.lose("finetuning_type", "weights are trained all, or by LoRA")


def _precision(said: Said) -> None:
    """Frozen weights are loaded in half precision, trained ones in float32 under autocast."""
    half = "float16" if said.on("fp16") else "bfloat16" if said.on("bf16") or said.on("pure_bf16") else ""
    trains_all = said.get("finetuning_type", "lora") == "full"
    if said.on("pure_bf16") and trains_all:
        said.say("dtype", "bfloat16", "pure_bf16")
        said.put("optim.master_weights", False, "pure_bf16")
    elif half and (not trains_all or said.get("deepspeed")):
        said.say("dtype", half)
    elif not half:
        said.say("bf16", False)
    said.trl.pop("fp16", None)
    if said.trl.get("bf16"):
        del said.trl["bf16"]
    kinds = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}
    asked = str(said.get("flash_attn", "auto"))
    asked = {"True": "fa2", "False": "disabled", "off": "disabled"}.get(asked, asked)
    if asked in kinds:
        said.say("attn_implementation", kinds[asked], "flash_attn")


def _rows(said: Said) -> None:
    folder = str(said.get("dataset_dir", "data"))
    names = [name.strip() for name in str(said.get("dataset", "")).split(",") if name.strip()]
    if names:
        said.put("data.train", [_source(said, folder, name) for name in names])
        said.notes.append(
            f"dataset: LLaMA-Factory's names stand for files in {folder}/dataset_info.json: write the files "
            "into data.train"
        )
    held = [name.strip() for name in str(said.get("eval_dataset", "")).split(",") if name.strip()]
    share = said.get("val_size")
    if held:
        said.put("data.eval", [_source(said, folder, name) for name in held])
    elif isinstance(share, float | int) and share:
        if share < 1:
            said.put("data.eval_fraction", share)
        else:
            said.lose("val_size", "a number of rows: `data.eval_fraction` is a fraction")
    stage = said.get("stage", "sft")
    packs = said.on("packing") or said.on("neat_packing") or (stage == "pt" and "packing" not in said.config)
    if packs and said.method == "sft":
        said.say("packing", True, "packing")
        if not said.on("neat_packing"):
            said.notes.append("packing: rows of a sequence see each other there; here they never do")
    if said.get("mix_strategy", "concat") != "concat" or said.get("interleave_probs"):
        said.lose("mix_strategy", "`weight` of each source in data.train mixes them")
    if said.get("enable_thinking") is False:
        said.put("data.chat_template_kwargs", {"enable_thinking": False})


def _source(said: Said, folder: str, name: str) -> dict[str, object]:
    source: dict[str, object] = {"source": f"{folder.rstrip('/')}/{name}.json"}
    if isinstance(said.get("max_samples"), int):
        source["limit"] = said.config["max_samples"]
    return source


def _losses(said: Said) -> None:
    kinds = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
    asked = said.get("pref_loss")
    if said.method == "dpo" and asked:
        if asked in kinds:
            said.say("loss_type", [kinds[asked]], "pref_loss")
        else:
            said.lose("pref_loss", f"the losses of pairs are {', '.join(kinds)} and more (dpo.loss)")
        if asked == "simpo":
            said.put("dpo.simpo_gamma", said.get("simpo_gamma", 0.5))
    if said.get("pref_ftx"):
        said.lose("pref_ftx", "a part of the plain loss: `dpo.loss: [sigmoid, sft]` with loss_weights")
    if said.on("use_dft_loss"):
        said.put("sft.loss", "dft")


LLAMAFACTORY = Tool(
    name="llamafactory",
    title="LLaMA-Factory",
    version="0.9.5",
    keys=KEYS,
    read=read,
    defaults={"learning_rate": 5e-5, "max_length": 2048, "lora_dropout": 0.0, "gradient_checkpointing": True},
    takes_trl=True,
)
"""LLaMA-Factory, as its arguments of 2026-08-18 have it."""
