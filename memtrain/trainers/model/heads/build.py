"""Scorers of tokens or answers, by the method's head and the settings."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.losses.head.tiles import check_kernels
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.offload.weights import compute_device


def scorer_of(model: PreTrainedModel | PeftModel, head: str, settings: Settings) -> Scorer | RewardScorer:
    """The scorer around `model`: of answers where its head is `score`, else of tokens.

    Raises: LaunchError where the plan takes kernels for the loss that do not run here.
    """
    if head == "score":
        return RewardScorer(model)
    device = compute_device(model)
    if settings.loss_kernel == "triton" and device.type == "cuda":
        check_kernels(device)
    return Scorer(model, **loss_form(settings))


def configure_loss(scorer: nn.Module, settings: Settings) -> None:
    """Set the form of a token scorer's logits by the settings; a scorer of answers has none."""
    if isinstance(scorer, Scorer):
        scorer.form = scorer.form._replace(**loss_form(settings))


def loss_form(settings: Settings) -> dict[str, Any]:
    """Form of the logits. Beside Liger's loss, which only knows the NLL, log-probs are in tiles."""
    return {
        "is_chunked": settings.loss != "full",
        "is_liger": settings.loss == "liger",
        "tile_bytes": settings.loss_tile_bytes,
        "kernel": settings.loss_kernel,
    }
