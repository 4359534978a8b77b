"""Refusals of streamed layers, where a recipe asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from memtrain.memory.rules.attention import MERGED, NOT_SLICED, AttentionChoice, model_facts
from memtrain.memory.rules.ledger import DecisionLog, streams

PATH = "memory.streamed_layers"

OF_ALL_TOKENS = (
    "LLM.int8 chooses the columns that stay in half precision from all tokens of a call, so the choice "
    "would depend on the slice"
)
"""Source: bitsandbytes 0.50.2, MatMul8bitLt: columns in which any token is above the threshold."""

ENGINES = ("ddp", "fsdp2", "zero1", "zero2")
"""Engines that slices run under: whole weights, or layers gathered once for all their slices."""

BY_HEADS = "attention heads are divided for whole rows, and a slice lacks the tokens of the other processes"

BY_MODULE = (
    "ZeRO-3 gathers weights and cuts up gradients module by module, in each module's own passes: a layer in "
    "slices would be gathered for each of them, and its gradients cut up before they are summed"
)


def mixing_layers(config: Mapping[str, object]) -> str | None:
    """Reason that layers of a model cannot be cut into slices; None where they can."""
    own = cast(tuple[str, ...], model_facts(config)["own_layers"])
    return f"the model's {', '.join(own)} layers carry state from one token to the next" if own else None


def refuse_streaming(
    ledger: DecisionLog, choice: AttentionChoice, config: Mapping[str, object], processes: int
) -> None:
    """Note everything that `memory.streamed_layers: on` cannot be with."""
    recipe = ledger.asked.recipe
    if not streams(recipe):
        return
    if choice.backend not in MERGED:
        others = "; ".join(f"{backend}: {why}" for backend, why in choice.refused if backend in MERGED)
        ledger.refuse(
            f"streamed layers under {choice.backend} attention: {NOT_SLICED}"
            f"{f' ({others})' if others else ''}",
            PATH,
            f"take {', '.join(MERGED)} attention, or set {PATH}: off",
        )
    mixed = mixing_layers(config)
    if mixed is not None:
        ledger.refuse(f"streamed layers: {mixed}", PATH, "remove it for this model")
    if recipe.cluster.sharing > 1 and recipe.cluster.context_parallel_mode == "ulysses":
        ledger.refuse(
            f"streamed layers with context parallelism by heads: {BY_HEADS}",
            PATH,
            "set it to off, or cluster.context_parallel_mode: all_gather",
        )
    if recipe.model.quantize == "8bit":
        ledger.refuse(f"streamed layers: {OF_ALL_TOKENS}", PATH, "set it to off, or model.quantize: 4bit")
    if processes > 1 and recipe.cluster.engine not in ("auto", *ENGINES):
        ledger.refuse(
            f"streamed layers with {recipe.cluster.engine}: {BY_MODULE}",
            PATH,
            f"set it to off, or cluster.engine: {', '.join(ENGINES[1:])} or {ENGINES[0]}",
        )
