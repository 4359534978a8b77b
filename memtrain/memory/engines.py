"""Which engine keeps the processes of a run together: what is refused, what is left open to the search."""

from __future__ import annotations

from typing import Literal

from memtrain.memory.blockwise import BITSANDBYTES
from memtrain.memory.rules import Ledger
from memtrain.memory.settings import Settings
from memtrain.recipes.recipe import Recipe

EngineName = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]

ZERO: tuple[EngineName, ...] = ("zero1", "zero2", "zero3")
PATH = "cluster.engine"


def is_sharded(settings: Settings) -> bool:
    """Whether ranks hold parts of what one process would hold whole; every pass is then a collective."""
    return settings.num_processes > 1 and settings.engine != "ddp"


def uses_zero(settings: Settings) -> bool:
    """Whether DeepSpeed's engine exchanges gradients and steps."""
    return settings.num_processes > 1 and settings.engine in ZERO


def shards_weights(settings: Settings) -> bool:
    """Whether a rank holds only its part of the weights."""
    return settings.num_processes > 1 and settings.engine in ("fsdp2", "zero3")


def open_engines(recipe: Recipe, processes: int) -> tuple[EngineName, ...]:
    """The engines that the search weighs, the usual one first."""
    if recipe.cluster.engine != "auto":
        return (recipe.cluster.engine,)
    return ("ddp", "fsdp2") if processes > 1 and not fsdp2_faults(recipe) else ("ddp",)


def refuse_engine(ledger: Ledger, processes: int, dtype: str) -> None:
    """Note what the engine that is asked for cannot honour."""
    recipe = ledger.asked.recipe
    asked = recipe.cluster.engine
    _refuse_offload(ledger)
    if asked == "auto":
        return
    if asked != "ddp" and processes == 1:
        ledger.refuse(
            f"cluster.engine {asked} shares out weights or states, and one process has nobody to share with",
            PATH,
            "remove it, or set cluster.processes",
        )
    faults = fsdp2_faults(recipe) if asked == "fsdp2" else []
    if asked in ZERO:
        faults = zero_faults(recipe, dtype)
    for what, path, fix in faults:
        ledger.refuse(f"cluster.engine {asked}: {what}", path, fix)


def loads_shards(recipe: Recipe, settings: Settings) -> bool:
    """Whether each process reads its own rows of the model's files, where their names are the model's."""
    is_pretrained = recipe.model.path is not None and not recipe.model.path.startswith("builtin:")
    is_plain = recipe.model.adapter is None and recipe.model.quantize == "none" and recipe.method != "reward"
    has_rows = settings.num_processes > 1 and settings.context_parallel == 1
    return has_rows and settings.engine == "fsdp2" and is_pretrained and is_plain


def decide_layout(ledger: Ledger, settings: Settings) -> Literal["full", "sharded"]:
    """Who writes checkpoints."""
    wanted, path = ledger.asked.recipe.save.layout, "save.layout"
    if settings.num_processes == 1 or settings.engine == "ddp":
        if wanted == "sharded":
            ledger.refuse(
                "save.layout sharded: every process holds all weights, and there are no shards to write",
                path,
                "remove it, or set cluster.engine: fsdp2",
            )
            ledger.settle()
        return "full"
    layout = "full" if wanted == "full" else "sharded"
    words = "each process writes its own shards" if layout == "sharded" else "the main process gathers all"
    ledger.decide("checkpoint_layout", layout, words, path)
    return layout


def _refuse_offload(ledger: Ledger) -> None:
    cluster = ledger.asked.recipe.cluster
    takes = {"none": ("auto", "ddp", "fsdp2", *ZERO), "optimizer": ZERO, "parameters": ("fsdp2", "zero3")}
    if cluster.engine not in takes[cluster.offload]:
        able = ", ".join(takes[cluster.offload])
        ledger.refuse(
            f"cluster.offload {cluster.offload} needs an engine that moves them, and cluster.engine is "
            f"{cluster.engine}",
            "cluster.offload",
            f"set cluster.engine to one of {able}; or memory.optimizer_offload: on, with any engine",
        )


def vllm_faults(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(what, where, fix) where a vLLM sampler is to be given weights that every process holds a part of."""
    if recipe.online is None or recipe.generation.backend != "vllm":
        return []
    return [
        (
            "vLLM takes whole weights, and every process holds a part of each; gathering them for it would "
            "need the memory that the shards save",
            "generate.backend",
            "set generate.backend: native, or cluster.engine: ddp",
        )
    ]


def zero_faults(recipe: Recipe, dtype: str) -> list[tuple[str, str, str]]:
    """(what, where, fix) of everything in a recipe that DeepSpeed's engine cannot honour."""
    in_parts = recipe.cluster.engine == "zero3"
    faults = vllm_faults(recipe) if in_parts else []
    faults += _unshared_faults(recipe, "of flat parts")
    if recipe.memory.optimizer_offload == "on":
        what = "it steps flat parts of weights, and memory.optimizer_offload moves the states of whole ones"
        faults.append((what, "memory.optimizer_offload", "remove it, and set cluster.offload: optimizer"))
    if dtype == "float16":
        faults.append(("float16 needs its loss scaled, and was never tried", "model.dtype", "use bfloat16"))
    if dtype == "bfloat16" and (recipe.model.adapter is not None or recipe.method == "reward"):
        what = "it would round what is trained in float32 (an adapter, a score head) to bfloat16"
        faults.append((what, "model.dtype", "set it to float32, or cluster.engine: fsdp2"))
    elif dtype == "bfloat16" and not recipe.optim.master_weights:
        what = "it keeps float32 copies of bfloat16 weights in any case"
        faults.append((what, "optim.master_weights", "set optim.master_weights: true"))
    section = recipe.dpo
    if in_parts and section is not None and section.reference == "synced":
        what = "a reference that follows the policy would have to gather it"
        faults.append((what, "dpo.reference", "use precomputed or copy, or cluster.engine: fsdp2"))
    return faults


def fsdp2_faults(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(what, where, fix) of everything in a recipe that FSDP2 cannot honour."""
    faults = vllm_faults(recipe) + _unshared_faults(recipe, "of shards")
    if recipe.memory.activation_offloading == "on" and recipe.memory.activation_checkpointing == "off":
        faults.append(
            (
                "what a layer saves would take the gathered weights along to the host",
                "memory.activation_offloading",
                "set memory.activation_checkpointing: on (its inputs travel then), or cluster.engine: ddp",
            )
        )
    return faults


def _unshared_faults(recipe: Recipe, of_what: str) -> list[tuple[str, str, str]]:
    """What no engine that shares weights or states out can honour."""
    faults: list[tuple[str, str, str]] = []
    if recipe.method == "ppo":
        faults.append(
            (
                "the value model of PPO was never cut into shards",
                "method",
                "set cluster.engine: ddp",
            )
        )
    if recipe.model.quantize != "none":
        faults.append(
            (
                f"weights in {recipe.model.quantize} cannot be cut into shards of their rows",
                "model.quantize",
                "set it to none, or cluster.engine: ddp",
            )
        )
    if recipe.optim.kind in ("adafactor", "muon"):
        faults.append(
            (
                f"{recipe.optim.kind} needs whole matrices, and a rank has some of their rows",
                "optim.kind",
                "use adamw or sgd, or cluster.engine: ddp",
            )
        )
    if recipe.optim.kind in BITSANDBYTES:
        faults.append(
            (
                f"8-bit and paged states ({recipe.optim.kind}) {of_what} were never tried",
                "optim.kind",
                "use adamw, or cluster.engine: ddp",
            )
        )
    return faults
