"""Which strategies exclude each other, and which need another: one table, each pair with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memtrain.memory.plan.engine_kinds import ZERO, is_sharded, uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.context_parallel import NOT_SLICED, NOT_WITH_LIGER, SLICED
from memtrain.memory.strategies.registry import STRATEGIES


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two things that no run does together."""

    strategy: str
    """Name of a strategy."""
    other: str
    """What it cannot be with, in words: another strategy, or a setting."""
    is_other: Callable[[Settings], bool]
    reason: str


def _with(strategy: str, other: str, reason: str) -> Exclusion:
    return Exclusion(strategy, other, STRATEGIES[other].is_used, reason)


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "boundary_offloading",
        "layers that keep everything",
        lambda settings: settings.checkpoint_every == 0 and not settings.slice_tokens,
        "only checkpointed layers keep their input alone; full_offloading moves what the others keep",
    ),
    _with(
        "full_offloading",
        "activation_checkpointing",
        "a checkpointed layer keeps its input alone: boundary_offloading moves that",
    ),
    _with(
        "full_offloading",
        "checkpoint_every_n",
        "what a checkpointed layer computes again would be moved again; boundary_offloading moves its input",
    ),
    _with(
        "full_offloading",
        "streamed_layers",
        "a streamed layer keeps its input alone: boundary_offloading moves that",
    ),
    Exclusion(
        "streamed_layers",
        "attention that is flex, dense or stock",
        lambda settings: settings.attention not in SLICED,
        NOT_SLICED,
    ),
    _with(
        "streamed_layers",
        "context_parallel",
        "a process holds two pieces of each row, and slices of these were never tried",
    ),
    Exclusion(
        "streamed_layers",
        "weights, gradients or moments in shards",
        lambda settings: settings.num_processes > 1 and settings.engine != "ddp",
        "slices of layers whose weights are gathered were never tried",
    ),
    Exclusion(
        "packing",
        "padded rows",
        lambda settings: not settings.padding_free,
        "packed rows are kept apart by their place in one flattened sequence",
    ),
    Exclusion(
        "shared_prompts",
        "padded rows",
        lambda settings: not settings.padding_free,
        "a padded row holds one answer",
    ),
    Exclusion(
        "qlora",
        "every weight trained",
        lambda settings: settings.adapter is None,
        "quantized weights are rounded once and get no gradient",
    ),
    Exclusion(
        "adapter_off_reference",
        "every weight trained",
        lambda settings: settings.adapter is None,
        "there is no adapter to switch off",
    ),
    Exclusion(
        "master_weights",
        "an adapter alone",
        lambda settings: settings.adapter is not None and not settings.adapter.modules_to_save,
        "adapters are float32 already",
    ),
    Exclusion(
        "master_weights",
        "float32 weights",
        lambda settings: settings.dtype == "float32",
        "the weights are float32 already",
    ),
    Exclusion(
        "pure_bfloat16",
        "DeepSpeed's ZeRO",
        uses_zero,
        "it keeps float32 copies of bfloat16 weights in any case",
    ),
    Exclusion(
        "optimizer_offload",
        "moments that are not moved",
        lambda settings: settings.optimizer not in ("adamw", "muon"),
        "paged and 8-bit moments have a place of their own; sgd and adafactor have hardly any",
    ),
    _with(
        "optimizer_offload",
        "optimizer_in_backward",
        "moments travel in buckets after the backward pass; in backward each weight wants its own",
    ),
    Exclusion(
        "optimizer_offload",
        "DeepSpeed's ZeRO",
        uses_zero,
        "it steps flat parts of weights; cluster.offload: optimizer moves their states",
    ),
    Exclusion(
        "optimizer_offload",
        "shards that wait on the host",
        lambda settings: settings.shard_offload != "none",
        "the states wait there with them",
    ),
    Exclusion(
        "lora",
        "DeepSpeed's ZeRO in bfloat16",
        lambda settings: uses_zero(settings) and settings.dtype == "bfloat16",
        "it would round an adapter that is trained in float32",
    ),
    Exclusion(
        "optimizer_in_backward",
        "several processes",
        lambda settings: settings.num_processes > 1,
        "gradients are summed over the processes before they are used",
    ),
    Exclusion(
        "optimizer_in_backward",
        "several micro-batches",
        lambda settings: (
            settings.micro_tokens is not None
            or settings.batch_rows is None
            or settings.micro_rows * settings.num_processes < settings.batch_rows
        ),
        "gradients of several micro-batches are summed before they are used",
    ),
    *(
        Exclusion(name, "weights in shards", is_sharded, reason)
        for name, reason in (
            ("full_offloading", "what a layer saves would take the gathered weights along to the host"),
            ("qlora", "quantized weights cannot be cut into shards of their rows"),
            ("adafactor", "it needs whole matrices, and a rank has some of their rows"),
            ("adamw_8bit", "8-bit states of shards were never tried"),
            ("paged_adamw", "paged states of shards were never tried"),
            ("paged_adamw_8bit", "8-bit states of shards were never tried"),
        )
    ),
    Exclusion(
        "context_parallel",
        "attention that is flex, dense or stock",
        lambda settings: settings.attention not in SLICED,
        NOT_SLICED,
    ),
    _with("context_parallel", "liger_loss", NOT_WITH_LIGER),
    Exclusion(
        "context_parallel",
        "DeepSpeed's ZeRO",
        lambda settings: settings.engine in ZERO,
        "slices of rows and DeepSpeed's shards were never tried together",
    ),
    _with("liger_loss", "shared_prompts", "Liger's kernel is cross-entropy of single rows"),
)


def excluded(settings: Settings) -> Exclusion | None:
    """The first pair of the table that `settings` break; None when they break none."""
    return next(
        (
            pair
            for pair in EXCLUSIONS
            if STRATEGIES[pair.strategy].is_used(settings) and pair.is_other(settings)
        ),
        None,
    )
