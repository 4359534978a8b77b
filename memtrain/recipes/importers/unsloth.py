"""Unsloth, and scripts of TRL's trainers: arguments of the calls that load, adapt and train a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.python_script import Call, Computed, calls_of
from memtrain.recipes.importers.tool import Tool, ToolReading, ToolRule, TrlKey
from memtrain.recipes.trl.rules import Automatic, ReadTogether, Unmapped

_LOAD, _ADAPT = "from_pretrained", "get_peft_model"
_SEED = Automatic("`train.seed` is for everything")
_KERNELS = Automatic("the plan chooses kernels and strategies")
_PARTS = Unmapped("some layers or parts of the model adapted, others not")
_OWN_VLLM = ReadTogether()

KEYS: dict[str, ToolRule] = {
    f"{_LOAD}.model_name": TrlKey("model_name_or_path"),
    f"{_LOAD}.max_seq_length": TrlKey("max_length"),
    f"{_LOAD}.dtype": TrlKey("dtype"),
    f"{_LOAD}.load_in_4bit": ReadTogether(),
    f"{_LOAD}.load_in_8bit": ReadTogether(),
    f"{_LOAD}.load_in_16bit": ReadTogether(),
    f"{_LOAD}.full_finetuning": ReadTogether(),
    f"{_LOAD}.trust_remote_code": TrlKey("trust_remote_code"),
    f"{_LOAD}.use_gradient_checkpointing": ReadTogether(),
    f"{_LOAD}.revision": TrlKey("model_revision"),
    f"{_LOAD}.rope_scaling": ReadTogether(),
    f"{_LOAD}.resize_model_vocab": Unmapped("another vocabulary: change tokenizer and model first"),
    f"{_LOAD}.offload_embedding": Unmapped("an embedding kept on the host"),
    f"{_LOAD}.load_in_fp8": Unmapped("FP8 weights"),
    f"{_LOAD}.qat_scheme": Unmapped("quantization-aware training"),
    f"{_LOAD}.float32_mixed_precision": ReadTogether(),
    f"{_LOAD}.fast_inference": _OWN_VLLM,
    f"{_LOAD}.gpu_memory_utilization": _OWN_VLLM,
    f"{_LOAD}.unsloth_vllm_standby": _OWN_VLLM,
    f"{_LOAD}.target_parameters": TrlKey("lora_target_parameters"),
    f"{_LOAD}.attn_implementation": TrlKey("attn_implementation"),
    f"{_LOAD}.torch_dtype": TrlKey("dtype"),
    f"{_LOAD}.device_map": Automatic("the plan decides where weights are kept"),
    f"{_LOAD}.*": _KERNELS,
    f"{_ADAPT}.r": TrlKey("lora_r"),
    f"{_ADAPT}.target_modules": TrlKey("lora_target_modules"),
    f"{_ADAPT}.lora_alpha": TrlKey("lora_alpha"),
    f"{_ADAPT}.lora_dropout": TrlKey("lora_dropout"),
    f"{_ADAPT}.use_rslora": TrlKey("use_rslora"),
    f"{_ADAPT}.use_dora": TrlKey("use_dora"),
    f"{_ADAPT}.modules_to_save": TrlKey("lora_modules_to_save"),
    f"{_ADAPT}.use_gradient_checkpointing": ReadTogether(),
    f"{_ADAPT}.bias": Unmapped("biases of an adapter", (None, "none")),
    f"{_ADAPT}.random_state": _SEED,
    f"{_ADAPT}.max_seq_length": ReadTogether(),
    f"{_ADAPT}.loftq_config": Unmapped("LoRA begins at zero", (None, {})),
    f"{_ADAPT}.init_lora_weights": Unmapped("LoRA begins at zero", (None, True)),
    f"{_ADAPT}.target_parameters": TrlKey("lora_target_parameters"),
    **dict.fromkeys(
        (
            f"{_ADAPT}.layers_to_transform",
            f"{_ADAPT}.layers_pattern",
            f"{_ADAPT}.finetune_last_n_layers",
        ),
        _PARTS,
    ),
    f"{_ADAPT}.*": _KERNELS,
    "dataset_text_field": TrlKey("dataset_text_field"),
    "load_dataset": ReadTogether(),
    "reward_funcs": ReadTogether(),
}
"""Arguments of Unsloth's two calls; arguments of the trainer's configuration are TRL's."""

