"""Reason that memory ran out, and settings that would fit: said at the end of a run that could not go on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.errors import DoesNotFit, Fault, OutOfMemory
from memtrain.memory.explain.out_of_memory import needed, ways_out
from memtrain.memory.explain.suggestions import Suggestion
from memtrain.memory.model_shape.shape import ModelShape, has_formula, is_measured, shape_of
from memtrain.memory.plan.plan import PhasePeak, Plan
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import gib
from memtrain.trainers.loop.oom.recover import Exhausted
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.loading.module_shapes import counted_shape

NUM_OWNERS = 5
"""Owners that are named. Taste."""


def post_mortem(
    spent: Exhausted, plan: Plan, settings: Settings, model: nn.Module, optimizer: Optimizer, *, step: int
) -> OutOfMemory:
    """The error that ends the run: largest owners, measured and predicted, and the smallest ways out."""
    tokens = spent.failure.load
    predicted, fix = _ways(plan, settings, model, tokens)
    owners = owners_of(model, optimizer) | {
        f"{owned.owner} (predicted)": owned.num_bytes
        for owned in predicted.owners
        if owned.owner not in ("weights", "optimizer", "master copies", "gradients", "batch")
    }
    largest = sorted(owners.items(), key=lambda item: -item[1])[:NUM_OWNERS]
    named = ", ".join(f"{name} {gib(size)}" for name, size in largest)
    tried = " and ".join(_tried(settings)) or "no other step is allowed"
    saved = f"step {step} is saved; " if step else ""
    return OutOfMemory(
        [
            Fault(
                f"ran out of memory with one sequence of {tokens:,} tokens in step {step + 1} ({tried}); "
                f"the largest owners: {named}",
                plan.run_dir,
                f"{saved}{fix}, and run the same command again",
            )
        ]
    )


def refuse_over_budget(
    plan: Plan, settings: Settings, model: nn.Module, peak_bytes: int, tokens: int
) -> None:
    """Refuse a run whose measured peak is above the budget that the recipe gives.

    Raises: DoesNotFit.
    """
    budget = plan.recipe.memory.budget
    if budget == "auto" or needed(peak_bytes, settings) <= budget:
        return
    _, fix = _ways(plan, settings, model, tokens)
    raise DoesNotFit(
        f"the dry run of the heaviest micro-batch ({tokens:,} tokens) needs "
        f"{gib(needed(peak_bytes, settings))}, and memory.budget is {gib(budget)}",
        plan.run_dir,
        f"{fix}; or raise memory.budget",
    )


def _ways(plan: Plan, settings: Settings, model: nn.Module, tokens: int) -> tuple[PhasePeak, str]:
    """(the peak predicted for one micro-batch of `tokens` in one row, changes with a lower peak).

    Of layers that no arithmetic knows, DoRA's too, the plan's peak, and changes whose peaks are not told.
    """
    config = base_model(model).config.to_dict()
    shape = shape_of(config) if has_formula(config) else counted_shape(config)
    if shape.is_floor or (shape.counts is None and is_measured(shape, settings.adapter)):
        return plan.prediction.peak, _untold(settings, shape)
    predicted, ways = ways_out(settings, shape, tokens, plan.prediction.budget_bytes)
    return predicted, _words(ways)


def _untold(settings: Settings, shape: ModelShape) -> str:
    """Changes that lower the peak of layers whose activations are not computed in a run."""
    changes = [] if settings.checkpoint_every == 1 else ["set memory.activation_checkpointing: on"]
    changes.append("set a smaller length.max_length")
    kinds = ", ".join(shape.own_layers) or "with DoRA"
    return (
        f"{', or '.join(changes)} (what its layers ({kinds}) need then is not known here; "
        "`memtrain plan` tells it where it can)"
    )


def _words(ways: Iterable[Suggestion]) -> str:
    return "; or ".join(way.words() for way in ways) or "use a smaller model, or a larger device"


def owners_of(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Measured bytes of weights, by part of the model, and of their optimizer states."""
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = f"weights of {part_of(name)}"
        sizes[part] = sizes.get(part, 0) + parameter.nbytes
    gradients = [p.nbytes for p in model.parameters() if p.requires_grad]
    sizes["gradients"] = sum(gradients)
    sizes["optimizer states"] = sum(tensor.nbytes for tensor in _tensors(optimizer.state.values()))
    return sizes


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: its layers together, or the module it is in."""
    words = [word for word in name.split(".") if not word.isdigit()]
    for part in ("layers", "h", "blocks"):
        if part in words:
            return "the layers"
    return words[-2] if len(words) > 1 else words[-1]


def _tried(settings: Settings) -> list[str]:
    tried = []
    if "split" in settings.recovery:
        tried.append("batches split down to one sequence")
    if settings.checkpoint_every == 1:
        tried.append("every layer checkpointed")
    if settings.slice_tokens:
        tried.append(f"layers in slices of {settings.slice_tokens:,} tokens")
    if settings.offload != "none":
        tried.append("activations offloaded")
    return tried


def _tensors(states: Iterable[object]) -> list[Tensor]:
    return [
        value
        for state in states
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
