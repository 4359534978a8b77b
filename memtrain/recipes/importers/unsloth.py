"""Unsloth, and scripts of TRL's trainers: the table of their arguments, and what they mean together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from memtrain.recipes.importers.engines import trainers_engine
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.python_script import Computed, is_computed
from memtrain.recipes.importers.script_calls import (
    ADAPT,
    DATASET,
    HELD_OUT,
    LOAD,
    OWN_DEFAULTS,
    ROWS,
    TEMPLATES,
    ScriptConfig,
)
from memtrain.recipes.importers.tool import Tool, ToolReading
from memtrain.recipes.peers.table import Row, table
from memtrain.recipes.trl.translation import Lost


def read(reading: ToolReading) -> None:
    """The adapter, precision, checkpointing, rows and vLLM."""
    told = [one.key for one in reading.lost]
    for key, value in [*reading.config.items()]:
        if key in told or not is_computed(value) or key.startswith(("trainer.", "script.")) or key == DATASET:
            continue
        kept: dict[str, Any] | None = None
        if isinstance(value, Mapping):
            kept = {one: of for one, of in cast(Mapping[str, Any], value).items() if not is_computed(of)}
        for name in [name for name, one in reading.trl.items() if one is value]:
            reading.trl.pop(name)
            if kept:
                reading.trl[name] = kept
        reading.lose(key, "its value is computed when the script runs")
    if names := reading.get(OWN_DEFAULTS):
        reading.notes.append(
            f"arguments of the script's own have their defaults ({', '.join(names)}); give the command "
            "that was run, and its values are taken"
        )
    if changes := reading.get(ROWS):
        reading.lost.append(
            Lost(
                "the script's rows",
                changes,
                "write the rows that it trains on to a file (dataset.to_json('rows.jsonl')), and name "
                "that in data.train",
            )
        )
    _template(reading)
    _length(reading)
    _group(reading)
    _adapter(reading)
    _precision(reading)
    default = "unsloth" if _is_fast(reading) else None
    checkpoints = reading.get(
        f"{ADAPT}.use_gradient_checkpointing", reading.get(f"{LOAD}.use_gradient_checkpointing", default)
    )
    if checkpoints is not None and not is_computed(checkpoints):
        is_on = checkpoints not in (False, "False")
        reading.set_trl("gradient_checkpointing", is_on, "use_gradient_checkpointing")
        reading.set_trl("activation_offloading", checkpoints == "unsloth", "use_gradient_checkpointing")
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


def _group(reading: ToolReading) -> None:
    """Unsloth's GRPO takes a group a device where the completions of a step are no whole number of groups.

    Source: `check_num_generations` in unsloth/models/rl.py.
    """
    if not _is_fast(reading) or reading.method != "grpo":
        return
    rows, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    group = reading.get("num_generations", 8)
    completions = [reading.get(rows, 4), reading.get(steps, 2), group]
    is_set = reading.config.keys() & {"steps_per_generation", "generation_batch_size"}
    if is_set or not all(isinstance(one, int) and one > 0 for one in completions):
        return
    if completions[0] * completions[1] * reading.processes % group:
        reading.set_trl(rows, group, "num_generations")


def _adapter(reading: ToolReading) -> None:
    adapted = any(key.startswith(f"{ADAPT}.") for key in reading.config)
    name = str(reading.trl.get("model_name_or_path", ""))
    if adapted and not reading.on(f"{LOAD}.full_finetuning"):
        reading.set_trl("use_peft", True, ADAPT)
    else:
        for key in [one for one in reading.trl if one.startswith("lora_")]:
            del reading.trl[key]
    given = reading.trl.get("lora_target_modules")
    modules = cast(list[Any], given) if isinstance(given, list) else []
    whole = [one for one in modules if one in ("embed_tokens", "lm_head")]
    if whole and _is_fast(reading):
        # Unsloth trains these whole beside the adapter. Source: `get_peft_model` in unsloth/models/llama.py.
        saved = cast(list[Any], reading.trl.get("lora_modules_to_save") or [])
        reading.trl["lora_target_modules"] = [one for one in modules if one not in whole]
        reading.set_trl("lora_modules_to_save", [*saved, *whole], f"{ADAPT}.target_modules")
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
    """The sources of the rows, and of those that are held out."""
    given: list[Mapping[str, Any]] = reading.get(DATASET, [])
    sources = [one for one in map(_source, given) if one is not None]
    for one in given:
        path = one.get("data_files", one.get("path"))
        if is_computed(path):
            reading.lost.append(Lost(DATASET, str(path), "its value is computed when the script runs"))
        elif _source(one) is None:
            reading.lost.append(Lost(DATASET, path, "write the files that are here into data.train"))
    for one in sources:
        cut = one.pop("cut", None)
        if cut is not None and "limit" not in one:
            reading.lost.append(
                Lost(f"{DATASET}.split", str(cut), "a share of the rows; `limit` counts them")
            )
        elif cut is not None:
            reading.notes.append(f"load_dataset.split: {cut} is the first rows; `limit` draws as many of all")
    if sources:
        reading.set_recipe("data.train", sources)
    strategy = reading.trl.get("eval_strategy", reading.trl.get("evaluation_strategy", "no"))
    held = [one for one in map(_source, reading.get(HELD_OUT, [])) if one is not None]
    if held and strategy != "no" and not is_computed(held):
        reading.set_recipe(
            "data.eval", [{key: of for key, of in one.items() if key != "cut"} for one in held]
        )


_FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""First arguments of `load_dataset` that say what its files are."""


