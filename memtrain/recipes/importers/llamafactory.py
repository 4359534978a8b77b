"""LLaMA-Factory: its keys, with transformers' own beside them, and keys that are read together."""

from __future__ import annotations

from memtrain.errors import RecipeError
from memtrain.recipes.importers.engines import deepspeed, fsdp
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.tool import Tool, ToolReading, ToolRule, TrlKey
from memtrain.recipes.trl.rules import Automatic, ReadTogether, RecipeKey, Unmapped

_CACHE = Automatic("tokenized rows are kept in memtrain's own cache (data.cache_dir)")
_TOKENS = Unmapped("your own tokens: add them to the tokenizer that `model.tokenizer` names")
_IMAGES = Unmapped("rows are text", (None, False, 262144, 1024, 589824, 2.0, 128, 16000))
_OTHER = Unmapped("methods that memtrain does not have")
_UNUSED = Automatic("inference and export are separate commands")
_SWANLAB = Unmapped("the trackers are tensorboard, wandb, mlflow and trackio")
_BESIDE = Automatic("belongs to a method, or an engine, that is listed where it is asked for")
_TOGETHER = ReadTogether()

KEYS: dict[str, ToolRule] = {
    "stage": _TOGETHER,
    "finetuning_type": _TOGETHER,
    "model_revision": TrlKey("model_revision", {"main": None}),
    "adapter_name_or_path": Unmapped("an adapter that is trained on: merge it into its base model first"),
    "template": Unmapped(
        "the tokenizer's own chat template is taken; `model.chat_template` names a Jinja file"
    ),
    "flash_attn": _TOGETHER,
    "quantization_bit": _TOGETHER,
    "quantization_method": Unmapped("weights are quantized by bitsandbytes", (None, "bnb", "bitsandbytes")),
    "quantization_type": TrlKey("bnb_4bit_quant_type"),
    "double_quantization": Automatic("the scales of 4-bit weights are always quantized too"),
    "quantization_device_map": Automatic("the plan decides where weights are kept"),
    "rope_scaling": _TOGETHER,
    "shift_attn": _OTHER,
    "mixture_of_depths": _OTHER,
    "use_unsloth": Unmapped("the plan chooses kernels and strategies"),
    "use_unsloth_gc": _TOGETHER,
    "enable_liger_kernel": TrlKey("use_liger_kernel"),
    "moe_aux_loss_coef": TrlKey("router_aux_loss_coef"),
    "disable_gradient_checkpointing": _TOGETHER,
    "pure_bf16": _TOGETHER,
    "upcast_layernorm": Automatic("norms are computed in float32"),
    "upcast_lmhead_output": Automatic("log-probs are accumulated in float32 in any case"),
    "train_from_scratch": Unmapped("`model.config` instead of `model.path` starts from random weights"),
    "lora_rank": TrlKey("lora_r"),
    "lora_alpha": TrlKey("lora_alpha"),
    "lora_dropout": TrlKey("lora_dropout"),
    "lora_target": _TOGETHER,
    "additional_target": _TOGETHER,
    "use_rslora": TrlKey("use_rslora"),
    "use_dora": TrlKey("use_dora"),
    "loraplus_lr_ratio": Unmapped("one rate for an adapter"),
    "pissa_init": Unmapped("LoRA begins at zero"),
    "use_llama_pro": _OTHER,
    "use_adam_mini": _OTHER,
    "use_muon": _TOGETHER,
    "use_galore": _OTHER,
    "use_apollo": _OTHER,
    "use_badam": _OTHER,
    "use_mca": Unmapped("Megatron's engine"),
    "use_megatron_bridge": Unmapped("Megatron's engine"),
    "use_hyper_parallel": Unmapped("`cluster.engine` and `cluster.context_parallel` divide a run"),
    "use_kt": Unmapped("weights that KTransformers keeps on the host"),
    "use_dft_loss": _TOGETHER,
    "use_asft_loss": _OTHER,
    "use_eaft_loss": _OTHER,
    "fp8": Unmapped("FP8 training"),
    "dataset": _TOGETHER,
    "dataset_dir": _TOGETHER,
    "eval_dataset": _TOGETHER,
    "val_size": _TOGETHER,
    "cutoff_len": TrlKey("max_length"),
    "train_on_prompt": TrlKey("completion_only_loss", {True: False, False: None}),
    "mask_history": RecipeKey("data.last_turn_only_loss"),
    "streaming": TrlKey("streaming"),
    "max_samples": _TOGETHER,
    "preprocessing_num_workers": TrlKey("dataset_num_proc"),
    "packing": _TOGETHER,
    "neat_packing": _TOGETHER,
    "mix_strategy": _TOGETHER,
    "interleave_probs": _TOGETHER,
    "ignore_pad_token_for_loss": Automatic("padding is never in the loss"),
    "default_system": RecipeKey("data.system_prompt"),
    "enable_thinking": _TOGETHER,
    "disable_shuffling": RecipeKey("train.shuffle", values={True: False, False: None}),
    "pref_beta": TrlKey("beta"),
    "pref_loss": _TOGETHER,
    "pref_ftx": _TOGETHER,
    "pref_bco_weight": Unmapped("a weighted sum with BCO's loss; `dpo.loss` takes several with loss_weights"),
    "dpo_label_smoothing": TrlKey("label_smoothing"),
    "kto_chosen_weight": TrlKey("desirable_weight"),
    "kto_rejected_weight": TrlKey("undesirable_weight"),
    "simpo_gamma": _TOGETHER,
    "ld_alpha": TrlKey("ld_alpha"),
    "ref_model": Unmapped("the reference is the model before training"),
    "reward_model": _BESIDE,
    "early_stopping_steps": RecipeKey("eval.early_stopping.patience"),
    "num_train_epochs": TrlKey("num_train_epochs"),
    "deepspeed": _TOGETHER,
    "fsdp": _TOGETHER,
    "fsdp_config": _TOGETHER,
    "freeze_trainable_*": Unmapped("some layers trained, others frozen"),
    "freeze_extra_modules": Unmapped("some layers trained, others frozen"),
    "compute_accuracy": Automatic("pairs report their accuracy"),
    "plot_loss": Automatic("report.md has the curves"),
    "include_effective_tokens_per_second": Automatic("metrics.jsonl has every step"),
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
        ("tool_format", "preserve_thinking"), Unmapped("the chat template writes tools and thoughts")
    ),
    **dict.fromkeys(
        ("use_fast_tokenizer", "low_cpu_mem_usage", "print_param_status", "use_reentrant_gc"),
        Automatic("the plan chooses how"),
    ),
    **dict.fromkeys(
        (
            "split_special_tokens",
            "new_special_tokens_config",
        ),
        _TOKENS,
    ),
    **dict.fromkeys(("resize_vocab", "add_tokens", "add_special_tokens"), _TOGETHER),
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
        Automatic("rows are text"),
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
        ("compute_dtype", "device_map", "model_max_length", "block_diag_attn"), Automatic("no key of a file")
    ),
    "overwrite_output_dir": Automatic("a run continues from its run folder; `--no-resume` starts over"),
    "predict_with_generate": Unmapped("text generation during evaluation"),
    "lora_modules_to_save": TrlKey("lora_modules_to_save"),
}
"""Every key of its own by its name; keys of transformers' trainer are TRL's."""

