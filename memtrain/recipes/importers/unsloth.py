"""Unsloth, and scripts of TRL's trainers: the table of their arguments, and what they mean together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from memtrain.recipes.importers.engines import ARGUMENTS, trainers_engine
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.python_script import Computed
from memtrain.recipes.importers.script_calls import ADAPT, DATASET, LOAD, OWN_CODE, OWN_DEFAULTS
from memtrain.recipes.importers.tool import Tool, ToolReading, ToolRule, TrlKey
from memtrain.recipes.trl.rules import Automatic, ReadTogether, Unmapped

_SEED = Automatic("`train.seed` is for everything")
_KERNELS = Automatic("the plan chooses kernels and strategies")
_OWN_LOADING = (
    "auto_model",
    "disable_log_stats",
    "fix_tokenizer",
    "float8_kv_cache",
    "fullgraph",
    "max_lora_rank",
    "random_state",
    "return_logits",
    "text_only",
    "token",
    "unsloth_force_compile",
    "unsloth_tiled_mlp",
    "use_exact_model_name",
)
LOADING = (
    "bnb_4bit_compute_dtype",
    "bnb_4bit_use_double_quant",
    "cache_dir",
    "force_download",
    "ignore_mismatched_sizes",
    "local_files_only",
    "low_cpu_mem_usage",
    "max_memory",
    "num_labels",
    "offload_folder",
    "offload_state_dict",
    "pad_token_id",
    "proxies",
    "resume_download",
    "return_dict",
    "use_auth_token",
    "use_cache",
    "use_flash_attention_2",
    "use_safetensors",
)
"""Arguments of transformers' `from_pretrained` that say nothing of the training."""

_PARTS = Unmapped("some layers or parts of the model adapted, others not")
_OWN_VLLM = ReadTogether()

KEYS: dict[str, ToolRule] = {
    f"{LOAD}.model_name": TrlKey("model_name_or_path"),
    f"{LOAD}.max_seq_length": TrlKey("max_length"),
    f"{LOAD}.dtype": TrlKey("dtype"),
    f"{LOAD}.load_in_4bit": ReadTogether(),
    f"{LOAD}.load_in_8bit": ReadTogether(),
    f"{LOAD}.load_in_16bit": ReadTogether(),
    f"{LOAD}.full_finetuning": ReadTogether(),
    f"{LOAD}.trust_remote_code": TrlKey("trust_remote_code"),
    f"{LOAD}.use_gradient_checkpointing": ReadTogether(),
    f"{LOAD}.revision": TrlKey("model_revision"),
    f"{LOAD}.rope_scaling": ReadTogether(),
    f"{LOAD}.resize_model_vocab": Unmapped("another vocabulary: change tokenizer and model first"),
    f"{LOAD}.offload_embedding": Unmapped("an embedding kept on the host"),
    f"{LOAD}.load_in_fp8": Unmapped("FP8 weights"),
    f"{LOAD}.qat_scheme": Unmapped("quantization-aware training"),
    f"{LOAD}.float32_mixed_precision": ReadTogether(),
    f"{LOAD}.fast_inference": _OWN_VLLM,
    f"{LOAD}.gpu_memory_utilization": _OWN_VLLM,
    f"{LOAD}.unsloth_vllm_standby": _OWN_VLLM,
    f"{LOAD}.target_parameters": TrlKey("lora_target_parameters"),
    f"{LOAD}.attn_implementation": TrlKey("attn_implementation"),
    f"{LOAD}.torch_dtype": TrlKey("dtype"),
    f"{LOAD}.device_map": ReadTogether(),
    **{f"{LOAD}.{key}": _KERNELS for key in (*_OWN_LOADING, *LOADING)},
    f"{LOAD}.bnb_4bit_quant_type": Unmapped("weights in 4 bits are NF4 (`model.quantize`)", (None, "nf4")),
    f"{LOAD}.quantization_config": Unmapped("weights are quantized by bitsandbytes alone (`model.quantize`)"),
    **dict.fromkeys((f"{LOAD}.whisper_language", f"{LOAD}.whisper_task"), Unmapped("audio rows")),
    f"{ADAPT}.r": TrlKey("lora_r"),
    f"{ADAPT}.target_modules": TrlKey("lora_target_modules"),
    f"{ADAPT}.lora_alpha": TrlKey("lora_alpha"),
    f"{ADAPT}.lora_dropout": TrlKey("lora_dropout"),
    f"{ADAPT}.use_rslora": TrlKey("use_rslora"),
    f"{ADAPT}.use_dora": TrlKey("use_dora"),
    f"{ADAPT}.modules_to_save": TrlKey("lora_modules_to_save"),
    f"{ADAPT}.use_gradient_checkpointing": ReadTogether(),
    f"{ADAPT}.bias": Unmapped("biases of an adapter", (None, "none")),
    f"{ADAPT}.random_state": _SEED,
    f"{ADAPT}.max_seq_length": ReadTogether(),
    f"{ADAPT}.loftq_config": Unmapped("LoRA begins at zero", (None, {})),
    f"{ADAPT}.init_lora_weights": Unmapped("LoRA begins at zero", (None, True)),
    f"{ADAPT}.target_parameters": TrlKey("lora_target_parameters"),
    **dict.fromkeys(
        (
            f"{ADAPT}.layers_to_transform",
            f"{ADAPT}.layers_pattern",
            f"{ADAPT}.finetune_last_n_layers",
        ),
        _PARTS,
    ),
    **dict.fromkeys(
        (
            f"{ADAPT}.finetune_attention_modules",
            f"{ADAPT}.finetune_language_layers",
            f"{ADAPT}.finetune_mlp_modules",
        ),
        Unmapped("`model.adapter.target_modules` names what is adapted", (None, True)),
    ),
    **dict.fromkeys(
        (f"{ADAPT}.finetune_audio_layers", f"{ADAPT}.finetune_vision_layers"),
        Automatic("only the text part of a model is trained"),
    ),
    f"{ADAPT}.qat_scheme": Unmapped("quantization-aware training"),
    **dict.fromkeys(
        (f"{ADAPT}.{key}" for key in ("ensure_weight_tying", "task_type", "temporary_location", "used")),
        _KERNELS,
    ),
    **ARGUMENTS,
    "dataset_text_field": TrlKey("dataset_text_field"),
    "load_dataset": ReadTogether(),
    "reward_model_name_or_path": TrlKey("reward_model_name_or_path"),
    "ref_model": ReadTogether(),
    **{f"trainer.{key}": Unmapped("code of the script") for key in OWN_CODE},
    "trainer.reward_funcs": Unmapped(
        "functions of the script: write them to a file, and name them in rewards.functions "
        "(`my_rewards.py:NAME`)"
    ),
}
"""Arguments of Unsloth's two calls; arguments of the trainer's configuration are TRL's."""