def _source(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """A source of a recipe from the arguments of `load_dataset`; None for one whose name is computed."""
    path, files = given.get("path"), given.get("data_files")
    split = given.get("split", "train")
    if isinstance(split, list):
        # Several datasets of one call: the first is trained on, as scripts have it.
        split = next(iter(cast(list[Any], split)), "train")
    if isinstance(files, Mapping):
        files = cast(Mapping[str, Any], files).get(str(split).partition("[")[0])
    if path in _FORMATS:
        path = files
        given = {}
    if isinstance(path, list) and len(cast(list[Any], path)) == 1:
        path = cast(list[Any], path)[0]
    if not isinstance(path, str) or isinstance(path, Computed) or "://" in path or not isinstance(split, str):
        return None
    source: dict[str, Any] = {"source": path}
    source |= {key: given[key] for key in ("name", "revision") if isinstance(given.get(key), str)}
    split, _, cut = str(split).partition("[")
    if split != "train" and given:
        source["split"] = split
    if cut:
        source["cut"] = f"{split}[{cut}"
        if (number := re.fullmatch(r":(\d+)\]", cut)) is not None:
            source["limit"] = int(number[1])
    return {key: one for key, one in source.items() if not isinstance(one, Computed)}


SHIPPED: Mapping[str, str] = {
    "chatml": "chatml",
    **dict.fromkeys(("llama-3", "llama3"), "llama3"),
    **dict.fromkeys(("qwen-2.5", "qwen-25", "qwen25", "qwen2.5"), "qwen2.5"),
    **dict.fromkeys(("qwen-3", "qwen3"), "qwen3"),
    "qwen3-instruct": "qwen3-instruct",
    **dict.fromkeys(("gemma-3", "gemma3", "gemma-3n", "gemma3n"), "gemma3"),
    "phi-4": "phi4",
}
"""Templates of Unsloth's (unsloth/chat_templates.py, 015bdef0) that write what a shipped training template
does: held to each other over the probe conversations of `trainers/data/tokenize/chat_templates.py`."""


def _template(reading: ToolReading) -> None:
    """The chat templates that a script gives its tokenizer."""
    for asked in reading.get(TEMPLATES, []):
        is_named = isinstance(asked, str) and not isinstance(asked, Computed) and len(asked) < 40
        if is_named and asked in SHIPPED:
            reading.set_recipe("model.chat_template", SHIPPED[asked])
            continue
        reading.lost.append(
            Lost(
                "chat_template",
                asked if is_named else "a template of the script",
                "write tokenizer.chat_template to a file (template.jinja), and name that in "
                "model.chat_template; without it the model's own is taken",
            )
        )


def _length(reading: ToolReading) -> None:
    """Unsloth's SFT cuts rows at the length that the model was loaded for, or at a shorter `max_seq_length`.

    Source: `max_length_check` in unsloth/models/rl.py.
    """
    if not _is_fast(reading) or reading.method != "sft":
        return
    most, asked = reading.get(f"{LOAD}.max_seq_length", 2048), reading.get("max_seq_length")
    if reading.get("max_length") not in (None, most) and asked is None:
        reading.lose("max_length", "Unsloth cuts rows at the model's max_seq_length")
    if isinstance(most, int):
        length = min(most, asked) if isinstance(asked, int) else most
        reading.trl.pop("max_seq_length", None)
        reading.set_trl("max_length", length, "max_seq_length")


UNSLOTH = Tool(table("unsloth"), read, takes_trl=True)

_PEFT = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of PEFT's `LoraConfig`. Source: PEFT 0.18."""

_TRANSFORMERS = {"learning_rate": 5e-5, "gradient_checkpointing": False}
"""Defaults of transformers' `TrainingArguments` that are not those of TRL's configurations."""


def tool_of(script: ScriptConfig) -> Tool:
    """The tool of a script, with the defaults of its trainer's configuration: Unsloth, or, where the script
    does not use it, TRL, as which it is called."""
    assumed = _TRANSFORMERS if script.is_transformers else {}
    known = UNSLOTH.table

    def keeps(row: Row) -> bool:
        if script.is_transformers or not script.is_unsloth:
            return script.is_unsloth and row.key.startswith(ADAPT)
        return not (row.key == "warmup_ratio" and "warmup_steps" in script.keys)

    rows = {key: row if keeps(row) else replace(row, default=None) for key, row in known.rows.items()}
    if script.is_unsloth:
        script.keys["unsloth"] = True
        return replace(UNSLOTH, table=replace(known, rows=rows, assumed=assumed))
    trl = table("trl")
    named = replace(known, title=trl.title, version=trl.version, rows=rows, assumed={**_PEFT, **assumed})
    return replace(UNSLOTH, table=named)
