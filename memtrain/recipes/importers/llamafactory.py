"""LLaMA-Factory: its keys, with transformers' own beside them, and keys that are read together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.dataset_info import FILE, find_info, named, read_info
from memtrain.recipes.importers.engines import deepspeed, fsdp
from memtrain.recipes.importers.positions import scale_positions
from memtrain.recipes.importers.tool import Tool, ToolReading, no_counterpart
from memtrain.recipes.peers.table import table
from memtrain.recipes.trl.translation import Lost

METHODS = {"pt": "sft", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
"""`stage:` and the method."""

TEMPLATES = {
    "chatml": "chatml",
    "deepseek3": "deepseek3",
    "falcon_h1": "falcon-h1",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma3",
    "llama3": "llama3",
    "llama4": "llama4",
    "mistral": "mistral",
    "phi": "phi3",
    "phi4": "phi4",
    "qwen": "qwen2.5",
    "qwen3": "qwen3",
    "qwen3_nothink": "qwen3-instruct",
}
"""Names of `template:` that write what a template of memtrain's writes, by its name in `model.chat_template`.
Source: LLaMA-Factory 0.9.5, data/template.py."""

_INFERS = {
    "export_dir": "`memtrain export` and `memtrain merge` write models",
    "infer_backend": "`memtrain chat` and `memtrain serve` answer with a model",
    "do_predict": "`memtrain eval` scores a model",
}
"""Keys of files that train nothing, and the command for each."""


def read(reading: ToolReading) -> None:
    """The method, adapter, precision, attention, rows and devices.

    Raises: RecipeError for a stage or a loss that has no counterpart, and for a file that trains nothing.
    """
    stage = reading.get("stage", "sft")
    if stage not in METHODS:
        raise no_counterpart("stage", stage, METHODS)
    other = next((key for key in _INFERS if reading.config.get(key) not in (None, False)), None)
    if other is not None and not reading.on("do_train"):
        raise RecipeError(
            f"LLaMA-Factory trains nothing with this file ({other}, without do_train: true)",
            other,
            _INFERS[other],
        )
    reading.method = METHODS[stage]
    _adapter(reading)
    _precision(reading)
    _rows(reading, stage)
    _lengths(reading, stage)
    _losses(reading)
    _tokens(reading)
    _template(reading, stage)
    scale_positions(reading, "rope_scaling", reading.get("rope_scaling"))
    off = reading.on("disable_gradient_checkpointing")
    reading.set_trl("gradient_checkpointing", not off, "disable_gradient_checkpointing")
    if reading.on("use_unsloth_gc"):
        reading.set_trl("activation_offloading", True, "use_unsloth_gc")
    if reading.on("use_muon"):
        reading.set_recipe("optim.kind", "muon")
        reading.trl.pop("optim", None)
    workers = reading.get("ray_num_workers")
    if isinstance(workers, int) and workers > 1 and reading.processes == 1:
        reading.processes = workers
    if reading.get("deepspeed"):
        deepspeed(reading, "deepspeed", reading.config["deepspeed"])
        reading.trl.pop("deepspeed", None)
    fsdp(reading, "fsdp", reading.get("fsdp"), reading.get("fsdp_config"))
    for key in ("fsdp", "fsdp_config"):
        reading.trl.pop(key, None)


def _listed(reading: ToolReading, key: str) -> list[str]:
    """The names of a key, which are one text with commas between them, or a list."""
    value = reading.get(key, "")
    items = cast(list[object], value) if isinstance(value, list) else str(value).split(",")
    return [str(one).strip() for one in items if str(one).strip()]


def _adapter(reading: ToolReading) -> None:
    kind = reading.get("finetuning_type", "lora")
    bits = reading.get("quantization_bit")
    if bits in (4, 8):
        reading.set_trl(f"load_in_{bits}bit", True, "quantization_bit")
    elif bits:
        reading.lose("quantization_bit", "weights are quantized to 4 or 8 bits")
    if kind in ("lora", "oft"):
        reading.set_trl("use_peft", True, "finetuning_type")
        modules = _listed(reading, f"{kind}_target") or ["all"]
        reading.set_trl(
            "lora_target_modules", "all-linear" if modules == ["all"] else modules, f"{kind}_target"
        )
        reading.trl.setdefault("lora_r", 8)
        reading.trl.setdefault("lora_alpha", 2 * int(reading.trl["lora_r"]))
        _trained_adapter(reading)
        if kind == "oft":
            reading.lose(
                "finetuning_type", "adapters are lora and dora: LoRA of rank 8 is trained in its place"
            )
        if reading.get("additional_target"):
            reading.set_trl(
                "lora_modules_to_save", _listed(reading, "additional_target"), "additional_target"
            )
    elif kind == "freeze":
        reading.lose("finetuning_type", "every weight is trained here; `model.adapter` trains few")
    elif kind != "full":
        raise RecipeError(
            f"finetuning_type: {kind} is none of LLaMA-Factory's",
            "finetuning_type",
            "give lora, full, freeze or oft",
        )


def _trained_adapter(reading: ToolReading) -> None:
    """The last of the named adapters is trained on, those before it are merged; all where a new one is begun.

    Source: LLaMA-Factory 0.9.5, model/adapter.py (_setup_lora_tuning), train/trainer_utils.py
    (create_ref_model: the reference is the model without an adapter).
    """
    key = "adapter_name_or_path"
    named = _listed(reading, key)
    if len(named) > 1 or (named and reading.on("create_new_adapter")):
        reading.lose(
            key, "merge adapters that are not trained on first (memtrain merge), and name the result"
        )
    elif named and reading.go_on_from(key, named[0]):
        compares = reading.get("pref_loss") not in ("orpo", "simpo")
        if reading.method in ("dpo", "kto") and compares:
            reading.set_recipe(f"{reading.method}.reference", "adapter_off", "the model without the adapter")


def _tokens(reading: ToolReading) -> None:
    """Tokens that are added, in one text with commas between them."""
    added = [token for key in ("add_tokens", "add_special_tokens") for token in _listed(reading, key)]
    if added:
        reading.add_tokens(added)
    elif reading.on("resize_vocab"):
        reading.lose("resize_vocab", "no tokens are named; `model.add_tokens` names them")


def _template(reading: ToolReading, stage: str) -> None:
    """The chat template that a name stands for; texts of the stage `pt` have none."""
    name = reading.get("template")
    if name is None or stage == "pt":
        return
    if name in TEMPLATES:
        reading.set_recipe("model.chat_template", TEMPLATES[name], f"template: {name}")
    else:
        reading.lose(
            "template", "the tokenizer's own chat template is taken; `model.chat_template` names a Jinja file"
        )
    if name == "qwen3":
        reading.notes.append(
            "template: qwen3: LLaMA-Factory writes an empty thought before every answer without one; here it "
            "is written before the last answer alone, as Qwen3's own template does"
        )


def _precision(reading: ToolReading) -> None:
    """Frozen weights are loaded in half precision, trained ones in float32 under autocast."""
    half = (
        "float16"
        if reading.on("fp16")
        else "bfloat16"
        if reading.on("bf16") or reading.on("pure_bf16")
        else ""
    )
    trains_all = reading.get("finetuning_type", "lora") in ("full", "freeze")
    if reading.on("pure_bf16") and trains_all:
        reading.set_trl("dtype", "bfloat16", "pure_bf16")
        reading.set_recipe("optim.master_weights", False, "pure_bf16")
    elif half and (not trains_all or reading.get("deepspeed")):
        reading.set_trl("dtype", half)
    elif not half and trains_all and not reading.on("use_badam"):
        reading.set_trl("bf16", False)
    elif not half:
        # Without autocast frozen weights are loaded, and computed in, as the card has it.
        # Source: LLaMA-Factory 0.9.5, model/patcher.py (patch_config), extras/misc.py (infer_optim_dtype).
        reading.set_trl("dtype", "bfloat16")
        reading.precision_is_open = True
    reading.trl.pop("fp16", None)
    if reading.trl.get("bf16"):
        del reading.trl["bf16"]
    kinds = {"fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "disabled": "eager"}
    asked = str(reading.get("flash_attn", "auto"))
    asked = {"True": "fa2", "False": "disabled", "off": "disabled"}.get(asked, asked)
    if asked in kinds:
        reading.set_trl("attn_implementation", kinds[asked], "flash_attn")


def _rows(reading: ToolReading, stage: str) -> None:
    """The sources of the rows, by dataset_info.json where that is here."""
    for key, ours in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        if names := _listed(reading, key):
            sources = _sources(reading, key, names, stage)
            if key == "eval_dataset" and reading.on("eval_on_each_dataset"):
                sources = [
                    {"set": re.sub(r"[^\w.-]", "-", name), **one}
                    for name, one in zip(names, sources, strict=True)
                ]
            reading.set_recipe(ours, sources)
    share = reading.get("val_size")
    if isinstance(share, float | int) and share and "data.eval" not in reading.direct:
        if share < 1:
            reading.set_recipe("data.eval_fraction", share)
        else:
            reading.lose("val_size", "a number of rows: `data.eval_fraction` is a fraction")
    if isinstance(reading.get("max_samples"), int):
        reading.notes.append(
            "max_samples: LLaMA-Factory takes the first rows; `limit` samples them with the seed"
        )
    _mix(reading)
    if stage == "sft":
        # Its templates leave the user's turns out of the loss, unless train_on_prompt asks for them.
        reading.set_trl("assistant_only_loss", not reading.on("train_on_prompt"), "train_on_prompt")
    if stage == "kto" and not reading.on("disable_shuffling"):
        reading.set_trl("train_sampling_strategy", "random")
    if stage == "rm":
        # Pairs of DPO and KTO are trained without dropout, as TRL does; rows of a reward model with it.
        reading.set_trl("disable_dropout", False)
    if reading.get("enable_thinking") is False:
        reading.set_recipe("data.chat_template_kwargs", {"enable_thinking": False})


def _sources(reading: ToolReading, key: str, names: list[str], stage: str) -> list[dict[str, object]]:
    folder = cast(object, reading.get("dataset_dir", "data"))
    entries: Mapping[str, Any] = {}
    path: Path | None = None
    if isinstance(folder, dict):
        entries = cast(Mapping[str, Any], folder)
    elif not str(folder).startswith(("REMOTE:", "ONLINE")):
        path = find_info(str(folder), reading.folder)
        entries = _entries(reading, path) if path is not None else {}
    absent = [name for name in names if not isinstance(entries.get(name), dict)]
    if absent and folder != "ONLINE":
        where = f"{path}, which has no such entry" if path else f"{folder}/{FILE}, not here"
        reading.notes.append(
            f"{key}: LLaMA-Factory looks {' and '.join(absent)} up in {where}: write the files and their "
            "columns into data"
        )
    made: list[dict[str, object]] = []
    for name in names:
        if folder == "ONLINE":
            source: dict[str, object] = {"source": name}
        elif name in absent:
            inside = "data" if isinstance(folder, dict) or ":" in str(folder) else str(folder).rstrip("/")
            source = {"source": f"{inside}/{name.removesuffix('.json')}.json"}
        else:
            found = named(entries[name], str(path.parent) if path else "data", stage, reading.method)
            source = found.source
            reading.lost += [Lost(key, name, words) for words in found.lost]
            reading.has_turns |= found.is_conversation
        limits = [one for one in (source.get("limit"), reading.get("max_samples")) if isinstance(one, int)]
        made.append(source | ({"limit": min(limits)} if limits else {}))
    return made


def _entries(reading: ToolReading, path: Path) -> Mapping[str, Any]:
    try:
        return read_info(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", str(path), "correct the file") from None


def _mix(reading: ToolReading) -> None:
    """Sources drawn from in turn, or with the given probabilities."""
    how = str(reading.get("mix_strategy", "concat"))
    sources = cast(list[dict[str, object]], reading.direct.get("data.train", ([], ""))[0])
    if how == "concat" or len(sources) < 2:
        return
    if how == "interleave_once":
        reading.notes.append(
            "mix_strategy: interleave_once: every row once, in a random order of all of them"
        )
        return
    shares = [float(one) for one in _listed(reading, "interleave_probs")] or [1.0] * len(sources)
    if len(shares) != len(sources):
        raise RecipeError(
            f"interleave_probs has {len(shares)} numbers for {len(sources)} datasets",
            "interleave_probs",
            "give one for each",
        )
    reading.set_recipe(
        "data.train", [one | {"weight": share} for one, share in zip(sources, shares, strict=True)]
    )
    reading.notes.append(
        f"mix_strategy: {how} ends a pass when {'one' if how.endswith('under') else 'every'} dataset is "
        "through; here a pass has as many rows as the datasets together"
    )


def _lengths(reading: ToolReading, stage: str) -> None:
    """Packing, and what is cut of a row that is too long.

    Source: LLaMA-Factory 0.9.5, data/processor (infer_seqlen, PretrainDatasetProcessor, greedy_knapsack).
    """
    if stage == "pt" and reading.get("packing", True) is not False:
        reading.set_trl("packing", True, "packing")
        reading.set_trl("packing_strategy", "wrapped")
        reading.set_recipe("length.cross_document_attention", True)
        return
    if stage == "sft" and (reading.on("packing") or reading.on("neat_packing")):
        reading.set_trl("packing", True, "packing")
        if not reading.on("neat_packing"):
            reading.notes.append("packing: rows of a sequence see each other there; here they never do")
    else:
        reading.trl.pop("packing", None)
    if stage in ("pt", "ppo"):
        reading.set_trl("truncation_mode", "keep_start" if stage == "pt" else "keep_end")
        return
    keeps_start = stage == "sft" and reading.has_turns and not reading.on("mask_history")
    reading.set_recipe(
        "length.truncation",
        "keep_start" if keeps_start else "keep_end",
        "the first turns are kept" if keeps_start else "the prompt is cut, the answer kept",
    )
    reading.notes.append(
        "cutoff_len: LLaMA-Factory cuts the end of a prompt to keep its answer, and both in proportion where "
        "both are long; "
        + (
            "here the end of the conversation is cut"
            if keeps_start
            else "here the beginning of the prompt is cut"
        )
    )


_PAIRS = ("sigmoid", "hinge", "ipo", "orpo", "simpo")


def _losses(reading: ToolReading) -> None:
    """The losses of pairs with their weights, and the loss of single tokens.

    Source: LLaMA-Factory 0.9.5, train/dpo/trainer.py (odds_ratio_loss, bco_loss, get_batch_loss_metrics).
    """
    beside = _number(reading, "pref_ftx")
    if reading.method == "dpo":
        asked = str(reading.get("pref_loss", "sigmoid"))
        if asked not in _PAIRS:
            raise no_counterpart("pref_loss", asked, _PAIRS)
        parts = {asked: 1.0}
        if asked == "orpo":
            parts = {"sft": 1.0 + beside, "orpo": _number(reading, "pref_beta", 0.1)}
            reading.trl.pop("beta", None)
        elif other := _number(reading, "pref_bco_weight"):
            parts = {asked: 1 / (1 + other), "bco_pair": other / (1 + other)}
        if beside and asked != "orpo":
            parts["sft"] = beside
        if parts != {"sigmoid": 1.0}:
            reading.set_trl("loss_type", [*parts], "pref_loss")
        if list(parts.values()) != [1.0]:
            reading.set_trl("loss_weights", [*parts.values()], "pref_loss")
        if asked == "simpo":
            reading.set_recipe("dpo.simpo_gamma", reading.get("simpo_gamma", 0.5))
        if "sft" in parts:
            reading.notes.append(
                "the likelihood of chosen answers is a mean over pairs there, and over the step's tokens here"
            )
    elif beside:
        reading.lose("pref_ftx", f"{reading.method} has no part of the plain loss")
    other = reading.get("ref_model")
    if other is not None and other != reading.get("model_name_or_path"):
        reading.lose("ref_model", "the reference is the model before training")
    if reading.on("use_dft_loss"):
        reading.set_recipe("sft.loss", "dft")
    if reading.method == "ppo":
        _policy(reading)


def _number(reading: ToolReading, key: str, default: float = 0.0) -> float:
    value = reading.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RecipeError(f"{key}: {value} is not a number", key, "write a number")
    return float(value)


def _policy(reading: ToolReading) -> None:
    """PPO with an adaptive KL term. Source: LLaMA-Factory 0.9.5, train/ppo; TRL 0.9.6, PPOConfig."""
    reading.set_recipe("ppo.beta", 0.2, "TRL 0.9.6's init_kl_coef")
    reading.set_recipe("ppo.kl_target", reading.get("ppo_target", 6.0))
    reading.set_recipe("ppo.updates_per_rollout", reading.get("ppo_epochs", 4))
    reading.set_trl("num_generations", 1)
    for key, default in (("max_new_tokens", 1024), ("top_p", 0.7), ("top_k", 50), ("temperature", 0.95)):
        reading.set_trl(key, reading.get(key, default), key)
    rows, held = reading.get("ppo_buffer_size", 1), reading.get("gradient_accumulation_steps", 1)
    if isinstance(rows, int) and isinstance(held, int) and rows > 1:
        reading.set_trl("steps_per_generation", rows * held, "ppo_buffer_size")
    if reading.get("reward_model"):
        reading.set_recipe("rewards.functions", [{"model": {"path": str(reading.config["reward_model"])}}])
        reading.notes.append(
            "reward_model: LLaMA-Factory's is an adapter, or a model with a value head beside it: train one "
            "with `memtrain reward`, or name a sequence classifier"
        )
    for key in ("ppo_score_norm", "ppo_whiten_rewards"):
        if reading.on(key):
            reading.lose(key, "rewards are taken as they are; advantages are normalized")


LLAMAFACTORY = Tool(table("llamafactory"), read, takes_trl=True)
