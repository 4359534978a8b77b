"""Settings of the other tool as keys of a recipe, for the plan of a run as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from memtrain.recipes.importers.tool import Tool, ToolReading
from memtrain.recipes.trl.sampling import ONLINE
from memtrain.recipes.trl.translation import Translation

_ATTENTION = {"eager": "masked"}
"""Back ends that keep scores; every other one, also padded flash-attn, keeps what `transformers` does."""

_OF_UNSLOTH = "flex"
"""Unsloth's attention, which keeps no scores of any model (flex for gpt-oss). Source: unsloth issue 3363."""

_PACKS_WITH = "torch_varlen"
"""Bytes kept for packed rows of other tools, as variable-length kernels keep them."""

_OFF: Mapping[str, object] = {
    "memory.streamed_layers": "off",
    "optim.in_backward": "off",
    "optim.compressed_moments": False,
    "memory.expandable_segments": False,
    "length.shared_prompts": False,
}
"""Strategies that no other tool takes of itself."""

_ENGINE = ("cluster.engine", "cluster.cpu_offload")


def as_it_was(tool: Tool, reading: ToolReading, made: Translation) -> dict[str, object]:
    """Dotted keys over the keys of the imported recipe. `made`: the recipe's keys, with the method."""
    trl = reading.trl
    pins: dict[str, object] = dict(_OFF)
    pins["train.micro_batch_size"] = _micro_batch(trl)
    checkpoints = bool(trl.get("gradient_checkpointing", trl.get("activation_checkpointing", True)))
    pins["memory.activation_checkpointing"] = "on" if checkpoints else "off"
    if checkpoints:
        pins["memory.checkpoint_every"] = 1
    pins["memory.activation_offloading"] = "on" if trl.get("activation_offloading") else "off"
    pins["memory.optimizer_offload"] = pins["memory.weights_offload"] = "off"
    pins["memory.loss"] = _loss(tool, reading)
    pins["model.liger"] = "auto" if trl.get("use_liger_kernel") else "off"
    packs = bool(trl.get("packing"))
    pins["length.padding_free"] = None if packs else bool(trl.get("padding_free"))
    asked = str(trl.get("attn_implementation", ""))
    pins["model.attention"] = (
        _PACKS_WITH if packs or trl.get("padding_free") else _ATTENTION.get(asked, "transformers")
    )
    if tool.name == "unsloth" and reading.on("unsloth") and pins["model.attention"] == "transformers":
        pins["model.attention"] = _OF_UNSLOTH
    pins["cluster.processes"] = reading.processes
    pins["cluster.engine"] = "ddp"
    pins["cluster.cpu_offload"] = "none"
    pins |= _reference(reading, trl)
    # TRL's own engine is among the recipe's keys, other tools' is beside them.
    pins |= {key: value for key, (value, _) in made.recipe_keys.items() if key in _ENGINE}
    pins |= {
        key: value for key, (value, _) in reading.direct.items() if key in pins or key.startswith("cluster.")
    }
    if made.recipe_keys.get("model.dtype", ("", ""))[0] == "float16" and pins["cluster.engine"] != "ddp":
        # Other tools scale losses over shards, a recipe cannot.
        pins["model.dtype"] = "float16"
    if _is_pure(tool, reading, made) and pins["cluster.engine"] == "ddp":
        pins["optim.master_weights"] = False
    if pins["memory.weights_offload"] == "on" and trl.get("use_peft"):
        # ZeRO-3's offloading takes what is trained with the rest.
        pins["memory.weights_offload"] = "all"
    pins |= reading.computed
    if made.recipe_keys.get("generate.backend", ("", ""))[0] == "vllm" and pins["cluster.engine"] != "ddp":
        # vLLM beside shards is not planned here; it sleeps while the shards train.
        pins["generate.backend"] = "native"
    if pins.get("length.padding_free"):
        pins["model.attention"] = _PACKS_WITH
    if "train.micro_tokens" in pins:
        pins["train.micro_batch_size"] = "auto"
    if reading.method in ONLINE and made.recipe_keys.get("generate.backend") is None:
        pins["generate.backend"] = "transformers"
    return pins


def _is_pure(tool: Tool, reading: ToolReading, made: Translation) -> bool:
    """Whether weights that were loaded in bfloat16 are stepped so: transformers' trainer keeps no float32
    copies of them, and states like them; DeepSpeed and FSDP keep copies."""
    asked = made.recipe_keys.get("model.dtype", ("", ""))[0] == "bfloat16"
    trains_all = tool.name in ("trl", "unsloth", "axolotl") and not reading.trl.get("use_peft")
    return asked and trains_all and "optim.master_weights" not in made.recipe_keys


def _micro_batch(trl: Mapping[str, Any]) -> object:
    rows = trl.get("per_device_train_batch_size", 8)
    return rows if isinstance(rows, int) else "auto"


def _loss(tool: Tool, reading: ToolReading) -> str:
    if tool.name == "unsloth" and reading.on("unsloth"):
        return "chunked"
    if tool.name == "llamafactory" and reading.method != "sft":
        # Its fused loss is off in every stage whose trainer reads logits (`require_logits`, liger_kernel.py).
        return "full"
    if reading.trl.get("use_liger_kernel") or reading.trl.get("use_liger_loss"):
        return "chunked"
    return "chunked" if reading.trl.get("loss_type") == "chunked_nll" else "full"


def _reference(reading: ToolReading, trl: Mapping[str, Any]) -> dict[str, object]:
    """Whole weights have a frozen copy beside them, adapters are switched off."""
    if reading.method in ("dpo", "kto"):
        losses = trl.get("loss_type")
        names = cast(list[object], losses) if isinstance(losses, list) else [losses]
        if all(name in ("orpo", "simpo", "cpo", "sft") for name in names):
            return {}
        if trl.get("precompute_ref_log_probs"):
            return {f"{reading.method}.reference": "precomputed"}
        return {f"{reading.method}.reference": "adapter_off" if trl.get("use_peft") else "copy"}
    return {}
