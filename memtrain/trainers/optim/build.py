"""The optimizer of a run: parameter groups, the kinds by name, and the clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memtrain.errors import LaunchError
from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.model.loading.quantize import refuse_without_bitsandbytes
from memtrain.trainers.optim.adafactor import Adafactor
from memtrain.trainers.optim.compressed_moments import CompressedMoments
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.optim.muon import Muon, split_hidden
from memtrain.trainers.optim.offload import OffloadedStates
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer

Group = dict[str, Any]
"""A parameter group of torch: `params` and its own settings."""

HALF = (torch.bfloat16, torch.float16)


def build_optimizer(
    model: nn.Module,
    recipe: Optim,
    settings: Settings,
    trained: Sequence[nn.Parameter] | None = None,
    *,
    seed: int = 0,
) -> Optimizer:
    """The optimizer of `settings.optimizer` over the trainable parameters of `model`, at the peak rate.

    `trained` stands in their place where this rank steps parts of them; `seed` is the run's, for weights that
    are rounded at random.

    The loop sets `lr` of every group before each step. State appears in the first step. Every kind's
    `state_dict` holds all there is: loading it continues bit for bit. Which kernel runs follows from
    `settings` alone: torch's fused ones for AdamW and SGD, which hold no temporaries.

    Raises: LaunchError when nothing is trainable, or the kind needs a package or device that is not here.
    """
    groups = parameter_groups(model, recipe.weight_decay, trained)
    build = _built_by(settings)
    if settings.optimizer == "muon":
        groups = split_hidden(groups, model)
    if OPTIMIZERS[settings.optimizer].is_bitsandbytes:
        refuse_without_bitsandbytes(settings.device, f"optim.kind: {settings.optimizer}", "optim.kind: adamw")
    if uses_zero(settings):
        is_half = settings.master_weights
        return ZeroOptimizer(groups, build(groups, recipe), recipe.lr, is_half=is_half)
    if settings.master_weights and any(p.dtype in HALF for group in groups for p in group["params"]):
        return MasterWeights(
            groups,
            lambda copies: build(copies, recipe),
            recipe.lr,
            form=settings.copies,
            seed=seed,
            away=settings.optimizer_offload,
        )
    return build(groups, recipe)


def _built_by(settings: Settings) -> Callable[[list[Group], Optim], Optimizer]:
    build = KINDS[settings.optimizer]
    if settings.compressed_moments:
        return lambda groups, recipe: CompressedMoments(build(groups, recipe))
    if not settings.optimizer_offload:
        return build
    return lambda groups, recipe: OffloadedStates(build(groups, recipe))


def parameter_groups(
    model: nn.Module, weight_decay: float, trained: Sequence[nn.Parameter] | None = None
) -> list[Group]:
    """Trainable parameters in two groups: matrices, with decay, then norms and biases, without.

    Tied parameters appear once. Embeddings are matrices. A group that would be empty is left out.

    Raises: LaunchError when no parameter of `model` is trainable.
    """
    trained = [p for p in model.parameters() if p.requires_grad] if trained is None else trained
    if not trained:
        raise LaunchError(
            "no parameter of the model is trainable",
            "model.adapter",
            "choose other target_modules, or remove it",
        )
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adamw(groups: list[Group], recipe: Optim) -> Optimizer:
    """Source: Loshchilov & Hutter 2017, arXiv:1711.05101, algorithm 2."""
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)


def _adafactor(groups: list[Group], recipe: Optim) -> Optimizer:
    """Source: Shazeer & Stern 2018, arXiv:1804.04235, algorithm 4, with the schedule's rate and no
    momentum."""
    return Adafactor(groups, lr=recipe.lr, scale_parameter=False, relative_step=False, warmup_init=False)


def _muon(groups: list[Group], recipe: Optim) -> Optimizer:
    return Muon(groups, recipe)


def _sgd(groups: list[Group], recipe: Optim) -> Optimizer:
    """Gradient descent without momentum: no state at all.

    torch's fused kernel for CPUs writes no vector of half-precision weights (torch 2.13): of these it steps
    the numbers after the last whole vector alone.
    """
    is_half_on_host = any(p.device.type == "cpu" and p.dtype in HALF for g in groups for p in g["params"])
    return torch.optim.SGD(groups, lr=recipe.lr, fused=not is_half_on_host, foreach=False)


def _bitsandbytes(name: str) -> Callable[[list[Group], Optim], Optimizer]:
    def build(groups: list[Group], recipe: Optim) -> Optimizer:
        """Source: Dettmers et al. 2021, arXiv:2110.02861 (blockwise 8-bit states)."""
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        kind = getattr(bitsandbytes.optim, name)
        optimizer: Optimizer = kind(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
        return optimizer

    return build


KINDS: dict[str, Callable[[list[Group], Optim], Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw": _bitsandbytes("PagedAdamW32bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "adafactor": _adafactor,
    "muon": _muon,
    "sgd": _sgd,
}
"""Makers of each `Settings.optimizer`."""
