"""Refusals of weights that live on the host, where a recipe asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe
from memtrain.recipes.recipe import Recipe

PATH = "memory.weights_offload"

EACH_ITS_OWN = (
    "with several processes, only the frozen weights under an adapter can wait on the host, with "
    "cluster.engine: ddp and whole rows in each process"
)
SENT = "weights are sent to vLLM from the device"
SHARED_KEYS = "its layers hand keys and values to each other beside the hidden states"


def refusal_of(recipe: Recipe, config: Mapping[str, object]) -> str | None:
    """Reason against weights on the host whatever else is chosen; None where they can live there."""
    if recipe.writes_completions and recipe.generation.backend == "vllm":
        return SENT
    if recipe.model.quantize == "8bit":
        return "8-bit weights keep their own copies on the device"
    text = config.get("text_config", config)
    known = cast(Mapping[str, object], text) if isinstance(text, Mapping) else config
    return SHARED_KEYS if known.get("num_kv_shared_layers") else None


def goes_with_others(engine: str, is_frozen: bool, shares_rows: bool) -> bool:
    """Whether weights can live on the host of a run with several processes: each has its own copy there.

    Adapters are on the device then, and summed over the processes as ever: `is_frozen`.
    """
    return engine == "ddp" and is_frozen and not shares_rows


def can_move(recipe: Recipe, config: Mapping[str, object], settings: Settings) -> bool:
    """Whether frozen weights can go to the host in mid-run: on one GPU, under an adapter.

    Weights that are trained have gradients and states beside them, which stay where they began.
    """
    is_frozen = settings.adapter is not None and settings.reference != "synced"
    is_alone = settings.device == "cuda" and settings.num_processes == 1
    if not is_frozen or not is_alone or settings.weights_offload or settings.router_aux_loss_coef > 0:
        return False
    # The sampler was planned, and its passes captured, with weights on the device.
    if recipe.writes_completions or recipe.eval.writes:
        return False
    return refusal_of(recipe, config) is None


def moved(settings: Settings) -> Settings:
    """The settings with the layers' weights on the host."""
    return settings.model_copy(update={"weights_offload": True})


def is_asked(asked: SourcedRecipe) -> bool:
    """Whether a recipe says that weights live on the host."""
    memory = asked.recipe.memory
    return memory.weights_offload in ("on", "all") or "weights_offload" in memory.use


def refuse_weights_offload(ledger: DecisionLog, config: Mapping[str, object], processes: int) -> None:
    """Note everything that `memory.weights_offload: on` cannot be with."""
    recipe = ledger.asked.recipe
    if not is_asked(ledger.asked):
        return
    reason = refusal_of(recipe, config)
    if reason is not None:
        ledger.refuse(f"weights_offload: {reason}", PATH, "remove it")
    engine = "ddp" if recipe.cluster.engine == "auto" else recipe.cluster.engine
    shares_rows = recipe.cluster.context_parallel not in ("auto", 1)
    is_frozen = recipe.model.adapter is not None and recipe.memory.weights_offload != "all"
    if processes > 1 and not goes_with_others(engine, is_frozen, shares_rows):
        ledger.refuse(
            f"weights_offload with {processes} processes: {EACH_ITS_OWN}",
            PATH,
            "set cluster.processes: 1, or cluster.engine: fsdp2 with cluster.cpu_offload: parameters"
            + (
                ""
                if recipe.model.adapter is None
                else "; or cluster.engine: ddp, cluster.context_parallel: 1, memory.weights_offload: on"
            ),
        )
    if not is_frozen and not OPTIMIZERS[recipe.optim.kind].steps_on_host:
        ledger.refuse(
            f"weights_offload with optim.kind: {recipe.optim.kind}: the host steps the weights, and has no "
            "kernels for it",
            PATH,
            "set optim.kind: adamw, or train an adapter on the device (model.adapter, "
            "memory.weights_offload: on)",
        )