METHODS = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}
"""`stage:` and the method."""


def read(reading: ToolReading) -> None:
    """The method, adapter, precision, attention, rows and devices.

    Raises: RecipeError for a stage that has no counterpart.
    """
    stage = reading.get("stage", "sft")
    if stage not in METHODS:
        raise RecipeError(
            f"stage: {stage} has no counterpart in memtrain", "stage", f"give one of {', '.join(METHODS)}"
        )
    reading.method = METHODS[stage]
    _adapter(reading)
    _precision(reading)
    _rows(reading)
    _losses(reading)
    _tokens(reading)
    scale_positions(reading, "rope_scaling", reading.get("rope_scaling"))
    off = reading.on("disable_gradient_checkpointing")
    reading.set_trl("gradient_checkpointing", not off, "disable_gradient_checkpointing")
    if reading.on("use_unsloth_gc"):
        reading.set_trl("activation_offloading", True, "use_unsloth_gc")
    if reading.on("use_muon"):
        reading.set_recipe("optim.kind", "muon")
        reading.trl.pop("optim", None)
    if reading.get("deepspeed"):
        deepspeed(reading, "deepspeed", reading.config["deepspeed"])
        reading.trl.pop("deepspeed", None)
    fsdp(reading, "fsdp", reading.get("fsdp"), reading.get("fsdp_config"))
    for key in ("fsdp", "fsdp_config"):
        reading.trl.pop(key, None)


def _adapter(reading: ToolReading) -> None:
    kind = reading.get("finetuning_type", "lora")
    bits = reading.get("quantization_bit")
    if bits in (4, 8):
        reading.set_trl(f"load_in_{bits}bit", True, "quantization_bit")
    elif bits:
        reading.lose("quantization_bit", "weights are quantized to 4 or 8 bits")
    if kind == "lora":
        reading.set_trl("use_peft", True, "finetuning_type")
        target = str(reading.get("lora_target", "all"))
        modules = [name.strip() for name in target.split(",") if name.strip()]
        reading.set_trl("lora_target_modules", "all-linear" if modules == ["all"] else modules, "lora_target")
        reading.trl.setdefault("lora_r", 8)
        reading.trl.setdefault("lora_alpha", 2 * int(reading.trl["lora_r"]))
        if reading.get("additional_target"):
            names = [name.strip() for name in str(reading.config["additional_target"]).split(",")]
            reading.set_trl("lora_modules_to_save", names, "additional_target")
    elif kind != "full":
        reading.lose("finetuning_type", "weights are trained all, or by LoRA")


