"""Survival of exhausted memory: preflight, recovery, the step in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from memtrain.memory.plan.engine_kinds import is_sharded, uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import MERGED
from memtrain.memory.rules.batching import Micro
from memtrain.memory.rules.ledger import DecisionLog, streams

RecoveryStep = Literal["split", "slices", "checkpointing", "offloading", "loss_tile", "weights"]


RETRIES: dict[RecoveryStep, str] = {
    "split": "smaller micro-batches",
    "checkpointing": "checkpointing",
    "slices": "slices of layers",
    "offloading": "offloading",
    "loss_tile": "smaller chunks of the loss",
    "weights": "the layers' weights on CPU",
}
"""Words of the rungs, in the order in which they are tried."""

STREAMED_RETRIES = {name: words for name, words in RETRIES.items() if name != "checkpointing"}
STREAMED_RETRIES["slices"] = "shorter slices of layers"
"""The same of a run whose recipe asks for slices, which are recomputed as checkpointed layers are."""


def decide_preflight(ledger: DecisionLog, settings: Settings) -> bool:
    """Whether the heaviest batch is tried before the first step."""
    wanted = ledger.asked.recipe.memory.preflight
    if uses_zero(settings):
        # Seen under stage 3 (deepspeed 0.19.8): the first step's norm was twice what it is.
        reason = "DeepSpeed's engine would keep the gradients of the dry run"
        ledger.decide("preflight", "off", reason, "memory.preflight")
        return False
    if wanted == "auto":
        is_on = settings.device == "cuda"
        reason = (
            "dry run of the heaviest batch, so that OOM shows early"
            if is_on
            else "off on a CPU: memory rarely runs out, and a step takes long"
        )
    else:
        is_on, reason = wanted == "on", ""
    ledger.decide("preflight", "on" if is_on else "off", reason, "memory.preflight")
    return is_on


def decide_recovery(
    ledger: DecisionLog,
    settings: Settings,
    allowed: Sequence[RecoveryStep],
    *,
    can_move_weights: bool = False,
) -> tuple[RecoveryStep, ...]:
    """Steps when memory runs out, in no order; `allowed`: the recipe's permitted steps.

    `can_move_weights`: the layers' weights may go to the host in mid-run (`weights_offload.can_move`).
    """
    recipe = ledger.asked.recipe
    if recipe.memory.oom_recovery == "off" or settings.in_backward:
        why = (
            ""
            if recipe.memory.oom_recovery == "off"
            else "optim.in_backward: an interrupted step cannot be repeated"
        )
        ledger.decide("oom_recovery", "off", why, "memory.oom_recovery")
        return ()
    if is_sharded(settings):
        why = f"{settings.engine}: after OOM on one rank, the others would hang in a collective"
        ledger.decide("oom_recovery", "off", why, "memory.oom_recovery")
        return ()
    if settings.context_parallel > 1:
        why = "after OOM on one process, the processes that share its rows would hang"
        ledger.decide("oom_recovery", "off", why, "memory.oom_recovery")
        return ()
    impossible: set[RecoveryStep] = {"split"} if recipe.ranks_the_batch else set()
    can_slice = settings.attention in MERGED and settings.quantize != "8bit" and not settings.compiled
    if not can_slice:
        impossible.add("slices")
    if not can_move_weights:
        impossible.add("weights")
    steps: tuple[RecoveryStep, ...] = tuple(step for step in allowed if step not in impossible)
    retries = STREAMED_RETRIES if streams(recipe) else RETRIES
    tried = ", then ".join(words for step, words in retries.items() if step in steps)
    words = f"on OOM: retry with {tried}" if tried else "on OOM: the run ends, as no other step is allowed"
    ledger.decide("oom_recovery", "on", words, "memory.oom_recovery")
    return steps


def in_backward_choices(
    ledger: DecisionLog, batch: tuple[int | None, int | None], num_processes: int
) -> tuple[Micro | None, ...]:
    """Micro-batches of runs that step inside the backward pass; None for other runs.

    Exact only where a gradient is whole, and used as it is, once the backward pass has made it: one
    micro-batch a step, one process, no clipping by the norm of all gradients.
    """
    recipe = ledger.asked.recipe
    wanted, path = recipe.optim.in_backward, "optim.in_backward"
    if wanted == "off":
        return (None,)
    refused = _refusal(ledger, batch, num_processes)
    if refused is not None:
        if wanted == "on":
            ledger.refuse(
                f"the optimizer cannot step inside the backward pass: {refused[0]}", path, refused[1]
            )
        return (None,)
    rows, _ = batch
    whole = Micro(rows or 1, None)
    return (whole,) if wanted == "on" else (None, whole)


def _refusal(
    ledger: DecisionLog, batch: tuple[int | None, int | None], num_processes: int
) -> tuple[str, str] | None:
    """(reason that the step inside the backward pass would not be exact, the way out)."""
    recipe = ledger.asked.recipe
    rows, _ = batch
    if recipe.optim.max_grad_norm is not None:
        norm = recipe.optim.max_grad_norm
        why = f"gradients are scaled by the norm of all of them (optim.max_grad_norm {norm})"
        return why, "set optim.max_grad_norm: null, or optim.in_backward: off"
    if num_processes > 1:
        why = f"gradients are summed over {num_processes} processes first"
        return why, "set cluster.processes: 1, or optim.in_backward: off"
    if rows is None:
        why = "a step in tokens may be cut into several micro-batches"
        return why, "set train.batch_size, or optim.in_backward: off"
    pinned = recipe.train.micro_batch_size
    if (pinned != "auto" and pinned < rows) or recipe.train.micro_tokens != "auto":
        why = "gradients of several micro-batches are summed first"
        return why, f"set train.micro_batch_size: {rows} (one micro-batch a step), or optim.in_backward: off"
    return None
