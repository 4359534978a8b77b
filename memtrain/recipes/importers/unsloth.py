"""Unsloth, and scripts of TRL's trainers: the table of their arguments, and what they mean together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from memtrain.recipes.importers.engines import trainers_engine
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.python_script import Computed
from memtrain.recipes.importers.script_calls import ADAPT, DATASET, LOAD, OWN_DEFAULTS
from memtrain.recipes.importers.tool import Tool, ToolReading
from memtrain.recipes.peers.table import table


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


UNSLOTH = Tool(table("unsloth"), read, takes_trl=True)
