"""The list of memory strategies: a page each under memory/strategies."""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.activations import (
    activation_checkpointing,
    boundary_offloading,
    checkpoint_every_n,
    chunked_loss,
    context_parallel,
    full_offloading,
    liger_loss,
    streamed_layers,
)
from memtrain.memory.strategies.base import Strategy, StrategyContext, StrategyRequest, Updates, no_forms
from memtrain.memory.strategies.batch import (
    packing,
    padding_free,
    shared_prompts,
    shorter_sequences,
    smaller_micro_batch,
)
from memtrain.memory.strategies.optimizer import (
    adafactor,
    adamw_8bit,
    master_weights,
    optimizer_in_backward,
    optimizer_offload,
    paged_adamw,
    paged_adamw_8bit,
)
from memtrain.memory.strategies.weights import (
    adapter_off_reference,
    lora,
    precomputed_reference,
    pure_bfloat16,
    qlora,
)

STRATEGIES: dict[str, Strategy] = {
    page.STRATEGY.name: page.STRATEGY
    for page in (
        padding_free,
        packing,
        shared_prompts,
        context_parallel,
        smaller_micro_batch,
        activation_checkpointing,
        checkpoint_every_n,
        streamed_layers,
        boundary_offloading,
        full_offloading,
        chunked_loss,
        liger_loss,
        optimizer_offload,
        optimizer_in_backward,
        precomputed_reference,
        adapter_off_reference,
        adamw_8bit,
        paged_adamw,
        paged_adamw_8bit,
        adafactor,
        master_weights,
        pure_bfloat16,
        lora,
        qlora,
        shorter_sequences,
    )
}
"""Every strategy by its name; exact ones first."""


UNNAMED: Updates = {"attention": "stock", "liger": False, "pad_to_multiple_of": None, "shard_offload": "none"}
"""Settings of the plain run that belong to no strategy: kernels, alignment, and where shards wait."""


def wish_of(strategy: Strategy, case: StrategyContext) -> StrategyRequest:
    """What the whole recipe says of a strategy: its keys, `memory.use`, `memory.never` and `memory.allow`."""
    memory = case.recipe.memory
    if strategy.name in memory.use:
        return "on"
    if strategy.name in memory.never:
        return "off"
    own = strategy.wish(case.recipe)
    if own == "allow":
        return "auto" if strategy.name in memory.allow else "off"
    return own


def is_searched(strategy: Strategy) -> bool:
    """Whether the search switches it on and off; else it follows from the recipe by rule."""
    return strategy.changes is not no_forms


def used_in(settings: Settings) -> list[Strategy]:
    """The strategies that a run under `settings` uses."""
    return [strategy for strategy in STRATEGIES.values() if strategy.is_used(settings)]


def without_strategies(settings: Settings) -> Settings:
    """The same steps of the same model, plainly: no strategy but those that say what is trained.

    Sequences that were packed are laid out anew; how many are in a micro-batch is left as it is.
    """
    plain = dict(UNNAMED)
    for strategy in used_in(settings):
        plain |= strategy.plain
    return settings.model_copy(update=plain)
