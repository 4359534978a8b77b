"""Engines that keep the processes of a run together: refusals, and choices left open to the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from memtrain.memory.plan.engine_kinds import ZERO, EngineName, Offload, is_sharded, shards_weights
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS

OFFLOADS: dict[EngineName, tuple[Offload, ...]] = {
    "ddp": ("none",),
    "fsdp2": ("none", "parameters"),
    "zero1": ("none", "optimizer"),
    "zero2": ("none", "optimizer"),
    "zero3": ("none", "optimizer", "parameters"),
}
"""Offloads to host memory under each engine; the simpler engines first."""

PACKAGE = "deepspeed"
MISSING = "DeepSpeed is not installed (pip install 'memtrain[deepspeed]')"
PATH = "cluster.engine"


class Form(NamedTuple):
    """An engine with its offloading to host memory."""

    engine: EngineName
    offload: Offload


def first_form(recipe: Recipe) -> Form:
    """The engine that the recipe names, and the simplest where it names none."""
    engine, offload = recipe.cluster.engine, recipe.cluster.cpu_offload
    return Form("ddp" if engine == "auto" else engine, "none" if offload == "auto" else offload)


def open_forms(recipe: Recipe, base: Settings, has: Callable[[str], bool]) -> tuple[Form, ...]:
    """The engines that the search ranks, with their offloading; the simplest first.

    `has`: whether a package is there. On a CPU the host's memory is the device's, and nothing is gained.
    """
    if base.num_processes == 1:
        return (first_form(recipe),)
    cluster = recipe.cluster
    names: tuple[EngineName, ...] = (cluster.engine,) if cluster.engine != "auto" else tuple(OFFLOADS)
    closed = dict(closed_engines(recipe, base, has))
    return tuple(
        Form(engine, offload)
        for engine in names
        if engine not in closed
        for offload in OFFLOADS[engine]
        if cluster.cpu_offload in ("auto", offload)
        and (cluster.cpu_offload != "auto" or offload == "none" or base.device == "cuda")
    )


def closed_engines(
    recipe: Recipe, base: Settings, has: Callable[[str], bool]
) -> tuple[tuple[EngineName, str], ...]:
    """(engine, reason) of engines that `auto` leaves out; none where an engine is named."""
    if recipe.cluster.engine != "auto" or base.num_processes == 1:
        return ()
    found: list[tuple[EngineName, str]] = []
    faults = fsdp2_faults(recipe, base.dtype)
    if faults:
        found.append(("fsdp2", faults[0][0]))
    for engine in ZERO:
        faults = zero_faults(recipe, base.dtype, engine)
        if base.context_parallel > 1:
            found.append((engine, "slices of rows are untested with DeepSpeed's shards"))
        elif faults:
            found.append((engine, f"{faults[0][0]} ({faults[0][1]}: {faults[0][2]})"))
        elif not has(PACKAGE):
            found.append((engine, MISSING))
    return tuple(found)


def refuse_engine(ledger: DecisionLog, processes: int, dtype: str, *, is_foreign: bool = False) -> None:
    """Refuse settings that the named engine does not support. `is_foreign`: in another tool's run, whose
    DeepSpeed rounds and scales as it likes."""
    recipe = ledger.asked.recipe
    asked = recipe.cluster.engine
    _refuse_offload(ledger, processes)
    if asked == "auto":
        return
    if asked in ZERO and processes > 1 and not ledger.has(PACKAGE):
        ledger.refuse(
            f"cluster.engine {asked} needs DeepSpeed, which is not installed",
            PATH,
            "pip install 'memtrain[deepspeed]', or set cluster.engine: fsdp2",
        )
    if asked != "ddp" and processes == 1:
        ledger.refuse(
            f"cluster.engine {asked} divides weights or states over processes, but this run has one process",
            PATH,
            "remove it, or set cluster.processes",
        )
    faults = fsdp2_faults(recipe, dtype) if asked == "fsdp2" else []
    if asked in ZERO:
        faults = zero_faults(recipe, dtype, asked, is_foreign=is_foreign)
    for what, path, fix in faults:
        ledger.refuse(f"cluster.engine {asked}: {what}", path, fix)


def under_engine(recipe: Recipe, settings: Settings, form: Form) -> Settings:
    """The settings under an engine, with its consequences: who reads weights, and who writes checkpoints."""
    chosen = settings.model_copy(update={"engine": form.engine, "shard_offload": form.offload})
    layout, in_parts = layout_of(recipe, chosen), loads_shards(chosen)
    return chosen.model_copy(update={"loads_shards": in_parts, "checkpoint_layout": layout})


def loads_shards(settings: Settings) -> bool:
    """Whether each process reads, or draws, its own rows."""
    return settings.num_processes > 1 and settings.engine == "fsdp2"


def decide_loading(ledger: DecisionLog, settings: Settings) -> None:
    """Note the part of the model that each process loads."""
    if not shards_weights(settings):
        return
    if settings.quantize == "8bit":
        words = "int8 by row, in shards; products are with the widened weight, in the model's own precision"
        ledger.decide_again("quantize", "8bit", words, "model.quantize")
    if settings.loads_shards:
        words = "each process loads, or initializes, only its own part of the weights"
        if settings.quantize != "none":
            words += "; a weight is packed whole, and then cut"
        ledger.decide("loading", "parts", words)
        return
    why = "DeepSpeed divides weights only after they are loaded whole"
    ledger.decide("loading", "whole", f"each process holds all weights until they are divided: {why}")


def layout_of(recipe: Recipe, settings: Settings) -> Literal["full", "sharded"]:
    """Writers of checkpoints: each process of its shards, where there are any; else the main process."""
    return "sharded" if is_sharded(settings) and recipe.save.layout != "full" else "full"


def decide_layout(ledger: DecisionLog, settings: Settings) -> None:
    """Say who writes checkpoints, where processes hold shards; refuse shards that are not there."""
    wanted, path = ledger.asked.recipe.save.layout, "save.layout"
    if is_sharded(settings):
        is_shared = settings.checkpoint_layout == "sharded"
        words = "each process writes its own shards" if is_shared else "the main process gathers all"
        ledger.decide("checkpoint_layout", settings.checkpoint_layout, words, path)
    elif wanted == "sharded":
        ledger.refuse(
            "save.layout sharded: every process holds all weights, and there are no shards to write",
            path,
            "remove it, or set cluster.engine: fsdp2",
        )
        ledger.raise_refusals()


def refuse_closed(ledger: DecisionLog, base: Settings) -> None:
    """Note a `cluster.cpu_offload` that no engine which is open here takes, each with its reason."""
    recipe = ledger.asked.recipe
    if recipe.cluster.engine == "auto" and not open_forms(recipe, base, ledger.has):
        closed = "; ".join(f"{engine}: {why}" for engine, why in closed_engines(recipe, base, ledger.has))
        ledger.refuse(
            f"cluster.cpu_offload {recipe.cluster.cpu_offload}: no engine that offloads them can be used "
            f"here ({closed})",
            "cluster.cpu_offload",
            "remove it, or the settings that rule the engines out",
        )


def _refuse_offload(ledger: DecisionLog, processes: int) -> None:
    cluster = ledger.asked.recipe.cluster
    if cluster.cpu_offload in ("auto", "none"):
        return
    if cluster.engine == "auto" and processes == 1:
        ledger.refuse(
            f"cluster.cpu_offload {cluster.cpu_offload} moves shards, but this run has one process",
            "cluster.cpu_offload",
            "use memory.optimizer_offload: on, or set cluster.processes",
        )
    takes = [engine for engine, offloads in OFFLOADS.items() if cluster.cpu_offload in offloads]
    if cluster.engine not in ("auto", *takes):
        able = ", ".join(takes)
        ledger.refuse(
            f"cluster.cpu_offload {cluster.cpu_offload} needs an engine that offloads them, and "
            f"cluster.engine is {cluster.engine}",
            "cluster.cpu_offload",
            f"set cluster.engine to one of {able}; or memory.optimizer_offload: on, with any engine",
        )


def vllm_faults(recipe: Recipe) -> list[tuple[str, str, str]]:
    """(what, where, fix) for a vLLM sampler whose weights are divided over the processes."""
    if recipe.online is None or recipe.generation.backend != "vllm":
        return []
    return [
        (
            "vLLM needs whole weights, and each process holds a part of each; gathering them for vLLM "
            "would need the memory that the shards save",
            "generate.backend",
            "set generate.backend: native, or cluster.engine: ddp",
        )
    ]


def zero_faults(
    recipe: Recipe, dtype: str, engine: str, *, is_foreign: bool = False
) -> list[tuple[str, str, str]]:
    """(what, where, fix) of each part of a recipe that DeepSpeed's engine cannot honour. `is_foreign`: of
    those alone that cannot be planned."""
    in_parts = engine == "zero3"
    faults = vllm_faults(recipe) if in_parts else []
    faults += _unshared_faults(recipe, "of flat parts")
    if recipe.taught is not None and recipe.taught.kind != "file":
        what = "the student's pass is made inside the teacher's, which DeepSpeed's hooks do not expect"
        fix = "set cluster.engine: fsdp2 or ddp, or top_k and top_k_file (memtrain score-teacher)"
        faults.append((what, f"{recipe.method}.teacher", fix))
    if recipe.model.quantize != "none":
        what = f"weights in {recipe.model.quantize} are cut into shards by FSDP2 alone"
        faults.append((what, "model.quantize", "set it to none, or cluster.engine: fsdp2 or ddp"))
    if recipe.memory.optimizer_offload == "on":
        what = (
            "the engine steps flat parts of weights, and memory.optimizer_offload moves the states of "
            "whole weights"
        )
        faults.append((what, "memory.optimizer_offload", "remove it, and set cluster.cpu_offload: optimizer"))
    if recipe.memory.preflight == "on":
        what = "the engine would keep the gradients of the dry run before the first step"
        faults.append((what, "memory.preflight", "set it to auto or off"))
    if recipe.model.compile == "on":
        what = "DeepSpeed's hooks work inside of a layer's pass, and were not tried with compiled layers"
        faults.append((what, "model.compile", "set it to off, or cluster.engine: fsdp2 or ddp"))
    if not is_foreign:
        faults += _roundings(recipe, dtype, engine)
    section = recipe.near_reference
    if in_parts and section is not None and section.reference == "synced":
        what = "a reference that follows the policy would have to gather the weights"
        fix = "cluster.engine: fsdp2"
        faults.append((what, f"{recipe.method}.reference", f"use precomputed or copy, or {fix}"))
    return faults


def _roundings(recipe: Recipe, dtype: str, engine: str) -> list[tuple[str, str, str]]:
    """(what, where, fix) of bits that DeepSpeed's engine would lose."""
    has_float = recipe.model.adapter is not None or METHODS[recipe.method].trains_numbers
    if dtype == "float16":
        return [("float16 needs loss scaling, and is untested", "model.dtype", "use bfloat16")]
    if dtype == "bfloat16" and has_float:
        what = (
            "the engine would round parts that are trained in float32 (an adapter, a score or value "
            "head) to bfloat16"
        )
        return [(what, "model.dtype", "set it to float32, or cluster.engine: fsdp2")]
    if dtype == "bfloat16" and recipe.optim.master_weights is False:
        what = "the engine keeps float32 copies of bfloat16 weights in any case"
        return [(what, "optim.master_weights", "leave it out")]
    if dtype == "bfloat16" and engine == "zero1":
        what = "the engine adds gradients of bfloat16 weights in bfloat16, which loses small ones"
        return [(what, PATH, "set it to zero2, which adds gradients in float32")]
    return []