def read(reading: ToolReading) -> None:
    """The adapter, precision, checkpointing, rows and vLLM."""
    for key, value in [*reading.config.items()]:
        if isinstance(value, Computed) and not key.startswith("trainer."):
            reading.trl = {name: one for name, one in reading.trl.items() if one is not value}
            reading.lose(key, "its value is computed when the script runs")
    if names := reading.get(OWN_DEFAULTS):
        reading.notes.append(
            f"arguments of the script's own have their defaults ({', '.join(names)}); give the command "
            "that was run, and its values are taken"
        )
    _adapter(reading)
    _precision(reading)
    checkpoints = reading.get(
        f"{ADAPT}.use_gradient_checkpointing", reading.get(f"{LOAD}.use_gradient_checkpointing")
    )
    if checkpoints == "unsloth":
        reading.set_trl("gradient_checkpointing", True, "use_gradient_checkpointing")
        reading.set_trl("activation_offloading", True, "use_gradient_checkpointing")
    elif checkpoints is not None:
        reading.set_trl(
            "gradient_checkpointing", checkpoints not in (False, "False"), "use_gradient_checkpointing"
        )
    if str(reading.get(f"{LOAD}.device_map", "")).startswith("balanced"):
        reading.notes.append(
            "device_map: balanced lays layers on several cards of one process; here each card has a "
            "process, with all layers or a part of each (cluster.engine: fsdp2)"
        )
    _reference(reading)
    trainers_engine(reading)
    _rows(reading)
    scale_positions(reading, f"{LOAD}.rope_scaling", reading.get(f"{LOAD}.rope_scaling"))
    if reading.on(f"{LOAD}.fast_inference"):
        reading.set_trl("use_vllm", True, "fast_inference")
        reading.set_trl(
            "vllm_gpu_memory_utilization",
            reading.get(f"{LOAD}.gpu_memory_utilization", 0.5),
            "gpu_memory_utilization",
        )
        if reading.on(f"{LOAD}.unsloth_vllm_standby"):
            reading.set_trl("vllm_enable_sleep_mode", True, "unsloth_vllm_standby")