def _tokens(reading: ToolReading) -> None:
    """Tokens that are added, in one text with commas between them."""
    texts = [str(reading.get(key, "")) for key in ("add_tokens", "add_special_tokens")]
    added = [token.strip() for text in texts for token in text.split(",") if token.strip()]
    if added:
        reading.add_tokens(added)
    elif reading.on("resize_vocab"):
        reading.lose("resize_vocab", "no tokens are named; `model.add_tokens` names them")


def _precision(reading: ToolReading) -> None:
    """Frozen weights are loaded in half precision, trained ones in float32 under autocast."""
    half = (
        "float16"
        if reading.on("fp16")
        else "bfloat16"
        if reading.on("bf16") or reading.on("pure_bf16")
        else ""
    )
    trains_all = reading.get("finetuning_type", "lora") == "full"
    if reading.on("pure_bf16") and trains_all:
        reading.set_trl("dtype", "bfloat16", "pure_bf16")
        reading.set_recipe("optim.master_weights", False, "pure_bf16")
    elif half and (not trains_all or reading.get("deepspeed")):
        reading.set_trl("dtype", half)
    elif not half:
        reading.set_trl("bf16", False)
    reading.trl.pop("fp16", None)
    if reading.trl.get("bf16"):
        del reading.trl["bf16"]
    kinds = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}
    asked = str(reading.get("flash_attn", "auto"))
    asked = {"True": "fa2", "False": "disabled", "off": "disabled"}.get(asked, asked)
    if asked in kinds:
        reading.set_trl("attn_implementation", kinds[asked], "flash_attn")


def _rows(reading: ToolReading) -> None:
    folder = str(reading.get("dataset_dir", "data")).rstrip("/")
    names = [name.strip() for name in str(reading.get("dataset", "")).split(",") if name.strip()]
    if names:
        reading.set_recipe("data.train", [_source(reading, folder, name) for name in names])
        reading.notes.append(
            f"dataset: LLaMA-Factory's names stand for files in {folder}/dataset_info.json: write the files "
            "into data.train"
        )
    held = [name.strip() for name in str(reading.get("eval_dataset", "")).split(",") if name.strip()]
    share = reading.get("val_size")
    if held:
        reading.set_recipe("data.eval", [_source(reading, folder, name) for name in held])
    elif isinstance(share, float | int) and share:
        if share < 1:
            reading.set_recipe("data.eval_fraction", share)
        else:
            reading.lose("val_size", "a number of rows: `data.eval_fraction` is a fraction")
    stage = reading.get("stage", "sft")
    packs = (
        reading.on("packing")
        or reading.on("neat_packing")
        or (stage == "pt" and "packing" not in reading.config)
    )
    if packs and reading.method == "sft":
        reading.set_trl("packing", True, "packing")
        if not reading.on("neat_packing"):
            reading.notes.append("packing: rows of a sequence see each other there; here they never do")
    if reading.get("mix_strategy", "concat") != "concat" or reading.get("interleave_probs"):
        reading.lose("mix_strategy", "`weight` of each source in data.train mixes them")
    if stage == "sft":
        # Its templates leave the user's turns out of the loss, unless train_on_prompt asks for them.
        reading.set_trl("assistant_only_loss", not reading.on("train_on_prompt"), "train_on_prompt")
    if reading.get("enable_thinking") is False:
        reading.set_recipe("data.chat_template_kwargs", {"enable_thinking": False})


def _source(reading: ToolReading, folder: str, name: str) -> dict[str, object]:
    source: dict[str, object] = {"source": f"{folder}/{name.removesuffix('.json')}.json"}
    if isinstance(reading.get("max_samples"), int):
        source["limit"] = reading.config["max_samples"]
    return source


def _losses(reading: ToolReading) -> None:
    kinds = {"sigmoid": "sigmoid", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
    asked = reading.get("pref_loss")
    if reading.method == "dpo" and asked:
        if asked in kinds:
            reading.set_trl("loss_type", [kinds[asked]], "pref_loss")
        else:
            reading.lose("pref_loss", f"the losses of pairs are {', '.join(kinds)} and more (dpo.loss)")
        if asked == "simpo":
            reading.set_recipe("dpo.simpo_gamma", reading.get("simpo_gamma", 0.5))
    if reading.get("pref_ftx"):
        reading.lose("pref_ftx", "a part of the plain loss: `dpo.loss: [sigmoid, sft]` with loss_weights")
    if reading.on("use_dft_loss"):
        reading.set_recipe("sft.loss", "dft")


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
