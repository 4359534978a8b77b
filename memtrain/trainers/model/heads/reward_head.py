"""A reward model: backbone and a head that gives one number for an answer, read at its last token."""

# B rows, T tokens of a row, D hidden size, A answers

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.captured_passes import CapturedPasses
from memtrain.trainers.model.heads.context_parallel_scoring import over_slices
from memtrain.trainers.model.heads.lm_head import hidden_states


class Rewards(NamedTuple):
    """The reward of each answer, float32."""

    reward_A: Tensor


class RewardScorer(nn.Module):
    """A sequence-classification model with one label (plain, or wrapped by PEFT) that scores answers.

    Wrap it for distribution as a whole. The head is kept and computed in float32: rewards are compared, and
    bfloat16 has three digits.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        in_float(model)
        self.context: ContextRanks | None = None
        """The ranks that hold each row together with this one; None: this rank holds whole rows."""
        self.captured: CapturedPasses | None = None
        """Recordings of training passes; None where each is computed operator by operator."""

    def forward(self, inputs: dict[str, Any], last_A: Tensor) -> Tensor:
        """float32 [A], the reward at rows `last_A` of the flattened hidden states [B * T, D]."""
        if self.context is None:
            return self._rewards(inputs, last_A).reward_A
        return over_slices(
            self.context, inputs, last_A, lambda own, rows, which: self._rewards(own, rows)
        ).reward_A

    def _rewards(self, inputs: dict[str, Any], last_A: Tensor) -> Rewards:
        base = base_model(self.model)
        hidden_BTD = hidden_states(base, inputs, self.captured)
        hidden_AD = hidden_BTD.flatten(0, 1).index_select(0, last_A)
        with torch.autocast(hidden_AD.device.type, enabled=False):
            return Rewards(head_of_rewards(base)(hidden_AD.float())[:, 0])


def in_float(model: PreTrainedModel | PeftModel) -> None:
    """Let the head of rewards be float32, in place."""
    head = head_of_rewards(base_model(model))
    # A trace's weights have no data and cannot be swapped; they are float32 already.
    if any(weight.dtype != torch.float32 for weight in head.parameters()):
        head.float()


def head_of_rewards(base: PreTrainedModel) -> nn.Module:
    """The module that turns a hidden state into a reward. Raises LaunchError where there is none."""
    for name in ("score", "classifier"):
        head = getattr(base, name, None)
        if isinstance(head, nn.Module):
            return cast(nn.Module, head)
    raise LaunchError(
        f"{type(base).__name__} has no head that scores a sequence",
        "model.path",
        "use a decoder that transformers can classify with, such as Qwen/Qwen3-0.6B",
    )