def fsdp2_faults(recipe: Recipe, dtype: str) -> list[tuple[str, str, str]]:
    """(what, where, fix) of each part of a recipe that FSDP2 cannot honour."""
    faults = vllm_faults(recipe) + _unshared_faults(recipe, "of shards")
    if recipe.taught is not None and recipe.taught.on_policy_fraction:
        what = "the student's own completions, judged by a teacher in shards, are untested"
        fix = "set on_policy_fraction: 0, or cluster.engine: ddp"
        faults.append((what, f"{recipe.method}.on_policy_fraction", fix))
    if dtype == "float16":
        what = "float16 needs its loss scaled, which is not done over shards"
        faults.append((what, "model.dtype", "set it to float32, or cluster.engine: ddp"))
    if recipe.memory.activation_offloading == "on" and recipe.memory.activation_checkpointing == "off":
        faults.append(
            (
                "offloading the activations of a layer would offload the gathered weights too",
                "memory.activation_offloading",
                "set memory.activation_checkpointing: on (its inputs travel then), or cluster.engine: ddp",
            )
        )
    return faults


def _unshared_faults(recipe: Recipe, of_what: str) -> list[tuple[str, str, str]]:
    """Faults of a recipe that no engine with divided weights or states can honour."""
    faults: list[tuple[str, str, str]] = []
    if OPTIMIZERS[recipe.optim.kind].needs_matrices:
        faults.append(
            (
                f"{recipe.optim.kind} needs whole matrices, and each rank has only some of their rows",
                "optim.kind",
                "use adamw or sgd, or cluster.engine: ddp",
            )
        )
    if OPTIMIZERS[recipe.optim.kind].is_bitsandbytes:
        faults.append(
            (
                f"8-bit and paged states ({recipe.optim.kind}) {of_what} are untested",
                "optim.kind",
                "use adamw, or cluster.engine: ddp",
            )
        )
    return faults