CONFIGS = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "RewardConfig": "reward",
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "GKDConfig": "distill",
    "ORPOConfig": "dpo",
    "CPOConfig": "dpo",
}
"""Configurations of TRL, and their method; `TrainingArguments` goes with the trainer beside it."""

TRAINERS = {name.replace("Config", "Trainer"): method for name, method in CONFIGS.items()}
_TRAINER_KEYS = (
    "max_seq_length",
    "max_length",
    "packing",
    "dataset_text_field",
    "beta",
    "max_prompt_length",
    "dataset_num_proc",
)


def script_config(text: str, name: str) -> tuple[dict[str, Any], str, bool]:
    """(arguments as dotted keys, method, whether Unsloth is used) of a script.

    Raises: RecipeError when it is no Python, or calls no trainer.
    """
    calls = calls_of(text, name)
    config: dict[str, Any] = {}
    method = ""
    teacher = next(
        (call.arguments["teacher_model"] for call in calls if "teacher_model" in call.arguments), ""
    )
    for call in calls:
        if call.name == _LOAD and call.result and call.result == teacher:
            config |= _teacher(call)
            continue
        config |= _arguments(call)
        method = CONFIGS.get(call.name, TRAINERS.get(call.name, method)) or method
    if not method and not any(
        call.name in ("TrainingArguments", "UnslothTrainingArguments") for call in calls
    ):
        raise RecipeError(
            f"{name} calls no trainer that is known ({', '.join(sorted(TRAINERS))})",
            name,
            "name the script that makes the trainer's configuration",
        )
    loss = next((call.name for call in calls if call.name in ("ORPOTrainer", "CPOTrainer")), "")
    if loss:
        config["loss_type"] = [loss.removesuffix("Trainer").lower()]
    return config, method or "sft", any("Fast" in call.owner for call in calls)


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments of a call that says something of a run, as keys."""
    given = {key: value for key, value in call.arguments.items() if value is not None}
    if call.name == _LOAD and ("Model" in call.owner or "AutoModel" in call.owner):
        if call.positional:
            given.setdefault("model_name", call.positional[0])
        if "pretrained_model_name_or_path" in given:
            given["model_name"] = given.pop("pretrained_model_name_or_path")
        kept = {key: value for key, value in given.items() if key != "quantization_config"}
        return {f"{_LOAD}.{key}": value for key, value in kept.items() if key != "torch_dtype"} | {
            f"{_LOAD}.dtype": value for key, value in kept.items() if key == "torch_dtype"
        }
    if call.name == "BitsAndBytesConfig":
        return {f"{_LOAD}.{key}": value for key, value in given.items() if key.startswith("load_in_")}
    if call.name in (_ADAPT, "LoraConfig"):
        kept = {key: value for key, value in given.items() if key not in ("task_type", "inference_mode")}
        return {f"{_ADAPT}.{key}": value for key, value in kept.items()} | {f"{_ADAPT}.used": True}
    if call.name in CONFIGS or call.name in ("TrainingArguments", "UnslothTrainingArguments"):
        return given
    if call.name in TRAINERS or call.name == "UnslothTrainer":
        taken = {key: value for key, value in given.items() if key in _TRAINER_KEYS}
        model = given.get("model") or next(iter(call.positional), None)
        if isinstance(model, str) and not isinstance(model, Computed):
            # A trainer of TRL loads a model that is given by its name.
            taken[f"{_LOAD}.model_name"] = model
        if isinstance(given.get("teacher_model"), str) and not isinstance(given["teacher_model"], Computed):
            taken["teacher_model_name_or_path"] = given["teacher_model"]
        return taken
    if call.name == "load_dataset" and call.positional:
        words = {f"{_DATASET}.{key}": given[key] for key in ("name", "split", "data_files") if key in given}
        return {"load_dataset": call.positional[0]} | words
    return {}


def _teacher(call: Call) -> dict[str, Any]:
    """The teacher's path and arguments; it is loaded by a call like the student's."""
    more = {key: value for key, value in call.arguments.items() if value is not None}
    path = call.positional[0] if call.positional else more.pop("pretrained_model_name_or_path", None)
    more.pop("device_map", None)
    found: dict[str, Any] = {} if path is None else {"teacher_model_name_or_path": path}
    return found | ({"teacher_model_init_kwargs": more} if more else {})


_DATASET = "load_dataset"


def read(reading: ToolReading) -> None:
    """The adapter, precision, checkpointing, rows and vLLM."""
    for key, value in [*reading.config.items()]:
        if isinstance(value, Computed):
            reading.trl = {name: one for name, one in reading.trl.items() if one is not value}
            reading.lose(key, "its value is computed when the script runs")
    _adapter(reading)
    _precision(reading)
    checkpoints = reading.get(
        f"{_ADAPT}.use_gradient_checkpointing", reading.get(f"{_LOAD}.use_gradient_checkpointing")
    )
    if checkpoints == "unsloth":
        reading.set_trl("gradient_checkpointing", True, "use_gradient_checkpointing")
        reading.set_trl("activation_offloading", True, "use_gradient_checkpointing")
    elif checkpoints is not None:
        reading.set_trl(
            "gradient_checkpointing", checkpoints not in (False, "False"), "use_gradient_checkpointing"
        )
    _rows(reading)
    scale_positions(reading, f"{_LOAD}.rope_scaling", reading.get(f"{_LOAD}.rope_scaling"))
    if reading.on(f"{_LOAD}.fast_inference"):
        reading.set_trl("use_vllm", True, "fast_inference")
        reading.set_trl(
            "vllm_gpu_memory_utilization",
            reading.get(f"{_LOAD}.gpu_memory_utilization", 0.5),
            "gpu_memory_utilization",
        )


def _adapter(reading: ToolReading) -> None:
    adapted = any(key.startswith(f"{_ADAPT}.") for key in reading.config)
    name = str(reading.trl.get("model_name_or_path", ""))
    if adapted and not reading.on(f"{_LOAD}.full_finetuning"):
        reading.set_trl("use_peft", True, _ADAPT)
    else:
        for key in [one for one in reading.trl if one.startswith("lora_")]:
            del reading.trl[key]
    bits4 = reading.get(f"{_LOAD}.load_in_4bit")
    if reading.on(f"{_LOAD}.load_in_8bit"):
        reading.set_trl("load_in_8bit", True, "load_in_8bit")
    elif adapted and (bits4 is True or name.endswith("bnb-4bit") or (bits4 is None and _is_fast(reading))):
        reading.set_trl("load_in_4bit", True, "load_in_4bit")
    if name.endswith("-bnb-4bit"):
        base = name.removesuffix("-bnb-4bit").removesuffix("-unsloth")
        reading.set_trl("model_name_or_path", base, "model_name")
        reading.notes.append(f"model_name: {name} is {base} quantized before; memtrain quantizes as it loads")


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
        files = reading.get(f"{_DATASET}.data_files")
        if name in ("json", "csv", "parquet", "text") and files:
            reading.set_recipe("data.train", _sources(files))
            return
        source: dict[str, object] = {"source": name}
        split = str(reading.get(f"{_DATASET}.split", "train")).partition("[")[0]
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
    KEYS[f"{_DATASET}.{_key}"] = ReadTogether()
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
