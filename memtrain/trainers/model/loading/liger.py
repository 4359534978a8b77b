"""Liger's fused Triton kernels for RMSNorm, SwiGLU and RoPE; the loss stays memtrain's own."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.memory.hardware.packages import missing
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.model.experts.forward import is_experts
from memtrain.trainers.model.kernels.own_names import unchanged, with_names


def apply_liger(model: PreTrainedModel, settings: Settings) -> None:
    """Put the kernels into `model`, in place, when `settings.liger`, and into no other model of its family.
    Call it before adapters and checkpointing. The MLPs of a model with stacked experts stay as they are.

    Source: Hsu et al. 2024, arXiv:2410.10989, section 3.2.

    Raises: LaunchError when asked for off CUDA, without liger-kernel, or for a family that Liger does not
    know.
    """
    if not settings.liger:
        return
    instead = "set model.liger to off"
    if settings.device != "cuda":
        raise LaunchError("Liger kernels need a CUDA device", "model.liger", instead)
    if why := missing("liger_kernel"):
        raise LaunchError(
            f"liger-kernel {why}", "model.liger", f"pip install 'memtrain[liger]', or {instead}"
        )
    # It warns of every back end of other vendors that is not installed.
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)
    from liger_kernel.transformers.monkey_patch import (  # pyright: ignore[reportMissingImports]
        MODEL_TYPE_TO_APPLY_LIGER_FN as PATCHES,
    )

    patch = PATCHES.get(model.config.model_type)
    if patch is None:
        raise LaunchError(f"Liger has no kernels for {model.config.model_type}", "model.liger", instead)
    # Its losses would replace the model's forward; the head and loss are computed in tiles here. Its experts
    # read stacks that may be packed or adapted here, and compute gradients of frozen ones (0.8.5).
    has_experts = any(is_experts(module) for module in model.modules())
    wanted = {
        "rms_norm": True,
        "swiglu": not has_experts,
        "geglu": not has_experts,
        "rope": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    takes = inspect.signature(patch).parameters
    # It turns whole heads, in halves: families that are turned otherwise have it off, or raise (0.8.5).
    wanted["rope"] = "rope" in takes and takes["rope"].default is True
    asked = {name: value for name, value in wanted.items() if name in takes}
    _patch_alone(model, lambda: patch(**asked, model=model))


def _patch_alone(model: PreTrainedModel, patch: Callable[[], None]) -> None:
    """Keep what `patch` puts into the module of the model's family for this model.

    Liger replaces names there, which every model of the family reads that this process makes or runs: the
    policy of another plan, a teacher, a model whose kernels should be transformers' own.
    """
    family = sys.modules[type(model).__module__]
    before = dict(vars(family))
    with unchanged([family, nn]):
        patch()
        put = {name: now for name, now in vars(family).items() if before.get(name) is not now}
    for module in model.modules():
        forward: Any = type(module).forward
        if isinstance(forward, FunctionType) and put.keys() & set(forward.__code__.co_names):
            module.forward = MethodType(with_names(forward, put), module)
