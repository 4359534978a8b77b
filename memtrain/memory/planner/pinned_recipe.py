"""The plan as a change of its recipe: every choice that was left open, said."""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.edit import with_key


def pins(asked: SourcedRecipe, settings: Settings) -> dict[str, object]:
    """Dotted keys with the values that pin a plan; keys that the recipe says so already are left out."""
    recipe, memory, train = asked.recipe, asked.recipe.memory, asked.recipe.train
    on = {True: "on", False: "off"}
    wanted: dict[str, object] = {}
    if memory.activation_checkpointing == "auto":
        wanted["memory.activation_checkpointing"] = on[settings.checkpoint_every > 0]
    if settings.checkpoint_every and memory.checkpoint_every != settings.checkpoint_every:
        wanted["memory.checkpoint_every"] = settings.checkpoint_every
    if memory.streamed_layers == "auto" and (
        settings.slice_tokens or memory.activation_checkpointing == "auto"
    ):
        wanted["memory.streamed_layers"] = on[settings.slice_tokens > 0]
    if memory.slice_tokens == "auto" and settings.slice_tokens:
        wanted["memory.slice_tokens"] = settings.slice_tokens
    if memory.activation_offloading == "auto":
        wanted["memory.activation_offloading"] = on[settings.offload != "none"]
    if memory.offload_keep == "auto" and settings.offload == "boundaries":
        wanted["memory.offload_keep"] = settings.offload_keep
    if memory.loss == "auto":
        wanted["memory.loss"] = settings.loss
    if memory.loss_chunk_size == "auto" and settings.loss == "chunked" and settings.device == "cuda":
        wanted["memory.loss_chunk_size"] = settings.loss_tile_bytes
    if memory.optimizer_offload == "auto":
        wanted["memory.optimizer_offload"] = on[settings.optimizer_offload]
    if memory.weights_offload == "auto":
        wanted["memory.weights_offload"] = (
            "all" if settings.adapters_offload else on[settings.weights_offload]
        )
    if recipe.optim.in_backward == "auto":
        wanted["optim.in_backward"] = on[settings.in_backward]
    if recipe.optim.kind != settings.optimizer:
        wanted["optim.kind"] = settings.optimizer
    if recipe.model.adapter is None and settings.adapter is not None:
        wanted["model.adapter"] = {"kind": settings.adapter.kind, "r": settings.adapter.r}
    if recipe.model.quantize != settings.quantize:
        wanted["model.quantize"] = settings.quantize
    if train.micro_batch_size == "auto":
        wanted["train.micro_batch_size"] = settings.micro_batch_size
    if train.micro_tokens == "auto" and settings.micro_tokens is not None:
        wanted["train.micro_tokens"] = settings.micro_tokens
    if recipe.model.dtype == "auto":
        wanted["model.dtype"] = settings.dtype
    if recipe.model.attention == "auto":
        wanted["model.attention"] = settings.attention
    if recipe.cluster.engine == "auto" and settings.num_processes > 1:
        wanted["cluster.engine"] = settings.engine
    if recipe.cluster.cpu_offload == "auto" and settings.shard_offload != "none":
        wanted["cluster.cpu_offload"] = settings.shard_offload
    if recipe.cluster.context_parallel == "auto":
        wanted["cluster.context_parallel"] = settings.context_parallel
    return wanted


def kept_pins(asked: SourcedRecipe, settings: Settings) -> SourcedRecipe:
    """The wish with every choice as in `settings`, also choices that follow from the machine.

    Nobody is told to have written them: their decisions are by rule, as they were.
    """
    recipe, cluster = asked.recipe, asked.recipe.cluster
    wanted = pins(asked, settings)
    if cluster.processes == "auto":
        wanted["cluster.processes"] = settings.num_processes
    if cluster.cpu_offload == "auto":
        wanted["cluster.cpu_offload"] = settings.shard_offload
    if cluster.threads == "auto":
        wanted["cluster.threads"] = settings.threads
    if recipe.model.liger == "auto":
        wanted["model.liger"] = "on" if settings.liger else "off"
    # `transformers` would take Triton's kernels of the loss out too; beside them it follows from the rest.
    if recipe.model.kernels == "auto" and (settings.kernels, settings.loss_kernel) != (
        "transformers",
        "triton",
    ):
        wanted["model.kernels"] = settings.kernels
    if recipe.model.compile == "auto":
        wanted["model.compile"] = "on" if settings.compiled else "off"
    if recipe.train.cuda_graphs == "auto" and settings.device == "cuda":
        wanted["train.cuda_graphs"] = "on" if settings.step_graphs else "off"
    if shards_weights(settings) and settings.sampler in ("native", "transformers"):
        wanted["generate.gather_weights"] = "on" if settings.gather_weights else "off"
    if settings.sampler == "native" and settings.device == "cuda":
        wanted["generate.cuda_graphs"] = "on" if settings.cuda_graphs else "off"
    if recipe.compared is not None and settings.reference != "none":
        wanted[f"{recipe.method}.reference"] = settings.reference
    for key, value in wanted.items():
        value = settings.adapter if key == "model.adapter" else value
        recipe = with_key(recipe, key, value)
    return SourcedRecipe(recipe, asked.where)


def yaml_lines(keys: Mapping[str, object]) -> list[str]:
    """Dotted keys as the lines of a recipe, each section once."""
    sections: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"  {name}: {_value(value)}")
    return [line for section, lines in sections.items() for line in (f"{section}:", *lines)]


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        items: Mapping[object, object] = value  # pyright: ignore[reportUnknownVariableType]
        return "{" + ", ".join(f"{name}: {_value(one)}" for name, one in items.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)
