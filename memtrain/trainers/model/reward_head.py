"""A reward model: backbone and a head that gives one number for an answer, read at its last token."""

# B rows, T tokens of a row, D hidden size, A answers

from __future__ import annotations

from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.trainers.model.head import base_model


class RewardScorer(nn.Module):
    """A sequence-classification model with one label (plain, or wrapped by PEFT) that scores answers.

    Wrap it for distribution as a whole. The head is kept and computed in float32: rewards are compared, and
    bfloat16 has three digits.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model
        head_of_rewards(base_model(model)).float()

    def forward(self, inputs: dict[str, Any], last_A: Tensor) -> Tensor:
        """float32 [A], the reward at rows `last_A` of the flattened hidden states [B * T, D]."""
        base = base_model(self.model)
        hidden_BTD = base.get_decoder()(**inputs, use_cache=False).last_hidden_state
        hidden_AD = hidden_BTD.flatten(0, 1).index_select(0, last_A)
        with torch.autocast(hidden_AD.device.type, enabled=False):
            return head_of_rewards(base)(hidden_AD.float())[:, 0]


def head_of_rewards(base: PreTrainedModel) -> nn.Module:
    """The module that turns a hidden state into a reward. Raises LaunchError where there is none."""
    for name in ("score", "classifier"):
        head = getattr(base, name, None)
        if isinstance(head, nn.Module):
            return cast(nn.Module, head)
    raise LaunchError(
        f"{type(base).__name__} has no head that scores a sequence",
        "model.path",
        "name a decoder that transformers can classify with, such as Qwen/Qwen3-0.6B",
    )