def _adapter(reading: ToolReading) -> None:
    adapted = any(key.startswith(f"{ADAPT}.") for key in reading.config)
    name = str(reading.trl.get("model_name_or_path", ""))
    if adapted and not reading.on(f"{LOAD}.full_finetuning"):
        reading.set_trl("use_peft", True, ADAPT)
    else:
        for key in [one for one in reading.trl if one.startswith("lora_")]:
            del reading.trl[key]
    bits4 = reading.get(f"{LOAD}.load_in_4bit")
    if reading.on(f"{LOAD}.load_in_8bit"):
        reading.set_trl("load_in_8bit", True, "load_in_8bit")
    elif adapted and (bits4 is True or name.endswith("bnb-4bit") or (bits4 is None and _is_fast(reading))):
        reading.set_trl("load_in_4bit", True, "load_in_4bit")
    if name.endswith("-bnb-4bit"):
        base = name.removesuffix("-bnb-4bit").removesuffix("-unsloth")
        reading.set_trl("model_name_or_path", base, "model_name")
        reading.notes.append(f"model_name: {name} is {base} quantized before; memtrain quantizes as it loads")


def _reference(reading: ToolReading) -> None:
    """A second model that a trainer of pairs is given."""
    if "ref_model" not in reading.config:
        return
    if reading.config["ref_model"] != "the same":
        reading.lose("ref_model", "the reference is the policy as it was before training")
    if reading.trl.get("use_peft"):
        reading.notes.append(
            "ref_model: beside an adapter the policy without it is the reference, and no second model is "
            "loaded (reference: adapter_off)"
        )
        if not reading.trl.get("precompute_ref_log_probs"):
            for method in ("dpo", "kto"):
                reading.computed[f"{method}.reference"] = "copy"


def _is_fast(reading: ToolReading) -> bool:
    """Whether it is Unsloth's call, which quantizes where nothing is written."""
    return reading.config.get("unsloth") is True


def _precision(reading: ToolReading) -> None:
    """Unsloth loads weights in half precision, and computes in it."""
    dtype = reading.trl.get("dtype")
    if dtype in (None, "auto") and _is_fast(reading):
        reading.precision_is_open = True
        reading.trl["dtype"] = (
            "float16" if reading.trl.get("fp16") is True and not reading.trl.get("bf16") else "bfloat16"
        )
    if reading.trl.get("dtype") == "float16" or reading.trl.get("bf16"):
        reading.trl.pop("fp16", None)


def _rows(reading: ToolReading) -> None:
    name = reading.get("load_dataset")
    if isinstance(name, str) and not isinstance(name, Computed):
        files = reading.get(f"{DATASET}.data_files")
        if name in ("json", "csv", "parquet", "text") and isinstance(files, Computed):
            return
        if name in ("json", "csv", "parquet", "text") and files:
            reading.set_recipe("data.train", _sources(files))
            return
        source: dict[str, object] = {"source": name}
        split = str(reading.get(f"{DATASET}.split", "train")).partition("[")[0]
        if split != "train":
            source["split"] = split
        reading.set_recipe("data.train", [source])


def _sources(files: Any) -> list[dict[str, object]]:
    if isinstance(files, Mapping):
        files = cast(Mapping[str, Any], files).get("train", [])
    if isinstance(files, str):
        files = [files]
    return [{"source": str(one)} for one in cast(list[object], files)] if isinstance(files, list) else []


for _key in ("name", "split", "data_files"):
    KEYS[f"{DATASET}.{_key}"] = ReadTogether()
KEYS[OWN_DEFAULTS] = ReadTogether()
KEYS["unsloth"] = Automatic("the tool itself")

UNSLOTH = Tool(
    name="unsloth",
    title="Unsloth",
    version="2026.10",
    keys=KEYS,
    read=read,
    defaults={"learning_rate": 5e-5, "lora_alpha": 16, "lora_r": 16, "lora_dropout": 0.0},
    takes_trl=True,
)
"""Unsloth's calls as of 2026-08-22; where no adapter is made, TRL's own."""
